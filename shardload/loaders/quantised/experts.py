"""Rows of fused experts: several matrices of codes in one tensor, of which a row is a whole matrix.

codes (experts, rows, columns)   as   (experts * rows, columns)   ─►   experts[i]: (rows, columns), or transposed
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.loaders.quantised.rows import Dequantised
from shardload.manifest import Tensor

_PIECE = 1 << 20
"""Most values that are dequantised at once: an expert of a large model has tens of millions."""


@dataclass(frozen=True, slots=True)
class FusedExperts(Dequantised):
    """Reads matrices that are stored one after the other, each in pieces."""

    matrices: Dequantised
    """Reads the rows of all matrices."""
    transposed: bool = False
    """Whether the weight has each matrix transposed."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The stored tensors."""
        return self.matrices.parts

    @property
    def encoding(self) -> Hashable:
        """All that determines the values, except the stored bytes."""
        return type(self).__name__, self.shape, self.transposed, self.matrices.encoding

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return matrices ``[start, stop)``, rounded to `dtype`."""
        found = np.empty((stop - start, *self.shape[1:]), self.dtype)
        n_rows, n_columns = self.shape[:0:-1] if self.transposed else self.shape[1:]
        piece = max(1, _PIECE // n_columns)
        for matrix in range(start, stop):
            into = found[matrix - start].T if self.transposed else found[matrix - start]
            for row in range(0, n_rows, piece):
                end = min(row + piece, n_rows)
                into[row:end] = self.matrices.read_rows(matrix * n_rows + row, matrix * n_rows + end)
        return found


def as_matrix(tensor: Tensor) -> Tensor:
    """Return a tensor of matrices, of any shape, as one matrix of all their rows."""
    return replace(tensor, shape=(math.prod(tensor.shape[:-1]), tensor.shape[-1]))
