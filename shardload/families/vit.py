"""ViT and DeiT."""

from __future__ import annotations

from dataclasses import replace

from shardload.families.parts import images
from shardload.families.parts.checks import Checks
from shardload.families.parts.config import BASE, NO_DROPOUT, SQUARES, Config
from shardload.families.parts.outside import MASK_TOKEN, VISION_HEADS
from shardload.families.record import Family, ModelType


def _lacking(config: Config, name: str) -> str | None:
    return images.no_biases(config) or images.oblong(config) or images.part_of_a_patch(config, name)


VIT = ModelType(
    name="vit",
    defaults=BASE | NO_DROPOUT | SQUARES | {"qkv_bias": True, "layer_norm_eps": 1e-12},
    lacking=_lacking,
    checks=Checks(("layer_norm_eps", 1e-12), ("hidden_act", "gelu")),
    is_image_model=True,
    attends_both_ways=True,
    prefix="vit",
    heads=VISION_HEADS,
    outside=MASK_TOKEN,
    has_pooler_outside=True,
)
DEIT = replace(VIT, name="deit", prefix="deit", heads=VISION_HEADS + r"|(cls|distillation)_classifier\.")
FAMILY = Family(name="vit", title="ViT", model_types=(VIT, DEIT))
