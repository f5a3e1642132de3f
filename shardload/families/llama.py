"""Llama 2 and 3; Mistral and Mixtral, its mixture of experts; SmolLM 3, with some layers without rotary positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardload.families.parts.checks import RMS_EPSILON, SILU, Checks, by_layer_type, every_layer
from shardload.families.parts.config import ROTARY, Config, Dims, decoder_defaults, published_decoder
from shardload.families.parts.conversion import Export, LayerSettings, exported_decoder, exported_plain_decoder
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
    OPTIONAL_OUTPUT_LAYER,
    DecoderTensors,
    TensorSpec,
    gated_mlp,
)
from shardload.families.record import Family, ModelType

_MIXTRAL_BLOCK = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
"""GGUF's name of a layer in a mixture of experts → its name in Mixtral's checkpoints; ``{}`` is an expert's number."""


def _experts(config: Config, layer: int, at: str) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{at}.block_sparse_moe.gate.weight", (config["num_local_experts"], config["hidden_size"]))
    for i in range(config["num_local_experts"]):
        yield from gated_mlp(config, f"{at}.block_sparse_moe.experts.{i}", names=("w1", "w3", "w2"))


def _export_mistral(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    config = exported_plain_decoder(backbone, "mistral", "MistralForCausalLM")
    return {**config, "head_dim": backbone.head_dim, "sliding_window": backbone.sliding_window}


def _published_mixtral(dims: Dims, *, longest: int) -> dict[str, Any]:
    rest: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": longest}
    rest |= {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None}
    return published_decoder("mixtral", "MixtralForCausalLM", dims, vocab=32000, tied=False, **rest)


_MISTRAL_DEFAULTS = ROTARY | decoder_defaults(32000, 4096, 14336, 32, 32, kv=8, longest=131072)
MISTRAL = ModelType(
    name="mistral",
    defaults=_MISTRAL_DEFAULTS | {"sliding_window": 4096},
    checks=Checks(RMS_EPSILON, SILU, Rotary(1e4), every_layer),
    heads=DECODER_HEADS,
    optional_part=OPTIONAL_OUTPUT_LAYER,
    tensors=DecoderTensors(reads_attention_bias=False),
    tensor_fields=DECODER_FIELDS,
    rounded_to="float16",
)
MIXTRAL = ModelType(
    name="mixtral",
    defaults=_MISTRAL_DEFAULTS
    | {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None}
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False},
    checks=Checks(("rms_norm_eps", 1e-5), SILU, Rotary(1e6), every_layer),
    heads=DECODER_HEADS,
    optional_part=OPTIONAL_OUTPUT_LAYER,
    tensors=DecoderTensors(reads_attention_bias=False, feed_forward=_experts),
    tensor_fields=(*DECODER_FIELDS, "num_local_experts"),
)
MISTRAL_FAMILY = Family(
    name="mistral",
    title="Mistral",
    model_types=(MISTRAL, MIXTRAL),
    sizes={
        "mistral_7b": published_decoder(
            *("mistral", "MistralForCausalLM", Dims(4096, 32, 32, 8, 14336)),
            vocab=32000,
            tied=False,
            rope_theta=10000.0,
            sliding_window=4096,
            rms_norm_eps=1e-5,
        ),
        "mixtral_8x7b": _published_mixtral(Dims(4096, 32, 32, 8, 14336), longest=32768),
        "mixtral_8x22b": _published_mixtral(Dims(6144, 56, 48, 8, 16384), longest=65536),
    },
    aliases={"mixtral_8_7b": "mixtral_8x7b"},
    dense_experts=("MixtralMoeExperts",),
    exports={"MistralBackbone": Export(_export_mistral)},
)


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
LLAMA_FAMILY = Family(
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
            config=_gguf_llama,
            block_names=BLOCK | _MIXTRAL_BLOCK,
            undone=PERMUTED,
            rope_factors=ROPE_FREQS,
        ),
    ),
    exports={"Llama3Backbone": Export(_export_llama, "llama-bpe")},
    pre_tokenizers={
        "llama-bpe": PreTokenizer(CONTRACTIONS + WORDS % "{1,3}", takes_whole_words=True, starts_texts=True),
        "smaug-bpe": PreTokenizer(CONTRACTIONS + WORDS % "{1,3}"),
    },
)


# The layers without rotary positions slide.
def _slides_in_smollm_3(config: Config, i: int) -> bool:
    rotated = config.get("no_rope_layers")
    return not rotated[i] if isinstance(rotated, list) and i < len(rotated) else (i + 1) % 4 == 0


def _complete_smollm_3(config: dict[str, Any]) -> None:
    """Fill in, if missing, which layers have rotary positions (``no_rope_layers``) and windows (``layer_types``)."""
    if config.get("no_rope_layers") is None:
        every = int(config["no_rope_layer_interval"])
        config["no_rope_layers"] = [int((i + 1) % every != 0) for i in range(int(config["num_hidden_layers"]))]
    if config.get("layer_types") is None:
        slides = config["use_sliding_window"] and config["sliding_window"] is not None
        rotated = [bool(rotates or not slides) for rotates in config["no_rope_layers"]]
        config["layer_types"] = ["full_attention" if one else "sliding_attention" for one in rotated]


def _gguf_smollm_3(values: GgufValues) -> dict[str, Any]:
    """Return the ``config.json`` of a GGUF file, with what GGUF omits: each fourth layer has no rotary positions."""
    base = with_llama3_scaling(values, decoder_entries(values, "smollm3", "SmolLM3ForCausalLM"))
    return base | {"no_rope_layer_interval": 4, "use_sliding_window": False}


SMOLLM_3 = ModelType(
    name="smollm3",
    defaults=ROTARY
    | decoder_defaults(128256, 2048, 11008, 36, 16, kv=4, longest=32768)
    | {"rope_theta": 2e6, "sliding_window": None, "use_sliding_window": False, "no_rope_layer_interval": 4}
    | {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "tie_word_embeddings": True},
    complete=_complete_smollm_3,
    checks=Checks(
        RMS_EPSILON, SILU, Rotary(2e6), by_layer_type(_slides_in_smollm_3, always=False), has_activation="silu"
    ),
    heads=DECODER_HEADS,
)
SMOLLM_3_FAMILY = Family(
    name="smollm3",
    title="SmolLM 3",
    model_types=(SMOLLM_3,),
    gguf=(
        GgufArchitecture(
            name="smollm3", config=_gguf_smollm_3, block_names=BLOCK, undone=PERMUTED, rope_factors=ROPE_FREQS
        ),
    ),
)
