"""LoRA factors of a matrix and of a kernel that is a view of it: the same product, in two forms.

Hugging Face's weight is a matrix, changed by ``left (rows, r) @ right (r, columns)``. KerasHub's kernel has the same
elements, reshaped and transposed, and Keras' factors are ``a (…, q) @ b (q, last)``: ``a`` has all dims but the last.
Each dim of a kernel runs along the rows of the matrix, or along its columns:

    wo    (heads, head_dim, out)    columns, columns, rows     a = right.T, b = left.T           q = r
    q     (in, heads, head_dim)     columns, rows, rows        heads are in a, head_dim in b     q = r · heads

In the second kernel the rows are split between both factors. The product is still the same with a rank that is larger
by the number of heads, at most: one block of ``a`` and ``b`` for each head, and zeros elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.manifest import View


@dataclass(frozen=True, slots=True)
class KernelDims:
    """How the dims of a kernel run along the rows and columns of a matrix."""

    shape: tuple[int, ...]
    rows: NDArray[np.intp]
    """For each index of the dims along rows, flattened in their order: the row."""
    columns: NDArray[np.intp]
    along_rows: tuple[bool, ...]
    """For each dim of the kernel, whether it runs along the rows."""

    @classmethod
    def of(cls, view: View, matrix: tuple[int, int]) -> KernelDims | None:
        """Return the dims of a view of a matrix; ``None`` if a dim runs along both, or the view has one dim."""
        width = matrix[1]
        if len(view.shape) < 2 or width < 2 or len(matrix) != 2:
            return None
        along_rows, steps = [], []
        for n, stride in zip(view.shape, view.strides, strict=True):
            # A dim of length 1 may have any stride: it counts as one along the rows.
            is_row = n == 1 or stride % width == 0
            along_rows.append(is_row)
            steps.append(stride // width if is_row and n > 1 else 0 if n == 1 else stride)
        row, column = divmod(view.offset, width)
        rows = _positions(row, [(n, s) for n, s, is_row in zip(view.shape, steps, along_rows, strict=True) if is_row])
        columns = [(n, s) for n, s, is_row in zip(view.shape, steps, along_rows, strict=True) if not is_row]
        found = cls(view.shape, rows, _positions(column, columns), tuple(along_rows))
        # A dim that goes on in the next row is neither.
        inside = found.rows.max(initial=0) < matrix[0] and found.columns.max(initial=0) < width
        return found if inside else None

    @property
    def blocks(self) -> int:
        """What the rank of Keras' factors is multiplied by: indices of the last dim's side that are in ``a``."""
        last = self.along_rows[-1]
        return math.prod(n for n, is_row in zip(self.shape[:-1], self.along_rows[:-1], strict=True) if is_row == last)

    def kernel_factors(self, left: NDArray[Any], right: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return Keras' factors ``a (…, q)`` and ``b (q, last)`` of the product ``left @ right``.

        ``q`` is the rank times `blocks` at most. Blocks with equal rows of ``b`` share them, so that factors that
        `matrix_factors` made get their own rank again.
        """
        own, other = left[self.rows], right[:, self.columns].T
        if not self.along_rows[-1]:
            own, other = other, own
        parts = own.reshape(self.blocks, self.shape[-1], left.shape[1])  # (blocks, last, rank)
        slots = list(self._slots(parts))
        a = np.zeros((self.blocks, other.shape[0], len(slots)), left.dtype)
        b = np.zeros((len(slots), self.shape[-1]), left.dtype)
        for q, (row, column_of) in enumerate(slots):
            b[q] = row
            for block, r in column_of.items():
                a[block, :, q] = other[:, r]
        return self._in_order(a), b

    def _slots(self, parts: NDArray[Any]) -> Iterator[tuple[NDArray[Any], dict[int, int]]]:
        """Yield each row of ``b``, and for each block that uses it the column of the product's factors that it is of.

        A column that is zero in some blocks only is not needed in these.
        """
        found: dict[bytes, list[list[int]]] = {}
        for r in range(parts.shape[2]):
            used = parts[:, :, r].any(1)
            for block in map(int, np.flatnonzero(used if used.any() else ~used)):
                key = parts[block, :, r].tobytes() if self.blocks > 1 else bytes([0]) * r
                found.setdefault(key, [[] for _ in range(self.blocks)])[block].append(r)
        for columns in found.values():
            for i in range(max(map(len, columns))):
                column_of = {block: own[i] for block, own in enumerate(columns) if i < len(own)}
                block, r = next(iter(column_of.items()))
                yield parts[block, :, r], column_of

    def matrix_factors(
        self, a: NDArray[Any], b: NDArray[Any], matrix: tuple[int, int]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return factors ``left`` and ``right`` of a matrix with the product ``a @ b`` in this kernel, else zeros."""
        blocks, rank, last = self.blocks, b.shape[0], self.shape[-1]
        parts = self._out_of_order(a)  # (blocks, other, rank)
        used = [(block, r) for block in range(blocks) for r in range(rank) if parts[block, :, r].any()]
        used = used or [(0, 0)]
        own = np.zeros((blocks, last, len(used)), a.dtype)
        other = np.zeros((parts.shape[1], len(used)), a.dtype)
        for i, (block, r) in enumerate(used):
            own[block, :, i], other[:, i] = b[r], parts[block, :, r]
        own = own.reshape(blocks * last, len(used))
        left, right = np.zeros((matrix[0], len(used)), a.dtype), np.zeros((len(used), matrix[1]), a.dtype)
        of_rows, of_columns = (own, other) if self.along_rows[-1] else (other, own)
        left[self.rows], right[:, self.columns] = of_rows, of_columns.T
        return left, right

    def _groups(self) -> tuple[list[int], list[int]]:
        """Return the dims in ``a`` along the side of the last dim, and those along the other side."""
        last = self.along_rows[-1]
        inner = range(len(self.shape) - 1)
        return [d for d in inner if self.along_rows[d] == last], [d for d in inner if self.along_rows[d] != last]

    def _in_order(self, a: NDArray[Any]) -> NDArray[Any]:
        """Return ``(blocks, other, rank)`` as ``a``, whose dims are in the kernel's order."""
        same, other = self._groups()
        order = [*same, *other]
        spread = a.reshape(*(self.shape[d] for d in order), a.shape[-1])
        return np.ascontiguousarray(spread.transpose(*np.argsort(order), len(order)))

    def _out_of_order(self, a: NDArray[Any]) -> NDArray[Any]:
        same, other = self._groups()
        sizes = [math.prod(self.shape[d] for d in dims) for dims in (same, other)]
        return a.transpose(*same, *other, a.ndim - 1).reshape(*sizes, a.shape[-1])


def _positions(start: int, dims: list[tuple[int, int]]) -> NDArray[np.intp]:
    """Return the position of each index of dims (length, step), flattened in row-major order."""
    found = np.array([start], np.intp)
    for n, step in dims:
        found = (found[:, None] + np.arange(n, dtype=np.intp) * step).reshape(-1)
    return found
