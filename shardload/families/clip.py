"""CLIP: MetaCLIP 2, which compares images with texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.parts.checks import FieldDifference
from shardload.families.parts.config import SIZES, Config
from shardload.families.parts.conversion import Export, LayerSettings
from shardload.families.parts.images import TOWER_FIELDS, clip_layers, oblong, part_of_a_patch
from shardload.families.parts.tensors import TensorSpec, norm
from shardload.families.record import NO_GGUF, Family, ModelType

_EPSILON = 1e-5
"""Epsilon of all norms in KerasHub's class."""
_END = 2
"""Token id at which KerasHub's class reads the text's vector."""
_ACTIVATIONS = ("quick_gelu", "gelu", "relu", "silu")


def _tensors(config: Config) -> Iterator[TensorSpec]:
    text, vision, projected = config["text_config"], config["vision_config"], config["projection_dim"]
    yield TensorSpec("logit_scale", ())
    yield from _text_tensors(text, "text_model")
    yield from _vision_tensors(vision, "vision_model")
    yield TensorSpec("visual_projection.weight", (projected, vision["hidden_size"]))
    yield TensorSpec("text_projection.weight", (projected, text["hidden_size"]))


def _text_tensors(text: Config, at: str) -> Iterator[TensorSpec]:
    hidden = text["hidden_size"]
    yield TensorSpec(f"{at}.embeddings.token_embedding.weight", (text["vocab_size"], hidden))
    yield TensorSpec(f"{at}.embeddings.position_embedding.weight", (text["max_position_embeddings"], hidden))
    yield from clip_layers(text, f"{at}.encoder.layers")
    yield from norm(f"{at}.final_layer_norm", hidden)


def _vision_tensors(vision: Config, at: str) -> Iterator[TensorSpec]:
    hidden, patch = vision["hidden_size"], vision["patch_size"]
    positions = (vision["image_size"] // patch) ** 2 + 1
    yield TensorSpec(f"{at}.embeddings.class_embedding", (hidden,))
    yield TensorSpec(f"{at}.embeddings.patch_embedding.weight", (hidden, 3, patch, patch))
    yield TensorSpec(f"{at}.embeddings.position_embedding.weight", (positions, hidden))
    yield from norm(f"{at}.pre_layrnorm", hidden)  # as transformers spells it
    yield from clip_layers(vision, f"{at}.encoder.layers")
    yield from norm(f"{at}.post_layernorm", hidden)


def _ignored(config: Config) -> Iterator[FieldDifference]:
    """Yield the fields that KerasHub's converter ignores, where they are not as its class has them."""
    for part, field, computed in (
        ("text_config", "layer_norm_eps", _EPSILON),
        ("vision_config", "layer_norm_eps", _EPSILON),
    ):
        nested = config.get(part)
        found = nested.get(field, computed) if isinstance(nested, Mapping) else computed
        if found != computed:
            yield FieldDifference(field, f"{found} (in {part})"[:80], str(computed), (field,))


def _lacking(config: Config, name: str) -> str | None:
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return None
    return oblong(vision) or part_of_a_patch(vision, name)


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    text, vision = backbone.text_encoder, backbone.vision_encoder
    height = vision.image_shape[0]
    return {
        "model_type": "metaclip_2",
        "architectures": ["MetaClip2Model"],
        "projection_dim": backbone.projection_dim,
        "text_config": _encoder_of(text, "metaclip_2_text_model")
        | {
            "vocab_size": text.vocabulary_size,
            "max_position_embeddings": text.max_sequence_length,
            "eos_token_id": backbone.text_pooler.eos_token_id,
        },
        "vision_config": _encoder_of(vision, "metaclip_2_vision_model")
        | {"image_size": height, "patch_size": vision.patch_size, "num_channels": 3},
    }


def _encoder_of(encoder: Any, model_type: str) -> dict[str, Any]:
    if encoder.intermediate_activation not in _ACTIVATIONS:
        raise UnsupportedError(
            f"Cannot write MetaCLIP 2 for Hugging Face: it has the activation {encoder.intermediate_activation!r}, "
            f"expected one of {', '.join(_ACTIVATIONS)}"
        )
    return {
        "model_type": model_type,
        "hidden_size": encoder.hidden_dim,
        "intermediate_size": encoder.intermediate_dim,
        "num_hidden_layers": encoder.num_layers,
        "num_attention_heads": encoder.num_heads,
        "hidden_act": encoder.intermediate_activation,
        "layer_norm_eps": _EPSILON,
    }


# ---- published models ---------------------------------------------------------------------------


_Encoder = tuple[int, int, int, int]
"""Hidden size, layers, heads, and width of the MLPs."""


def _published(text: _Encoder, vision: _Encoder, *, image: int, activation: str = "gelu") -> dict[str, Any]:
    """Return the ``config.json`` of a published model, whose vectors are as wide as its text's hidden states."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    more = {"hidden_act": activation, "layer_norm_eps": _EPSILON}
    return {
        "model_type": "metaclip_2",
        "architectures": ["MetaClip2Model"],
        "projection_dim": text[0],
        "text_config": dict(zip(names, text, strict=True))
        | {"vocab_size": 901629, "max_position_embeddings": 77, "eos_token_id": _END, **more},
        "vision_config": dict(zip(names, vision, strict=True)) | {"image_size": image, "patch_size": 14, **more},
    }


_HUGE = (1024, 24, 16, 4096), (1280, 32, 16, 5120)
_GIANT = (1280, 32, 20, 5120), (1664, 48, 16, 8192)
METACLIP_2_TEXT = ModelType(name="metaclip_2_text_model", is_part=True, defaults={"eos_token_id": 49407})
METACLIP_2 = ModelType(
    name="metaclip_2",
    lacks=NO_GGUF,
    attends_both_ways=True,
    parts={"text_config": METACLIP_2_TEXT.name, "vision_config": "metaclip_2_vision_model"},
    only={"eos_token_id": (_END,)},
    differences=_ignored,
    lacking=_lacking,
    tensors=_tensors,
    tensor_fields=("projection_dim",),
    part_fields={"text_config": (*SIZES, "max_position_embeddings"), "vision_config": TOWER_FIELDS},
)
CLIP_FAMILY = Family(
    name="clip",
    title="CLIP",
    model_types=(METACLIP_2_TEXT, METACLIP_2),
    sizes={
        "metaclip_2_vit_huge_patch14_224": _published(*_HUGE, image=224, activation="quick_gelu"),
        "metaclip_2_vit_huge_patch14_378": _published(*_HUGE, image=378),
        "metaclip_2_vit_giant_patch14_224": _published(*_GIANT, image=224),
        "metaclip_2_vit_giant_patch14_378": _published(*_GIANT, image=378),
    },
    exports={"MetaCLIP2Backbone": Export(_export, model_types=("metaclip_2",))},
    gguf_refused={"clip": "it is the vision part of another file: load the model itself, without mmproj"},
)
