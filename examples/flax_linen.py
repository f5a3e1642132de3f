"""Load a Llama into a model of your own in Flax Linen, scanned over its layers; train it for a step, and save it.

python examples/flax_linen.py TinyLlama-1.1B trained     # a Hugging Face folder, and where to write one
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import shardload
from shardload import StoredAs

jax.config.update("jax_num_cpu_devices", 8)  # without accelerators: simulate eight devices
source, target = sys.argv[1:]
config = json.loads((Path(source) / "config.json").read_text())
width, heads, kv_heads = (config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))


def split(*axes):
    """Return an initialiser whose array has these axes of the mesh; the scan adds one for the layers."""
    return nn.with_partitioning(nn.initializers.normal(), axes)


class Block(nn.Module):
    """One layer; `nn.scan` stacks the arrays of all layers along their first dim."""

    @nn.compact
    def __call__(self, x, _):
        """Attend and transform ``x``, (batch, tokens, width)."""
        head = width // heads
        y = nn.RMSNorm(epsilon=config["rms_norm_eps"], name="before")(x)
        kernels = {"axis": -1, "use_bias": False, "kernel_init": split(None, "model", None)}
        counts = {"q": heads, "k": kv_heads, "v": kv_heads}
        q, k, v = (nn.DenseGeneral((n, head), name=name, **kernels)(y) for name, n in counts.items())
        y = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        kernels = {"axis": (-2, -1), "use_bias": False, "kernel_init": split("model", None, None)}
        x = x + nn.DenseGeneral(width, name="o", **kernels)(y)
        y = nn.RMSNorm(epsilon=config["rms_norm_eps"], name="before_mlp")(x)
        size, kernels = config["intermediate_size"], {"use_bias": False, "kernel_init": split(None, "model")}
        y = nn.silu(nn.Dense(size, name="gate", **kernels)(y)) * nn.Dense(size, name="up", **kernels)(y)
        return x + nn.Dense(width, use_bias=False, kernel_init=split("model", None), name="down")(y), None


class Llama(nn.Module):
    """The whole model: logits for each token."""

    @nn.compact
    def __call__(self, ids):
        """Return the logits, (batch, tokens, vocabulary), of ``ids``."""
        x = nn.Embed(config["vocab_size"], width, embedding_init=split("model", None), name="embed")(ids)
        options = {"length": config["num_hidden_layers"], "metadata_params": {nn.PARTITION_NAME: None}}
        layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, **options)
        x = nn.RMSNorm(epsilon=config["rms_norm_eps"], name="norm")(layers(name="layers")(x, None)[0])
        return nn.Dense(config["vocab_size"], use_bias=False, kernel_init=split(None, "model"), name="head")(x)


def rotated(x):
    """Rotate pairs of ``x``, (batch, tokens, heads, head_dim), by angles that grow with the position."""
    rates = config["rope_theta"] ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = jnp.arange(x.shape[1])[:, None, None] * rates
    (a, b), sin, cos = jnp.split(x, 2, axis=-1), jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


LAYER, ATTENTION = "model.layers.{layer}.", "model.layers.{layer}.self_attn."
rules = {n: StoredAs(f"{LAYER}mlp.{n}_proj.weight", "out in -> layer in out") for n in ("gate", "up", "down")}
rules |= {n: StoredAs(f"{ATTENTION}{n}_proj.weight", "(n head) in -> layer in n head") for n in "qkv"}
rules |= {"o": StoredAs(f"{ATTENTION}o_proj.weight", "out (n head) -> layer n head out")}
rules = {f"params.layers.{name}.kernel": rule for name, rule in rules.items()}
norms = {"before": "input_layernorm", "before_mlp": "post_attention_layernorm"}
rules |= {f"params.layers.{n}.scale": StoredAs(f"{LAYER}{norms[n]}.weight", "width -> layer width") for n in norms}
rules |= {"params.head.kernel": StoredAs("lm_head.weight", "out in -> in out")}
rules |= {"params.embed.embedding": "model.embed_tokens.weight", "params.norm.scale": "model.norm.weight"}

ids = jax.random.randint(jax.random.key(1), (4, 16), 0, config["vocab_size"])
shapes = jax.eval_shape(Llama().init, jax.random.key(0), ids)  # boxes that say how to split what is in them
params = shardload.load_arrays(source, shapes, mesh={"data": 2, "model": 4}, names=rules)
print(params["params"]["layers"]["q"]["kernel"].value.sharding.spec)


def loss_of(params):
    """Return the mean loss of predicting each next token."""
    return optax.softmax_cross_entropy_with_integer_labels(Llama().apply(params, ids)[:, :-1], ids[:, 1:]).mean()


loss, gradients = jax.jit(jax.value_and_grad(loss_of))(params)
updates, _ = (optimizer := optax.sgd(0.1)).update(gradients, optimizer.init(params))
params = optax.apply_updates(params, updates)
print(f"loss {loss:.3f}, then {jax.jit(loss_of)(params):.3f}")
shardload.save_arrays(params, target, to="safetensors", names=rules)  # layer by layer again
again = shardload.load_arrays(target, params, names=rules)
assert all((a == b).all() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True))
