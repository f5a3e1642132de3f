"""Random weights at the speed of memory: seeded bits, shaped into floating-point numbers by two masks.

A weight keeps a random sign, a random mantissa and the last bit of a fixed exponent::

    bfloat16    s eeeeeee r mmmmmmm      |x| in [2**-7, 2**-5), mean 0, root mean square 0.019
    near one    0 0111111 1 0000mmm      x in [1, 1.06)

This is the usual initial spread of transformers (0.02), with every mantissa bit in use, so that a misplaced byte
never goes unnoticed; drawing normals would take ten times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.errors import UnsupportedError

CHUNK_BYTES = 8 << 20
"""Small enough to stay in the CPU cache until it is written, large enough to amortise each call."""


@dataclass(frozen=True, slots=True)
class _Masks:
    """Bits of a random number that stay random, and bits that are set, for values around zero and around one."""

    width: type[np.unsignedinteger[Any]]
    keep: int
    base: int
    near_one_keep: int
    near_one_base: int


_MASKS = {
    "bfloat16": _Masks(np.uint16, 0x80FF, 0x3C00, 0x0007, 0x3F80),
    "float16": _Masks(np.uint16, 0x87FF, 0x2000, 0x003F, 0x3C00),
    "float32": _Masks(np.uint32, 0x80FFFFFF, 0x3C000000, 0x0007FFFF, 0x3F800000),
}
DTYPES = tuple(_MASKS)
"""Dtypes that can be written."""


def item_bytes(dtype: str) -> int:
    """Return the bytes of one value.

    Raises:
        UnsupportedError: When ``dtype`` is not in `DTYPES`.
    """
    if dtype not in _MASKS:
        raise UnsupportedError(f"Cannot write random weights as {dtype!r}, expected one of {', '.join(DTYPES)}")
    return np.dtype(_MASKS[dtype].width).itemsize


def chunks(size: int, *, dtype: str, near_one: bool, seed: tuple[int, int]) -> Iterator[NDArray[Any]]:
    """Yield the bytes of ``size`` values, `CHUNK_BYTES` at a time, as unsigned integers.

    Args:
        size: Number of values.
        dtype: One of `DTYPES`.
        near_one: Draw values around one instead of zero.
        seed: The checkpoint's seed and the number of the tensor in it.
    """
    masks = _MASKS[dtype]
    per_chunk = CHUNK_BYTES // item_bytes(dtype)
    # The fastest of NumPy's generators, used raw: no conversion to floats, only two masks.
    bits = np.random.SFC64(np.random.SeedSequence(seed))
    keep = masks.width(masks.near_one_keep if near_one else masks.keep)
    base = masks.width(masks.near_one_base if near_one else masks.base)
    for start in range(0, size, per_chunk):
        count = min(per_chunk, size - start)
        # One word of the generator has eight bytes: four values of bfloat16, two of float32.
        words = -(-count * item_bytes(dtype) // 8)
        values = bits.random_raw(words).view(masks.width)[:count]
        np.bitwise_and(values, keep, out=values)
        np.bitwise_or(values, base, out=values)
        yield values
