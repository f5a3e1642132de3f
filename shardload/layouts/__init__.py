"""Choose layouts: which mesh axes split each dim of a variable. It takes shapes and layer objects, but no values.

`roles` finds the meaning of each dim and the best one to split. `rules` reads users' own rules, for variables or for
classes of layers. `role_layouts` makes layouts of both. A split that would be uneven is replaced with the next best
one, which reports call a fallback. `choosing` calls these modules in order, and returns a `choice.LayoutChoice`.
"""
