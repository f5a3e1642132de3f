"""DINOv2, with and without registers, and DINOv3: they cut off the rest of an image that is no whole patch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.parts.checks import Checks
from shardload.families.parts.config import BASE, NO_DROPOUT, SIZES, SQUARES, Config
from shardload.families.parts.conversion import Export, LayerSettings
from shardload.families.parts.images import (
    IMAGE_FIELDS,
    IMAGE_MODEL,
    attention,
    exported_images,
    no_biases,
    oblong,
    patch_embedding,
    published_images,
)
from shardload.families.parts.tensors import VISION_HEADS, TensorSpec, dense, norm
from shardload.families.record import NO_GGUF, Family, ModelType

_DINO_DEFAULTS = BASE | NO_DROPOUT | SQUARES | {"mlp_ratio": 4, "layerscale_value": 1.0, "drop_path_rate": 0.0}
_DINO_DEFAULTS |= {"use_swiglu_ffn": False}


def _tensors(config: Config) -> Iterator[TensorSpec]:
    hidden, registers = config["hidden_size"], config.get("num_register_tokens", 0)
    yield TensorSpec("embeddings.cls_token", (1, 1, hidden))
    if config.get("use_mask_token", True):
        yield TensorSpec("embeddings.mask_token", (1, hidden))
    if registers:
        yield TensorSpec("embeddings.register_tokens", (1, registers, hidden))
    patches = (config["image_size"] // config["patch_size"]) ** 2
    yield TensorSpec("embeddings.position_embeddings", (1, patches + 1, hidden))
    yield from patch_embedding(config, "embeddings.patch_embeddings.projection")
    for i in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{i}"
        yield from norm(f"{at}.norm1", hidden)
        yield from attention(config, f"{at}.attention")
        yield TensorSpec(f"{at}.layer_scale1.lambda1", (hidden,), near_one=True)
        yield from norm(f"{at}.norm2", hidden)
        yield from _feed_forward(config, f"{at}.mlp")
        yield TensorSpec(f"{at}.layer_scale2.lambda1", (hidden,), near_one=True)
    yield from norm("layernorm", hidden)


def _feed_forward(config: Config, at: str) -> Iterator[TensorSpec]:
    hidden = config["hidden_size"]
    width = int(hidden * config["mlp_ratio"])
    if not config["use_swiglu_ffn"]:
        yield from dense(f"{at}.fc1", hidden, width)
        yield from dense(f"{at}.fc2", width, hidden)
        return
    width = (int(width * 2 / 3) + 7) // 8 * 8
    yield from dense(f"{at}.weights_in", hidden, 2 * width)
    yield from dense(f"{at}.weights_out", width, hidden)


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    images, registers = exported_images(backbone), backbone.num_register_tokens
    if tuple(backbone.position_embedding_shape) != tuple(backbone.image_shape[:2]):
        raise UnsupportedError(
            f"Cannot write DINOv2 for Hugging Face: it has positions for images of {backbone.position_embedding_shape} "
            f"pixels, and computes with images of {backbone.image_shape[:2]}, expected one size"
        )
    ratio = backbone.intermediate_dim / backbone.hidden_dim
    return {
        "model_type": "dinov2_with_registers" if registers else "dinov2",
        "architectures": ["Dinov2WithRegistersModel" if registers else "Dinov2Model"],
        **images,
        "mlp_ratio": int(ratio) if ratio.is_integer() else ratio,
        "qkv_bias": True,
        "hidden_act": "gelu" if backbone.use_swiglu_ffn else layers.activation,
        "layer_norm_eps": layers.epsilon,
        "layerscale_value": backbone.layer_scale_init_value,
        "use_swiglu_ffn": backbone.use_swiglu_ffn,
        "use_mask_token": backbone.use_mask_token,
        "hidden_dropout_prob": backbone.dropout_rate,
        "attention_probs_dropout_prob": backbone.dropout_rate,
        "drop_path_rate": backbone.drop_path_rate,
        "apply_layernorm": backbone.apply_layernorm,
        **({"num_register_tokens": registers} if registers else {}),
    }


def _published(hidden: int, *, layers: int, heads: int, registers: int = 0) -> dict[str, Any]:
    kind = ("dinov2_with_registers", "Dinov2WithRegistersModel") if registers else ("dinov2", "Dinov2Model")
    rest: dict[str, Any] = {"image_size": 518, "patch_size": 14, "mlp_ratio": 4, "use_swiglu_ffn": hidden == 1536}
    rest |= {"num_register_tokens": registers} if registers else {}
    return {**published_images(*kind, hidden=hidden, layers=layers, heads=heads), **rest}


DINO_2 = ModelType(
    name="dinov2",
    lacks=NO_GGUF,
    defaults=_DINO_DEFAULTS | {"patch_size": 14},
    lacking=lambda config, name: no_biases(config) or oblong(config),
    checks=Checks(("layer_norm_eps", 1e-6), ("hidden_act", "gelu")),
    heads=VISION_HEADS,
    tensors=_tensors,
    tensor_fields=IMAGE_FIELDS,
    **IMAGE_MODEL,
)
WITH_REGISTERS = replace(DINO_2, name="dinov2_with_registers", defaults=_DINO_DEFAULTS | {"num_register_tokens": 4})
# ---- DINOv3 -------------------------------------------------------------------------------------


def _tensors_3(config: Config) -> Iterator[TensorSpec]:
    hidden = config["hidden_size"]
    yield TensorSpec("embeddings.cls_token", (1, 1, hidden))
    yield TensorSpec("embeddings.mask_token", (1, 1, hidden))
    if config["num_register_tokens"]:
        yield TensorSpec("embeddings.register_tokens", (1, config["num_register_tokens"], hidden))
    yield from patch_embedding(config, "embeddings.patch_embeddings")
    for i in range(config["num_hidden_layers"]):
        yield from _block_3(config, f"layer.{i}", hidden, config["intermediate_size"])
    yield from norm("norm", hidden)


def _block_3(config: Config, at: str, hidden: int, width: int) -> Iterator[TensorSpec]:
    yield from norm(f"{at}.norm1", hidden)
    for letter, part in (("k", "key"), ("v", "value"), ("q", "query"), ("o", "proj")):
        yield from _linear(f"{at}.attention.{letter}_proj", hidden, hidden, biased=config[f"{part}_bias"])
    yield TensorSpec(f"{at}.layer_scale1.lambda1", (hidden,), near_one=True)
    yield from norm(f"{at}.norm2", hidden)
    for name in ("gate_proj", "up_proj") if config["use_gated_mlp"] else ("up_proj",):
        yield from _linear(f"{at}.mlp.{name}", hidden, width, biased=config["mlp_bias"])
    yield from _linear(f"{at}.mlp.down_proj", width, hidden, biased=config["mlp_bias"])
    yield TensorSpec(f"{at}.layer_scale2.lambda1", (hidden,), near_one=True)


def _linear(at: str, inputs: int, outputs: int, *, biased: bool) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{at}.weight", (outputs, inputs))
    if biased:
        yield TensorSpec(f"{at}.bias", (outputs,))


def _export_3(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    return {
        "model_type": "dinov3_vit",
        "architectures": ["DINOv3ViTModel"],
        **exported_images(backbone),
        "intermediate_size": backbone.intermediate_dim,
        "hidden_act": backbone.hidden_activation,
        "layer_norm_eps": backbone.layer_norm_eps,
        "layerscale_value": backbone.layer_scale_init_value,
        "num_register_tokens": backbone.num_register_tokens,
        "use_gated_mlp": backbone.use_gated_mlp,
        "attention_dropout": backbone.attention_dropout,
        "drop_path_rate": backbone.drop_path_rate,
        "rope_theta": backbone.rope_theta,
        **{f"{part}_bias": getattr(backbone, f"use_{part}_bias") for part in _BIASES},
    }


def _published_3(hidden: int, *, layers: int, heads: int, width: int, gated: bool = False) -> dict[str, Any]:
    rest: dict[str, Any] = {"intermediate_size": width, "image_size": 224, "patch_size": 16, "num_register_tokens": 4}
    rest |= {"use_gated_mlp": gated, "hidden_act": "silu" if gated else "gelu", "rope_theta": 100.0}
    rest |= dict.fromkeys(("query_bias", "value_bias"), hidden != 4096) | {"key_bias": False}
    return {**published_images("dinov3_vit", "DINOv3ViTModel", hidden=hidden, layers=layers, heads=heads), **rest}


_BIASES = ("query", "key", "value", "proj", "mlp")
DINO_3 = ModelType(
    name="dinov3_vit",
    lacks=NO_GGUF,
    defaults=dict(zip(SIZES[1:], (384, 1536, 12, 6), strict=True))
    | SQUARES
    | {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "layerscale_value": 1.0, "rope_theta": 100.0}
    | {"num_register_tokens": 0, "use_gated_mlp": False, "attention_dropout": 0.0, "drop_path_rate": 0.0}
    | {f"{part}_bias": part != "key" for part in _BIASES},
    lacking=lambda config, name: oblong(config),
    tensors=_tensors_3,
    tensor_fields=(*IMAGE_FIELDS, "intermediate_size"),
    **IMAGE_MODEL,
)
FAMILY = Family(
    name="dino",
    title="DINO",
    model_types=(DINO_2, WITH_REGISTERS, DINO_3),
    sizes={
        "dinov2_small": _published(384, layers=12, heads=6),
        "dinov2_base": _published(768, layers=12, heads=12),
        "dinov2_large": _published(1024, layers=24, heads=16),
        "dinov2_giant": _published(1536, layers=40, heads=24),
        "dinov2_with_registers_small": _published(384, layers=12, heads=6, registers=4),
        "dinov2_with_registers_base": _published(768, layers=12, heads=12, registers=4),
        "dinov2_with_registers_large": _published(1024, layers=24, heads=16, registers=4),
        "dinov2_with_registers_giant": _published(1536, layers=40, heads=24, registers=4),
        "dinov3_vit_small": _published_3(384, layers=12, heads=6, width=1536),
        "dinov3_vit_small_plus": _published_3(384, layers=12, heads=6, width=1536, gated=True),
        "dinov3_vit_base": _published_3(768, layers=12, heads=12, width=3072),
        "dinov3_vit_large": _published_3(1024, layers=24, heads=16, width=4096),
        "dinov3_vit_huge_plus": _published_3(1280, layers=32, heads=20, width=5120, gated=True),
        "dinov3_vit_7b": _published_3(4096, layers=40, heads=32, width=8192, gated=True),
    },
    exports={
        "DINOV2Backbone": Export(
            _export,
            model_types=("dinov2", "dinov2_with_registers"),
            derived=lambda backbone: (backbone.embeddings.interpolated_position_embeddings,),
        ),
        "DINOV3Backbone": Export(_export_3, model_types=("dinov3_vit",)),
    },
)
