"""Load a checkpoint as sharded JAX arrays, without Keras or a model class. The layout depends on name and shape.

python examples/plain_jax.py gemma3_270m
python examples/plain_jax.py Llama-3.2-1B          # a Hugging Face folder
"""

import sys

import jax

import shardload

jax.config.update("jax_num_cpu_devices", 8)  # without accelerators: simulate eight devices
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def layout(name, shape, dtype):
    """Split embeddings and output projections by rows, other matrices by columns; keep vectors whole."""
    if len(shape) < 2:
        return P()
    return P("model", None) if "embed" in name or "o_proj" in name or "down_proj" in name else P(None, "model")


params = shardload.load_arrays(sys.argv[1], layout, mesh=mesh, dtype="bfloat16")

embedding = params["model.embed_tokens.weight"]
print(f"{len(params)} arrays, {sum(a.nbytes for a in params.values()) / 2**20:.0f} MiB")
print(embedding.dtype, embedding.shape, embedding.sharding.spec)
embed = jax.jit(lambda table, ids: table[ids])
print(embed(embedding, jax.numpy.array([2, 9259])).shape)
assert "keras" not in sys.modules
