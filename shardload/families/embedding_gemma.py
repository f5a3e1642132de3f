"""EmbeddingGemma, whose ``model_type`` is that of Gemma 3."""

from __future__ import annotations

from typing import Any

from shardload.families import gemma3
from shardload.families.parts.gguf import SANDWICH, GgufArchitecture
from shardload.families.parts.gguf_values import GgufValues
from shardload.families.record import Family


def _gguf(values: GgufValues) -> dict[str, Any]:
    return gemma3.gguf(values) | {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}


FAMILY = Family(
    name="embedding_gemma",
    title="EmbeddingGemma",
    gguf=(GgufArchitecture(name="gemma-embedding", config=_gguf, block_names=SANDWICH, norms_plus_one=True),),
)
