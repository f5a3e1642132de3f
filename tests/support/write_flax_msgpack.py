"""Writes ``flax_state.msgpack`` with Flax itself, which is not among the packages of the tests.

PYTHONPATH=… python tests/support/write_flax_msgpack.py     with flax 0.12.8 installed somewhere
"""

from pathlib import Path

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np

TREE = {
    "params": {
        "dense": {"kernel": jnp.arange(24 * 8, dtype=jnp.float32).reshape(24, 8), "bias": jnp.ones(8, jnp.bfloat16)},
        "long": np.arange(40 * 16, dtype=np.int16).reshape(40, 16),
        "layers": [np.full((3,), 1.5, np.float16), np.zeros((0, 2), np.uint8)],
    },
    "step": 7,
    "rate": 0.5,
    "done": True,
    "scalar": np.float32(2.5),
    "phase": 1 + 2j,
    "name": "a text",
    "none": None,
    "key": jax.random.key_data(jax.random.key(3)),
}

if __name__ == "__main__":
    flax.serialization.MAX_CHUNK_SIZE = 512  # instead of 1 GiB
    Path(__file__).with_name("flax_state.msgpack").write_bytes(flax.serialization.to_bytes(TREE))
