"""Choose, search and check layouts. A layout says which mesh axes split each dim of a variable.

The public names come from the modules of this package, and from three other packages that these modules use:

    choosing, distribution, tensor_parallel     this package
    layout_checks      is it right? compiled steps, numbers, placement
    layout_search      which layout is fastest? traces, costs, plans
    layouts            what divides? roles, rules, choices, collectives
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardload.layouts.collectives import (
    all_gather,
    all_reduce,
    devices_of,
    get_best_devices,
    list_devices,
    reduce_scatter,
    split_tensor_for_parallelism,
)

if TYPE_CHECKING:
    from shardload.layout_checks.comparison import ComparedArray
    from shardload.layout_checks.compiled_step import CompiledStep, compile_step
    from shardload.layout_checks.hlo import Collective, collectives_in
    from shardload.layout_checks.numbers import NumbersCheck, check_numbers
    from shardload.layout_checks.placement import Misplaced, SetupReport, check_placement
    from shardload.layout_search.hardware import Hardware
    from shardload.layout_search.layout_plan import LayoutPlan
    from shardload.layout_search.searching import search
    from shardload.layout_search.smallest_mesh import search_smallest_mesh
    from shardload.layouts.choice import LayoutChoice, VariableLayout
    from shardload.parallel.choosing import MeshFit, autoconfig, choose, fit, search_compiled, smallest_mesh
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
_HOME = {
    name: module
    for module, names in {
        "layout_checks.comparison": "ComparedArray",
        "layout_checks.compiled_step": "CompiledStep compile_step",
        "layout_checks.hlo": "Collective collectives_in",
        "layout_checks.numbers": "NumbersCheck check_numbers",
        "layout_checks.placement": "Misplaced SetupReport check_placement",
        "layout_search.layout_plan": "LayoutPlan",
        "layout_search.problem": "Hardware",
        "layout_search.searching": "search",
        "layout_search.smallest_mesh": "search_smallest_mesh",
        "layouts.choice": "LayoutChoice VariableLayout",
        "parallel.choosing": "MeshFit autoconfig choose fit search_compiled smallest_mesh",
        "parallel.tensor_parallel": "ParallelismInfo",
    }.items()
    for name in names.split()
}
"""The module of each public name that needs Keras; it is imported when the name is first used."""


def __getattr__(name: str) -> Any:
    """Import a public name that needs Keras on first use: who uses only collectives can do without Keras."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shardload.{_HOME[name]}"), name)
    # From now on an ordinary attribute: Python calls `__getattr__` for missing names only.
    globals()[name] = value
    return value
