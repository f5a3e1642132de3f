"""ViT and DeiT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from shardload.families.parts.checks import Checks
from shardload.families.parts.config import BASE, NO_DROPOUT, SQUARES, Config
from shardload.families.parts.conversion import Export, LayerSettings
from shardload.families.parts.images import (
    IMAGE_FIELDS,
    IMAGE_MODEL,
    attention,
    exported_images,
    no_biases,
    oblong,
    part_of_a_patch,
    patch_embedding,
    published_images,
)
from shardload.families.parts.tensors import VISION_HEADS, TensorSpec, dense, norm
from shardload.families.record import NO_GGUF, Family, ModelType


def _tensors(config: Config, tokens: tuple[str, ...] = ("cls_token",)) -> Iterator[TensorSpec]:
    hidden, width = config["hidden_size"], config["intermediate_size"]
    for token in tokens:
        yield TensorSpec(f"embeddings.{token}", (1, 1, hidden))
    patches = (config["image_size"] // config["patch_size"]) ** 2
    yield TensorSpec("embeddings.position_embeddings", (1, patches + len(tokens), hidden))
    yield from patch_embedding(config, "embeddings.patch_embeddings.projection")
    for i in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{i}"
        yield from attention(config, f"{at}.attention")
        yield from dense(f"{at}.intermediate.dense", hidden, width)
        yield from dense(f"{at}.output.dense", width, hidden)
        yield from norm(f"{at}.layernorm_before", hidden)
        yield from norm(f"{at}.layernorm_after", hidden)
    yield from norm("layernorm", hidden)


def _exported(model_type: str, class_name: str, width: str) -> Export:
    """Return how to write a backbone; ``width``: its attribute with the width of the feed-forward part."""

    def config(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
        return {
            "model_type": model_type,
            "architectures": [class_name],
            **exported_images(backbone),
            "intermediate_size": getattr(backbone, width),
            "hidden_act": layers.activation,
            "layer_norm_eps": backbone.layer_norm_epsilon,
            "qkv_bias": backbone.use_mha_bias,
            "hidden_dropout_prob": backbone.dropout_rate,
            "attention_probs_dropout_prob": backbone.attention_dropout,
        }

    return Export(config, model_types=(model_type,), without_pooler=True)


def _published(kind: tuple[str, str], *sizes: int, image: int, patch: int) -> dict[str, Any]:
    hidden, layers, heads = sizes
    rest = {"intermediate_size": 4 * hidden, "image_size": image, "patch_size": patch, "layer_norm_eps": 1e-12}
    return {**published_images(*kind, hidden=hidden, layers=layers, heads=heads), **rest}


_VIT, _DEIT = ("vit", "ViTModel"), ("deit", "DeiTModel")
VIT = ModelType(
    name="vit",
    lacks=NO_GGUF,
    defaults=BASE | NO_DROPOUT | SQUARES | {"qkv_bias": True, "layer_norm_eps": 1e-12},
    lacking=lambda config, name: no_biases(config) or oblong(config) or part_of_a_patch(config, name),
    checks=Checks(("layer_norm_eps", 1e-12), ("hidden_act", "gelu")),
    prefix="vit",
    heads=VISION_HEADS,
    tensors=_tensors,
    tensor_fields=(*IMAGE_FIELDS, "intermediate_size"),
    **IMAGE_MODEL,
)
DEIT = replace(
    VIT,
    name="deit",
    prefix="deit",
    heads=VISION_HEADS + r"|(cls|distillation)_classifier\.",
    tensors=partial(_tensors, tokens=("cls_token", "distillation_token")),
)
FAMILY = Family(
    name="vit",
    title="ViT",
    model_types=(VIT, DEIT),
    sizes={
        "vit_base_patch16_224": _published(_VIT, 768, 12, 12, image=224, patch=16),
        "vit_base_patch16_384": _published(_VIT, 768, 12, 12, image=384, patch=16),
        "vit_base_patch32_384": _published(_VIT, 768, 12, 12, image=384, patch=32),
        "vit_large_patch16_224": _published(_VIT, 1024, 24, 16, image=224, patch=16),
        "vit_large_patch16_384": _published(_VIT, 1024, 24, 16, image=384, patch=16),
        "vit_large_patch32_384": _published(_VIT, 1024, 24, 16, image=384, patch=32),
        "vit_huge_patch14_224": _published(_VIT, 1280, 32, 16, image=224, patch=14),
        "deit_tiny_distilled_patch16_224": _published(_DEIT, 192, 12, 3, image=224, patch=16),
        "deit_small_distilled_patch16_224": _published(_DEIT, 384, 12, 6, image=224, patch=16),
        "deit_base_distilled_patch16_224": _published(_DEIT, 768, 12, 12, image=224, patch=16),
        "deit_base_distilled_patch16_384": _published(_DEIT, 768, 12, 12, image=384, patch=16),
    },
    exports={
        "ViTBackbone": _exported(*_VIT, "mlp_dim"),
        "DeiTBackbone": _exported(*_DEIT, "intermediate_dim"),
    },
)
