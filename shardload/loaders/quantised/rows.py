"""Read rows of quantised weights, dequantised as the library that wrote them does, to the bit.

Each class reads the stored bytes that its rows need, in the file's order: rows of codes, and their scales.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from contextlib import closing
from dataclasses import dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from shardload.errors import SourceError, SourceNotFoundError, TransferError
from shardload.loaders.quantised.codes import as_float32, by_columns, unpacked
from shardload.manifest import EncodedRows, Extent, Tensor
from shardload.stores.location import Location
from shardload.stores.store import fill_runs

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_SHORT_BYTES = 32 << 10
"""Longest run of bytes that is read with what lies next to it: a request takes as long as some MB of a fast store."""
_KEPT_BYTES = 8 << 20
"""Largest tensor of which columns are read with what lies next to them: half of what a remote store keeps in memory.
Of a larger one, pages would be dropped before the next columns need them."""


def read(tensor: Tensor, start: int = 0, stop: int | None = None, *, columns: slice | None = None) -> NDArray[Any]:
    """Return rows ``[start, stop)`` of a stored tensor, or ``columns`` of all rows of a matrix."""
    assert isinstance(tensor.storage, Extent)
    path, offset, size = tensor.storage.path, tensor.storage.offset, tensor.dtype.itemsize
    stop = tensor.rows if stop is None else stop
    width = math.prod(tensor.shape[1:])
    shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
    first, pitch, n_bytes, n_runs = offset + start * width * size, 0, (stop - start) * width * size, 1
    if columns is not None and (columns.start, columns.stop) != (0, width):
        first, pitch, n_bytes = first + columns.start * size, width * size, (columns.stop - columns.start) * size
        shape, n_runs = (stop - start, columns.stop - columns.start), stop - start
    raw = np.empty(n_runs * n_bytes, np.uint8)
    # Of a remote file, whole pages are kept: for the next short run, or the next small tensor.
    in_pages = n_bytes <= _SHORT_BYTES and (columns is None or tensor.nbytes <= _KEPT_BYTES)
    try:
        with closing(path.open()) as file:
            fill_runs(file, raw.data, first, pitch, n_bytes, in_pages=in_pages)
    except (SourceError, SourceNotFoundError) as error:
        raise TransferError(f"Tensor {tensor.name!r} can no longer be read: {error}") from error
    return raw.view(tensor.dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class Dequantised(EncodedRows):
    """Reads rows of a weight from codes and what turns them into numbers, each of which is a stored tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """Dtype of the weights, to which each product is rounded once."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The stored tensors."""
        return tuple(part for field in fields(self) if isinstance(part := getattr(self, field.name), Tensor))

    @property
    def row_alignment(self) -> int:
        """Number of rows that are decoded together."""
        return 1

    @property
    def ranges(self) -> tuple[tuple[Location, int, int], ...]:
        """Place of each stored tensor's data: path of the file, byte offset, length in bytes."""
        return tuple((p.storage.path, p.storage.offset, p.nbytes) for p in self.parts if isinstance(p.storage, Extent))

    @property
    def encoding(self) -> Hashable:
        """All that determines the values, except the stored bytes: the method, its settings, and shapes and dtypes."""
        known = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return type(self).__name__, *(
            (name, (value.shape, value.dtype.name) if isinstance(value, Tensor) else str(value))
            for name, value in known
        )

    def require_decoder(self) -> None:
        """Do nothing: NumPy alone decodes these rows."""

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)``, dequantised, as a `shardload.manifest.RowReader` does."""
        if start == stop:
            return np.empty((0, *self.shape[1:]), self.dtype)
        # A scale may be infinite or NaN, and so may its weights.
        with np.errstate(all="ignore"):
            return np.ascontiguousarray(self.rows(start, stop)).astype(self.dtype, copy=False)

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)`` before they are rounded to `dtype`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Scaled(Dequantised):
    """float8 or integer codes as large as the weight, with a scale for the tensor, each row, or blocks of any size.

    The last block along a dim may be cut off.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    zeros: Tensor | None = None
    """Integers of the shape of `scales`, subtracted from the codes."""
    factor: float = 1.0
    """Another factor, multiplied last."""
    rows_of_each: int | None = None
    """After how many rows blocks begin again: those of one of several matrices. ``None``: there is only one."""

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)`` before they are rounded to `dtype`."""
        values = as_float32(read(self.codes, start, stop))
        if self.zeros is not None:
            by_columns(np.subtract, values, self._of_rows(self.zeros, start, stop), self.block[1])
        by_columns(np.multiply, values, self._of_rows(self.scales, start, stop), self.block[1])
        if self.factor != 1.0:
            values *= np.float32(self.factor)
        return values

    def _of_rows(self, tensor: Tensor, start: int, stop: int) -> NDArray[np.float32]:
        # As a matrix with one row for each of the rows, and at least one column.
        columns = math.prod(tensor.shape[1:])
        if tensor.rows == 1:
            return np.broadcast_to(as_float32(read(tensor)).reshape(1, columns), (stop - start, columns))
        each, block = self.rows_of_each or self.shape[0], self.block[0]
        rows = np.arange(start, stop)
        index = rows // each * -(-each // block) + rows % each // block
        first, last = int(index[0]), int(index[-1]) + 1
        found: NDArray[np.float32] = as_float32(read(tensor, first, last)).reshape(last - first, columns)[index - first]
        return found


@dataclass(frozen=True, slots=True)
class PackedRows(Dequantised):
    """compressed-tensors: codes of 1 to 8 bits packed along each row, scales for groups of columns."""

    codes: Tensor
    scales: Tensor
    bits: int
    group_size: int
    """Columns that share a scale."""
    zeros: Tensor | None = None
    """Codes packed along dim 0."""
    groups: Tensor | None = None
    """The group of each column, where they are not in order."""

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)`` before they are rounded to `dtype`."""
        values, zeros = self.code_rows(start, stop).astype(np.float32), self.zero_rows(start, stop).astype(np.float32)
        return scaled_by_groups(values, zeros, self._scales(start, stop), self.groups, self.group_size)

    def code_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the codes of rows ``[start, stop)``."""
        return unpacked(read(self.codes, start, stop), self.bits)[:, : self.shape[1]]

    def zero_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return what is subtracted from the codes of rows ``[start, stop)``: one column for each group, or for all."""
        if self.zeros is None:
            return np.full((stop - start, 1), 1 << (self.bits - 1), np.uint8)
        first, last = start // 32, -(-stop // 32)
        words = read(self.zeros, first * self.bits, min(last * self.bits, self.zeros.rows))
        found = unpacked(np.ascontiguousarray(words.T), self.bits).T
        return found[start - first * 32 : stop - first * 32]

    def _scales(self, start: int, stop: int) -> NDArray[np.float32]:
        if self.scales.rows == 1 < self.shape[0]:  # one for the tensor
            return np.broadcast_to(as_float32(read(self.scales)).reshape(1, 1), (stop - start, 1))
        return as_float32(read(self.scales, start, stop)).reshape(stop - start, math.prod(self.scales.shape[1:]))


def scaled_by_groups(
    values: NDArray[np.float32],
    zeros: NDArray[np.float32],
    scales: NDArray[np.float32],
    groups: Tensor | None,
    group_size: int,
) -> NDArray[np.float32]:
    """Subtract zeros from rows of codes and multiply them by scales, in place; each is for a group of columns.

    ``zeros`` and ``scales`` may have one column, for all. ``groups`` has the group of each column if they are not in
    order.
    """
    of_column = None if groups is None else read(groups)
    for operation, by in ((np.subtract, zeros), (np.multiply, scales)):
        if by.shape[1] == 1:
            operation(values, by, out=values)
        elif of_column is not None:
            operation(values, by[:, of_column], out=values)
        else:
            by_columns(operation, values, by, group_size)
    return values


def dtype_of_weights(scales: Tensor) -> np.dtype[Any]:
    """Return the dtype of weights with these scales: theirs, or float32 if it has 8 bits."""
    return scales.dtype if scales.dtype.itemsize > 1 else np.dtype(np.float32)
