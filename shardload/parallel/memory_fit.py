"""Find a mesh that a model fits on: weights per device against device memory."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardload.errors import UsageError
from shardload.layout_search.layout_plan import LayoutPlan
from shardload.layout_search.searching import MAX_DEVICES
from shardload.parallel.choosing import choose
from shardload.sharding.mesh import DEFAULT_AXES, MeshSpec

RESERVED_SHARE = 0.1
"""Fraction of device memory reserved for activations, the generation cache and the runtime; a lower bound."""


@dataclass(frozen=True, slots=True)
class MeshFit:
    """A mesh, and the memory its devices need for weights."""

    mesh: MeshSpec
    device_bytes: int
    """Bytes of weights on each device."""
    usable_bytes: int
    """Device memory minus the margin."""

    @property
    def fits(self) -> bool:
        """Whether the weights fit."""
        return self.device_bytes <= self.usable_bytes


def belongs_to_a_mesh(layout: Any) -> bool:
    """Whether a layout is for one mesh only: a LayoutMap or a distribution of Keras, a `LayoutPlan` or its file."""
    if isinstance(layout, str | os.PathLike):
        return Path(layout).suffix == ".json"
    return hasattr(layout, "device_mesh") or isinstance(layout, LayoutPlan)


def fit(model: Any, mesh: MeshSpec, device_memory_bytes: int, *, layout: Any = "auto") -> MeshFit:
    """Compute whether ``model`` fits on the devices of ``mesh``: weights only, `RESERVED_SHARE` stays free."""
    is_number = isinstance(device_memory_bytes, int | float) and not isinstance(device_memory_bytes, bool)
    if not is_number or not math.isfinite(device_memory_bytes):
        raise UsageError(
            f"Cannot use device_memory_bytes={device_memory_bytes!r:.60}: expected the bytes of one device, such as "
            "16 << 30"
        )
    choice = choose(model, mesh, layout)
    return MeshFit(choice.mesh, choice.device_bytes, int(device_memory_bytes * (1 - RESERVED_SHARE)))


def smallest_mesh(model: Any, device_memory_bytes: int, *, layout: Any = "auto") -> MeshFit | None:
    """Return the smallest of the meshes 1x1, 1x2, 1x4, … that ``model`` fits on, or ``None`` if it fits on none.

    Args:
        model: A built model; its variables may have no values.
        device_memory_bytes: Memory of one device.
        layout: As in `choose`; a LayoutMap belongs to one mesh and cannot be used here.

    Raises:
        LayoutError: As `choose` does.
    """
    devices, whole = 1, None
    while devices <= MAX_DEVICES:
        found = fit(model, MeshSpec(DEFAULT_AXES, (1, devices)), device_memory_bytes, layout=layout)
        if found.fits:
            return found
        # Stop where nothing divides any more. A doubling that saves nothing is not enough to stop: one variable may be
        # whole from there on while others still divide.
        if whole is None:
            whole = found.device_bytes
        elif found.device_bytes >= whole:
            return None
        devices *= 2
    return None
