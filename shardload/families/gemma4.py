"""Gemma 4: text alone, text with images and sound, and the assistant that predicts tokens ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardload.families.parts.checks import TANH
from shardload.families.record import Family, ModelType


def _adapt(config: dict[str, Any]) -> None:
    """Remove parts that are null, which KerasHub would build, and set the one ``global_head_dim`` that it reads."""
    for part in ("vision_config", "audio_config"):
        if part in config and config[part] is None:
            del config[part]
    text = config.get("text_config", config)
    layers = text.get("per_layer_config") if isinstance(text, dict) else None
    if isinstance(layers, dict) and text.get("global_head_dim") is None:
        widths = {layer.get("head_dim") for layer in layers.values() if isinstance(layer, dict)} - {None}
        if len(widths) == 1:
            text["global_head_dim"] = widths.pop()


TEXT = ModelType(
    name="gemma4_text",
    adapt=_adapt,
    only={"use_bidirectional_attention": ("vision", None), "hidden_activation": (TANH, None)},
)
WITH_IMAGES = replace(TEXT, name="gemma4")
ASSISTANT = ModelType(name="gemma4_assistant", adapt=_adapt)
FAMILY = Family(name="gemma4", title="Gemma 4", model_types=(TEXT, WITH_IMAGES, ASSISTANT))
