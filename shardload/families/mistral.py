"""Mistral, and Mixtral, its mixture of experts."""

from __future__ import annotations

from shardload.families.parts.checks import RMS, SILU, Checks, every_layer
from shardload.families.parts.config import ROTARY, Dims, decoder_defaults, published_decoder
from shardload.families.parts.outside import DECODER_HEADS, OPTIONAL_OUTPUT_LAYER
from shardload.families.parts.rope import Rotary
from shardload.families.record import Family, ModelType

_DEFAULTS = ROTARY | decoder_defaults(32000, 4096, 14336, 32, 32, kv=8, longest=131072)
MISTRAL = ModelType(
    name="mistral",
    defaults=_DEFAULTS | {"sliding_window": 4096},
    checks=Checks(RMS, SILU, Rotary(1e4), every_layer),
    heads=DECODER_HEADS,
    optional_part=OPTIONAL_OUTPUT_LAYER,
)
MIXTRAL = ModelType(
    name="mixtral",
    defaults=_DEFAULTS
    | {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None}
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False},
    checks=Checks(("rms_norm_eps", 1e-5), SILU, Rotary(1e6), every_layer),
    heads=DECODER_HEADS,
    optional_part=OPTIONAL_OUTPUT_LAYER,
)
FAMILY = Family(
    name="mistral",
    title="Mistral",
    model_types=(MISTRAL, MIXTRAL),
    sizes={
        "mistral_7b": published_decoder(
            *("mistral", "MistralForCausalLM", Dims(4096, 32, 32, 8, 14336)),
            vocab=32000,
            tied=False,
            rope_theta=10000.0,
            sliding_window=4096,
            rms_norm_eps=1e-5,
        ),
    },
)
