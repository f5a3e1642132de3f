"""N-dimensional half-open boxes that describe parts of tensors.

A 2-D example, ``Bounds(start=(1, 2), stop=(3, 5))``::

        0 1 2 3 4 5
      0 . . . . . .
      1 . . # # # .
      2 . . # # # .
      3 . . . . . .
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from operator import lt, sub


@dataclass(frozen=True, slots=True)
class Bounds:
    """A half-open box in the index space of a tensor.

    Raises:
        ValueError: When ``start`` and ``stop`` differ in length, a bound is negative, or a dim
            ends before it starts.
    """

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
        """Extent of the box in each dim."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """Number of elements in the box (1 for rank 0)."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into a NumPy array."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Bounds) -> Bounds | None:
        """Return the overlap, or ``None`` if there is none (rank-0 boxes always overlap)."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        # Boxes that only touch do not overlap. In rank 0 there is no dim that could keep two boxes apart.
        if any(b <= a for a, b in zip(start, stop, strict=True)):
            return None
        return Bounds(start, stop)

    def relative_to(self, origin: tuple[int, ...]) -> Bounds:
        """Return the same box, relative to ``origin``."""
        return Bounds(
            tuple(a - o for a, o in zip(self.start, origin, strict=True)),
            tuple(b - o for b, o in zip(self.stop, origin, strict=True)),
        )


@functools.lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> Bounds:
    """Layers repeat, so a few shapes are asked for thousands of times."""
    return Bounds((0,) * len(shape), shape)
