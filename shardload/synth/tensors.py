"""Hugging Face names and shapes of an architecture's tensors, from its configuration alone.

Shapes are stored shapes: a ``Linear`` is ``(out, in)``, GPT-2's ``Conv1D`` is ``(in, out)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardload.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor to write."""

    name: str
    shape: tuple[int, ...]
    near_one: bool = False
    """Whether its values are around one (the scale of a norm), not around zero."""


def transformers_tensors(config: dict[str, Any]) -> list[Spec]:
    """Return all tensors of a Hugging Face checkpoint with this configuration, in file order.

    Raises:
        UnsupportedError: When ``model_type`` is not supported.
    """
    match config["model_type"]:
        case "gemma" | "gemma2" | "gemma3_text" | "llama" | "mistral" | "qwen2" | "qwen3":
            return list(_decoder(config))
        case "gpt2":
            return list(_gpt2(config))
        case "bert":
            return list(_bert(config))
    raise UnsupportedError(f"Cannot write Hugging Face tensors for model_type {config['model_type']!r}")


def _decoder(config: dict[str, Any]) -> Iterator[Spec]:
    kind, vocab, hidden = config["model_type"], config["vocab_size"], config["hidden_size"]
    one = not kind.startswith("gemma")  # Gemma's norms store their scale minus one
    yield Spec("model.embed_tokens.weight", (vocab, hidden))
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        yield from _attention(config, f"{at}.self_attn", one=one)
        yield from _gated_mlp(config, f"{at}.mlp")
        yield Spec(f"{at}.input_layernorm.weight", (hidden,), one)
        yield Spec(f"{at}.post_attention_layernorm.weight", (hidden,), one)
        if kind in ("gemma2", "gemma3_text"):  # norms before and after both parts of a block
            yield Spec(f"{at}.pre_feedforward_layernorm.weight", (hidden,), one)
            yield Spec(f"{at}.post_feedforward_layernorm.weight", (hidden,), one)
    yield Spec("model.norm.weight", (hidden,), one)
    if not config["tie_word_embeddings"]:
        yield Spec("lm_head.weight", (vocab, hidden))


def _attention(config: dict[str, Any], at: str, *, one: bool) -> Iterator[Spec]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
    for letter, out in (("q", queries), ("k", keys), ("v", keys)):
        yield Spec(f"{at}.{letter}_proj.weight", (out, hidden))
        if config["model_type"] == "qwen2":
            yield Spec(f"{at}.{letter}_proj.bias", (out,))
    yield Spec(f"{at}.o_proj.weight", (hidden, queries))
    if config["model_type"] in ("gemma3_text", "qwen3"):
        yield Spec(f"{at}.q_norm.weight", (head_dim,), one)
        yield Spec(f"{at}.k_norm.weight", (head_dim,), one)


def _gated_mlp(config: dict[str, Any], at: str) -> Iterator[Spec]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    yield Spec(f"{at}.gate_proj.weight", (inner, hidden))
    yield Spec(f"{at}.up_proj.weight", (inner, hidden))
    yield Spec(f"{at}.down_proj.weight", (hidden, inner))


def _gpt2(config: dict[str, Any]) -> Iterator[Spec]:
    hidden = config["n_embd"]
    yield Spec("wte.weight", (config["vocab_size"], hidden))
    yield Spec("wpe.weight", (config["n_positions"], hidden))
    for i in range(config["n_layer"]):
        yield from _norm(f"h.{i}.ln_1", hidden)
        yield from _affine(f"h.{i}.attn.c_attn", (hidden, 3 * hidden), out=3 * hidden)
        yield from _affine(f"h.{i}.attn.c_proj", (hidden, hidden), out=hidden)
        yield from _norm(f"h.{i}.ln_2", hidden)
        yield from _affine(f"h.{i}.mlp.c_fc", (hidden, 4 * hidden), out=4 * hidden)
        yield from _affine(f"h.{i}.mlp.c_proj", (4 * hidden, hidden), out=hidden)
    yield from _norm("ln_f", hidden)


def _bert(config: dict[str, Any]) -> Iterator[Spec]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    sizes = {"word": "vocab_size", "position": "max_position_embeddings", "token_type": "type_vocab_size"}
    for table, size in sizes.items():
        yield Spec(f"embeddings.{table}_embeddings.weight", (config[size], hidden))
    yield from _norm("embeddings.LayerNorm", hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            yield from _affine(f"{at}.attention.self.{part}", (hidden, hidden), out=hidden)
        yield from _affine(f"{at}.attention.output.dense", (hidden, hidden), out=hidden)
        yield from _norm(f"{at}.attention.output.LayerNorm", hidden)
        yield from _affine(f"{at}.intermediate.dense", (inner, hidden), out=inner)
        yield from _affine(f"{at}.output.dense", (hidden, inner), out=hidden)
        yield from _norm(f"{at}.output.LayerNorm", hidden)
    yield from _affine("pooler.dense", (hidden, hidden), out=hidden)


def _affine(at: str, shape: tuple[int, int], *, out: int) -> Iterator[Spec]:
    yield Spec(f"{at}.weight", shape)
    yield Spec(f"{at}.bias", (out,))


def _norm(at: str, hidden: int) -> Iterator[Spec]:
    yield Spec(f"{at}.weight", (hidden,), near_one=True)
    yield Spec(f"{at}.bias", (hidden,))
