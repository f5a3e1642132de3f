"""Hugging Face names and shapes of an architecture's tensors, from its configuration alone.

Shapes are stored shapes: a ``Linear`` is ``(out, in)``, GPT-2's ``Conv1D`` is ``(in, out)``. A field that the
configuration omits has transformers' default. What a class adds to its base model is listed for language models only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardload.errors import SourceError, UnsupportedError
from shardload.families.parts.config import GENERATORS, architecture_of
from shardload.hub.config_forms import completed, renamed
from shardload.units import plural

Config = Mapping[str, Any]
MAX_LAYERS, MAX_SIZE, MAX_EXPERTS = 1000, 1 << 24, 1 << 15
"""More than any model has, with the experts of all layers together.

Without a limit, the list for a damaged configuration would fill the memory."""
_LAYERS = ("num_hidden_layers", "n_layer")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_DECODER_SIZES = ("vocab_size", *_SIZES, "num_key_value_heads")
_BERT_SIZES = ("vocab_size", *_SIZES, "max_position_embeddings", "type_vocab_size")
_QWEN_MOE_SIZES = (*_DECODER_SIZES, "num_experts", "moe_intermediate_size")
_GPT2_SIZES = ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor to write."""

    name: str
    shape: tuple[int, ...]
    near_one: bool = False
    """Whether its values are around one (the scale of a norm), not around zero."""


def are_listed(config: Config) -> bool:
    """Whether `transformers_tensors` knows the tensors of a configuration's ``model_type``."""
    kind = config.get("model_type")
    return isinstance(kind, str) and kind in _FAMILIES


def transformers_tensors(config: Config) -> list[Spec]:
    """Return all tensors of a Hugging Face checkpoint with this configuration, in the order of the file.

    Raises:
        UnsupportedError: When the tensors of its ``model_type`` are not known; the message is a clause.
        SourceError: When a size is not a positive number, or heads cannot share keys; the message is a clause.
    """
    kind = config.get("model_type")
    if not are_listed(config):
        raise UnsupportedError(
            f"the tensors of model_type {kind!r:.60} cannot be listed from a configuration, only those of "
            f"{', '.join(sorted(_FAMILIES))}"
        )
    family, sizes = _FAMILIES[str(kind)]
    config = completed(renamed(config))
    _check(config, sizes)
    return list(family(config))


def _check(config: Config, sizes: tuple[str, ...]) -> None:
    optional = [key for key in ("head_dim", "n_inner") if config.get(key) is not None]
    for key in (*sizes, *optional):
        # type(), not isinstance(): True is an int, but no size.
        size, most = config.get(key), MAX_LAYERS if key in _LAYERS else MAX_SIZE
        if type(size) is not int or not 0 < size <= most:
            raise SourceError(
                f"its configuration sets {key}={size!r:.60}, expected a whole number from 1 to {most}. Correct it"
            )
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    if experts * config.get("num_hidden_layers", 0) > MAX_EXPERTS:
        raise SourceError(
            f"its configuration sets {plural(experts, 'expert')} in {plural(config['num_hidden_layers'], 'layer')}, "
            f"expected at most {MAX_EXPERTS} in all layers. Correct it"
        )
    # Each key-value head serves as many query heads as any other.
    if "num_key_value_heads" in sizes and config["num_attention_heads"] % config["num_key_value_heads"]:
        raise SourceError(
            f"its configuration sets num_attention_heads={config['num_attention_heads']}, expected a multiple of "
            f"num_key_value_heads={config['num_key_value_heads']}. Correct them"
        )
    if config.get("add_cross_attention"):
        raise UnsupportedError("its configuration sets add_cross_attention, expected a model without cross-attention")


def _decoder(config: Config) -> Iterator[Spec]:
    kind, vocab, hidden = config["model_type"], config["vocab_size"], config["hidden_size"]
    one = not kind.startswith("gemma")  # Gemma's norms store their scale minus one
    yield Spec("model.embed_tokens.weight", (vocab, hidden))
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        yield from _attention(config, f"{at}.self_attn", one=one)
        yield from _feed_forward(config, i, at)
        yield Spec(f"{at}.input_layernorm.weight", (hidden,), one)
        yield Spec(f"{at}.post_attention_layernorm.weight", (hidden,), one)
        if kind in ("gemma2", "gemma3_text"):  # norms before and after both parts of a block
            yield Spec(f"{at}.pre_feedforward_layernorm.weight", (hidden,), one)
            yield Spec(f"{at}.post_feedforward_layernorm.weight", (hidden,), one)
    yield Spec("model.norm.weight", (hidden,), one)
    # A base model (LlamaModel) has no output layer; a configuration without a class is taken for one that generates.
    architecture = architecture_of(config)
    if not config.get("tie_word_embeddings", True) and (not architecture or architecture.endswith(GENERATORS)):
        yield Spec("lm_head.weight", (vocab, hidden))


def _attention(config: Config, at: str, *, one: bool) -> Iterator[Spec]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
    biased = config["model_type"] not in ("mistral", "mixtral", "qwen2_moe") and bool(config.get("attention_bias"))
    # Qwen 2 has biases of query, key and value, and no field for them.
    for letter, out in (("q", queries), ("k", keys), ("v", keys)):
        yield Spec(f"{at}.{letter}_proj.weight", (out, hidden))
        if biased or config["model_type"] in ("qwen2", "qwen2_moe"):
            yield Spec(f"{at}.{letter}_proj.bias", (out,))
    yield Spec(f"{at}.o_proj.weight", (hidden, queries))
    if biased:
        yield Spec(f"{at}.o_proj.bias", (hidden,))
    if config["model_type"] in ("gemma3_text", "qwen3", "qwen3_moe"):
        yield Spec(f"{at}.q_norm.weight", (head_dim,), one)
        yield Spec(f"{at}.k_norm.weight", (head_dim,), one)


def _feed_forward(config: Config, layer: int, at: str) -> Iterator[Spec]:
    hidden, kind = config["hidden_size"], config["model_type"]
    if kind == "mixtral":
        yield Spec(f"{at}.block_sparse_moe.gate.weight", (config["num_local_experts"], hidden))
        for i in range(config["num_local_experts"]):
            yield from _gated_mlp(config, f"{at}.block_sparse_moe.experts.{i}", names=("w1", "w3", "w2"))
    elif kind.endswith("_moe") and _has_experts(config, layer):
        yield Spec(f"{at}.mlp.gate.weight", (config["num_experts"], hidden))
        for i in range(config["num_experts"]):
            yield from _gated_mlp(config, f"{at}.mlp.experts.{i}", size="moe_intermediate_size")
        if kind == "qwen2_moe":
            yield from _gated_mlp(config, f"{at}.mlp.shared_expert", size="shared_expert_intermediate_size")
            yield Spec(f"{at}.mlp.shared_expert_gate.weight", (1, hidden))
    else:
        yield from _gated_mlp(config, f"{at}.mlp")


def _has_experts(config: Config, layer: int) -> bool:
    """Whether a layer of Qwen has experts."""
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % config["decoder_sparse_step"] == 0


_GATED = ("gate_proj", "up_proj", "down_proj")


def _gated_mlp(
    config: Config, at: str, *, names: tuple[str, ...] = _GATED, size: str = "intermediate_size"
) -> Iterator[Spec]:
    hidden, inner = config["hidden_size"], config[size]
    biased = config["model_type"] == "llama" and bool(config.get("mlp_bias"))
    for name, shape in zip(names, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True):
        yield Spec(f"{at}.{name}.weight", shape)
        if biased:
            yield Spec(f"{at}.{name}.bias", shape[:1])


def _gpt2(config: Config) -> Iterator[Spec]:
    hidden, inner = config["n_embd"], config.get("n_inner") or 4 * config["n_embd"]
    yield Spec("wte.weight", (config["vocab_size"], hidden))
    yield Spec("wpe.weight", (config["n_positions"], hidden))
    for i in range(config["n_layer"]):
        yield from _norm(f"h.{i}.ln_1", hidden)
        yield from _affine(f"h.{i}.attn.c_attn", (hidden, 3 * hidden), out=3 * hidden)
        yield from _affine(f"h.{i}.attn.c_proj", (hidden, hidden), out=hidden)
        yield from _norm(f"h.{i}.ln_2", hidden)
        yield from _affine(f"h.{i}.mlp.c_fc", (hidden, inner), out=inner)
        yield from _affine(f"h.{i}.mlp.c_proj", (inner, hidden), out=hidden)
    yield from _norm("ln_f", hidden)


def _bert(config: Config) -> Iterator[Spec]:
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


_DECODERS = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
_FAMILIES: Mapping[str, tuple[Callable[[Config], Iterator[Spec]], tuple[str, ...]]] = {
    **dict.fromkeys(_DECODERS, (_decoder, _DECODER_SIZES)),
    "mixtral": (_decoder, (*_DECODER_SIZES, "num_local_experts")),
    "qwen2_moe": (_decoder, (*_QWEN_MOE_SIZES, "shared_expert_intermediate_size", "decoder_sparse_step")),
    "qwen3_moe": (_decoder, (*_QWEN_MOE_SIZES, "decoder_sparse_step")),
    "gpt2": (_gpt2, _GPT2_SIZES),
    "bert": (_bert, _BERT_SIZES),
}
"""``model_type`` → its tensors, and the sizes they depend on."""
