"""Geometry: boxes, meshes and layouts as numbers; `devices` puts a mesh on real devices."""
