"""Rows of weights of GPTQ and AWQ, which store ``(in, out)``: a row is a column of theirs.

Each packed row is read from the first needed word to the last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.loaders.quantised.codes import as_float32, unpacked
from shardload.loaders.quantised.rows import Dequantised, read, scaled_by_groups
from shardload.manifest import Tensor

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of eight columns, which of the eight codes in a word is its."""


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
    zeros_less_one: bool = False
    """Whether 1 was taken from each zero before they were stored, as in GPTQ's first version."""

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
        zeros = self._in_order(self._zeros(words))[:, wanted].T.astype(np.float32)
        if self.is_awq:
            values = _awq_codes(read(self.codes, columns=words))[wanted]
        else:
            packed = read(self.codes, columns=slice(start, stop))
            codes = unpacked(np.ascontiguousarray(packed.T), self.bits)[:, : self.shape[1]]
            values = np.ascontiguousarray(codes).astype(np.float32)
        return scaled_by_groups(values, zeros, scales, self.groups, self.group_size)

    def code_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the codes of rows ``[start, stop)``."""
        if self.is_awq:
            words, wanted = self._words(start, stop)
            return self._in_order(unpacked(read(self.codes, columns=words), self.bits))[:, wanted].T
        packed = read(self.codes, columns=slice(start, stop))
        return unpacked(np.ascontiguousarray(packed.T), self.bits)[:, : self.shape[1]]

    def zero_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return what is subtracted from the codes of rows ``[start, stop)``: one column for each group."""
        words, wanted = self._words(start, stop)
        return self._in_order(self._zeros(words))[:, wanted].T

    def _words(self, start: int, stop: int) -> tuple[slice, slice]:
        """Return the columns of words with codes or zeros of rows ``[start, stop)``, and where these are among them."""
        align = self.row_alignment
        first, last = start // align * align, min(-(-stop // align) * align, self.shape[0])
        words = slice(first * self.bits // 32, -(-last * self.bits // 32))
        return words, slice(start - first, stop - first)

    def _zeros(self, words: slice) -> NDArray[np.uint8]:
        stored = read(self.zeros, columns=words)
        if not self.zeros_less_one:
            return unpacked(stored, self.bits)
        if 32 % self.bits:
            return (unpacked(stored, self.bits) + 1) & np.uint8((1 << self.bits) - 1)
        # gptqmodel takes 1 from each code of a word at once, so a zero of 0 borrows from the next one.
        ones = np.uint32(sum(1 << at for at in range(0, 32, self.bits)))
        return unpacked(stored.view(np.uint32) + ones, self.bits)

    def _in_order(self, codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if not self.is_awq:
            return codes
        return codes.reshape(len(codes), -1, 8)[..., _AWQ_ORDER].reshape(codes.shape)


def _awq_codes(words: NDArray[Any]) -> NDArray[np.float32]:
    """Return the codes in words ``(in, out / 8)`` as numbers ``(out, in)``."""
    moved = np.ascontiguousarray(words.T).view(np.uint32)  # before codes are unpacked: it moves an eighth of the items
    values = np.empty((len(moved), 8, len(words)), np.float32)
    for place, at in enumerate(_AWQ_ORDER):
        values[:, place] = moved >> np.uint32(4 * at) & np.uint32(15)
    return values.reshape(-1, len(words))
