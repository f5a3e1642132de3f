"""GPT-OSS."""

from __future__ import annotations

from typing import Any

from shardload.families.parts.checks import Checks, by_layer_type, first_slides
from shardload.families.parts.config import ROTARY, decoder_defaults
from shardload.families.parts.outside import DECODER_HEADS, OPTIONAL_OUTPUT_LAYER
from shardload.families.parts.rope import Rotary
from shardload.families.record import Family, ModelType

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _complete(config: dict[str, Any]) -> None:
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config["rope_scaling"] = _YARN  # transformers 4 reads null as no scaling, 5 as this


GPT_OSS = ModelType(
    name="gpt_oss",
    defaults=ROTARY
    | decoder_defaults(201088, 2880, 2880, 36, 64, kv=8, longest=131072)
    | {"rope_theta": 1.5e5, "rms_norm_eps": 1e-5, "head_dim": 64, "sliding_window": 128}
    | {"num_local_experts": 128, "num_experts_per_tok": 4},
    complete=_complete,
    checks=Checks(
        ("rms_norm_eps", 1e-5),
        None,
        Rotary(1.5e5, stretched="yarn"),
        by_layer_type(first_slides),
        sets_windows=True,
    ),
    only={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    heads=DECODER_HEADS,
    optional_part=OPTIONAL_OUTPUT_LAYER,
)
FAMILY = Family(name="gpt_oss", title="GPT-OSS", model_types=(GPT_OSS,))
