"""Geometry: boxes, meshes and layouts as numbers; `devices` maps a mesh to real devices."""
