"""Weights from a tensor's name alone, the same on every machine: what a fixture need not store.

A value is a whole number of at most seven bits times a power of two, so that bfloat16, float16 and float32 hold it
exactly: a folder in bfloat16 has the very weights of its twin in float32, and one reference serves both. The numbers
are drawn by `numpy.random.RandomState`, whose streams never change, and summed as integers, which no platform rounds.

    matrices    about normal, standard deviation 1 / sqrt(inputs): activations keep their size through every layer
    norms       1 and a little
    biases      about normal, small, never all zero: one that is dropped shows in the outputs
"""

from __future__ import annotations

import math
import re
import zlib

import numpy as np

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
INTEGERS = {
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "uint8",
}  # fmt: skip
_NORM = re.compile(
    r"(norm|ln|gamma|scale|laye?r_?scale|layernorm\w*|lambda)\d?(_\w+)?\.?(weight|gamma|lambda1)?$", re.I
)
_STEP = 64
"""Largest draw of each of four summands; their sum has a standard deviation of about 75."""


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Whole numbers from -127 to 127, about normal with a standard deviation of 37, decided by ``name`` alone."""
    stream = np.random.RandomState(zlib.crc32(name.encode()))
    total = sum(stream.randint(-_STEP, _STEP, size=shape) for _ in range(4))
    return np.clip(np.asarray(total) // 2, -127, 127).astype(np.float32)


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 values of a weight."""
    whole = draw(name, shape)
    if len(shape) <= 1:
        if _NORM.search(name):
            return 1 + np.trunc(whole / 16) / 128
        return whole / 512
    inputs = math.prod(shape[1:]) if len(shape) > 2 and not re.search(r"experts|_embed|token", name) else shape[-1]
    return whole * np.float32(2.0 ** -(5 + round(math.log2(inputs) / 2)))


def to_bytes(array: np.ndarray, dtype: str) -> bytes:
    """Little-endian bytes as safetensors stores them; bfloat16 is the upper half of float32, exact for `values`."""
    if dtype == "BF16":
        return (np.ascontiguousarray(array, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return np.ascontiguousarray(array).astype({**FLOATS, **INTEGERS}[dtype]).tobytes()
