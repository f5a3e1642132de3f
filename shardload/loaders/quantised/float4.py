"""Rows of weights of which two codes of 4 bits share a byte: float4 (NVFP4, MXFP4), and bitsandbytes' tables."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.loaders.quantised.codes import FLOAT4, as_float32, by_columns, looked_up
from shardload.loaders.quantised.rows import Dequantised, read
from shardload.manifest import Tensor


@dataclass(frozen=True, slots=True)
class Float4Rows(Dequantised):
    """NVFP4 and MXFP4: two float4 codes in a byte, the lower one first, with a float8 scale for a group of columns."""

    codes: Tensor
    scales: Tensor
    group_size: int
    """Columns that share a scale."""
    factor: Tensor | None = None
    """A float32 by which all scales are multiplied,"""
    divisor: Tensor | None = None
    """or divided."""
    signs_zeros: bool = True
    """Whether code 8 is -0.0, not 0.0."""

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)`` before they are rounded to `dtype`."""
        table = FLOAT4 if self.signs_zeros else FLOAT4 + np.float32(0)
        codes = read(self.codes, start, stop).view(np.uint8)
        values = looked_up(codes, table, high_first=False).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
        scales = as_float32(read(self.scales, start, stop))
        if self.factor is not None:
            scales = scales * read(self.factor).reshape(())
        if self.divisor is not None:
            scales = scales / read(self.divisor).reshape(())
        by_columns(np.multiply, values, scales, self.group_size)
        return values


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
        values = looked_up(stored, read(self.table), high_first=True)[: end - begin]
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
