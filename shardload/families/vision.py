"""SigLIP, the vision part of other models."""

from __future__ import annotations

from shardload.families.parts.config import BASE, SQUARES
from shardload.families.record import Family, ModelType

VISION = ModelType(name="siglip_vision_model", is_part=True, defaults=BASE | SQUARES)
SIGLIP_FAMILY = Family(name="siglip", title="SigLIP", model_types=(VISION,))
