"""Rows of a weight with LoRA factors merged into them while they are read.

    rows [start, stop) of W  +  Σ scale · left[start:stop] @ right      computed in float32, rounded once

Only the rows that are asked for are read, of the base's weight and of ``left``; ``right`` is read whole: it has as many
rows as the rank. Products are made of whole groups of rows, so that a value does not depend on where blocks begin.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.loaders.peft.folder import LoraFactors
from shardload.loaders.quantised.rows import read
from shardload.manifest import Decoded, EncodedRows, Extent, Tensor
from shardload.stores.location import Location

_GROUP = 64
"""Rows of a product that are computed together. How a library adds up a product's summands may depend on its shape:
the same rows in other groups could differ in the last bit, and with them the copies of a weight on two processes."""
_ONE_THREAD = 1 << 18
"""Most multiplications for which OpenBLAS, which NumPy uses, takes no second thread. A load has threads of its own, and
with several for each of them it was ten times slower."""


@dataclass(frozen=True, slots=True)
class Change:
    """A product of two factors that is added to a matrix."""

    factors: LoraFactors
    is_transposed: bool
    """Whether the matrix is stored as ``(in, out)``, so that its rows belong to factor ``a``."""
    scale: float

    def of_rows(self, start: int, stop: int, wide: np.dtype[Any]) -> NDArray[Any]:
        """Return rows ``[start, stop)`` of the product."""
        a, b = self.factors.a, self.factors.b
        n_rows = a.shape[1] if self.is_transposed else b.shape[0]
        first, last = start // _GROUP * _GROUP, min(-(-stop // _GROUP) * _GROUP, n_rows)
        if self.is_transposed:
            left, right = read(a, columns=slice(first, last)).T, read(b).T
        else:
            left, right = read(b, first, last), read(a)
        left, right = np.ascontiguousarray(left, wide), np.ascontiguousarray(right, wide)
        left *= wide.type(self.scale)
        product = np.empty((last - first, right.shape[1]), wide)
        width = max(8, _ONE_THREAD // (_GROUP * right.shape[0]))
        for row in range(0, last - first, _GROUP):
            for column in range(0, right.shape[1], width):
                tile = slice(row, row + _GROUP), slice(column, column + width)
                np.matmul(left[tile[0]], right[:, tile[1]], out=product[tile])
        return product[start - first : stop - first]


@dataclass(frozen=True, slots=True)
class MergedRows(EncodedRows):
    """Reads rows of a weight of the base model with the products of one or more adapters added to them."""

    base: Tensor
    changes: tuple[Change, ...]
    dtype: np.dtype[Any]
    """Dtype of the rows, to which each sum is rounded once."""

    @property
    def row_alignment(self) -> int:
        """Number of rows that are decoded together: as for the base's weight."""
        return self.base.storage.reader.row_alignment if isinstance(self.base.storage, Decoded) else 1

    @property
    def ranges(self) -> tuple[tuple[Location, int, int], ...]:
        """(file, offset, number of bytes) of the base's weight and of each factor."""
        factors = [tensor for change in self.changes for tensor in (change.factors.a, change.factors.b)]
        own = self.base.storage
        found = own.reader.ranges if isinstance(own, Decoded) and isinstance(own.reader, EncodedRows) else ()
        stored = (*(() if found else (self.base,)), *factors)
        return (
            *found,
            *((t.storage.path, t.storage.offset, t.nbytes) for t in stored if isinstance(t.storage, Extent)),
        )

    @property
    def encoding(self) -> Hashable:
        """All that determines the values, except the stored bytes."""
        own = self.base.storage
        of_base = own.reader.encoding if isinstance(own, Decoded) and isinstance(own.reader, EncodedRows) else None
        changes = tuple((c.scale, c.is_transposed, c.factors.a.shape, c.factors.b.shape) for c in self.changes)
        return "merged", of_base, self.base.shape, self.base.dtype.name, changes, self.dtype.name

    def require_decoder(self) -> None:
        """Raise an error unless the packages that decode the base's rows are installed."""
        if isinstance(self.base.storage, Decoded) and isinstance(self.base.storage.reader, EncodedRows):
            self.base.storage.reader.require_decoder()

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)``, merged, as a `shardload.manifest.RowReader` does."""
        wide = np.promote_types(self.dtype if self.dtype.name == "float64" else np.float32, np.float32)
        own = self.base.storage
        rows = own.reader.read_rows(start, stop) if isinstance(own, Decoded) else read(self.base, start, stop)
        total = np.array(rows, wide)
        # Weights and factors may be infinite or NaN, and so may the result.
        with np.errstate(all="ignore"):
            for change in self.changes:
                total += change.of_rows(start, stop, wide)
            return total.astype(self.dtype, copy=False)
