"""SmolLM 3, whose every fourth layer has no rotary positions."""

from __future__ import annotations

from typing import Any

from shardload.families.parts.checks import RMS, SILU, Checks, by_layer_type
from shardload.families.parts.config import ROTARY, Config, decoder_defaults
from shardload.families.parts.gguf import BLOCK, PERMUTED, ROPE_FREQS, GgufArchitecture
from shardload.families.parts.gguf_values import GgufValues, decoder_entries, with_llama3_scaling
from shardload.families.parts.outside import DECODER_HEADS
from shardload.families.parts.rope import Rotary
from shardload.families.record import Family, ModelType


# The layers without rotary positions slide.
def _slides(config: Config, i: int) -> bool:
    rotated = config.get("no_rope_layers")
    return not rotated[i] if isinstance(rotated, list) and i < len(rotated) else (i + 1) % 4 == 0


def _complete(config: dict[str, Any]) -> None:
    """Fill in the lists of layers: every few have no rotary positions and, if it is used, a sliding window."""
    if config.get("no_rope_layers") is None:
        every = int(config["no_rope_layer_interval"])
        config["no_rope_layers"] = [int((i + 1) % every != 0) for i in range(int(config["num_hidden_layers"]))]
    if config.get("layer_types") is None:
        slides = config["use_sliding_window"] and config["sliding_window"] is not None
        rotated = [bool(rotates or not slides) for rotates in config["no_rope_layers"]]
        config["layer_types"] = ["full_attention" if one else "sliding_attention" for one in rotated]


def _gguf(values: GgufValues) -> dict[str, Any]:
    """Build the configuration; that every fourth layer has no rotary positions is known to llama.cpp, not to GGUF."""
    base = with_llama3_scaling(values, decoder_entries(values, "smollm3", "SmolLM3ForCausalLM"))
    return base | {"no_rope_layer_interval": 4, "use_sliding_window": False}


SMOLLM_3 = ModelType(
    name="smollm3",
    defaults=ROTARY
    | decoder_defaults(128256, 2048, 11008, 36, 16, kv=4, longest=32768)
    | {"rope_theta": 2e6, "sliding_window": None, "use_sliding_window": False, "no_rope_layer_interval": 4}
    | {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "tie_word_embeddings": True},
    complete=_complete,
    checks=Checks(RMS, SILU, Rotary(2e6), by_layer_type(_slides, always=False), has_activation="silu"),
    heads=DECODER_HEADS,
)
FAMILY = Family(
    name="smollm3",
    title="SmolLM 3",
    model_types=(SMOLLM_3,),
    gguf=(GgufArchitecture(name="smollm3", config=_gguf, block_names=BLOCK, undone=PERMUTED, rope_factors=ROPE_FREQS),),
)
