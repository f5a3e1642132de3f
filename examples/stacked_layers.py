"""Load a Llama or Gemma with one array for each weight of all layers, as MaxText and scanned Flax have it, and save it.

python examples/stacked_layers.py gemma3_270m stacked
python examples/stacked_layers.py Llama-3.2-1B stacked     # a Hugging Face folder
"""

import sys

import jax

import shardload
from shardload import StoredAs

jax.config.update("jax_num_cpu_devices", 8)  # without accelerators: simulate eight devices
from jax.sharding import PartitionSpec as P

source, folder = sys.argv[1:]
LAYER = "model.layers.{layer}"
DIMS = "out in -> layer in out"  # for MaxText, whose layer axis is the second: "out in -> in layer out"
rules = {f"mlp.{name}": StoredAs(f"{LAYER}.mlp.{name}_proj.weight", DIMS) for name in ("gate", "up", "down")}
rules |= {f"attention.{name}": StoredAs(f"{LAYER}.self_attn.{name}_proj.weight", DIMS) for name in "qkvo"}
rules |= {"norm": StoredAs(f"{LAYER}.input_layernorm.weight", "width -> layer width")}
targets = dict.fromkeys(rules, P(None, "model", None)) | {"norm": P()}

params = shardload.load_arrays(source, targets, mesh="2x4", names=rules, dtype="bfloat16", strict=False)
for name, array in params.items():
    print(name, array.dtype, array.shape, array.sharding.spec)


@jax.jit
def squares(params):
    """Scan over the layers: each step sees the weights of one."""
    return jax.lax.scan(
        lambda total, layer: (total + (layer["mlp.up"].astype("float32") ** 2).sum(), None), 0.0, params
    )[0]


print(f"{squares(params):.1f}")
report = shardload.save_arrays(params, folder, to="safetensors", names=rules)  # layer by layer again
print(f"{report.tensors} tensors, {report.n_bytes / 2**20:.0f} MiB")
