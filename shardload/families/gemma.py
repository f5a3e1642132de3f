"""Gemma and Gemma 2, which share a class of KerasHub, Gemma 3, and the models made of their layers.

EmbeddingGemma is Gemma 3's text model, attending in both directions, and has its ``model_type``. PaliGemma is Gemma
with a vision tower; T5Gemma and T5Gemma 2 have encoders and decoders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.parts.checks import (
    RMS_EPSILON,
    TANH,
    WINDOW,
    Caps,
    Checks,
    FieldDifference,
    by_layer_type,
    first_slides,
)
from shardload.families.parts.config import Config, Dims, decoder_defaults, published_decoder
from shardload.families.parts.conversion import Export, LayerSettings, exported_decoder
from shardload.families.parts.gguf import BLOCK, SANDWICH, GgufArchitecture
from shardload.families.parts.gguf_values import GgufValues, decoder_entries
from shardload.families.parts.rope import SLIDING, Rotary
from shardload.families.parts.tensors import DECODER_FIELDS, DECODER_HEADS, VISION_POOLER, DecoderTensors
from shardload.families.record import Family, ModelType

_ONE_WAY = {"use_bidirectional_attention": (False, None)}
_DECODER: dict[str, Any] = {
    "heads": DECODER_HEADS,
    "tensor_fields": DECODER_FIELDS,
    "norms_minus_one": True,
    "tokenizer_class": "GemmaTokenizer",
}


def _published_gemma(dims: Dims) -> dict[str, Any]:
    return published_decoder("gemma", "GemmaForCausalLM", dims, vocab=256000, head_dim=256)


def _published_gemma_2(dims: Dims, *, head_dim: int = 256, scalar: int = 256) -> dict[str, Any]:
    caps: dict[str, Any] = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    heads: dict[str, Any] = {"head_dim": head_dim, "query_pre_attn_scalar": scalar}
    return published_decoder("gemma2", "Gemma2ForCausalLM", dims, vocab=256000, **heads, **caps, sliding_window=4096)


def _attention_scalar(base: dict[str, Any], *, largest_layers: int) -> int:
    """Return the ``query_pre_attn_scalar`` (its root divides attention scores) of a GGUF file, which does not store it.

    It is the size of a head or, in the 27B model, hidden size / heads. That model has ``largest_layers`` layers.
    """
    if base["num_hidden_layers"] == largest_layers:
        return int(base["hidden_size"] // base["num_attention_heads"])
    return int(base["head_dim"])


def _gguf_gemma_2(values: GgufValues) -> dict[str, Any]:
    base = decoder_entries(values, "gemma2", "Gemma2ForCausalLM")
    return base | {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": _attention_scalar(base, largest_layers=46),
        # Files may omit these three keys; the values are llama.cpp's defaults.
        "attn_logit_softcapping": values.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.number("final_logit_softcapping", 30.0),
        "sliding_window": values.number("attention.sliding_window", 4096),
    }


def _export_gemma(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    is_second = backbone.use_post_ffw_norm
    kind = ("gemma2", "Gemma2ForCausalLM") if is_second else ("gemma", "GemmaForCausalLM")
    common = {
        **exported_decoder(backbone, *kind),
        "intermediate_size": backbone.intermediate_dim // 2,  # KerasHub counts gate and up projection together
        "head_dim": backbone.head_dim,
        # Gemma's activation is read from the first name, Gemma 2's from the second.
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
    }
    if not is_second:
        return common
    return {
        **common,
        "query_pre_attn_scalar": _exported_scalar(backbone),
        "attn_logit_softcapping": backbone.attention_logit_soft_cap,
        "final_logit_softcapping": backbone.final_logit_soft_cap,
        "sliding_window": backbone.sliding_window_size,
    }


def _exported_scalar(backbone: Any) -> int:
    """Return a ``query_pre_attn_scalar``: the head size if ``query_head_dim_normalize``, else hidden size / heads."""
    normalised = backbone.query_head_dim_normalize
    return int(backbone.head_dim if normalised else backbone.hidden_dim // backbone.num_query_heads)


GEMMA = ModelType(
    name="gemma",
    defaults=decoder_defaults(256000, 3072, 24576, 28, 16, kv=16, longest=8192) | {"head_dim": 256},
    checks=Checks(
        RMS_EPSILON,
        ("hidden_act", TANH),
        Rotary(1e4),
        has_activation=TANH,
        # Gemma's first configurations meant the tanh form.
        activation_names={"gelu": TANH},
    ),
    only=_ONE_WAY,
    tensors=DecoderTensors(norms_minus_one=True),
    **_DECODER,
)
GEMMA_2 = ModelType(
    name="gemma2",
    defaults=decoder_defaults(256000, 2304, 9216, 26, 8, kv=4, longest=8192)
    | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    checks=Checks(
        RMS_EPSILON,
        ("hidden_activation", TANH),
        Rotary(1e4),
        by_layer_type(first_slides),
        TANH,
        caps=Caps(scores=50.0, logits=30.0),
    ),
    only=_ONE_WAY,
    tensors=DecoderTensors(norms_minus_one=True, sandwich=True),
    **_DECODER,
)
GEMMA_FAMILY = Family(
    name="gemma",
    title="Gemma",
    model_types=(GEMMA, GEMMA_2),
    # 27B scales queries by hidden / heads instead of head_dim.
    sizes={
        "gemma_2b": _published_gemma(Dims(2048, 18, 8, 1, 16384)),
        "gemma_7b": _published_gemma(Dims(3072, 28, 16, 16, 24576)),
        "gemma2_2b": _published_gemma_2(Dims(2304, 26, 8, 4, 9216)),
        "gemma2_9b": _published_gemma_2(Dims(3584, 42, 16, 8, 14336)),
        "gemma2_27b": _published_gemma_2(Dims(4608, 46, 32, 16, 36864), head_dim=128, scalar=144),
    },
    aliases={"gemma2_7b": "gemma2_9b"},
    alias_notes={"gemma2_7b": "Gemma 2 was never released at 7B"},
    gguf=(
        GgufArchitecture(
            name="gemma",
            config=lambda values: decoder_entries(values, "gemma", "GemmaForCausalLM") | {"tie_word_embeddings": True},
            block_names=BLOCK,
            norms_plus_one=True,
        ),
        GgufArchitecture(name="gemma2", config=_gguf_gemma_2, block_names=SANDWICH, norms_plus_one=True),
    ),
    exports={"GemmaBackbone": Export(_export_gemma)},
)


def _published_gemma_3(
    dims: Dims, *, window: int, head_dim: int = 256, scalar: int = 256, factor: float | None = 8.0
) -> dict[str, Any]:
    scaling = {"rope_type": "linear", "factor": factor} if factor else None
    heads: dict[str, Any] = {"head_dim": head_dim, "query_pre_attn_scalar": scalar}
    rest: dict[str, Any] = {**heads, "sliding_window": window, "rope_scaling": scaling}
    return published_decoder("gemma3_text", "Gemma3ForCausalLM", dims, vocab=262144, **rest)


def _windows_of_gemma_3(config: Config, layers: int) -> list[int | None]:
    """Return how many tokens the sliding window of each layer has; ``None`` for a layer that attends to all tokens.

    If tokens attend in both directions, a configured window of n has n // 2 tokens on each side.
    """
    every = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
    windows = by_layer_type(lambda config, i: (i + 1) % every != 0)(config, layers)
    if not config.get("use_bidirectional_attention"):
        return windows
    return [None if window is None else 2 * (int(window) // 2) + 1 for window in windows]


_GEMMA_3_CHECKS = Checks(
    RMS_EPSILON,
    ("hidden_activation", TANH),
    Rotary(1e6, sliding_theta=1e4),
    _windows_of_gemma_3,
    TANH,
    # KerasHub's class applies a cap of the scores, transformers does not.
    caps=Caps(scores=None, logits=None, has_scores=False),
)


def _lacking_image_tokens(config: Config, name: str) -> str | None:
    """Return an error's text if KerasHub makes more or fewer tokens from an image than configured; else ``None``."""
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


def _gguf_gemma_3(values: GgufValues) -> dict[str, Any]:
    """Return the ``config.json`` of a GGUF file of Gemma 3, from which KerasHub's converter builds the model."""
    base = decoder_entries(values, "gemma3_text", "Gemma3ForCausalLM")
    return base | {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": _attention_scalar(base, largest_layers=62),
        "attn_logit_softcapping": values.number("attn_logit_softcapping", None),
        "final_logit_softcapping": values.number("final_logit_softcapping", None),
        "sliding_window": values.number("attention.sliding_window", 1024),
        "rope_local_base_freq": values.number("rope.freq_base_swa", 10000.0),
    }


def _export_gemma_3(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    if backbone.vision_encoder is not None:
        raise UnsupportedError("Cannot write Gemma 3 with a vision encoder for Hugging Face")
    if backbone.use_bidirectional_attention or backbone.attention_logit_soft_cap is not None:
        feature = "bidirectional attention" if backbone.use_bidirectional_attention else "capped attention scores"
        raise UnsupportedError(f"Cannot write Gemma 3 with {feature} for Hugging Face")
    factor = backbone.global_rope_scaling_factor
    return {
        **exported_decoder(backbone, "gemma3_text", "Gemma3ForCausalLM"),
        "intermediate_size": backbone.intermediate_dim,
        "head_dim": backbone.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _exported_scalar(backbone),
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


GEMMA_3_TEXT = ModelType(
    name="gemma3_text",
    defaults=decoder_defaults(262208, 2304, 9216, 26, 8, kv=4, longest=131072)
    | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096},
    checks=replace(_GEMMA_3_CHECKS, attention_flags=("use_bidirectional_attention",)),
    pools_if="use_bidirectional_attention",
    tensors=DecoderTensors(norms_minus_one=True, sandwich=True, normed_heads=True),
    **_DECODER,
)
GEMMA_3 = ModelType(
    name="gemma3",
    parts={"text_config": "gemma3_text", "vision_config": "siglip_vision_model"},
    checks=_GEMMA_3_CHECKS,
    only=_ONE_WAY,
    lacking=_lacking_image_tokens,
    heads=DECODER_HEADS,
    outside=VISION_POOLER,
    tokenizer_class="GemmaTokenizer",
)
GEMMA_3_FAMILY = Family(
    name="gemma3",
    title="Gemma 3",
    model_types=(GEMMA_3_TEXT, GEMMA_3),
    # 27B scales queries by hidden / heads instead of head_dim. 4B and more stretch RoPE by 8, to 128 K tokens.
    sizes={
        "gemma3_270m": _published_gemma_3(Dims(640, 18, 4, 1, 2048), window=512, factor=None),
        "gemma3_1b": _published_gemma_3(Dims(1152, 26, 4, 1, 6912), window=512, factor=None),
        "gemma3_4b": _published_gemma_3(Dims(2560, 34, 8, 4, 10240), window=1024),
        "gemma3_12b": _published_gemma_3(Dims(3840, 48, 16, 8, 15360), window=1024),
        "gemma3_27b": _published_gemma_3(Dims(5376, 62, 32, 16, 21504), window=1024, head_dim=128, scalar=168),
    },
    gguf=(GgufArchitecture(name="gemma3", config=_gguf_gemma_3, block_names=SANDWICH, norms_plus_one=True),),
    exports={"Gemma3Backbone": Export(_export_gemma_3)},
)


_EMBEDDER = {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}
EMBEDDING_GEMMA_FAMILY = Family(
    name="embedding_gemma",
    title="EmbeddingGemma",
    gguf=(
        GgufArchitecture(
            name="gemma-embedding",
            config=lambda values: _gguf_gemma_3(values) | _EMBEDDER,
            block_names=SANDWICH,
            norms_plus_one=True,
        ),
    ),
)


def _adapt_paligemma(config: dict[str, Any]) -> None:
    if isinstance(text := config.get("text_config"), dict):
        text["num_image_tokens"] = text["head_dim"]  # KerasHub reads num_image_tokens as the head dim


PALIGEMMA = ModelType(
    name="paligemma",
    parts={"text_config": "gemma", "vision_config": "siglip_vision_model"},
    adapt=_adapt_paligemma,
    outside=VISION_POOLER,
    tokenizer_class="GemmaTokenizer",
)
PALIGEMMA_FAMILY = Family(name="paligemma", title="PaliGemma", model_types=(PALIGEMMA,))


def _windows_of_t5gemma(config: Config) -> Iterator[FieldDifference]:
    """Yield, to refuse the model, windows that KerasHub ignores (encoder) or makes one token longer (decoder)."""
    for part, has in (("encoder", "no window"), ("decoder", "one token more")):
        found = config.get(part)
        nested = found if isinstance(found, Mapping) else {}
        types = nested.get("layer_types")
        window, longest = nested.get("sliding_window", 4096), nested.get("max_position_embeddings") or float("inf")
        if window and window < longest and (types is None or SLIDING in types):
            yield FieldDifference("sliding_window", f"{window} (in the {part})", has, WINDOW)


def _adapt_t5gemma_2(config: dict[str, Any]) -> None:
    """Set a missing rotary ``factor`` of full attention to 1: transformers 5 omits it, KerasHub reads it."""
    encoder = config.get("encoder")
    parts = (config.get("decoder"), encoder.get("text_config") if isinstance(encoder, dict) else None)
    for part in parts:
        rope = part.get("rope_parameters") if isinstance(part, dict) else None
        full = rope.get("full_attention") if isinstance(rope, dict) else None
        if isinstance(full, dict) and full.get("rope_type", "default") == "default":
            full.setdefault("factor", 1.0)


T5GEMMA_FAMILY = Family(
    name="t5gemma",
    title="T5Gemma",
    model_types=(
        ModelType(name="t5gemma", differences=_windows_of_t5gemma),
        ModelType(name="t5gemma2", adapt=_adapt_t5gemma_2),
    ),
)
