"""Layouts by pure arithmetic over layer objects: which mesh axes split each dim of a variable.

Roles describe the meaning of each dim and the best one to split (`roles`); users' rules are for variables or for
classes of layers (`rules`); `role_layouts` turns all of them into layouts that divide evenly, and into
fallbacks to report where it cannot. `choosing` is the order of these, and `choice.LayoutChoice` the result.
"""
