"""Choose layouts, the mesh axes that split each dim of a variable, by pure arithmetic over layer objects.

Roles describe the meaning of each dim and the best one to split (`roles`); users' rules are for variables
(`rules`) or for classes of layers (`layer_rules`); `auto` turns all of them into layouts that divide evenly, and into
fallbacks to report where it cannot.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardload.parallel.collectives import all_gather, all_reduce, reduce_scatter, split_tensor_for_parallelism
from shardload.parallel.device_ids import devices_of, get_best_devices, list_devices

if TYPE_CHECKING:
    from shardload.parallel.agreement import check_numbers
    from shardload.parallel.checked_search import search_compiled
    from shardload.parallel.choosing import choose
    from shardload.parallel.compiled import compile_step
    from shardload.parallel.compiled_step import CompiledStep
    from shardload.parallel.hlo_collectives import Collective, collectives_in
    from shardload.parallel.layout_search.hardware import Hardware
    from shardload.parallel.layout_search.layout_plan import LayoutPlan
    from shardload.parallel.layout_search.searching import search
    from shardload.parallel.layout_search.smallest import search_smallest_mesh
    from shardload.parallel.memory_fit import MeshFit, fit, smallest_mesh
    from shardload.parallel.numbers_check import ComparedArray, Misplaced, NumbersCheck
    from shardload.parallel.one_axis import autoconfig
    from shardload.parallel.placement_check import check_placement
    from shardload.parallel.result import LayoutChoice, VariableLayout
    from shardload.parallel.setup_check import SetupReport
    from shardload.parallel.tensor_parallel import ParallelismInfo

__all__ = [
    "Collective",
    "ComparedArray",
    "CompiledStep",
    "Hardware",
    "LayoutChoice",
    "LayoutPlan",
    "MeshFit",
    "Misplaced",
    "NumbersCheck",
    "ParallelismInfo",
    "SetupReport",
    "VariableLayout",
    "all_gather",
    "all_reduce",
    "autoconfig",
    "check_numbers",
    "check_placement",
    "choose",
    "collectives_in",
    "compile_step",
    "devices_of",
    "fit",
    "get_best_devices",
    "list_devices",
    "reduce_scatter",
    "search",
    "search_compiled",
    "search_smallest_mesh",
    "smallest_mesh",
    "split_tensor_for_parallelism",
]
# Where each name that needs Keras lives: these modules are imported on first use.
_OF_MODELS = {
    "Collective": "hlo_collectives",
    "ComparedArray": "numbers_check",
    "CompiledStep": "compiled_step",
    "Hardware": "layout_search.hardware",
    "LayoutChoice": "result",
    "LayoutPlan": "layout_search.layout_plan",
    "MeshFit": "memory_fit",
    "Misplaced": "numbers_check",
    "NumbersCheck": "numbers_check",
    "ParallelismInfo": "tensor_parallel",
    "SetupReport": "setup_check",
    "VariableLayout": "result",
    "autoconfig": "one_axis",
    "check_numbers": "agreement",
    "check_placement": "placement_check",
    "choose": "choosing",
    "collectives_in": "hlo_collectives",
    "compile_step": "compiled",
    "fit": "memory_fit",
    "search": "layout_search.searching",
    "search_compiled": "checked_search",
    "search_smallest_mesh": "layout_search.smallest",
    "smallest_mesh": "memory_fit",
}


def __getattr__(name: str) -> Any:
    """Import names that need Keras on first use: collectives need JAX only."""
    if name not in _OF_MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_OF_MODELS[name]}"), name)
    # From now on an ordinary attribute: Python calls `__getattr__` for missing names only.
    globals()[name] = value
    return value
