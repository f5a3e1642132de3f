"""Which mesh a model fits on: weights per device against device memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardload.parallel.choose import choose
from shardload.sharding.mesh import DEFAULT_AXES, MeshSpec

MARGIN = 0.1
"""Share of device memory left to activations, the generation cache and the runtime; a floor, not a promise."""
MAX_DEVICES = 4096


@dataclass(frozen=True, slots=True)
class MeshFit:
    """A mesh, and what a device of it needs for weights."""

    mesh: MeshSpec
    device_bytes: int
    """Bytes of weights on each device."""
    usable_bytes: int
    """Device memory less the margin."""

    @property
    def fits(self) -> bool:
        """Whether the weights fit."""
        return self.device_bytes <= self.usable_bytes


def fit(model: Any, mesh: MeshSpec, device_memory_bytes: int, *, layout: Any = "auto") -> MeshFit:
    """Whether ``model`` fits on the devices of ``mesh``, weights only, `MARGIN` of their memory left free."""
    return MeshFit(mesh, choose(model, mesh, layout).device_bytes, int(device_memory_bytes * (1 - MARGIN)))


def smallest_mesh(model: Any, device_memory_bytes: int, *, layout: Any = "auto") -> MeshFit | None:
    """The smallest of the meshes 1x1, 1x2, 1x4, … on which ``model`` fits, or ``None`` where none does.

    Args:
        model: A built model; its variables may have no values.
        device_memory_bytes: Memory of one device.
        layout: As in `choose`; a LayoutMap belongs to one mesh and cannot be used here.

    Raises:
        LayoutError: As `choose` does.
    """
    devices, last = 1, None
    while devices <= MAX_DEVICES:
        found = fit(model, MeshSpec(DEFAULT_AXES, (1, devices)), device_memory_bytes, layout=layout)
        if found.fits:
            return found
        if last is not None and found.device_bytes >= last:
            return None  # nothing divides any further
        devices, last = devices * 2, found.device_bytes
    return None
