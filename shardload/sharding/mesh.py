"""Meshes as numbers: axis names and sizes, no device.

A mesh of 2 x 4 with axes ``batch`` and ``model`` has eight *positions*, counted row-major::

                 model
              0  1  2  3
    batch 0   0  1  2  3
          1   4  5  6  7

The name of an axis says what it splits, at any place in the mesh::

    batch   batch, data, dp, replica     the batch; each device along it has the same weights
    fsdp    fsdp, zero                   weights, in the largest dim that no other axis splits
    model   model, tp, tensor            weights, as tensor parallelism does
    expert  expert, ep                   the experts of a mixture

Any other name means what its position suggests: the last axis is ``model``, the first of several is ``batch``, those
between are ``fsdp``.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardload.errors import MeshError
from shardload.units import check_kind

_AxisKind = Literal["batch", "fsdp", "model", "expert"]
"""What an axis splits: the batch, weights (``fsdp``: as ZeRO does; ``model``: tensor parallelism), or experts."""
AXIS_NAMES: dict[_AxisKind, tuple[str, ...]] = {
    "batch": ("batch", "data", "dp", "replica"),
    "fsdp": ("fsdp", "zero"),
    "model": ("model", "tp", "tensor"),
    "expert": ("expert", "ep"),
}
_KINDS: dict[str, _AxisKind] = {name: kind for kind, names in AXIS_NAMES.items() for name in names}
DEFAULT_AXES = ("batch", "model")
_MAX_POSITIONS = 1 << 20
"""Largest number of positions in a mesh: more devices than any machine has, so a larger mesh is a typo."""


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """A mesh: one name and one size per axis, in order; names differ and sizes are positive."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        names, sizes = ", ".join(map(str, self.axes)), "x".join(map(str, self.sizes))
        if not self.axes or len(self.axes) != len(self.sizes):
            raise MeshError(f"A mesh needs one name per axis, got {names or 'none'} for {sizes}")
        if len(set(self.axes)) != len(self.axes):
            raise MeshError(f"Mesh axis names must differ, got {names}")
        if any(n < 1 for n in self.sizes) or math.prod(self.sizes) > _MAX_POSITIONS:
            raise MeshError(f"Mesh sizes must be positive and at most {_MAX_POSITIONS} together, got {sizes}")

    @classmethod
    def parse(cls, text: str, *, axes: str | None = None) -> MeshSpec:
        """Parse ``1x8`` (``axes`` names its axes, joined by commas), ``8`` (means ``1x8``) or ``data=2,model=4``."""
        check_kind("axes", axes, str | None, "text such as 'data,model'")
        if "=" in text:
            if axes is not None:
                raise MeshError(f"The mesh {text!r} names its axes already; give no separate axes ({axes})")
            pairs = [p.strip() for p in text.split(",")]
            if not all(re.fullmatch(r"[A-Za-z_]\w*=\d{1,9}", p) for p in pairs):
                raise MeshError(f"Cannot read the mesh {text!r}. Write a name and a size for each axis: data=2,model=4")
            names, numbers = zip(*(p.split("=") for p in pairs), strict=True)
            return cls(names, tuple(map(int, numbers)))
        # At most nine digits, as int() raises for thousands of them.
        if not re.fullmatch(r"\d{1,9}(x\d{1,9})*", text.strip(), re.ASCII | re.IGNORECASE):
            raise MeshError(f"Cannot read the mesh {text!r}. Write sizes like 1x8, or names like data=2,model=4")
        sizes = tuple(int(n) for n in text.lower().split("x"))
        if axes is not None:
            return cls(tuple(a.strip() for a in axes.split(",")), sizes)
        if len(sizes) > len(DEFAULT_AXES):
            raise MeshError(f"The mesh {text!r} has {len(sizes)} axes; name them, for example data=2,fsdp=2,model=2")
        # A size alone is tensor parallelism over all devices: "8" means 1x8.
        return cls(DEFAULT_AXES, (1,) * (len(DEFAULT_AXES) - len(sizes)) + sizes)

    @property
    def size(self) -> int:
        """Number of positions, and so of devices."""
        return math.prod(self.sizes)

    def axis_size(self, axis: str) -> int:
        """Return the size of one axis."""
        if axis not in self.axes:
            raise MeshError(f"The mesh {self} has no axis {axis!r}; it has {', '.join(self.axes)}")
        return self.sizes[self.axes.index(axis)]

    def axis_kind(self, axis: str) -> _AxisKind:
        """Return what an axis splits: its name says so, or if the name is unknown, its position in the mesh."""
        if (known := _KINDS.get(axis.lower())) is not None:
            return known
        # Test for the last axis first, so that the only axis of a mesh is `model`.
        if axis == self.axes[-1]:
            return "model"
        return "batch" if axis == self.axes[0] else "fsdp"

    def axes_of(self, kind: _AxisKind) -> tuple[str, ...]:
        """Return the names of the axes of one kind, in the order of the mesh."""
        return tuple(axis for axis in self.axes if self.axis_kind(axis) == kind)

    @property
    def guessed_axes(self) -> tuple[str, ...]:
        """Axes of unknown name, whose kind is guessed from their place in the mesh; those of size 1 are left out."""
        return tuple(axis for axis in self.axes if axis.lower() not in _KINDS and self.axis_size(axis) > 1)

    @property
    def batch_axis(self) -> str:
        """The axis that splits the batch: the first ``batch`` axis, else the first ``fsdp`` axis, else the first."""
        # Without a batch axis, `fsdp` splits the batch, as in ZeRO: its devices share weights, not examples.
        return (*self.axes_of("batch"), *self.axes_of("fsdp"), *self.axes)[0]

    def coordinates(self, position: int) -> dict[str, int]:
        """Return axis → index along it of the ``position``-th device, in row-major order: 5 of 2 x 4 is (1, 1)."""
        found: dict[str, int] = {}
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            position, found[axis] = divmod(position, size)
        return found

    def __str__(self) -> str:
        return ",".join(f"{a}={n}" for a, n in zip(self.axes, self.sizes, strict=True))


def planned_mesh(layout: Any) -> MeshSpec | None:
    """Return the mesh of a `shardload.parallel.LayoutPlan`, or of the JSON file of one; ``None`` for other layouts.

    A file that cannot be read has no mesh; the code that reads its layouts raises the error.
    """
    if isinstance(layout, str | os.PathLike):
        # Without JAX: a command simulates the devices of the mesh, and JAX fixes their number when it starts.
        if (path := Path(layout)).suffix != ".json":
            return None
        try:
            mesh = json.loads(path.read_text())["mesh"]
            return MeshSpec(tuple(mesh["axes"]), tuple(mesh["sizes"]))
        # A MeshError is a ValueError.
        except (OSError, ValueError, KeyError, TypeError):
            return None
    # By attribute: `shardload.parallel`, which defines LayoutPlan, imports JAX and is above this package.
    found = getattr(layout, "mesh", None)
    return found if isinstance(found, MeshSpec) else None
