"""Layouts for tensor parallelism on one axis, by the identity of each variable: no device, no path, no pattern."""

from __future__ import annotations

from typing import Any

from shardload.errors import LayoutError, UsageError
from shardload.layouts.choice import LayoutChoice
from shardload.parallel.choosing import choose, given_plan
from shardload.sharding.mesh import DEFAULT_AXES, MeshSpec
from shardload.typing import LayoutLike
from shardload.units import is_integer, plural


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
    """Return the mesh of ``device_count`` devices along the ``model`` axis; each of them gets the whole batch.

    Raises:
        UsageError: When it is not a positive integer.
    """
    if not (is_integer(device_count) and device_count >= 1):
        raise UsageError(f"Cannot use device_count={device_count!r}: expected a positive integer")
    return MeshSpec(DEFAULT_AXES, (1, int(device_count)))
