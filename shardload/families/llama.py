"""Llama 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardload.families.mistral import MIXTRAL_BLOCK
from shardload.families.parts.checks import RMS_EPSILON, SILU, Checks
from shardload.families.parts.config import ROTARY, Config, Dims, decoder_defaults, published_decoder
from shardload.families.parts.conversion import Export, LayerSettings, exported_decoder
from shardload.families.parts.gguf import (
    BLOCK,
    CONTRACTIONS,
    PERMUTED,
    ROPE_FREQS,
    WORDS,
    GgufArchitecture,
    PreTokenizer,
)
from shardload.families.parts.gguf_values import GgufValues, decoder_entries, with_llama3_scaling
from shardload.families.parts.rope import Rotary
from shardload.families.parts.tensors import (
    DECODER_FIELDS,
    DECODER_HEADS,
    DecoderTensors,
    gated_mlp,
)
from shardload.families.record import Family, ModelType


def _published_llama(dims: Dims, *, tied: bool = False, factor: float | None = None) -> dict[str, Any]:
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
    """Return a configuration without ``rope_scaling``, unless of kind ``llama3``: KerasHub's converter refuses others.

    `shardload.hub.fidelity` passes other scaling to KerasHub's class, or refuses the model.
    """
    scaling = config.get("rope_scaling")
    kind = scaling.get("rope_type") or scaling.get("type") if isinstance(scaling, Mapping) else None
    if kind in (None, "llama3"):
        return config
    return {key: value for key, value in config.items() if key != "rope_scaling"}


def _gguf_llama(values: GgufValues) -> dict[str, Any]:
    """Return the ``config.json`` of a GGUF ``llama`` file: of Llama, Mistral or Mixtral, which differ in a few keys."""
    base = with_llama3_scaling(values, decoder_entries(values, "llama", "LlamaForCausalLM"))
    window = values.number("attention.sliding_window", None)
    if values.number("expert_count", 0):
        return base | {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": values.count("expert_count"),
            "num_experts_per_tok": values.count("expert_used_count"),
            "sliding_window": window,
        }
    # Of the two, only Mistral has a window, or (Nemo) heads that do not add up to the hidden size.
    if window is not None or base["head_dim"] * base["num_attention_heads"] != base["hidden_size"]:
        return base | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return base


def _export_llama(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    config = {
        **exported_decoder(backbone, "llama", "LlamaForCausalLM"),
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
    checks=Checks(RMS_EPSILON, SILU, Rotary(1e4)),
    heads=DECODER_HEADS,
    tensors=DecoderTensors(
        feed_forward=lambda config, layer, at: gated_mlp(config, f"{at}.mlp", biased=bool(config.get("mlp_bias")))
    ),
    tensor_fields=DECODER_FIELDS,
)
FAMILY = Family(
    name="llama",
    title="Llama 3",
    model_types=(LLAMA,),
    sizes={
        "llama3_8b": _published_llama(Dims(4096, 32, 32, 8, 14336)),
        "llama3_70b": _published_llama(Dims(8192, 80, 64, 8, 28672)),
        "llama3.1_8b": _published_llama(Dims(4096, 32, 32, 8, 14336), factor=8.0),
        "llama3.1_70b": _published_llama(Dims(8192, 80, 64, 8, 28672), factor=8.0),
        "llama3.1_405b": _published_llama(Dims(16384, 126, 128, 8, 53248), factor=8.0),
        "llama3.2_1b": _published_llama(Dims(2048, 16, 32, 8, 8192), tied=True, factor=32.0),
        "llama3.2_3b": _published_llama(Dims(3072, 28, 24, 8, 8192), tied=True, factor=32.0),
    },
    aliases={"llama3_405b": "llama3.1_405b"},  # released as 3.1 only
    ties_unsaid=("LlamaBackbone", "Llama3Backbone"),
    gguf=(
        GgufArchitecture(
            name="llama",
            model_types=("llama", "mistral", "mixtral"),
            config=_gguf_llama,
            block_names=BLOCK | MIXTRAL_BLOCK,
            undone=PERMUTED,
            rope_factors=ROPE_FREQS,
        ),
    ),
    exports={"Llama3Backbone": Export(_export_llama, "llama-bpe", ("llama",))},
    pre_tokenizers={
        "llama-bpe": PreTokenizer(CONTRACTIONS + WORDS % "{1,3}", takes_whole_words=True, starts_texts=True),
        "smaug-bpe": PreTokenizer(CONTRACTIONS + WORDS % "{1,3}"),
    },
)
