"""Load Gemma 3 into a model of your own in Flax NNX, continue a prompt, save the model, and load that again.

python examples/flax_nnx.py gemma3_270m own.safetensors 2 818 5279 529 7001 563     # The capital of France is
"""

import sys

import jax
import jax.numpy as jnp
from flax import nnx

import shardload
from shardload import StoredAs

jax.config.update("jax_num_cpu_devices", 8)  # without accelerators: simulate eight devices
source, target, *ids = sys.argv[1:]
shapes = {name: tensor.shape for name, tensor in shardload.inspect(source).tensors.items()}
(vocabulary, width), (head,) = shapes["model.embed_tokens.weight"], shapes["model.layers.0.self_attn.q_norm.weight"]


class Norm(nnx.Module):
    """Gemma's: the stored scale is that of the model without 1."""

    def __init__(self, size):
        self.scale = nnx.Param(jnp.zeros(size))

    def __call__(self, x):
        """Divide ``x`` by the root of its mean square."""
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + self.scale)


def split(*axes):
    """Return an initialiser whose array has these axes of the mesh."""
    return nnx.with_partitioning(nnx.initializers.normal(), axes)


class Block(nnx.Module):
    """One layer. Each sixth attends far, by slower rotations; the others see 512 tokens, more than are used here."""

    def __init__(self, layer, rngs):
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"):
            out, into = shapes[f"model.layers.{layer}.{name}_proj.weight"]
            linear = nnx.Linear(into, out, use_bias=False, kernel_init=split(None, "model"), rngs=rngs)
            setattr(self, name.split(".")[1], linear)
        self.q_norm, self.k_norm = Norm(head), Norm(head)
        self.before, self.after, self.before_mlp, self.after_mlp = (Norm(width) for _ in range(4))
        self.theta = 1e4 if (layer + 1) % 6 else 1e6

    def __call__(self, x):
        """Attend and transform ``x``, (batch, tokens, width)."""
        y, batch = self.before(x), x.shape[:2]
        q, k, v = (project(y).reshape(*batch, -1, head) for project in (self.q, self.k, self.v))
        y = jax.nn.dot_product_attention(self.rotated(self.q_norm(q)), self.rotated(self.k_norm(k)), v, is_causal=True)
        x = x + self.after(self.o(y.reshape(*batch, -1)))
        y = self.before_mlp(x)
        return x + self.after_mlp(self.down(jax.nn.gelu(self.gate(y)) * self.up(y)))

    def rotated(self, x):
        """Rotate pairs of ``x``, (batch, tokens, heads, head_dim), by angles that grow with the position."""
        angles = jnp.arange(x.shape[1])[:, None, None] * self.theta ** (-jnp.arange(0, head, 2) / head)
        (a, b), sin, cos = jnp.split(x, 2, axis=-1), jnp.sin(angles), jnp.cos(angles)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Gemma(nnx.Module):
    """The whole model: logits for each token."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(vocabulary, width, embedding_init=split("model", None), rngs=rngs)
        self.layers = nnx.List([Block(i, rngs) for i in range(sum("q_norm" in name for name in shapes))])
        self.norm = Norm(width)

    def __call__(self, ids):
        """Return the logits, (batch, tokens, vocabulary), of ``ids``."""
        x = self.embed(ids) * width**0.5
        for block in self.layers:
            x = block(x)
        return self.embed.attend(self.norm(x))


TENSORS = {name: f"self_attn.{name}_proj" for name in "qkvo"} | {
    name: f"mlp.{name}_proj" for name in ("gate", "up", "down")
}
TENSORS |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "before": "input_layernorm"}
TENSORS |= {"after": "post_attention_layernorm", "before_mlp": "pre_feedforward_layernorm"}
TENSORS |= {"after_mlp": "post_feedforward_layernorm"}


def names(array):
    """Return the tensor of an array: layers.0.q.kernel is model.layers.0.self_attn.q_proj.weight, transposed."""
    if not array.startswith("layers."):
        return {"embed.embedding": "model.embed_tokens.weight", "norm.scale": "model.norm.weight"}[array]
    _, layer, name, leaf = array.split(".")
    tensor = f"model.layers.{layer}.{TENSORS[name]}.weight"
    return StoredAs(tensor, "out in -> in out") if leaf == "kernel" else tensor


mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
graph, abstract = nnx.get_abstract_model(lambda: Gemma(nnx.Rngs(0)), mesh)  # shapes and shardings, no arrays
state = shardload.load_arrays(source, abstract, names=names)
model, forward = nnx.merge(graph, state), nnx.jit(lambda model, ids: model(ids))

ids = list(map(int, ids))
while len(ids) < 14:
    ids.append(int(forward(model, jnp.array([ids + [0] * (16 - len(ids))]))[0, len(ids) - 1].argmax()))
print(ids)
report = shardload.save_arrays(state, target, names=names)
again = shardload.load_arrays(target, abstract, names=names)
assert all((a == b).all() for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True))
print(f"{report.tensors} tensors, {model.layers[0].q.kernel.sharding.spec}")
