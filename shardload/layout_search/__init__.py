"""Search layouts for any Keras model: trace it, plan all mesh axes together, explain the plan.

    model ─► tracing ─► Program (groups of dims, operations) ─► problem ─► linear_program ─► plan_building ─► LayoutPlan
             primitives: one rule each                          weight_options

`searching.search` is the order of a search, on one page. Costs: the formulas are `Hardware.exchange_s` and
`compute_s`, an operation's cost is `problem.work_s`, a weight's are `weight_options.weight_exchanges`, and the
linear program adds them up.
"""
