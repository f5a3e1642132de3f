"""BLOOM: query, key and value are one matrix in a checkpoint, head by head."""

from __future__ import annotations

from shardload.families.parts.checks import Checks
from shardload.families.record import Family, ModelType

BLOOM = ModelType(
    name="bloom",
    defaults={"vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8, "layer_norm_epsilon": 1e-5},
    checks=Checks(("layer_norm_epsilon", 1e-5)),
    only={"apply_residual_connection_post_layernorm": (False, None)},
)
FAMILY = Family(name="bloom", title="BLOOM", model_types=(BLOOM,))
