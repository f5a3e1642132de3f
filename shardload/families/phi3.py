"""Phi-3 and Phi-4: query, key and value are one matrix in a checkpoint, and so are gate and up."""

from __future__ import annotations

from shardload.families.parts.checks import SILU, Checks, every_layer
from shardload.families.parts.config import ROTARY, decoder_defaults
from shardload.families.parts.outside import OPTIONAL_OUTPUT_LAYER
from shardload.families.parts.rope import Rotary
from shardload.families.record import Family, ModelType

_ROTARY = Rotary(1e4, is_partial=True)
PHI_3 = ModelType(
    name="phi3",
    defaults=ROTARY
    | decoder_defaults(32064, 3072, 8192, 32, 32, kv=None, longest=4096)
    | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "sliding_window": None},
    checks=Checks(("rms_norm_eps", 1e-5), SILU, _ROTARY, every_layer),
    optional_part=OPTIONAL_OUTPUT_LAYER,
)
FAMILY = Family(name="phi3", title="Phi-3", model_types=(PHI_3,))
