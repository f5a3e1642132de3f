"""How a variable is sharded over a mesh, as arithmetic.

A `Layout` names, for each dim of a variable, the mesh axes that split it (usually none or one). A
(4, 6) kernel with ``spec=((), ("model",))`` on the mesh ``batch=1,model=2``::

         model=0 │ model=1
       [ 0 0 0   │ 1 1 1 ]
       [ 0 0 0   │ 1 1 1 ]      every dim that is split divides evenly: uneven shards
       [ 0 0 0   │ 1 1 1 ]      do not exist in JAX's NamedSharding, nor here
       [ 0 0 0   │ 1 1 1 ]

`Bounds` is the box of one shard: that of ``model=1`` is ``Bounds(start=(0, 3), stop=(4, 6))``. `spread` splits a layout
further, as ZeRO-1 does with the state of an optimizer. Each shard of a (6, 8) momentum that follows its kernel has two
equal copies over ``batch``, so each copy may keep a part::

    mesh batch=2,model=4     follows its kernel    (-, model)         (6, 2) on each device
                             spread over batch     (batch, model)     (3, 2) on each device
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add, lt, sub
from typing import Any

import numpy as np

from shardload.errors import LayoutError
from shardload.sharding.mesh import MeshSpec
from shardload.units import plural

Spec = tuple[tuple[str, ...], ...]
"""For each dim, the mesh axes that split it: ``((), ("model",))`` splits the second dim over the axis ``model``."""


def spec_from_axes(axes: Iterable[Any]) -> Spec:
    """Return the `Spec` of a `jax.sharding.PartitionSpec`, or of the axes of a Keras layout."""
    return tuple(() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in axes)


@dataclass(frozen=True, slots=True)
class Bounds:
    """A box of indices of a tensor: in each dim, those from ``start`` up to, but not including, ``stop``."""

    start: tuple[int, ...]
    """First index in each dim."""
    stop: tuple[int, ...]
    """One past the last index in each dim."""

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"start {self.start} and stop {self.stop} differ in rank")
        if min(self.start, default=0) < 0 or any(map(lt, self.stop, self.start)):
            raise ValueError(f"bounds must satisfy 0 <= start <= stop, got {self.start} and {self.stop}")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Bounds:
        """Return the box that covers a tensor of ``shape`` entirely."""
        return _whole(tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of the box in each dim: ``stop`` minus ``start``."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """Number of elements in the box (1 for rank 0)."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as slices: ``array[box.slices]`` are the entries of an array in the box."""
        return tuple(map(slice, self.start, self.stop))

    def intersect(self, other: Bounds) -> Bounds | None:
        """Return the overlap of two boxes, or ``None`` if there is none (rank-0 boxes always overlap)."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        # Boxes that only touch do not overlap. In rank 0 there is no dim that could keep two boxes apart.
        return Bounds(start, stop) if all(map(lt, start, stop)) else None

    def relative_to(self, origin: tuple[int, ...]) -> Bounds:
        """Return this box in the indices of a part that starts at ``origin``, such as a shard: minus ``origin``."""
        return Bounds(
            tuple(a - o for a, o in zip(self.start, origin, strict=True)),
            tuple(b - o for b, o in zip(self.stop, origin, strict=True)),
        )


@functools.lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> Bounds:
    """Return the box of a whole tensor; cached, because repeated layers ask for few shapes thousands of times."""
    return Bounds((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """How one variable is sharded over a mesh: which mesh axes split which dim. Each axis splits at most one dim."""

    mesh: MeshSpec
    spec: Spec

    def __post_init__(self) -> None:
        used = [axis for axes in self.spec for axis in axes]
        if len(set(used)) != len(used):
            raise LayoutError(f"A mesh axis can split one dim only, got {self.spec}")
        if unknown := sorted(set(used) - set(self.mesh.axes)):
            raise LayoutError(f"The layout {self.spec} names axes {unknown} that the mesh {self.mesh} does not have")

    def __hash__(self) -> int:
        # A key of several caches, asked for each tensor: without the mesh, which nearly always is the same.
        return hash(self.spec)

    @classmethod
    def replicated(cls, mesh: MeshSpec, rank: int) -> Layout:
        """Return the layout that stores the whole variable on every device."""
        return cls(mesh, ((),) * rank)

    @classmethod
    def split(cls, mesh: MeshSpec, rank: int, *, dim: int, axis: str) -> Layout:
        """Return the layout that splits ``dim`` over ``axis``, and no other dim of a variable of ``rank`` dims."""
        return cls(mesh, tuple((axis,) if d == dim else () for d in range(rank)))

    @classmethod
    def of_spec(cls, mesh: MeshSpec, spec: Iterable[Any], rank: int) -> Layout:
        """Return the layout that a `jax.sharding.PartitionSpec` states for a variable of ``rank`` dims."""
        axes = spec_from_axes(spec)
        # A PartitionSpec may be shorter than the rank: the dims at the end are not split.
        return cls(mesh, (*axes, *((),) * (rank - len(axes))))

    @property
    def parts(self) -> tuple[int, ...]:
        """Number of parts into which each dim of the variable is split: 1 for a dim that is not split."""
        return tuple(math.prod(self.mesh.axis_size(a) for a in axes) for axes in self.spec)

    @property
    def is_replicated(self) -> bool:
        """Whether every device stores the whole variable."""
        return all(n == 1 for n in self.parts)

    def divides(self, shape: tuple[int, ...]) -> bool:
        """Whether each dim of ``shape`` is divisible by its number of parts, so that all shards are equally large."""
        return len(shape) == len(self.spec) and all(n % p == 0 for n, p in zip(shape, self.parts, strict=True))

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one device's shard; raise a `LayoutError` if a dim is not divisible."""
        return _shard_shape(self, tuple(shape))

    def bounds(self, shape: tuple[int, ...]) -> tuple[Bounds, ...]:
        """Return the box of a tensor that each mesh position stores, in row-major order; raise if shards are uneven."""
        return _bounds(self, tuple(shape))

    def bounds_at(self, shape: tuple[int, ...], positions: Sequence[int]) -> tuple[Bounds, ...]:
        """Return the boxes that these mesh positions store, like `bounds`; equal boxes are one object."""
        shard = self.shard_shape(shape)
        # Axis → its index at each position.
        indices = np.unravel_index(np.asarray(positions, np.int64), self.mesh.sizes)
        where = dict(zip(self.mesh.axes, indices, strict=True))
        starts = []  # per dim, of every position
        for axes, length in zip(self.spec, shard, strict=True):
            index = np.zeros(len(positions), np.int64)
            for axis in axes:
                # Several axes of one dim count like digits, the first the most significant, as in a PartitionSpec.
                index = index * self.mesh.axis_size(axis) + where[axis]
            starts.append((index * length).tolist())
        every = list(zip(*starts, strict=True)) if starts else [()] * len(positions)
        # All shards have one shape, so their starts tell them apart. A mesh of thousands of devices has few.
        made = {start: Bounds(start, tuple(map(add, start, shard))) for start in set(every)}
        return tuple(map(made.__getitem__, every))

    def __str__(self) -> str:
        return "(" + ", ".join("+".join(axes) or "-" for axes in self.spec) + ")"


@functools.lru_cache(maxsize=1024)
def _shard_shape(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    if not layout.divides(shape):
        raise LayoutError(f"Shape {shape} does not divide into {layout.parts} parts on the mesh {layout.mesh}")
    return tuple(n // p for n, p in zip(shape, layout.parts, strict=True))


@functools.lru_cache(maxsize=1024)
def _bounds(layout: Layout, shape: tuple[int, ...]) -> tuple[Bounds, ...]:
    # Cached: requested several times per variable, while a model has few different shapes.
    return layout.bounds_at(shape, range(layout.mesh.size))


@dataclass(frozen=True, slots=True)
class Fallback:
    """A variable that could not get the layout that a layout rule asks for, to report it."""

    variable: str
    """Path of the variable."""
    wanted: str
    """The layout that the rule asks for, as text."""
    got: str
    """The layout that the variable got instead, as text."""
    why: str
    """One line for people, such as ``4 heads do not divide by 8``."""


def spread(layout: Layout, shape: tuple[int, ...], axes: Sequence[str]) -> Layout:
    """Return ``layout`` split further over ``axes``, one after the other, where an axis divides a dim evenly.

    Of the dims that an axis divides, it splits the longest one that is not split yet. If all are, it also splits the
    one with the longest shards. An axis that divides no dim, or splits the variable already, changes nothing.
    """
    for axis in axes:
        layout = _over(layout, shape, axis)
    return layout


def why_not_spread(layout: Layout, shape: tuple[int, ...], axes: Sequence[str]) -> str:
    """Return a note on why `spread` splits nothing over some of ``axes``; empty if it uses all of them."""
    why = []
    for axis in axes:
        before, size = layout, layout.mesh.axis_size(axis)
        layout = _over(layout, shape, axis)
        if size == 1:
            why.append(f"axis {axis!r} has one device")
        elif before == layout and not _splits(layout, axis):
            shards = "x".join(map(str, layout.shard_shape(shape))) or "scalar"
            why.append(f"no dim of its {shards} shard divides by the {plural(size, 'device')} of axis {axis!r}")
    return "; ".join(why)


def _over(layout: Layout, shape: tuple[int, ...], axis: str) -> Layout:
    size = layout.mesh.axis_size(axis)
    shard = layout.shard_shape(shape)
    # Shards must stay even: only a dim whose shards divide can be split again.
    dims = [dim for dim, length in enumerate(shard) if length % size == 0 and length > 0]
    if size == 1 or not dims or _splits(layout, axis):
        return layout
    # A dim that is not split yet before one that is, then the longest, then the first.
    chosen = min(dims, key=lambda dim: (bool(layout.spec[dim]), -shard[dim], dim))
    spec: Spec = tuple((*axes, axis) if dim == chosen else axes for dim, axes in enumerate(layout.spec))
    return Layout(layout.mesh, spec)


def _splits(layout: Layout, axis: str) -> bool:
    return any(axis in axes for axes in layout.spec)
