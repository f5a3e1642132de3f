"""How a variable is sharded over a mesh, as arithmetic.

A `Layout` names, for each dim of a variable, the mesh axes that split it (usually none or one). A
(4, 6) kernel with ``spec=((), ("model",))`` on the mesh ``batch=1,model=2``::

         model=0 │ model=1
       [ 0 0 0   │ 1 1 1 ]
       [ 0 0 0   │ 1 1 1 ]      every dim that is split divides evenly: uneven shards
       [ 0 0 0   │ 1 1 1 ]      do not exist in JAX's NamedSharding, nor here
       [ 0 0 0   │ 1 1 1 ]
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.errors import LayoutError
from shardload.sharding.bounds import Bounds
from shardload.sharding.mesh import MeshSpec

Spec = tuple[tuple[str, ...], ...]
"""Mesh axes that split each dim, one tuple per dim."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The sharding of one variable over a mesh.

    Raises:
        LayoutError: When an axis is used twice or is not in the mesh.
    """

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
        """Return a layout that splits one dim over one axis."""
        return cls(mesh, tuple((axis,) if d == dim else () for d in range(rank)))

    @classmethod
    def of_spec(cls, mesh: MeshSpec, spec: Iterable[Any], rank: int) -> Layout:
        """Return the layout that a `jax.sharding.PartitionSpec` states for a variable of ``rank`` dims."""
        axes = [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec]
        # A PartitionSpec may be shorter than the rank: the dims at the end are not split.
        return cls(mesh, (*axes, *((),) * (rank - len(axes))))

    @property
    def parts(self) -> tuple[int, ...]:
        """Number of parts along each dim."""
        return tuple(math.prod(self.mesh.axis_size(a) for a in axes) for axes in self.spec)

    @property
    def is_replicated(self) -> bool:
        """Whether every device stores the whole variable."""
        return all(n == 1 for n in self.parts)

    def divides(self, shape: tuple[int, ...]) -> bool:
        """Whether each dim of ``shape`` is divisible by its number of parts."""
        return len(shape) == len(self.spec) and all(n % p == 0 for n, p in zip(shape, self.parts, strict=True))

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one device's shard.

        Raises:
            LayoutError: When a dim is not divisible.
        """
        return _shard_shape(self, tuple(shape))

    def bounds(self, shape: tuple[int, ...]) -> tuple[Bounds, ...]:
        """Return the box of each mesh position, row-major over the mesh.

        Raises:
            LayoutError: When a dim is not divisible.
        """
        return _bounds(self, tuple(shape))

    def __str__(self) -> str:
        return "(" + ", ".join("+".join(axes) or "-" for axes in self.spec) + ")"


@functools.lru_cache(maxsize=1024)
def _shard_shape(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    if not layout.divides(shape):
        raise LayoutError(f"Shape {shape} does not divide into {layout.parts} parts on the mesh {layout.mesh}")
    return tuple(n // p for n, p in zip(shape, layout.parts, strict=True))


@functools.lru_cache(maxsize=1024)
def _bounds(layout: Layout, shape: tuple[int, ...]) -> tuple[Bounds, ...]:
    """Cached: requested several times per variable, while a model has few different shapes.

    Positions with the same box share one object, of which a mesh of thousands of devices has few.
    """
    shard, mesh = layout.shard_shape(shape), layout.mesh
    # Axis → its index at each mesh position, row-major.
    where = dict(zip(mesh.axes, np.indices(mesh.sizes).reshape(len(mesh.axes), mesh.size), strict=True))
    starts = []  # per dim, of every position
    for axes, length in zip(layout.spec, shard, strict=True):
        index = np.zeros(mesh.size, np.int64)
        for axis in axes:
            # Several axes of one dim count like digits, the first the most significant, as in a PartitionSpec.
            index = index * mesh.axis_size(axis) + where[axis]
        starts.append((index * length).tolist())
    every = list(zip(*starts, strict=True)) if starts else [()] * mesh.size
    # All shards have one shape, so their starts tell them apart.
    made = {start: Bounds(start, tuple(a + n for a, n in zip(start, shard, strict=True))) for start in set(every)}
    return tuple(map(made.__getitem__, every))


@dataclass(frozen=True, slots=True)
class Fallback:
    """A variable that did not get its rule's layout."""

    variable: str
    """Path of the variable."""
    wanted: str
    """The rule's layout, as text."""
    got: str
    """The actual layout, as text."""
    why: str
    """One line for people, such as ``4 heads do not divide by 8``."""
