"""Gemma 4: text alone, text with images and sound, and the assistant that predicts tokens ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.parts.checks import TANH
from shardload.families.parts.config import Config, Dims, published_decoder
from shardload.families.parts.conversion import Export, LayerSettings, exported_decoder
from shardload.families.parts.gemma4_text import adapt, assistant_tensors, text_tensors
from shardload.families.parts.gemma4_towers import (
    AUDIO_DEFAULTS,
    AUDIO_SIZES,
    AUDIO_TYPE,
    VISION_DEFAULTS,
    VISION_SIZES,
    VISION_TYPE,
    audio_tensors,
    exported_audio,
    exported_vision,
    ignored_by_towers,
    vision_tensors,
)
from shardload.families.parts.gguf import ROPE_FREQS, SANDWICH, TOP, GgufArchitecture
from shardload.families.parts.gguf_values import GgufValues, model_entries
from shardload.families.parts.rope import FULL, SLIDING
from shardload.families.parts.tensors import DECODER_FIELDS, TensorSpec
from shardload.families.record import NO_GGUF, OTHER_FILE, Family, ModelType, Part
from shardload.units import plural

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


# ---- its tensors, and the configuration of a backbone -------------------------------------------


def _tensors_of_all(config: Config) -> Iterator[TensorSpec]:
    text, vision, audio = config["text_config"], config.get("vision_config"), config.get("audio_config")
    for spec in text_tensors(text):
        yield replace(spec, name=spec.name.replace("model.", "model.language_model.", 1))
    if vision:
        yield from vision_tensors(vision, text["hidden_size"])
    if audio:
        yield from audio_tensors(audio, text["hidden_size"])


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    text, vision, audio = _export_text(backbone), backbone.vision_encoder, backbone.audio_encoder
    if vision is None and audio is None:
        return text
    del text["architectures"]
    return {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": text,
        "vision_config": None if vision is None else exported_vision(vision),
        "audio_config": None if audio is None else exported_audio(audio),
        "tie_word_embeddings": True,
    }


def _export_text(backbone: Any) -> dict[str, Any]:
    if backbone.is_embedding_model:
        raise UnsupportedError("Cannot write Gemma 4 that makes embeddings for Hugging Face")
    if not backbone.use_sliding_window_attention or not backbone.layer_types:
        raise UnsupportedError("Cannot write Gemma 4 without sliding windows or layer_types for Hugging Face")
    shares = backbone.num_global_key_value_heads is not None
    rotated = {"partial_rotary_factor": backbone.global_rope_partial_rotary_factor}
    return {
        **exported_decoder(backbone, "gemma4_text", "Gemma4ForCausalLM"),
        "intermediate_size": backbone.intermediate_dim,
        "head_dim": backbone.head_dim,
        "global_head_dim": backbone.global_head_dim,
        **({} if backbone.global_head_dim else {"per_layer_config": {}}),  # else transformers takes a default
        "num_global_key_value_heads": backbone.num_global_key_value_heads,
        "attention_k_eq_v": shares,
        "hidden_activation": TANH,
        "layer_types": list(backbone.layer_types),
        "sliding_window": backbone.sliding_window_size,
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "rope_theta": backbone.global_rope_wavelength, **rotated},
            SLIDING: {"rope_type": "default", "rope_theta": backbone.local_rope_wavelength},
        },
        "attn_logit_softcapping": backbone.attention_logit_soft_cap,
        "final_logit_softcapping": backbone.final_logit_soft_cap,
        "num_kv_shared_layers": backbone.num_kv_shared_layers,
        "use_double_wide_mlp": backbone.use_double_wide_mlp,
        "hidden_size_per_layer_input": backbone.hidden_size_per_layer_input,
        "vocab_size_per_layer_input": backbone.vocab_size_per_layer_input or 0,
        "enable_moe_block": backbone.enable_moe_block,
        "num_experts": backbone.num_experts,
        "moe_intermediate_size": backbone.expert_intermediate_dim,
        "top_k_experts": backbone.num_experts_per_token if backbone.enable_moe_block else None,
        "use_bidirectional_attention": "vision" if backbone.use_vision_bidirectional_attention else None,
        "attention_bias": False,
        "tie_word_embeddings": True,
    }


# ---- published models ---------------------------------------------------------------------------


def _published_text(dims: Dims, *, every: int, **more: Any) -> dict[str, Any]:
    """Return the ``config.json`` of a published model's text part; each ``every``-th layer has full attention."""
    rope = {
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    }
    rest: dict[str, Any] = {
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": TANH,
        "layer_types": [SLIDING if (i + 1) % every else FULL for i in range(dims.layers)],
        "sliding_window": 1024,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "rope_parameters": rope,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        **more,
    }
    return published_decoder("gemma4_text", "Gemma4ForCausalLM", dims, vocab=262144, **rest)


def _published(text: dict[str, Any], *, vision: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Return the ``config.json`` of a published model; ``vision`` are its first sizes, the others are the defaults."""
    sizes = dict(zip(VISION_SIZES, vision, strict=False))
    audio = {"audio_config": {"model_type": AUDIO_TYPE, **AUDIO_DEFAULTS}} if more["use_clipped_linears"] else {}
    return {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": {"model_type": VISION_TYPE, **VISION_DEFAULTS, **sizes, **more},
        **audio,
        "tie_word_embeddings": True,
    }


def _assistant(dims: Dims, *, of: str, use_ordered_embeddings: bool) -> dict[str, Any]:
    """Return the ``config.json`` of the published assistant of a model."""
    assisted = _TEXTS[of]
    kept = {key: assisted[key] for key in ("sliding_window", "num_global_key_value_heads", "attention_k_eq_v")}
    text = _published_text(dims, every=4, num_kv_shared_layers=4, **kept, final_logit_softcapping=None)
    return {
        "model_type": "gemma4_assistant",
        "architectures": ["Gemma4AssistantForCausalLM"],
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "backbone_hidden_size": assisted["hidden_size"],
        "use_ordered_embeddings": use_ordered_embeddings,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
        "tie_word_embeddings": True,
    }


_INPUTS: dict[str, Any] = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
_SHARED: dict[str, Any] = {"num_kv_shared_layers": 20, "use_double_wide_mlp": True}
_KEYS_AS_VALUES: dict[str, Any] = {"attention_k_eq_v": True, "use_bidirectional_attention": "vision"}
_EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
_TEXTS = {
    "gemma4_2b": _published_text(Dims(1536, 35, 8, 1, 6144), every=5, sliding_window=512, **_INPUTS, **_SHARED),
    "gemma4_4b": _published_text(
        Dims(2560, 42, 8, 2, 10240), every=6, sliding_window=512, **_INPUTS, num_kv_shared_layers=18
    ),
    "gemma4_26b_a4b": _published_text(
        Dims(2816, 30, 16, 8, 2112), every=6, num_global_key_value_heads=2, **_KEYS_AS_VALUES, **_EXPERTS
    ),
    "gemma4_31b": _published_text(
        Dims(5376, 60, 32, 16, 21504), every=6, num_global_key_value_heads=4, **_KEYS_AS_VALUES
    ),
}
_ASSISTANTS = {
    "gemma4_2b_assistant": _assistant(Dims(256, 4, 4, 1, 2048), of="gemma4_2b", use_ordered_embeddings=True),
    "gemma4_4b_assistant": _assistant(Dims(256, 4, 4, 2, 2048), of="gemma4_4b", use_ordered_embeddings=True),
    "gemma4_26b_a4b_assistant": _assistant(
        Dims(1024, 4, 16, 8, 8192), of="gemma4_26b_a4b", use_ordered_embeddings=False
    ),
    "gemma4_31b_assistant": _assistant(Dims(1024, 4, 32, 16, 8192), of="gemma4_31b", use_ordered_embeddings=False),
}
_SMALL_TOWER: dict[str, Any] = {
    "vision": (768, 3072, 16, 12, 12, 64),
    "use_clipped_linears": True,
    "standardize": False,
}
_LARGE_TOWER: dict[str, Any] = {
    "vision": (1152, 4304, 27, 16, 16, 72),
    "use_clipped_linears": False,
    "standardize": True,
}
_TEXT_FIELDS = (*DECODER_FIELDS, "head_dim")
TEXT = ModelType(
    name="gemma4_text",
    tensors=text_tensors,
    tensor_fields=_TEXT_FIELDS,
    adapt=adapt,
    outside={
        r"model\.(language_model\.)?layers\.\d+\.self_attn\.([kv]_proj|k_norm)\.weight": (
            "keys and values of layers that take those of an earlier layer"
        )
    },
    only={"use_bidirectional_attention": ("vision", None), "hidden_activation": (TANH, None)},
)
WITH_IMAGES = replace(
    TEXT,
    name="gemma4",
    lacks={Part.GGUF: OTHER_FILE},
    parts={"text_config": TEXT.name, "vision_config": VISION_TYPE, "audio_config": AUDIO_TYPE},
    optional_parts=frozenset({"vision_config", "audio_config"}),
    differences=ignored_by_towers,
    tensors=_tensors_of_all,
    tensor_fields=(),
    part_fields={"text_config": _TEXT_FIELDS, "vision_config": VISION_SIZES, "audio_config": AUDIO_SIZES},
)
_VISION = ModelType(name=VISION_TYPE, is_part=True, defaults=VISION_DEFAULTS)
_AUDIO = ModelType(name=AUDIO_TYPE, is_part=True, defaults=AUDIO_DEFAULTS)
ASSISTANT = ModelType(
    name="gemma4_assistant",
    lacks=NO_GGUF | {Part.EXPORT: "its projections are in KerasHub's task, and exports write backbones"},
    defaults={
        **{"backbone_hidden_size": 1536, "num_centroids": 2048, "centroid_intermediate_top_k": 32},
        "use_ordered_embeddings": False,
    },
    parts={"text_config": TEXT.name},
    adapt=adapt,
    tensors=assistant_tensors,
    tensor_fields=("backbone_hidden_size", "num_centroids"),
    part_fields={"text_config": _TEXT_FIELDS},
    loads_head_of=("Gemma4AssistantForCausalLM",),
)
FAMILY = Family(
    name="gemma4",
    title="Gemma 4",
    model_types=(TEXT, WITH_IMAGES, ASSISTANT, _VISION, _AUDIO),
    # As KerasHub's presets are called: with all towers, of which only the small models have one for sound.
    sizes={
        name: _published(text, **(_LARGE_TOWER if name in ("gemma4_26b_a4b", "gemma4_31b") else _SMALL_TOWER))
        for name, text in _TEXTS.items()
    }
    | {f"{name}_text": text for name, text in _TEXTS.items()}
    | _ASSISTANTS,
    aliases={"gemma4_e2b": "gemma4_2b", "gemma4_e4b": "gemma4_4b"},
    dense_experts=("Gemma4MoEBlock",),
    exports={"Gemma4Backbone": Export(_export, model_types=("gemma4_text", "gemma4"))},
    gguf=(
        GgufArchitecture(
            name="gemma4",
            model_types=("gemma4_text",),
            config=_gguf,
            block_names=_GGUF_BLOCK,
            top_names=_GGUF_TOP,
            bare=_BARE,
            rope_factors=ROPE_FREQS,
        ),
    ),
)
