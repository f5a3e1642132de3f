"""Gemma 3, with and without images, and EmbeddingGemma.

EmbeddingGemma is Gemma 3's text model, attending in both directions, and has its ``model_type``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.gemma import DECODER, ONE_WAY, attention_scalar, exported_scalar
from shardload.families.parts.checks import RMS_EPSILON, TANH, Caps, Checks, by_layer_type
from shardload.families.parts.config import Config, Dims, decoder_defaults, published_decoder
from shardload.families.parts.conversion import Export, LayerSettings, exported_decoder
from shardload.families.parts.gguf import SANDWICH, GgufArchitecture
from shardload.families.parts.gguf_values import GgufValues, decoder_entries
from shardload.families.parts.images import (
    TOWER_FIELDS,
    exported_tower,
    tokens_per_image,
    tower_config,
    tower_tensors,
)
from shardload.families.parts.rope import Rotary
from shardload.families.parts.tensors import DECODER_FIELDS, DECODER_HEADS, VISION_POOLER, DecoderTensors, TensorSpec
from shardload.families.record import OTHER_FILE, Family, ModelType, Part


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
        "query_pre_attn_scalar": attention_scalar(base, largest_layers=62),
        "attn_logit_softcapping": values.number("attn_logit_softcapping", None),
        "final_logit_softcapping": values.number("final_logit_softcapping", None),
        "sliding_window": values.number("attention.sliding_window", 1024),
        "rope_local_base_freq": values.number("rope.freq_base_swa", 10000.0),
    }


def _export_gemma_3(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    text = _export_text(backbone)
    if (tower := backbone.vision_encoder) is None:
        return text
    del text["architectures"]
    return {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": exported_tower(tower),
        "mm_tokens_per_image": tokens_per_image(tower),
        "tie_word_embeddings": True,
    }


def _export_text(backbone: Any) -> dict[str, Any]:
    if backbone.use_bidirectional_attention or backbone.attention_logit_soft_cap is not None:
        feature = "bidirectional attention" if backbone.use_bidirectional_attention else "capped attention scores"
        raise UnsupportedError(f"Cannot write Gemma 3 with {feature} for Hugging Face")
    factor = backbone.global_rope_scaling_factor
    return {
        **exported_decoder(backbone, "gemma3_text", "Gemma3ForCausalLM"),
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


GEMMA_3_TEXT = ModelType(
    name="gemma3_text",
    defaults=decoder_defaults(262208, 2304, 9216, 26, 8, kv=4, longest=131072)
    | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096},
    checks=replace(_GEMMA_3_CHECKS, attention_flags=("use_bidirectional_attention",)),
    pools_if="use_bidirectional_attention",
    tensors=DecoderTensors(norms_minus_one=True, sandwich=True, normed_heads=True),
    **DECODER,
)


def _tensors(config: Config) -> Iterator[TensorSpec]:
    assert GEMMA_3_TEXT.tensors is not None
    text, vision = config["text_config"], config["vision_config"]
    for spec in GEMMA_3_TEXT.tensors(text):
        yield replace(spec, name=f"language_model.{spec.name}")
    # As in published files; transformers 5 reads these names too.
    yield from tower_tensors(vision, "vision_tower.vision_model")
    yield TensorSpec("multi_modal_projector.mm_input_projection_weight", (vision["hidden_size"], text["hidden_size"]))
    yield TensorSpec("multi_modal_projector.mm_soft_emb_norm.weight", (vision["hidden_size"],))


def _with_tower(text: dict[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` of a published model that reads images, too."""
    return {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {key: value for key, value in text.items() if key != "architectures"} | {"vocab_size": 262208},
        "vision_config": tower_config(hidden=1152, layers=27, heads=16, width=4304, image=896, patch=14),
        "mm_tokens_per_image": 256,
        "tie_word_embeddings": True,
    }


_TEXTS = {
    "gemma3_270m": _published_gemma_3(Dims(640, 18, 4, 1, 2048), window=512, factor=None),
    "gemma3_1b": _published_gemma_3(Dims(1152, 26, 4, 1, 6912), window=512, factor=None),
    "gemma3_4b": _published_gemma_3(Dims(2560, 34, 8, 4, 10240), window=1024),
    "gemma3_12b": _published_gemma_3(Dims(3840, 48, 16, 8, 15360), window=1024),
    "gemma3_27b": _published_gemma_3(Dims(5376, 62, 32, 16, 21504), window=1024, head_dim=128, scalar=168),
}
GEMMA_3 = ModelType(
    name="gemma3",
    lacks={Part.GGUF: OTHER_FILE},
    parts={"text_config": "gemma3_text", "vision_config": "siglip_vision_model"},
    checks=_GEMMA_3_CHECKS,
    only=ONE_WAY,
    tensors=_tensors,
    part_fields={"text_config": DECODER_FIELDS, "vision_config": TOWER_FIELDS},
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
    sizes=_TEXTS | {f"{name}_vision": _with_tower(_TEXTS[name]) for name in ("gemma3_4b", "gemma3_12b", "gemma3_27b")},
    gguf=(
        GgufArchitecture(
            name="gemma3",
            model_types=("gemma3_text",),
            config=_gguf_gemma_3,
            block_names=SANDWICH,
            norms_plus_one=True,
        ),
    ),
    exports={"Gemma3Backbone": Export(_export_gemma_3, model_types=("gemma3_text", "gemma3"))},
)


_EMBEDDER = {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}
EMBEDDING_GEMMA_FAMILY = Family(
    name="embedding_gemma",
    title="EmbeddingGemma",
    gguf=(
        GgufArchitecture(
            name="gemma-embedding",
            model_types=("gemma3_text",),
            config=lambda values: _gguf_gemma_3(values) | _EMBEDDER,
            block_names=SANDWICH,
            norms_plus_one=True,
        ),
    ),
)
