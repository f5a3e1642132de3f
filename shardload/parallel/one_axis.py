"""Layouts for tensor parallelism on one axis, by the identity of each variable: no device, no path, no pattern."""

from __future__ import annotations

from typing import Any

from shardload.errors import UsageError
from shardload.parallel.choosing import choose
from shardload.parallel.result import LayoutChoice
from shardload.sharding.mesh import DEFAULT_AXES, MeshSpec
from shardload.typing import LayoutLike


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
        LayoutError: As in `shardload.parallel.choose`.
    """
    return choose(model, tensor_parallel_mesh(device_count), layout)


def tensor_parallel_mesh(device_count: int) -> MeshSpec:
    """Return the mesh of ``device_count`` devices along the ``model`` axis; each of them gets the whole batch.

    Raises:
        UsageError: When it is not a positive integer.
    """
    if isinstance(device_count, bool) or not isinstance(device_count, int) or device_count < 1:
        raise UsageError(f"Cannot use device_count={device_count!r}: expected a positive integer")
    return MeshSpec(DEFAULT_AXES, (1, device_count))
