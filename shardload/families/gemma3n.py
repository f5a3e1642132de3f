"""Gemma 3n, with images and sound."""

from __future__ import annotations

from shardload.families.record import LATER, Family, ModelType, Part

GEMMA_3N = ModelType(name="gemma3n", lacks=dict.fromkeys((Part.EXPORT, Part.GGUF, Part.SIZE), LATER))
FAMILY = Family(name="gemma3n", title="Gemma 3n", model_types=(GEMMA_3N,))
