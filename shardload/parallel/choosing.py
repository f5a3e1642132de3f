"""`choose`: a layout for every variable of a model, in any of the forms that users give layouts in.

"auto", "keras_hub", "replicated", rules, a LayoutMap ─► layouts.choosing
a distribution of keras.distribution                  ─► its own layout, or each variable's
"search"                                              ─► layout_search ─► a plan
a plan, or its file                                   ─► layout_search.given_layouts
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shardload.errors import LayoutError, UsageError
from shardload.keras_bridge import distributions
from shardload.layout_search.given_layouts import choose_by_plan
from shardload.layout_search.layout_plan import LayoutPlan
from shardload.layout_search.searching import search
from shardload.layouts import model_variables
from shardload.layouts.choice import LayoutChoice
from shardload.layouts.choosing import MODES, choose_by_distribution, choose_by_rules, rules_in_file
from shardload.sharding.devices import mesh_spec
from shardload.sharding.mesh import DEFAULT_AXES, MeshSpec
from shardload.typing import LayoutLike, MeshLike
from shardload.units import is_integer, plural


def choose(model: Any, mesh: MeshLike | MeshSpec, layout: LayoutLike = "auto") -> LayoutChoice:
    """Choose a layout for every variable of a built model.

    Reads layer objects, shapes and dtypes only, so the variables may have no values yet.

    Args:
        model: A built Keras model.
        mesh: The mesh, such as ``"data=2,model=4"``; what its axes split follows from their names
            (`shardload.sharding.mesh`).
        layout: ``auto``, ``keras_hub`` (the backbone class' own ``get_layout_map``), ``replicated``, ``search`` (see
            `shardload.parallel.search`), a plan of that search or the path of its JSON file, a mapping of rules, a
            ``LayoutMap`` or a distribution of ``keras.distribution``, or the path of a rules file (see
            `shardload.layouts.rules`).

    Raises:
        LayoutError: When the mode is unknown, the class has no map, or a rule cannot be applied.
        UsageError: When ``model`` is not a Keras model.
    """
    model_variables.check_model(model, to="choose layouts for")
    mesh = mesh_spec(mesh)
    if distributions.is_distribution(layout):
        return _by_distribution(model, mesh, layout)
    if isinstance(layout, str) and layout == "search":
        return choose_by_plan(model, mesh, search(model, mesh))
    if (plan := given_plan(layout)) is not None:
        return choose_by_plan(model, mesh, plan)
    return choose_by_rules(model, mesh, layout)


def _by_distribution(model: Any, mesh: MeshSpec, distribution: Any) -> LayoutChoice:
    own = mesh_spec(distribution.device_mesh)
    if own != mesh:
        raise LayoutError(f"Cannot use this {type(distribution).__name__} on the mesh {mesh}: its own is {own}")
    if (layout := distributions.layout_of_models(distribution)) is not None:
        return choose(model, mesh, layout)
    return choose_by_distribution(model, mesh, distribution)


def given_plan(layout: Any) -> LayoutPlan | None:
    """Return a layout that is a plan, or read it from its JSON file; ``None`` for other layouts."""
    if isinstance(layout, LayoutPlan):
        return layout
    if isinstance(layout, str | os.PathLike) and Path(layout).suffix == ".json" and Path(layout).exists():
        return LayoutPlan.load(layout)
    return None


def check_layout(layout: Any) -> None:
    """Check a layout given as text or a path: it names a layout, or a file that is a plan or has rules."""
    if isinstance(layout, str | os.PathLike) and str(layout) not in MODES and given_plan(layout) is None:
        rules_in_file(layout)


# ---- tensor parallelism on one axis ------------------------------------------------------------------


def autoconfig(model: Any, device_count: int, layout: LayoutLike = "auto") -> LayoutChoice:
    """Return the layout of each variable of a model for ``device_count`` devices, with its reason.

    Reads layers, einsum equations, shapes and dtypes only: the variables may have no values, and the devices need not
    exist. ``choice.of(variable)`` is a variable's layout, ``choice.by_id[id(variable)].rule`` the reason, and
    ``choice.fallbacks`` lists what did not divide.

    Args:
        model: A built Keras model.
        device_count: Number of devices.
        layout: As in `shardload.parallel.choose`.

    Raises:
        UsageError: When ``device_count`` is not a positive integer.
        LayoutError: As in `shardload.parallel.choose`, and when a plan is for another number of devices, or for a mesh
            of several axes.
    """
    return choose(model, mesh_for(layout, device_count), layout)


def mesh_for(layout: LayoutLike, device_count: int) -> MeshSpec:
    """Return the mesh of a layout on ``device_count`` devices: a plan brings its own, with any axis name.

    Raises:
        UsageError: When ``device_count`` is not a positive integer.
        LayoutError: When a plan is for another number of devices, or for a mesh of several axes.
    """
    plan, mesh = given_plan(layout), tensor_parallel_mesh(device_count)
    if plan is None:
        return mesh
    own = plan.mesh
    # Axes of one position split nothing, so `batch=1,model=4` counts as one axis.
    if sum(size > 1 for size in own.sizes) > 1:
        raise LayoutError(
            f"Cannot use the plan for {own} for tensor parallelism: it has several axes, expected one, such as 1x"
            f"{own.size}. Use AutoShardDistribution(layout=plan), or plan again"
        )
    if own.size != device_count:
        raise LayoutError(
            f"Cannot use the plan for {own} on {plural(device_count, 'device')}: expected {own.size}. Use "
            f"{own.size}, or plan again"
        )
    return own


def tensor_parallel_mesh(device_count: int) -> MeshSpec:
    """Return the mesh of ``device_count`` devices along the ``model`` axis; each of them gets the whole batch."""
    if not (is_integer(device_count) and device_count >= 1):
        raise UsageError(f"Cannot use device_count={device_count!r}: expected a positive integer")
    return MeshSpec(DEFAULT_AXES, (1, int(device_count)))
