"""PaliGemma: Gemma with a vision tower."""

from __future__ import annotations

from typing import Any

from shardload.families.parts.outside import VISION_POOLER
from shardload.families.record import Family, ModelType


def _adapt(config: dict[str, Any]) -> None:
    if isinstance(text := config.get("text_config"), dict):
        text["num_image_tokens"] = text["head_dim"]  # KerasHub reads num_image_tokens as the head dim


PALIGEMMA = ModelType(
    name="paligemma",
    parts={"text_config": "gemma", "vision_config": "siglip_vision_model"},
    adapt=_adapt,
    outside=VISION_POOLER,
    tokenizer_class="GemmaTokenizer",
)
FAMILY = Family(name="paligemma", title="PaliGemma", model_types=(PALIGEMMA,))
