"""Layouts: how the variables of a model are spread over a mesh."""
