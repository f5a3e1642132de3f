"""Gemma 3: text alone, and text with images. EmbeddingGemma is its text model, attending in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.gemma import ONE_WAY, attention_scalar, exported_scalar
from shardload.families.parts import export
from shardload.families.parts.checks import RMS, TANH, Caps, Checks, by_layer_type
from shardload.families.parts.config import Config, Dims, decoder_defaults, published_decoder
from shardload.families.parts.export import Export, LayerSettings
from shardload.families.parts.gguf import SANDWICH, GgufArchitecture
from shardload.families.parts.gguf_values import GgufValues, decoder_entries
from shardload.families.parts.outside import DECODER_HEADS, VISION_POOLER
from shardload.families.parts.rope import Rotary
from shardload.families.parts.tensors import DECODER_FIELDS, DecoderTensors
from shardload.families.record import Family, ModelType


def _published(
    dims: Dims, *, window: int, head_dim: int = 256, scalar: int = 256, factor: float | None = 8.0
) -> dict[str, Any]:
    scaling = {"rope_type": "linear", "factor": factor} if factor else None
    heads: dict[str, Any] = {"head_dim": head_dim, "query_pre_attn_scalar": scalar}
    rest: dict[str, Any] = {**heads, "sliding_window": window, "rope_scaling": scaling}
    return published_decoder("gemma3_text", "Gemma3ForCausalLM", dims, vocab=262144, **rest)


# All layers slide but, by default, every sixth.
def _slides(config: Config, i: int) -> bool:
    return bool((i + 1) % int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6))


def _windows(config: Config, layers: int) -> list[int | None]:
    """Return the windows; a bidirectional one extends by half its size to each side, and KerasHub counts all tokens."""
    windows = by_layer_type(_slides)(config, layers)
    if not config.get("use_bidirectional_attention"):
        return windows
    return [None if window is None else 2 * (int(window) // 2) + 1 for window in windows]


_CHECKS = Checks(
    RMS,
    ("hidden_activation", TANH),
    Rotary(1e6, sliding_theta=1e4),
    _windows,
    TANH,
    # KerasHub's class applies a cap of the scores, transformers does not.
    caps=Caps(scores=None, logits=None, has_scores=False),
)


def _lacking(config: Config, name: str) -> str | None:
    """Compare the tokens per image, configured and in KerasHub (one per 4x4 patches)."""
    vision, configured = config.get("vision_config"), config.get("mm_tokens_per_image")
    if not isinstance(vision, Mapping) or not isinstance(configured, int):
        return None
    side, patch = vision.get("image_size"), vision.get("patch_size")
    if not isinstance(side, int) or not isinstance(patch, int) or patch < 1:
        return None
    made = (side // patch // 4) ** 2
    if made == configured:
        return None
    return f"config.json sets mm_tokens_per_image={configured}, but KerasHub makes {made} for each image"


def gguf(values: GgufValues) -> dict[str, Any]:
    """Return the ``config.json`` of a GGUF file of Gemma 3."""
    base = decoder_entries(values, "gemma3_text", "Gemma3ForCausalLM")
    return base | {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": attention_scalar(base, largest_layers=62),
        "attn_logit_softcapping": values.number("attn_logit_softcapping", None),
        "final_logit_softcapping": values.number("final_logit_softcapping", None),
        "sliding_window": values.number("attention.sliding_window", 1024),
        "rope_local_base_freq": values.number("rope.freq_base_swa", 10000.0),
    }


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    if backbone.vision_encoder is not None:
        raise UnsupportedError("Cannot write Gemma 3 with a vision encoder for Hugging Face")
    if backbone.use_bidirectional_attention or backbone.attention_logit_soft_cap is not None:
        feature = "bidirectional attention" if backbone.use_bidirectional_attention else "capped attention scores"
        raise UnsupportedError(f"Cannot write Gemma 3 with {feature} for Hugging Face")
    factor = backbone.global_rope_scaling_factor
    return {
        **export.decoder_entries(backbone, "gemma3_text", "Gemma3ForCausalLM"),
        "intermediate_size": backbone.intermediate_dim,
        "head_dim": backbone.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": exported_scalar(backbone),
        "sliding_window": backbone.sliding_window_size,
        "sliding_window_pattern": 6,  # as in KerasHub's class: every sixth layer attends to all tokens
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": factor} if factor != 1.0 else None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": backbone.final_logit_soft_cap,
        "attention_bias": False,
        "tie_word_embeddings": True,
    }


TEXT = ModelType(
    name="gemma3_text",
    defaults=decoder_defaults(262208, 2304, 9216, 26, 8, kv=4, longest=131072)
    | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096},
    checks=replace(_CHECKS, attention_flags=("use_bidirectional_attention",)),
    pools_if="use_bidirectional_attention",
    heads=DECODER_HEADS,
    tensors=DecoderTensors(norms_minus_one=True, sandwich=True, normed_heads=True),
    tensor_fields=DECODER_FIELDS,
    norms_minus_one=True,
    tokenizer_class="GemmaTokenizer",
)
WITH_IMAGES = ModelType(
    name="gemma3",
    parts={"text_config": "gemma3_text", "vision_config": "siglip_vision_model"},
    checks=_CHECKS,
    only=ONE_WAY,
    lacking=_lacking,
    heads=DECODER_HEADS,
    outside=VISION_POOLER,
    tokenizer_class="GemmaTokenizer",
)
FAMILY = Family(
    name="gemma3",
    title="Gemma 3",
    model_types=(TEXT, WITH_IMAGES),
    # 27B scales queries by hidden / heads instead of head_dim. 4B and more stretch RoPE by 8, to 128 K tokens.
    sizes={
        "gemma3_270m": _published(Dims(640, 18, 4, 1, 2048), window=512, factor=None),
        "gemma3_1b": _published(Dims(1152, 26, 4, 1, 6912), window=512, factor=None),
        "gemma3_4b": _published(Dims(2560, 34, 8, 4, 10240), window=1024),
        "gemma3_12b": _published(Dims(3840, 48, 16, 8, 15360), window=1024),
        "gemma3_27b": _published(Dims(5376, 62, 32, 16, 21504), window=1024, head_dim=128, scalar=168),
    },
    gguf=(GgufArchitecture(name="gemma3", config=gguf, block_names=SANDWICH, norms_plus_one=True),),
    exports={"Gemma3Backbone": Export(_export)},
)
