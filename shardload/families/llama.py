"""Llama 2 and 3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardload.families.mistral import MIXTRAL_BLOCK, gguf_mistral, gguf_mixtral
from shardload.families.parts import export
from shardload.families.parts.checks import RMS, SILU, Checks
from shardload.families.parts.config import ROTARY, Config, Dims, decoder_defaults, published_decoder
from shardload.families.parts.export import Export, LayerSettings
from shardload.families.parts.gguf import BLOCK, PERMUTED, ROPE_FREQS, GgufArchitecture
from shardload.families.parts.gguf_tokenizer import CONTRACTIONS, WORDS, PreTokenizer
from shardload.families.parts.gguf_values import GgufValues, decoder_entries, with_llama3_scaling
from shardload.families.parts.outside import DECODER_HEADS
from shardload.families.parts.rope import Rotary
from shardload.families.parts.tensors import DECODER_FIELDS, DecoderTensors, Spec, gated_mlp
from shardload.families.record import Family, ModelType


def _published(dims: Dims, *, tied: bool = False, factor: float | None = None) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rest: dict[str, Any] = {"rope_theta": 500000.0, "rope_scaling": scaling if factor else None, "rms_norm_eps": 1e-5}
    return published_decoder("llama", "LlamaForCausalLM", dims, vocab=128256, tied=tied, **rest)


def _for_converter(config: Config) -> Config:
    """Leave out scalings other than llama3, for which KerasHub's converter raises; its class takes a linear factor."""
    scaling = config.get("rope_scaling")
    kind = scaling.get("rope_type") or scaling.get("type") if isinstance(scaling, Mapping) else None
    if kind in (None, "llama3"):
        return config
    return {key: value for key, value in config.items() if key != "rope_scaling"}


def _gguf(values: GgufValues) -> dict[str, Any]:
    """Build the configuration of Llama, Mistral or Mixtral; GGUF tells them apart only by keys that one of them has."""
    base = with_llama3_scaling(values, decoder_entries(values, "llama", "LlamaForCausalLM"))
    if values.number("expert_count", 0):
        return gguf_mixtral(values, base)
    window = values.number("attention.sliding_window", None)
    # Of the two, only Mistral has a window, or (Nemo) heads that do not add up to the hidden size.
    if window is not None or base["head_dim"] * base["num_attention_heads"] != base["hidden_size"]:
        return base | gguf_mistral(window)
    return base


def _feed_forward(config: Config, layer: int, at: str) -> Iterator[Spec]:
    return gated_mlp(config, f"{at}.mlp", biased=bool(config.get("mlp_bias")))


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    config = {
        **export.decoder_entries(backbone, "llama", "LlamaForCausalLM"),
        "intermediate_size": backbone.intermediate_dim,
        "hidden_act": "silu",
        "rope_theta": backbone.rope_max_wavelength,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": bool(backbone.tie_word_embeddings),
        "rope_scaling": None,
    }
    if backbone.rope_frequency_adjustment_factor is not None:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": backbone.rope_frequency_adjustment_factor,
            "low_freq_factor": backbone.rope_low_freq_factor,
            "high_freq_factor": backbone.rope_high_freq_factor,
            "original_max_position_embeddings": backbone.rope_pretraining_sequence_length,
        }
    return config


LLAMA = ModelType(
    name="llama",
    defaults=ROTARY | decoder_defaults(32000, 4096, 11008, 32, 32, kv=None, longest=2048),
    for_converter=_for_converter,
    has_tie_argument=True,
    checks=Checks(RMS, SILU, Rotary(1e4)),
    heads=DECODER_HEADS,
    tensors=DecoderTensors(feed_forward=_feed_forward),
    tensor_fields=DECODER_FIELDS,
)
FAMILY = Family(
    name="llama",
    title="Llama 3",
    model_types=(LLAMA,),
    sizes={
        "llama3_8b": _published(Dims(4096, 32, 32, 8, 14336)),
        "llama3_70b": _published(Dims(8192, 80, 64, 8, 28672)),
        "llama3.1_8b": _published(Dims(4096, 32, 32, 8, 14336), factor=8.0),
        "llama3.1_70b": _published(Dims(8192, 80, 64, 8, 28672), factor=8.0),
        "llama3.1_405b": _published(Dims(16384, 126, 128, 8, 53248), factor=8.0),
        "llama3.2_1b": _published(Dims(2048, 16, 32, 8, 8192), tied=True, factor=32.0),
        "llama3.2_3b": _published(Dims(3072, 28, 24, 8, 8192), tied=True, factor=32.0),
    },
    aliases={"llama3_405b": "llama3.1_405b"},  # released as 3.1 only
    ties_unsaid=("LlamaBackbone", "Llama3Backbone"),
    gguf=(
        GgufArchitecture(
            name="llama", config=_gguf, block_names=BLOCK | MIXTRAL_BLOCK, undone=PERMUTED, rope_factors=ROPE_FREQS
        ),
    ),
    exports={"Llama3Backbone": Export(_export, "llama-bpe")},
    pre_tokenizers={
        "llama-bpe": PreTokenizer(CONTRACTIONS + WORDS % "{1,3}", takes_whole_words=True, starts_texts=True),
        "smaug-bpe": PreTokenizer(CONTRACTIONS + WORDS % "{1,3}"),
    },
)
