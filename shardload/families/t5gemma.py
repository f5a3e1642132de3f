"""T5Gemma and T5Gemma 2: encoders and decoders made of Gemma's layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardload.families.parts.checks import WINDOW, FieldDifference
from shardload.families.parts.config import Config
from shardload.families.parts.rope import SLIDING
from shardload.families.record import Family, ModelType


def _windows(config: Config) -> Iterator[FieldDifference]:
    """Yield the windows: KerasHub's encoder has none, and its decoder's window is one token too long."""
    for part, has in (("encoder", "no window"), ("decoder", "one token more")):
        found = config.get(part)
        nested = found if isinstance(found, Mapping) else {}
        types = nested.get("layer_types")
        window, longest = nested.get("sliding_window", 4096), nested.get("max_position_embeddings") or float("inf")
        if window and window < longest and (types is None or SLIDING in types):
            yield FieldDifference("sliding_window", f"{window} (in the {part})", has, WINDOW)


def _adapt(config: dict[str, Any]) -> None:
    """Fill in the factor of full attention, which KerasHub divides positions by and transformers 5 omits if it is 1."""
    encoder = config.get("encoder")
    parts = (config.get("decoder"), encoder.get("text_config") if isinstance(encoder, dict) else None)
    for part in parts:
        rope = part.get("rope_parameters") if isinstance(part, dict) else None
        full = rope.get("full_attention") if isinstance(rope, dict) else None
        if isinstance(full, dict) and full.get("rope_type", "default") == "default":
            full.setdefault("factor", 1.0)


FAMILY = Family(
    name="t5gemma",
    title="T5Gemma",
    model_types=(ModelType(name="t5gemma", differences=_windows), ModelType(name="t5gemma2", adapt=_adapt)),
)
