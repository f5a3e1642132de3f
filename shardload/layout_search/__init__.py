"""Search layouts for any Keras model, and give the reason for each layout.

    model ─► tracing         ─► `Program`: operations, and dims that must be split alike
          ─► dim_groups      ─► `DimGroups`: dims that play the same part in equal layers
          ─► problem_making  ─► `Problem`: which mesh axis may split which dims, and what operations then cost
          ─► linear_program  ─► `Solution`: the best decisions for all mesh axes together
          ─► plan_building   ─► `LayoutPlan`

`searching.search` runs these modules in order. `tracing` follows the rules in `primitives`, one for each JAX primitive.
`linear_program` chooses from the layouts in `weight_options`, which also has their costs.
"""
