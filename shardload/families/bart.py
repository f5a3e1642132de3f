"""BART, an encoder and a decoder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardload.families.parts.checks import Checks, SameAttribute
from shardload.families.parts.config import Config
from shardload.families.parts.conversion import Export, LayerSettings, ZeroRows
from shardload.families.parts.tensors import TensorSpec, dense, norm
from shardload.families.record import NO_GGUF, Family, ModelType

_BART_PARTS = ("encoder", "decoder")


def _lacking_two_sizes(config: Config, name: str) -> str | None:
    """Return an error's text if encoder and decoder differ in size, which KerasHub cannot build; else ``None``."""
    for size in ("layers", "attention_heads", "ffn_dim"):
        pair = [f"{part}_{size}" for part in _BART_PARTS]
        if all(key in config for key in pair) and config[pair[0]] != config[pair[1]]:
            values = " and ".join(f"{key}={config[key]}" for key in pair)
            return f"config.json sets {values}, but {name} uses one number for both"
    return None


def _tensors(config: Config) -> Iterator[TensorSpec]:
    hidden = config["d_model"]
    yield TensorSpec("model.shared.weight", (config["vocab_size"], hidden))
    yield TensorSpec("final_logits_bias", (1, config["vocab_size"]), is_zero=True)
    for part in _BART_PARTS:
        # Two more positions than tokens, which BART's code skips.
        yield TensorSpec(f"model.{part}.embed_positions.weight", (config["max_position_embeddings"] + 2, hidden))
        yield from norm(f"model.{part}.layernorm_embedding", hidden)
        for i in range(config[f"{part}_layers"]):
            yield from _layer(hidden, config[f"{part}_ffn_dim"], f"model.{part}.layers.{i}", crosses=part == "decoder")


def _layer(hidden: int, width: int, at: str, *, crosses: bool) -> Iterator[TensorSpec]:
    for attention in ("self_attn", "encoder_attn")[: 1 + crosses]:
        for part in ("k", "v", "q", "out"):
            yield from dense(f"{at}.{attention}.{part}_proj", hidden, hidden)
        yield from norm(f"{at}.{attention}_layer_norm", hidden)
    yield from dense(f"{at}.fc1", hidden, width)
    yield from dense(f"{at}.fc2", width, hidden)
    yield from norm(f"{at}.final_layer_norm", hidden)


def _described(hidden: int, *, layers: int, heads: int, width: int, vocab: int, longest: int) -> dict[str, Any]:
    return {
        "model_type": "bart",
        "architectures": ["BartForConditionalGeneration"],
        "is_encoder_decoder": True,
        "vocab_size": vocab,
        "d_model": hidden,
        "num_hidden_layers": layers,
        **{f"{part}_layers": layers for part in _BART_PARTS},
        **{f"{part}_attention_heads": heads for part in _BART_PARTS},
        **{f"{part}_ffn_dim": width for part in _BART_PARTS},
        "max_position_embeddings": longest,
        "activation_function": "gelu",
        "scale_embedding": False,
        "tie_word_embeddings": True,
    }


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    sizes = {"layers": backbone.num_layers, "heads": backbone.num_heads, "width": backbone.intermediate_dim}
    rest = {"vocab": backbone.vocabulary_size, "longest": backbone.max_sequence_length}
    return {
        **_described(backbone.hidden_dim, **sizes, **rest),
        "activation_function": layers.activation,
        "dropout": backbone.dropout,
    }


BART = ModelType(
    name="bart",
    lacks=NO_GGUF,
    defaults={"vocab_size": 50265, "d_model": 1024, "num_hidden_layers": 12, "max_position_embeddings": 1024}
    | {f"{part}_layers": 12 for part in _BART_PARTS}
    | {f"{part}_attention_heads": 16 for part in _BART_PARTS}
    | {f"{part}_ffn_dim": 4096 for part in _BART_PARTS}
    | {"dropout": 0.1},
    renamed={"num_hidden_layers": "encoder_layers"},
    lacking=_lacking_two_sizes,
    checks=Checks(
        None,
        ("activation_function", "gelu"),
        attributes={"decoder_attention_heads": SameAttribute("num_heads", 16, ("decoder_attention_heads",))},
    ),
    only={"scale_embedding": (False, None)},
    heads=r"classification_head\.|qa_outputs\.",
    tensors=_tensors,
    tensor_fields=(
        *("vocab_size", "d_model", "max_position_embeddings"),
        *(f"{part}_{size}" for part in _BART_PARTS for size in ("layers", "attention_heads", "ffn_dim")),
    ),
)
FAMILY = Family(
    name="bart",
    title="BART",
    model_types=(BART,),
    sizes={
        "bart_base": _described(768, layers=6, heads=12, width=3072, vocab=50265, longest=1024),
        "bart_large": _described(1024, layers=12, heads=16, width=4096, vocab=50265, longest=1024),
    },
    exports={
        "BartBackbone": Export(
            _export,
            model_types=("bart",),
            zeros=(
                ZeroRows("final_logits_bias"),
                *(ZeroRows(f"model.{part}.embed_positions.weight", 2) for part in _BART_PARTS),
            ),
        ),
    },
)
