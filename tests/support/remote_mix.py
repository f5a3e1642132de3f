"""Tensors of a small Gemma 2, 97 MB of random bits, and how tensor parallelism splits them."""

import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

HIDDEN, WIDE, HEADS, VOCABULARY = 1024, 4096, 1024, 18432
ROWS, COLUMNS, WHOLE = ("model", None), (None, "model"), ()
MIX = {"embed": ROWS, "q_proj": ROWS, "o_proj": COLUMNS, "gate": ROWS, "up": COLUMNS, "down": COLUMNS, "norm": WHOLE}
"""How a Gemma 2 is split for tensor parallelism: by rows, by columns, whole; "up" is transposed as well."""


def tensors():
    rng = np.random.default_rng(0)
    shapes = {"embed": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(2):
        shapes |= {f"{layer}.q_proj": (HEADS, HIDDEN), f"{layer}.o_proj": (HIDDEN, HEADS), f"{layer}.norm": (HIDDEN,)}
        shapes |= {f"{layer}.gate": (WIDE, HIDDEN), f"{layer}.up": (WIDE, HIDDEN), f"{layer}.down": (HIDDEN, WIDE)}
    return {n: rng.integers(0, 1 << 16, shape, np.uint16).view(ml_dtypes.bfloat16) for n, shape in shapes.items()}


def mix(name, shape):
    return P(*MIX[name.rpartition(".")[2]])


def turned(name, shape):
    return (1, 0) if name.endswith("up") else None
