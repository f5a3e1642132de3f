"""RoBERTa and XLM-RoBERTa, whose positions start at ``pad_token_id + 1``."""

from __future__ import annotations

from dataclasses import replace

from shardload.families.bert import DEFAULTS, ONLY
from shardload.families.parts.checks import Checks
from shardload.families.record import Family, ModelType

ROBERTA = ModelType(
    name="roberta",
    defaults=DEFAULTS | {"vocab_size": 50265},
    checks=Checks(("layer_norm_eps", 1e-12), ("hidden_act", "gelu")),
    only={**ONLY, "pad_token_id": (1,)},  # KerasHub's converter always skips the first two rows
    attends_both_ways=True,
    prefix="roberta",
    heads=r"lm_head\.|classifier\.|qa_outputs\.",
    has_pooler_outside=True,
)
XLM_ROBERTA = replace(ROBERTA, name="xlm-roberta", defaults=DEFAULTS)
FAMILY = Family(name="roberta", title="RoBERTa", model_types=(ROBERTA, XLM_ROBERTA))
