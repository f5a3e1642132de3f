"""Layouts by pure arithmetic over layer objects: which mesh axes split each dim of a variable.

`roles` finds the meaning of each dim and the best one to split. `rules` reads users' own rules, for variables or for
classes of layers. `role_layouts` turns both into layouts that divide evenly, or into the next best ones, which reports
name as fallbacks. `choosing` calls these in order, and returns a `choice.LayoutChoice`.
"""
