"""Gemma 4: text alone, text with images and sound, and the assistant that predicts tokens ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.parts.checks import TANH
from shardload.families.parts.gguf import ROPE_FREQS, SANDWICH, TOP, GgufArchitecture
from shardload.families.parts.gguf_values import GgufValues, model_entries
from shardload.families.record import Family, ModelType
from shardload.units import plural


def _adapt(config: dict[str, Any]) -> None:
    """Fill in a missing ``global_head_dim``, and remove a null encoder, which KerasHub would try to build."""
    for part in ("vision_config", "audio_config"):
        if part in config and config[part] is None:
            del config[part]
    text = config.get("text_config", config)
    layers = text.get("per_layer_config") if isinstance(text, dict) else None
    if isinstance(layers, dict) and text.get("global_head_dim") is None:
        widths = {layer.get("head_dim") for layer in layers.values() if isinstance(layer, dict)} - {None}
        if len(widths) == 1:
            text["global_head_dim"] = widths.pop()


_GGUF_TOP = TOP | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GGUF_BLOCK = SANDWICH | {
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_BARE = frozenset(
    {"layer_scalar", "router.scale", "router.per_expert_scale", "experts.gate_up_proj", "experts.down_proj"}
)


def _gguf(values: GgufValues) -> dict[str, Any]:
    """Return the ``config.json`` of a GGUF file, which has settings for each layer instead of each kind of layer."""
    layers = values.count("block_count")
    # Settings of each layer: Hugging Face's fields are read off the first layer of either kind.
    slides = values.each("attention.sliding_window_pattern", layers)
    inner = values.each("feed_forward_length", layers)
    shared = values.each("attention.head_count_kv", layers)
    full = next((i for i, one in enumerate(slides) if not one), layers - 1)
    sliding = next((i for i, one in enumerate(slides) if one), 0)
    width = values.count("attention.key_length")
    turned = {"rope_type": "proportional", "rope_theta": values.number("rope.freq_base", 1e6)}
    turned |= {"partial_rotary_factor": _rotated_part(values, width)}
    local = {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", 1e4)}
    experts = values.number("expert_count", 0)
    return model_entries(values, "gemma4_text", "Gemma4ForCausalLM") | {
        "hidden_size": values.count("embedding_length"),
        "intermediate_size": inner[0],
        # Only the last layers, which share keys and values, can be wider.
        "use_double_wide_mlp": inner[-1] != inner[0],
        "num_hidden_layers": layers,
        "num_attention_heads": values.count("attention.head_count"),
        "num_key_value_heads": shared[sliding],
        "num_global_key_value_heads": None if shared[full] == shared[sliding] else shared[full],
        # Where keys serve as values, layers with full attention store no matrix for values.
        "attention_k_eq_v": values.rows(f"blk.{full}.attn_v.weight") is None,
        "num_kv_shared_layers": values.number("attention.shared_kv_layers", 0),
        "head_dim": values.number("attention.key_length_swa", width),
        "global_head_dim": width,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "sliding_window": values.number("attention.sliding_window", 512),
        "rope_parameters": {"full_attention": turned, "sliding_attention": local},
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": values.number("context_length", None),
        "hidden_size_per_layer_input": values.number("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": values.rows("per_layer_token_embd.weight") or 0,
        "final_logit_softcapping": values.number("final_logit_softcapping", None),
        "hidden_activation": "gelu_pytorch_tanh",
        "enable_moe_block": bool(experts),
        "num_experts": experts or None,
        "top_k_experts": values.number("expert_used_count", None),
        "moe_intermediate_size": values.number("expert_feed_forward_length", None),
        "tie_word_embeddings": True,
    }


def _rotated_part(values: GgufValues, width: int) -> float:
    """Return ``partial_rotary_factor``, the share of a head's features that rotate, as a fraction of ``width``.

    A GGUF file stores one divisor of the angle for each pair of features: 1 for a pair that rotates, and 1e30 for one
    that does not. Without these divisors, all features rotate.
    """
    factors = values.rope_factors.get("rope_freqs", ())
    if not factors:
        return 1.0
    rotated = factors.count(1.0)
    in_order = factors[:rotated] == (1.0,) * rotated and all(one > 1e29 for one in factors[rotated:])
    if 2 * len(factors) != width or not in_order:
        raise UnsupportedError(
            f"{values.path}: 'rope_freqs.weight' should have {plural(width // 2, 'number')}, 1 for the first pairs "
            f"of a head and 1e30 for the others, but has {len(factors)}: {str(factors)[:80]}. Load the safetensors "
            "of this model instead"
        )
    return 2 * rotated / width


TEXT = ModelType(
    name="gemma4_text",
    adapt=_adapt,
    only={"use_bidirectional_attention": ("vision", None), "hidden_activation": (TANH, None)},
)
WITH_IMAGES = replace(TEXT, name="gemma4")
ASSISTANT = ModelType(name="gemma4_assistant", adapt=_adapt, loads_head_of=("Gemma4AssistantForCausalLM",))
FAMILY = Family(
    name="gemma4",
    title="Gemma 4",
    model_types=(TEXT, WITH_IMAGES, ASSISTANT),
    dense_experts=("Gemma4MoEBlock",),
    gguf=(
        GgufArchitecture(
            name="gemma4",
            config=_gguf,
            block_names=_GGUF_BLOCK,
            top_names=_GGUF_TOP,
            bare=_BARE,
            rope_factors=ROPE_FREQS,
        ),
    ),
)
