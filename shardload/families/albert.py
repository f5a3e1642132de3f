"""ALBERT."""

from __future__ import annotations

from shardload.families.bert import DEFAULTS, ONLY
from shardload.families.parts.checks import Checks
from shardload.families.parts.config import NO_DROPOUT, SIZES
from shardload.families.parts.outside import OPTIONAL_POOLER
from shardload.families.record import Family, ModelType

ALBERT = ModelType(
    name="albert",
    defaults=DEFAULTS
    | NO_DROPOUT
    | dict(zip(SIZES, (30000, 4096, 16384, 12, 64), strict=True))
    | {"embedding_size": 128, "num_hidden_groups": 1, "inner_group_num": 1},
    checks=Checks(("layer_norm_eps", 1e-12), ("hidden_act", "gelu_new")),
    only=ONLY,
    attends_both_ways=True,
    prefix="albert",
    heads=r"predictions\.|sop_classifier\.|classifier\.|qa_outputs\.",
    optional_part=OPTIONAL_POOLER,
)
FAMILY = Family(name="albert", title="ALBERT", model_types=(ALBERT,))
