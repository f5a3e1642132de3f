"""Search layouts for any Keras model: trace it, plan all mesh axes together, explain the plan.

    model ─► tracing ─► Program (groups of dims, operations) ─► problem ─► linear_program ─► plan_building ─► LayoutPlan
             primitives: one rule each                          weight_options

`searching.search` runs these modules in order. The formulas for costs are `Hardware.exchange_s` and `compute_s`. With
these formulas, `Problem.work_s` gives the time of an operation, and `weight_options.weight_exchanges` the time of
moving a weight. The linear program adds up these times.
"""
