"""Meshes, layouts, and the part of a tensor in each shard, as plain numbers; only `devices` has real devices."""
