"""DINOv2, with and without registers, and DINOv3; they cut off the part of an image that fills no patch."""

from __future__ import annotations

from dataclasses import replace

from shardload.families.parts import images
from shardload.families.parts.checks import Checks
from shardload.families.parts.config import BASE, NO_DROPOUT, SIZES, SQUARES, Config
from shardload.families.parts.outside import MASK_TOKEN, VISION_HEADS
from shardload.families.record import Family, ModelType

_DEFAULTS = BASE | NO_DROPOUT | SQUARES | {"mlp_ratio": 4, "layerscale_value": 1.0, "drop_path_rate": 0.0}
_DEFAULTS |= {"use_swiglu_ffn": False}


def _lacking(config: Config, name: str) -> str | None:
    return images.no_biases(config) or images.oblong(config)


DINO_2 = ModelType(
    name="dinov2",
    defaults=_DEFAULTS | {"patch_size": 14},
    lacking=_lacking,
    checks=Checks(("layer_norm_eps", 1e-6), ("hidden_act", "gelu")),
    is_image_model=True,
    attends_both_ways=True,
    heads=VISION_HEADS,
    outside=MASK_TOKEN,
    has_pooler_outside=True,
)
WITH_REGISTERS = replace(DINO_2, name="dinov2_with_registers", defaults=_DEFAULTS | {"num_register_tokens": 4})
DINO_3 = ModelType(
    name="dinov3_vit",
    defaults=dict(zip(SIZES[1:], (384, 1536, 12, 6), strict=True))
    | SQUARES
    | {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "layerscale_value": 1.0, "rope_theta": 100.0}
    | {"num_register_tokens": 0, "use_gated_mlp": False, "attention_dropout": 0.0, "drop_path_rate": 0.0}
    | {f"{part}_bias": part != "key" for part in ("query", "key", "value", "proj", "mlp")},
    lacking=lambda config, name: images.oblong(config),
    is_image_model=True,
    attends_both_ways=True,
    outside=MASK_TOKEN,
    has_pooler_outside=True,
)
FAMILY = Family(name="dino", title="DINO", model_types=(DINO_2, WITH_REGISTERS, DINO_3))
