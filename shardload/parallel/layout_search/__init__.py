"""Search layouts for any Keras model: trace it, plan all mesh axes together, explain the plan.

    model ─► tracing ─► Program (groups of dims, operations) ─► problem (kinds) ─► solving (HiGHS) ─► LayoutPlan
             reading    primitives: one rule per primitive       hardware: costs

`searching.search` is the order of a search, on one page.
"""
