"""Read rows of quantised weights, dequantised as the library that wrote them does, to the bit.

Each class reads the stored bytes that its rows need, in the file's order: rows of codes, and their scales. GPTQ and
AWQ store ``(in, out)``, and the rows of ``weight`` are their columns: each packed row is read from the first needed
word to the last.
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
from shardload.loaders.quantised.codes import FLOAT4, as_float32, by_columns, unpacked
from shardload.manifest import EncodedRows, Extent, Tensor
from shardload.stores.location import Location
from shardload.stores.store import fill_exactly

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of eight columns, which of the eight codes in a word is its."""


def read(tensor: Tensor, start: int = 0, stop: int | None = None, *, columns: slice | None = None) -> NDArray[Any]:
    """Return rows ``[start, stop)`` of a stored tensor, or ``columns`` of all rows of a matrix."""
    assert isinstance(tensor.storage, Extent)
    path, offset, size = tensor.storage.path, tensor.storage.offset, tensor.dtype.itemsize
    stop = tensor.rows if stop is None else stop
    width = math.prod(tensor.shape[1:])
    shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
    runs = [(offset + start * width * size, 0, (stop - start) * width * size)]
    if columns is not None and (columns.start, columns.stop) != (0, width):
        n_bytes = (columns.stop - columns.start) * size
        shape = (stop - start, columns.stop - columns.start)
        runs = [
            (offset + (row * width + columns.start) * size, (row - start) * n_bytes, n_bytes)
            for row in range(start, stop)
        ]
    raw = np.empty(sum(n for *_, n in runs), np.uint8)
    try:
        with closing(path.open()) as file:
            for at, into, n_bytes in runs:
                if n_bytes:
                    fill_exactly(file, raw[into : into + n_bytes].data, at)
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
        block = self.block[0]
        first, last = start // block, -(-stop // block)
        found = as_float32(read(tensor, first, last)).reshape(last - first, columns)
        return found[np.arange(start, stop) // block - first]


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
        values = unpacked(read(self.codes, start, stop), self.bits)[:, : self.shape[1]].astype(np.float32)
        return scaled_by_groups(
            values, self._zeros(start, stop), self._scales(start, stop), self.groups, self.group_size
        )

    def _zeros(self, start: int, stop: int) -> NDArray[np.float32]:
        if self.zeros is None:
            return np.full((stop - start, 1), 1 << (self.bits - 1), np.float32)
        first, last = start // 32, -(-stop // 32)
        words = read(self.zeros, first * self.bits, min(last * self.bits, self.zeros.rows))
        found = unpacked(np.ascontiguousarray(words.T), self.bits).T
        return found[start - first * 32 : stop - first * 32].astype(np.float32)

    def _scales(self, start: int, stop: int) -> NDArray[np.float32]:
        if self.scales.rows == 1 < self.shape[0]:  # one for the tensor
            return np.broadcast_to(as_float32(read(self.scales)).reshape(1, 1), (stop - start, 1))
        return as_float32(read(self.scales, start, stop)).reshape(stop - start, math.prod(self.scales.shape[1:]))


@dataclass(frozen=True, slots=True)
class Float4Rows(Dequantised):
    """NVFP4: two float4 codes in a byte, the lower one first, with a float8 scale for 16 columns, and one for all."""

    codes: Tensor
    scales: Tensor
    divisor: Tensor

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)`` before they are rounded to `dtype`."""
        values = FLOAT4[unpacked(read(self.codes, start, stop), 4)]
        by_columns(np.multiply, values, as_float32(read(self.scales, start, stop)) / read(self.divisor).reshape(()), 16)
        return values


@dataclass(frozen=True, slots=True)
class PackedColumns(Dequantised):
    """GPTQ and AWQ: codes of the transposed weight in words along ``in`` (GPTQ) or, in another order, ``out`` (AWQ)."""

    codes: Tensor
    """``(in * bits / 32, out)`` for GPTQ, ``(in, out / 8)`` for AWQ."""
    scales: Tensor
    """``(groups, out)``."""
    zeros: Tensor
    """``(groups, out * bits / 32)``."""
    bits: int
    group_size: int
    is_awq: bool = False
    groups: Tensor | None = None
    """The group of each index along ``in``."""
    added: int = 0
    """What is added to the stored zeros: 1 in files of GPTQ's first version."""

    @property
    def row_alignment(self) -> int:
        """Number of rows that are decoded together: those that share words."""
        return 32 // math.gcd(32, self.bits)

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)`` before they are rounded to `dtype`."""
        align = self.row_alignment
        first, last = start // align * align, min(-(-stop // align) * align, self.shape[0])
        words = slice(first * self.bits // 32, -(-last * self.bits // 32))
        wanted = slice(start - first, stop - first)
        scales = as_float32(read(self.scales, columns=slice(start, stop))).T
        stored_zeros = self._in_order(unpacked(read(self.zeros, columns=words), self.bits))[:, wanted].T
        zeros = ((stored_zeros + self.added) & ((1 << self.bits) - 1)).astype(np.float32)
        if self.is_awq:
            codes = self._in_order(unpacked(read(self.codes, columns=words), self.bits))[:, wanted].T
        else:
            packed = read(self.codes, columns=slice(start, stop))
            codes = unpacked(np.ascontiguousarray(packed.T), self.bits)[:, : self.shape[1]]
        values = np.ascontiguousarray(codes).astype(np.float32)
        return scaled_by_groups(values, zeros, scales, self.groups, self.group_size)

    def _in_order(self, codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if not self.is_awq:
            return codes
        return codes.reshape(len(codes), -1, 8)[..., _AWQ_ORDER].reshape(codes.shape)


@dataclass(frozen=True, slots=True)
class Float4Blocks(Dequantised):
    """bitsandbytes: two codes in a byte, the higher one first, each an index of a table; a scale for each block."""

    codes: Tensor
    table: Tensor
    scales: Tensor
    block: int
    nested_scales: Tensor | None = None
    """If given, `scales` are codes themselves: scales of blocks of `nested_block` of them,"""
    nested_table: Tensor | None = None
    """their table,"""
    nested_block: int = 0
    offset: float = 0.0
    """and what is added to each."""

    @property
    def row_alignment(self) -> int:
        """Number of rows that are decoded together: those of which all blocks are whole."""
        width = math.prod(self.shape[1:])
        return min(math.lcm(width, self.block) // width, self.shape[0])

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)`` before they are rounded to `dtype`."""
        width = math.prod(self.shape[1:])
        first, last = start * width // self.block, -(-stop * width // self.block)
        begin, end = first * self.block, min(last * self.block, math.prod(self.shape))
        item = self.codes.dtype.itemsize  # the codes may be stored as any dtype
        stored = read(self.codes, begin // 2 // item, -(-end // 2 // item)).view(np.uint8).reshape(-1)
        codes = np.stack([stored >> 4, stored & 15], -1).reshape(-1)[: end - begin]
        values = read(self.table)[codes]
        scales = np.repeat(self._scales(first, last), self.block)[: end - begin]
        values *= scales
        return values[start * width - begin : stop * width - begin].reshape(stop - start, *self.shape[1:])

    def _scales(self, first: int, last: int) -> NDArray[np.float32]:
        found: NDArray[Any] = read(self.scales, first, last)
        if self.nested_scales is None or self.nested_table is None:
            return found
        block = self.nested_block
        nested = read(self.nested_scales, first // block, -(-last // block))
        scaled: NDArray[np.float32] = read(self.nested_table)[found]
        scaled *= nested[np.arange(first, last) // block - first // block]
        return scaled + np.float32(self.offset)


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
