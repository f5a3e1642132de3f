"""Meshes as numbers: axis names and sizes, no device.

A mesh of 2 x 4 with axes ``batch`` and ``model`` has eight *positions*, counted row-major::

                 model
              0  1  2  3
    batch 0   0  1  2  3
          1   4  5  6  7

The name of an axis says what it splits, at any place in the mesh::

    batch     batch, data, dp, replica      the batch; each device along it has the same weights
    fsdp      fsdp, zero                    the batch, and the storage of weights, which are gathered for use
    sequence  sequence, seq, context, cp    the sequence of the inputs
    model     model, tp, tensor             weights, as tensor parallelism does
    expert    expert, ep                    the experts of a mixture
    stage     stage, pipe, pipeline, pp     nothing: shardload has no pipeline parallelism

A number may follow a name (``model_1``, ``model_2``). Any other name means what its position suggests: the last axis is
``model``, the first of several is ``batch``, those between are ``fsdp``.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardload.errors import MeshError
from shardload.units import check_kind

_AxisKind = Literal["batch", "fsdp", "sequence", "model", "expert", "stage"]
"""What an axis splits: the batch (``fsdp``: and the storage of weights), the sequence, weights, experts, or nothing."""
AXIS_NAMES: dict[_AxisKind, tuple[str, ...]] = {
    "batch": ("batch", "data", "dp", "replica"),
    "fsdp": ("fsdp", "zero"),
    "sequence": ("sequence", "seq", "context", "cp"),
    "model": ("model", "tp", "tensor"),
    "expert": ("expert", "ep"),
    "stage": ("stage", "pipe", "pipeline", "pp"),
}
_KINDS: dict[str, _AxisKind] = {name: kind for kind, names in AXIS_NAMES.items() for name in names}
_ARTICLES = {"batch": "the batch", "fsdp": "an fsdp", "model": "the model", "expert": "the expert"}
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
        if (known := _known_kind(axis)) is not None:
            return known
        # Test for the last axis first, so that the only axis of a mesh is `model`.
        if axis == self.axes[-1]:
            return "model"
        return "batch" if axis == self.axes[0] else "fsdp"

    def axes_of(self, kind: _AxisKind) -> tuple[str, ...]:
        """Return the names of the axes of one kind, in the order of the mesh."""
        return tuple(axis for axis in self.axes if self.axis_kind(axis) == kind)

    @property
    def guess_notes(self) -> tuple[str, ...]:
        """One sentence for each axis whose use is guessed from its position, because its name is unknown."""
        guessed = [axis for axis in self.axes if _known_kind(axis) is None and self.axis_size(axis) > 1]
        return tuple(
            f"axis {axis!r} of the mesh is used as {_ARTICLES[self.axis_kind(axis)]} axis because of its position; "
            f"known names are {', '.join(AXIS_NAMES[self.axis_kind(axis)])}"
            for axis in guessed
        )

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that split the batch: those of the kinds ``batch`` and ``fsdp``; none in a mesh without them."""
        return tuple(axis for axis in self.axes if self.axis_kind(axis) in ("batch", "fsdp"))

    def splitting(self, length: int, axes: Sequence[str]) -> tuple[str, ...]:
        """Return those of ``axes`` that split a dim of this length evenly, in order: one that does not is left out."""
        found: tuple[str, ...] = ()
        for axis in axes:
            if length % (size := self.axis_size(axis)) == 0:
                found, length = (*found, axis), length // size
        return found

    def of_batch(self, shape: Sequence[int], batch_axes: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """Return which axes split each dim of an array of a batch: its rows, and its sequence, as far as they divide.

        An axis for sequences splits the second dim of token ids, ``(rows, tokens)``, and of vectors, ``(rows, tokens,
        features)``; not that of images.
        """
        rows = self.splitting(shape[0], batch_axes) if shape else ()
        along = [axis for axis in self.axes_of("sequence") if axis not in batch_axes]
        tokens = self.splitting(shape[1], along) if len(shape) in (2, 3) else ()
        return (rows, tokens, *((),) * len(shape))[: len(shape)]

    def divided(self, axis: str, major: int) -> MeshSpec:
        """Return the mesh with one axis divided in two: ``model=64`` by ``major=8`` into ``model_1=8,model_2=8``.

        The devices keep their positions. A dim that is split over both parts is split as over the whole axis.
        """
        at, size = self.axes.index(axis), self.axis_size(axis)
        parts, sizes = (f"{axis}_1", f"{axis}_2"), (major, size // major)
        return MeshSpec(
            (*self.axes[:at], *parts, *self.axes[at + 1 :]), (*self.sizes[:at], *sizes, *self.sizes[at + 1 :])
        )

    @property
    def undivided(self) -> MeshSpec:
        """The mesh with the axes that `divided` has made joined again: ``model=64`` for ``model_1=8,model_2=8``."""
        for axis in (axis.removesuffix("_1") for axis in self.axes if axis.endswith("_1")):
            at = self.axes.index(f"{axis}_1")
            if self.axes[at + 1 : at + 2] == (f"{axis}_2",) and axis not in self.axes:
                size = self.sizes[at] * self.sizes[at + 1]
                return MeshSpec(
                    (*self.axes[:at], axis, *self.axes[at + 2 :]), (*self.sizes[:at], size, *self.sizes[at + 2 :])
                ).undivided
        return self

    def parts_in(self, other: MeshSpec) -> dict[str, tuple[str, ...]] | None:
        """Return which axes of ``other`` each axis of this mesh is divided into; ``None`` if it is another mesh.

        An axis that ``other`` has too is its own only part.
        """
        found: dict[str, tuple[str, ...]] = {}
        for axis, size in zip(self.axes, self.sizes, strict=True):
            parts = (axis,) if axis in other.axes else (f"{axis}_1", f"{axis}_2")
            if not {*parts} <= {*other.axes} or math.prod(map(other.axis_size, parts)) != size:
                return None
            found[axis] = parts
        return found if tuple(itertools.chain(*found.values())) == other.axes else None

    def check_no_stages(self) -> None:
        """Raise if the mesh has an axis for the stages of a pipeline: nothing would be split over it."""
        for axis in self.axes_of("stage"):
            if self.axis_size(axis) > 1:
                raise MeshError(
                    f"Cannot choose layouts on {self}: axis {axis!r} is for the stages of a pipeline, and shardload "
                    "has no pipeline parallelism. Give its devices to another axis: data, fsdp or model"
                )

    def coordinates(self, position: int) -> dict[str, int]:
        """Return axis → index along it of the ``position``-th device, in row-major order: 5 of 2 x 4 is (1, 1)."""
        found: dict[str, int] = {}
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            position, found[axis] = divmod(position, size)
        return found

    def __str__(self) -> str:
        return ",".join(f"{a}={n}" for a, n in zip(self.axes, self.sizes, strict=True))


def _known_kind(axis: str) -> _AxisKind | None:
    return _KINDS.get(re.sub(r"(_\d+)+$", "", axis.lower()))


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
