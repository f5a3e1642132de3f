"""Choose layouts, the mesh axes that split each dim of a variable, by pure arithmetic over layer objects.

Roles describe the meaning of each dim and the best one to split (`roles`); users' rules are for variables
(`rules`) or for classes of layers (`layer_rules`); `auto` turns all of them into layouts that divide evenly, and into
fallbacks to report where it cannot.
"""

from __future__ import annotations

from shardload.parallel.choose import choose
from shardload.parallel.collectives import all_gather, all_reduce, reduce_scatter, split_tensor_for_parallelism
from shardload.parallel.device_ids import devices_of, get_best_devices, list_devices
from shardload.parallel.memory_fit import MeshFit, fit, smallest_mesh
from shardload.parallel.result import LayoutChoice, VariableLayout

__all__ = [
    "LayoutChoice",
    "MeshFit",
    "VariableLayout",
    "all_gather",
    "all_reduce",
    "choose",
    "devices_of",
    "fit",
    "get_best_devices",
    "list_devices",
    "reduce_scatter",
    "smallest_mesh",
    "split_tensor_for_parallelism",
]
