"""Load a GPT-2 into a model of your own in Equinox, train it for a step, save it, and load that again.

python examples/equinox_modules.py gpt2 trained     # a Hugging Face folder, and where to write one
"""

import json
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import shardload
from shardload import StoredAs

jax.config.update("jax_num_cpu_devices", 8)  # without accelerators: simulate eight devices
from jax.sharding import PartitionSpec as P

source, target = sys.argv[1:]
config = json.loads((Path(source) / "config.json").read_text())


class Block(eqx.Module):
    """One layer, with queries, keys and values in one matrix, as GPT-2 stores them."""

    norm: eqx.nn.LayerNorm
    attention: eqx.nn.Linear
    joined: eqx.nn.Linear
    norm_mlp: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width, key):
        keys = jax.random.split(key, 4)
        self.norm, self.norm_mlp = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.Linear(width, 3 * width, key=keys[0])
        self.joined = eqx.nn.Linear(width, width, key=keys[1])
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[2])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[3])

    def __call__(self, x):
        """Attend and transform ``x``, (tokens, width)."""
        q, k, v = jnp.split(jax.vmap(self.attention)(jax.vmap(self.norm)(x)), 3, axis=-1)
        q, k, v = (part.reshape(len(x), config["n_head"], -1) for part in (q, k, v))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + jax.vmap(self.joined)(y)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm_mlp)(x))))


class Gpt2(eqx.Module):
    """The whole model: logits for each token."""

    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        first, second, *keys = jax.random.split(key, 2 + config["n_layer"])
        self.tokens = eqx.nn.Embedding(config["vocab_size"], config["n_embd"], key=first)
        self.positions = eqx.nn.Embedding(config["n_positions"], config["n_embd"], key=second)
        self.blocks = [Block(config["n_embd"], key) for key in keys]
        self.norm = eqx.nn.LayerNorm(config["n_embd"])

    def __call__(self, ids):
        """Return the logits, (tokens, vocabulary), of ``ids``."""
        x = jax.vmap(self.tokens)(ids) + self.positions.weight[: len(ids)]
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.norm)(x) @ self.tokens.weight.T


TENSORS = {"norm": "ln_1", "attention": "attn.c_attn", "joined": "attn.c_proj", "norm_mlp": "ln_2"}
TENSORS |= {"up": "mlp.c_fc", "down": "mlp.c_proj"}
OUTSIDE = {"tokens": "wte", "positions": "wpe", "norm": "ln_f"}


def names(array):
    """Return the tensor of an array: blocks.0.up.weight is h.0.mlp.c_fc.weight, which GPT-2 stores transposed."""
    *block, module, leaf = array.split(".")
    tensor = f"h.{block[1]}.{TENSORS[module]}.{leaf}" if block else f"{OUTSIDE[module]}.{leaf}"
    return StoredAs(tensor, "in out -> out in") if leaf == "weight" and ".c_" in tensor else tensor


mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))


def placed(leaf):
    """Return a shape with a sharding: matrices of which eight devices divide the rows are split by them."""
    spec = P("model") if leaf.ndim == 2 and leaf.shape[0] % 8 == 0 else P()
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec))


shapes = jax.tree.map(placed, eqx.filter_eval_shape(Gpt2, jax.random.key(0)))  # no arrays
model = shardload.load_arrays(source, shapes, names=names)
print(model.blocks[0].up.weight.sharding.spec, model.tokens.weight.sharding.spec)
ids = jax.random.randint(jax.random.key(1), (8, 16), 0, config["vocab_size"])


@eqx.filter_jit
def loss_of(model):
    """Return the mean loss of predicting each next token."""
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(ids)[:, :-1], ids[:, 1:]).mean()


loss, gradients = eqx.filter_jit(eqx.filter_value_and_grad(loss_of))(model)
updates, _ = (optimizer := optax.sgd(0.1)).update(gradients, optimizer.init(model))
model = eqx.apply_updates(model, updates)
print(f"loss {loss:.3f}, then {loss_of(model):.3f}")
shardload.save_arrays(model, target, to="safetensors", names=names)
again = shardload.load_arrays(target, model, names=names)
assert all((a == b).all() for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True))
