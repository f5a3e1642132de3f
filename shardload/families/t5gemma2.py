"""T5Gemma 2: an encoder of images and texts and a decoder that attends to both at once, made of Gemma 3's layers.

Encoder and decoder share one embedding, which KerasHub's class has twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.parts.checks import ROPE, TANH, FieldDifference
from shardload.families.parts.config import Config, Dims, decoder_defaults, published_decoder
from shardload.families.parts.conversion import Export, LayerSettings
from shardload.families.parts.images import (
    TOWER_FIELDS,
    exported_tower,
    tokens_per_image,
    tower_config,
    tower_tensors,
)
from shardload.families.parts.rope import FULL, SLIDING, Rotary, rotation
from shardload.families.parts.tensors import DECODER_FIELDS, TensorSpec
from shardload.families.record import NO_GGUF, Family, ModelType
from shardload.families.t5gemma import exported_part, layer_tensors

_ROTARY = Rotary(1e6, sliding_theta=1e4)
_OF_THE_DECODER = (*("rms_norm_eps", "query_pre_attn_scalar", "hidden_activation", "sliding_window"),)
"""Fields of encoder and decoder; KerasHub's converter reads the decoder's for both."""
_GELU = {"gelu_approximate": TANH}
"""KerasHub's name of an activation → transformers' name, where they differ."""


def _parts_of(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the decoder's configuration and that of the encoder's text; either may be malformed."""
    encoder = config.get("encoder")
    yield "decoder", config.get("decoder")
    yield "encoder", encoder.get("text_config") if isinstance(encoder, Mapping) else None


def _adapt(config: dict[str, Any]) -> None:
    """Set a missing rotary ``factor`` of full attention to 1: transformers 5 omits it, KerasHub reads it."""
    for _, part in _parts_of(config):
        rope = part.get("rope_parameters") if isinstance(part, dict) else None
        full = rope.get(FULL) if isinstance(rope, dict) else None
        if isinstance(full, dict) and full.get("rope_type", "default") == "default":
            full.setdefault("factor", 1.0)


def _differences(config: Config) -> Iterator[FieldDifference]:
    """Yield what KerasHub's class has only one value of, or a fixed one."""
    parts = {name: part for name, part in _parts_of(config) if isinstance(part, Mapping)}
    if len(parts) < 2:
        return
    for field in _OF_THE_DECODER:
        one, other = parts["encoder"].get(field), parts["decoder"].get(field)
        if one != other:
            yield FieldDifference(field, f"{one} (in the encoder)", f"{other}, the decoder's value", (field,))
    for name, part in parts.items():
        full = rotation(part, FULL, _ROTARY, head_dim=None)
        sliding = rotation(part, SLIDING, _ROTARY, head_dim=None)
        if full.kind not in ("default", "linear") or full.theta != _ROTARY.theta:
            yield FieldDifference("rope_parameters", f"{full} (in the {name})", "base 1e+06, scaled linearly", ROPE)
        if (cap := part.get("attn_logit_softcapping")) is not None:
            ignored = f"{cap}, which transformers ignores (in the {name})"
            yield FieldDifference("attn_logit_softcapping", ignored, "a cap", ("attn_logit_softcapping",))
        if sliding.kind != "default":
            yield FieldDifference("rope_parameters", f"{sliding} (in the {name}'s windows)", "no scaling", ROPE)


# ---- tensors ------------------------------------------------------------------------------------


def _tensors(config: Config) -> Iterator[TensorSpec]:
    encoder, decoder = config["encoder"], config["decoder"]
    text, vision = encoder["text_config"], encoder["vision_config"]
    hidden = text["hidden_size"]
    yield TensorSpec("model.encoder.embed_tokens.weight", (text["vocab_size"], hidden))
    yield TensorSpec("model.encoder.embed_tokens.eoi_embedding", (hidden,))
    yield from _layers(text, "model.encoder")
    # As in published files; transformers 5 reads these names too.
    yield from tower_tensors(vision, "model.encoder.vision_tower.vision_model")
    at = "model.encoder.multi_modal_projector"
    yield TensorSpec(f"{at}.mm_input_projection_weight", (vision["hidden_size"], hidden))
    yield TensorSpec(f"{at}.mm_soft_emb_norm.weight", (vision["hidden_size"],))
    yield from _layers(decoder, "model.decoder")


def _layers(part: Config, at: str) -> Iterator[TensorSpec]:
    for i in range(part["num_hidden_layers"]):
        yield from layer_tensors(part, f"{at}.layers.{i}")
        for letter in ("q", "k"):
            yield TensorSpec(f"{at}.layers.{i}.self_attn.{letter}_norm.weight", (part["head_dim"],))
    yield TensorSpec(f"{at}.norm.weight", (part["hidden_size"],))


# ---- the configuration of a backbone ------------------------------------------------------------


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    tower = backbone.vision_encoder
    if tower is None:
        raise UnsupportedError(
            "Cannot write T5Gemma2Backbone for Hugging Face: it has vision_encoder=None, expected a model that reads "
            "images, as each one is there"
        )
    return {
        "model_type": "t5gemma2",
        "architectures": ["T5Gemma2ForConditionalGeneration"],
        "encoder": {
            "model_type": "t5gemma2_encoder",
            "text_config": _exported_part(backbone, "encoder", rope="encoder_"),
            "vision_config": exported_tower(tower),
            "mm_tokens_per_image": tokens_per_image(tower),
            "eoi_token_index": backbone.eoi_token_index,
            "tie_word_embeddings": backbone.tie_word_embeddings,
        },
        "decoder": _exported_part(backbone, "decoder", rope=""),
        "eoi_token_index": backbone.eoi_token_index,
        "dropout_rate": backbone.dropout_rate,
        "attention_dropout": backbone.attention_dropout,
        "is_encoder_decoder": True,
        "tie_word_embeddings": backbone.tie_word_embeddings,
    }


def _exported_part(backbone: Any, part: str, *, rope: str) -> dict[str, Any]:
    factor = getattr(backbone, f"{rope}global_rope_scaling_factor")
    found = exported_part(backbone, part) | {
        "model_type": "t5gemma2_text" if part == "encoder" else "t5gemma2_decoder",
        "hidden_activation": _GELU.get(backbone.hidden_activation, backbone.hidden_activation),
        "rope_parameters": _rope(factor, getattr(backbone, f"{rope}rope_max_wavelength")),
        "tie_word_embeddings": backbone.tie_word_embeddings,
    }
    del found["rope_theta"]
    return found


def _rope(factor: float, sliding: float) -> dict[str, Any]:
    stretched = {"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    return {
        FULL: {"rope_theta": _ROTARY.theta, **stretched},
        SLIDING: {"rope_theta": sliding, "rope_type": "default"},
    }


def _one_embedding(backbone: Any) -> tuple[tuple[Any, Any], ...]:
    return (
        (backbone.token_embedding.embeddings, backbone.decoder_token_embedding.embeddings),
        (backbone.encoder_eoi_embedding, backbone.decoder_eoi_embedding),
    )


# ---- published models ---------------------------------------------------------------------------


_REST: dict[str, Any] = {
    **{"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": False},
    **{"attention_dropout": 0.0, "dropout_rate": 0.0, "initializer_range": 0.02},
    **{"head_dim": 256, "query_pre_attn_scalar": 256, "hidden_activation": TANH},
}
"""Fields with one value in all published models, which is transformers' default, too."""


def _layer_types(layers: int) -> list[str]:
    return [SLIDING if (i + 1) % 6 else FULL for i in range(layers)]


def _published(dims: Dims, *, window: int, factor: float = 1.0) -> dict[str, Any]:
    rest: dict[str, Any] = {
        "sliding_window": window,
        "layer_types": _layer_types(dims.layers),
        "max_position_embeddings": 131072,
    }
    rest |= {"rope_parameters": _rope(factor, 10000.0)}
    part = published_decoder("t5gemma2_text", "", dims, vocab=262144, **_REST, **rest)
    del part["architectures"]
    return {
        "model_type": "t5gemma2",
        "architectures": ["T5Gemma2ForConditionalGeneration"],
        "encoder": {
            "model_type": "t5gemma2_encoder",
            "text_config": part,
            "vision_config": tower_config(hidden=1152, layers=27, heads=16, width=4304, image=896, patch=14),
            "mm_tokens_per_image": 256,
            "eoi_token_index": 256000,
            "tie_word_embeddings": True,
        },
        "decoder": {**part, "model_type": "t5gemma2_decoder"},
        "eoi_token_index": 256000,
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
    }


_DEFAULTS = decoder_defaults(262208, 2304, 9216, 26, 8, kv=4, longest=131072)
_TEXT = ModelType(
    name="t5gemma2_text",
    is_part=True,
    defaults=_DEFAULTS | _REST | {"rms_norm_eps": 1e-6, "sliding_window": 4096, "tie_word_embeddings": True},
)
_ENCODER = ModelType(
    name="t5gemma2_encoder",
    is_part=True,
    defaults={"mm_tokens_per_image": 256},
    parts={"text_config": _TEXT.name, "vision_config": "siglip_vision_model"},
    part_fields={"text_config": (*DECODER_FIELDS, "head_dim"), "vision_config": TOWER_FIELDS},
)
_DECODER = replace(_TEXT, name="t5gemma2_decoder")
T5GEMMA_2 = ModelType(
    name="t5gemma2",
    lacks=NO_GGUF,
    adapt=_adapt,
    differences=_differences,
    parts={"encoder": _ENCODER.name, "decoder": _DECODER.name},
    tensors=_tensors,
    part_fields={"encoder": (), "decoder": (*DECODER_FIELDS, "head_dim")},
)
FAMILY = Family(
    name="t5gemma2",
    title="T5Gemma 2",
    model_types=(_TEXT, _ENCODER, _DECODER, T5GEMMA_2),
    sizes={
        "t5gemma2_270m_270m": _published(Dims(640, 18, 4, 1, 2048), window=512),
        "t5gemma2_1b_1b": _published(Dims(1152, 26, 4, 1, 6912), window=512),
        "t5gemma2_4b_4b": _published(Dims(2560, 34, 8, 4, 10240), window=1024, factor=8.0),
    },
    exports={"T5Gemma2Backbone": Export(_export, model_types=("t5gemma2",), same=_one_embedding)},
)
