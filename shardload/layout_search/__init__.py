"""Search layouts for any Keras model: trace it, plan all mesh axes together, explain the plan.

    model ─► tracing ─► Program (groups of dims, operations) ─► problem (kinds) ─► solving (HiGHS) ─► LayoutPlan
             reading    primitives: one rule per primitive       hardware: costs

`searching.search` is the order of a search, on one page. Costs: the formulas are `hardware.exchange_s` and
`compute_s`, an operation's cost is `problem.work_s`, a weight's are `solving.gather_s` and `tables.differences`, and
`solving._Model._time` adds them up.
"""
