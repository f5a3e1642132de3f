"""The variables of Keras' packed layers (int4 in groups, GPTQ), from codes that a checkpoint stores.

Keras flattens a kernel to a matrix: some leading dims become its rows, the others its columns, and a group is a number
of rows that share a scale. GPTQ stores the matrix transposed::

    kernel (in, heads, head_dim)  ─►  matrix (in, out)        codes                 scale, zero
                                      int4                    int8 (in, ⌈out/2⌉)    (groups, out)
                                      GPTQ of 4 bits          uint8 (⌈out/2⌉, in)   (out, groups)
                                      GPTQ of 8 bits          uint8 (out, in)       (out, groups)

Codes and zeros come unsigned, as GPTQ has them. Those of int4 are signed: 8 is subtracted from each, so that a code
less its zero stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.sharding.layout import Bounds
from shardload.transfer.encoding import Output

HALF = 8
"""What is subtracted from unsigned codes of 4 bits to make them signed."""


@dataclass(frozen=True)
class KeptCodes:
    """Packs the codes of one kernel: an `shardload.transfer.encoding.Encoding`."""

    outputs: tuple[Output, ...]
    """The codes, and variables that are constant."""
    shape: tuple[int, ...]
    """Shape of the kernel."""
    row_dims: int
    """How many leading dims become rows of the matrix."""
    is_packed: bool
    """Whether two codes are packed into a byte, along the columns."""
    is_transposed: bool
    is_signed: bool

    @cached_property
    def _pivots(self) -> tuple[int, int]:
        """The dims that a box may have in part: of the dims of rows, and of columns, the first that is not 1."""
        found = []
        for first, stop in ((0, self.row_dims), (self.row_dims, len(self.shape))):
            found.append(next((d for d in range(first, stop) if self.shape[d] > 1), first))
        return found[0], found[1]

    @property
    def whole_dims(self) -> frozenset[int]:
        """Dims along which a box must be complete, so that it is a box of the matrix."""
        return frozenset(range(len(self.shape))) - frozenset(self._pivots)

    @property
    def multiples(self) -> tuple[int, ...]:
        """What a box must begin at a multiple of: two codes of a byte are computed together."""
        _, pivot = self._pivots
        odd = self.is_packed and self._inner(pivot) % 2
        return tuple(2 if odd and d == pivot else 1 for d in range(len(self.shape)))

    def _inner(self, dim: int) -> int:
        """Return how many rows or columns of the matrix one index of a dim is."""
        return math.prod(self.shape[dim + 1 : self.row_dims if dim < self.row_dims else None])

    def needed(self, number: int, box: Bounds) -> Bounds:
        """Return the box of the kernel from which a box of the packed codes is computed."""
        rows, columns = range(box.start[0], box.stop[0]), range(box.start[1], box.stop[1])
        if self.is_transposed:
            rows, columns = columns, rows
        times = 2 if self.is_packed else 1
        wanted = (rows.start, rows.stop), (times * columns.start, times * columns.stop)
        start, stop = [0] * len(self.shape), list(self.shape)
        for pivot, (first, last), multiple in zip(
            self._pivots, wanted, (1, self.multiples[self._pivots[1]]), strict=True
        ):
            inner, n = self._inner(pivot), self.shape[pivot]
            start[pivot] = min(n, first // inner // multiple * multiple)
            stop[pivot] = min(n, -(-last // inner // multiple) * multiple)
        return Bounds(tuple(start), tuple(stop))

    def encode(self, values: NDArray[Any], box: Bounds) -> Iterator[tuple[int, Bounds, NDArray[Any]]]:
        """Yield the packed codes of a box of the kernel, with their place."""
        row, column = self._pivots
        rows = box.start[row] * self._inner(row), box.stop[row] * self._inner(row)
        columns = box.start[column] * self._inner(column), box.stop[column] * self._inner(column)
        codes = np.ascontiguousarray(values, np.uint8).reshape(rows[1] - rows[0], columns[1] - columns[0])
        if self.is_signed:
            codes = codes ^ np.uint8(HALF)
        if self.is_packed:
            codes, columns = _packed(codes), (columns[0] // 2, -(-columns[1] // 2))
        place = (rows, columns)
        if self.is_transposed:
            codes, place = codes.T, (columns, rows)
        (a, b), (c, d) = place
        yield 0, Bounds((a, c), (b, d)), codes.view(self.outputs[0].dtype)


def _packed(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack codes of 4 bits along the last dim, the first one in the low half of its byte."""
    low = codes[:, ::2].copy()
    low[:, : codes.shape[1] // 2] |= codes[:, 1::2] << 4
    return low


@dataclass(frozen=True, slots=True)
class KeptGroups:
    """Puts the scales or zero points of one kernel in Keras' order: an `shardload.transfer.encoding.Encoding`.

    They come as ``(dims of the kernel that are outputs, …, groups)``.
    """

    outputs: tuple[Output, ...]
    shape: tuple[int, ...]
    """Shape in which they come."""
    row_dims: int
    """How many of its leading dims are rows of the matrix; each of their indices has groups of its own."""
    is_transposed: bool
    is_signed: bool = False
    """Whether they are zero points, from which 8 is subtracted."""

    @property
    def whole_dims(self) -> frozenset[int]:
        """All dims: there are few numbers."""
        return frozenset(range(len(self.shape)))

    @property
    def multiples(self) -> tuple[int, ...]:
        """Nothing needs to be a multiple."""
        return (1,) * len(self.shape)

    def needed(self, number: int, box: Bounds) -> Bounds:
        """Return all."""
        return Bounds.whole(self.shape)

    def encode(self, values: NDArray[Any], box: Bounds) -> Iterator[tuple[int, Bounds, NDArray[Any]]]:
        """Yield the variable's value, with its place."""
        output, groups = self.outputs[0], self.shape[-1]
        matrices = math.prod(self.shape[: self.row_dims])
        found = values.reshape(matrices, -1, groups)
        if self.is_signed:
            found = (found - np.uint8(HALF)).view(np.int8)
        found = found.transpose(1, 0, 2) if self.is_transposed else found.transpose(0, 2, 1)
        yield 0, Bounds.whole(output.shape), found.reshape(output.shape).astype(output.dtype, copy=False)
