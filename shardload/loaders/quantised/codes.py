"""Unpack codes of a few bits, and turn them into numbers: NumPy alone, for a few rows at a time.

Codes of ``b`` bits are packed without gaps from the lowest bit on: 32 codes take ``b`` words of 32 bits::

    bits = 3    word 0: c0 c1 c2 … c9 (2 bits of c10)   word 1: (1 bit of c10) c11 …   word 2: …
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
FLOAT4 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
"""The value of each float4 (E2M1) code; its fourth bit is the sign."""
_FLOAT8 = {
    np.dtype(t): np.arange(256, dtype=np.uint8).view(t).astype(np.float32)
    for t in (
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e4m3fnuz,
        ml_dtypes.float8_e5m2fnuz,
        ml_dtypes.float8_e8m0fnu,
    )
}
"""Dtype → the value of each of its 256 codes: a lookup is several times faster than a cast."""


def unpacked(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Return the codes of ``bits`` bits (1 to 8) that are packed along the last dim of little-endian words."""
    *before, n_words = words.shape
    stored = np.ascontiguousarray(words).view(np.uint8).reshape(*before, n_words * words.dtype.itemsize)
    if bits == 8:
        return stored
    if bits == 4:
        return np.stack([stored & 15, stored >> 4], -1).reshape(*before, stored.shape[-1] * 2)
    # Eight codes take `bits` bytes, which a number of 64 bits holds. Words end within eight codes if there are less
    # than `bits` of them.
    n_codes = stored.shape[-1] * 8 // bits
    n_groups = -(-stored.shape[-1] // bits)
    groups = np.zeros((*before, n_groups * bits), np.uint8)
    groups[..., : stored.shape[-1]] = stored
    wide = np.zeros((*before, n_groups, 8), np.uint8)
    wide[..., :bits] = groups.reshape(*before, n_groups, bits)
    shifts = np.arange(8, dtype=np.uint64) * np.uint64(bits)
    codes: NDArray[np.uint8] = (wide.view("<u8") >> shifts).astype(np.uint8) & np.uint8((1 << bits) - 1)
    return codes.reshape(*before, n_groups * 8)[..., :n_codes]


def looked_up(stored: NDArray[np.uint8], table: NDArray[np.float32], *, high_first: bool) -> NDArray[np.float32]:
    """Return the number in a table of 16 for each half of each byte, flat; ``high_first``: which half comes first."""
    flat = np.ascontiguousarray(stored).reshape(-1)
    even = flat if flat.size % 2 == 0 else np.append(flat, np.uint8(0))
    fours: NDArray[Any] = _of_two_bytes(table.tobytes(), high_first).take(even.view("<u2"), mode="wrap")
    numbers: NDArray[np.float32] = fours.view(np.float32)[: flat.size * 2]
    return numbers


@functools.lru_cache(maxsize=8)
def _of_two_bytes(table: bytes, high_first: bool) -> NDArray[np.complex128]:
    """Return, for each number of 16 bits, the four numbers of its halves of bytes: as one item, to look up at once."""
    bits = np.arange(1 << 16)
    shifts = (4, 0, 12, 8) if high_first else (0, 4, 8, 12)
    numbers = np.frombuffer(table, np.float32)
    fours: NDArray[np.complex128] = np.stack([numbers[bits >> at & 15] for at in shifts], -1).view(np.complex128)
    return fours.reshape(-1)


def as_float32(codes: NDArray[Any]) -> NDArray[np.float32]:
    """Return codes that are numbers (float8, integers) as float32, which holds each of them exactly."""
    if (values := _FLOAT8.get(codes.dtype)) is not None:
        # No index is out of range, and the default mode would look for one.
        numbers: NDArray[np.float32] = values.take(codes.view(np.uint8), mode="wrap")
        return numbers
    return codes.astype(np.float32, copy=False)


def by_columns(operation: np.ufunc, values: NDArray[np.float32], by: NDArray[np.float32], width: int) -> None:
    """Apply an operation in place to rows and, for each ``width`` columns, a number; the last may be for fewer."""
    n_columns, n_groups = values.shape[1], by.shape[1]
    n_whole = n_columns // width
    whole, rest = values[:, : n_whole * width], values[:, n_whole * width :]
    each = whole.reshape(len(values), n_whole, width)  # a view, as it only splits a dim
    operation(each, by[:, :n_whole, None], out=each)
    if n_whole < n_groups:
        operation(rest, by[:, n_whole:], out=rest)
