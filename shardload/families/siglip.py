"""SigLIP: the vision tower of other models."""

from __future__ import annotations

from shardload.families.parts.config import BASE, SQUARES
from shardload.families.record import Family, ModelType

VISION = ModelType(name="siglip_vision_model", defaults=BASE | SQUARES)
FAMILY = Family(name="siglip", title="SigLIP", model_types=(VISION,))
