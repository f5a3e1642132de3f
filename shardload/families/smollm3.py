"""SmolLM 3, of which some layers have no rotary positions."""

from __future__ import annotations

from typing import Any

from shardload.families.parts.checks import RMS_EPSILON, SILU, Checks, by_layer_type
from shardload.families.parts.config import ROTARY, Config, Dims, decoder_defaults, published_decoder
from shardload.families.parts.conversion import Export, LayerSettings
from shardload.families.parts.gguf import BLOCK, PERMUTED, ROPE_FREQS, GgufArchitecture
from shardload.families.parts.gguf_values import GgufValues, decoder_entries, with_llama3_scaling
from shardload.families.parts.rope import Rotary
from shardload.families.parts.tensors import DECODER_FIELDS, DECODER_HEADS, DecoderTensors, gated_mlp
from shardload.families.record import Family, ModelType


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


_PADDING = 128004
"""Default of ``pad_token_id`` in transformers, which refuses to build a smaller vocabulary with it."""


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    return {
        **({} if backbone.vocabulary_size > _PADDING else {"pad_token_id": None}),
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "vocab_size": backbone.vocabulary_size,
        "hidden_size": backbone.hidden_dim,
        "intermediate_size": backbone.intermediate_dim,
        "num_hidden_layers": backbone.num_layers,
        "num_attention_heads": backbone.num_attention_heads,
        "num_key_value_heads": backbone.num_key_value_heads,
        "hidden_act": "silu",
        "rms_norm_eps": backbone.layer_norm_epsilon,
        "rope_theta": backbone.rope_theta,
        "max_position_embeddings": backbone.max_position_embeddings,
        "attention_bias": backbone.attention_bias,
        "attention_dropout": backbone.attention_dropout,
        "mlp_bias": backbone.mlp_bias,
        "no_rope_layers": [int(rotates) for rotates in backbone.rope_layer_enabled_list],
        "layer_types": list(backbone.layer_types),
        "use_sliding_window": False,  # KerasHub's class ignores windows
        "sliding_window": None,
        "tie_word_embeddings": True,
    }


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
    tensors=DecoderTensors(
        feed_forward=lambda config, layer, at: gated_mlp(config, f"{at}.mlp", biased=bool(config.get("mlp_bias")))
    ),
    tensor_fields=DECODER_FIELDS,
)
FAMILY = Family(
    name="smollm3",
    title="SmolLM 3",
    model_types=(SMOLLM_3,),
    sizes={
        "smollm3_3b": published_decoder(
            *("smollm3", "SmolLM3ForCausalLM", Dims(2048, 36, 16, 4, 11008)),
            vocab=128256,
            rope_theta=5e6,
            max_position_embeddings=65536,
            use_sliding_window=False,
            sliding_window=None,
            no_rope_layer_interval=4,
        ),
    },
    exports={"SmolLM3Backbone": Export(_export, "llama-bpe", ("smollm3",))},
    gguf=(
        GgufArchitecture(
            name="smollm3",
            model_types=("smollm3",),
            config=_gguf_smollm_3,
            block_names=BLOCK,
            undone=PERMUTED,
            rope_factors=ROPE_FREQS,
        ),
    ),
)
