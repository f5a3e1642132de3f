"""Programs that stack the layers of a model, as MaxText and `flax.linen.scan` do, and their checkpoints by tensor."""

import numpy as np
from jax.sharding import PartitionSpec as P

from shardload import StoredAs

LAYER = "model.layers.{layer}"


def bits(rng, shape, dtype):
    """Random bits, among them NaNs, infinities and denormals."""
    return rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype).reshape(shape)


def llama_tensors(*, layers=4, width=24, heads=6, kv=2, head=4, hidden=40, vocab=50, dtype="uint16", seed=0):
    """Tensors of a Llama as in Hugging Face's folders: one by one for each layer, (out, in)."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    for i in range(layers):
        shapes |= {
            f"model.layers.{i}.self_attn.q_proj.weight": (heads * head, width),
            f"model.layers.{i}.self_attn.k_proj.weight": (kv * head, width),
            f"model.layers.{i}.self_attn.v_proj.weight": (kv * head, width),
            f"model.layers.{i}.self_attn.o_proj.weight": (width, heads * head),
            f"model.layers.{i}.mlp.gate_proj.weight": (hidden, width),
            f"model.layers.{i}.mlp.up_proj.weight": (hidden, width),
            f"model.layers.{i}.mlp.down_proj.weight": (width, hidden),
            f"model.layers.{i}.input_layernorm.weight": (width,),
            f"model.layers.{i}.post_attention_layernorm.weight": (width,),
        }
    return {name: bits(rng, shape, dtype) for name, shape in shapes.items()}


def llama_rules(*, head=4, layers=None, where="decoder.layers.", vocab=50, multiple=16):
    """One rule for each array of a MaxText-like Llama, whose layer axis is dim 1."""
    indices = {} if layers is None else {"layer": layers}

    def heads(name):
        dims = "(heads head) in -> in layer heads head"
        return StoredAs(f"{LAYER}.self_attn.{name}_proj.weight", dims, sizes={"head": head}, indices=indices)

    def stacked(name, dims):
        return StoredAs(f"{LAYER}.{name}.weight", dims, indices=indices)

    rules = {
        f"{where}attention.query": heads("q"),
        f"{where}attention.key": heads("k"),
        f"{where}attention.value": heads("v"),
        f"{where}attention.out": StoredAs(
            f"{LAYER}.self_attn.o_proj.weight",
            "out (heads head) -> heads layer head out",
            sizes={"head": head},
            indices=indices,
        ),
        f"{where}mlp.wi_0": stacked("mlp.gate_proj", "out in -> in layer out"),
        f"{where}mlp.wi_1": stacked("mlp.up_proj", "out in -> in layer out"),
        f"{where}mlp.wo": stacked("mlp.down_proj", "out in -> in layer out"),
        f"{where}pre_norm": stacked("input_layernorm", "width -> width layer"),
        f"{where}post_norm": stacked("post_attention_layernorm", "width -> width layer"),
    }
    embedding = StoredAs(
        "model.embed_tokens.weight", "vocab width -> vocab width", sizes={"vocab": vocab}, pad={"vocab": multiple}
    )
    return rules | {"token_embedder": embedding, "decoder.norm": StoredAs("model.norm.weight")}


def stacked_by_hand(tensors, *, head=4, layers=range(4), where="decoder.layers.", multiple=16):
    """The same arrays by NumPy."""

    def every(name):
        return np.stack([tensors[f"model.layers.{i}.{name}.weight"] for i in layers])

    def heads(name):
        value = every(f"self_attn.{name}_proj")
        return value.reshape(len(layers), -1, head, value.shape[-1]).transpose(3, 0, 1, 2)

    out = every("self_attn.o_proj")
    embedding = tensors["model.embed_tokens.weight"]
    return {
        f"{where}attention.query": heads("q"),
        f"{where}attention.key": heads("k"),
        f"{where}attention.value": heads("v"),
        f"{where}attention.out": out.reshape(*out.shape[:2], -1, head).transpose(2, 0, 3, 1),
        f"{where}mlp.wi_0": every("mlp.gate_proj").transpose(2, 0, 1),
        f"{where}mlp.wi_1": every("mlp.up_proj").transpose(2, 0, 1),
        f"{where}mlp.wo": every("mlp.down_proj").transpose(2, 0, 1),
        f"{where}pre_norm": every("input_layernorm").T,
        f"{where}post_norm": every("post_attention_layernorm").T,
        "token_embedder": np.pad(embedding, ((0, -len(embedding) % multiple), (0, 0))),
        "decoder.norm": tensors["model.norm.weight"],
    }


def specs_of(arrays, mesh):
    """Split of each array the first dim that the axis ``model`` divides, and the next that ``batch`` divides."""
    found = {}
    for name, value in arrays.items():
        free, spec = [axis for axis in ("model", "batch") if mesh.shape[axis] > 1], []
        for n in value.shape:
            spec.append(free.pop(0) if free and n % mesh.shape[free[0]] == 0 else None)
        found[name] = P(*spec)
    return found
