"""Phi-3 and Phi-4: query, key and value are one matrix in a checkpoint, and so are gate and up."""

from __future__ import annotations

from typing import Any

from shardload.errors import SourceError
from shardload.families.parts.checks import SILU, Checks, every_layer
from shardload.families.parts.config import ROTARY, decoder_defaults
from shardload.families.parts.gguf import GgufArchitecture
from shardload.families.parts.gguf_values import GgufValues, decoder_entries, shortest
from shardload.families.parts.outside import OPTIONAL_OUTPUT_LAYER
from shardload.families.parts.rope import Rotary
from shardload.families.record import Family, ModelType

_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}


def _gguf(values: GgufValues) -> dict[str, Any]:
    base = decoder_entries(values, "phi3", "Phi3ForCausalLM")
    original = values.number("rope.scaling.original_context_length", base["max_position_embeddings"])
    rotated = values.number("rope.dimension_count", base["head_dim"])
    found = base | {
        # 0 means Phi-4, which has none.
        "sliding_window": values.number("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": rotated / base["head_dim"],
    }
    return found | ({"rope_scaling": _longrope(values)} if values.rope_factors else {})


def _longrope(values: GgufValues) -> dict[str, Any]:
    """Return the scaling of a Phi-3 model for long texts: one list of factors for short texts, one for long texts."""
    lists = {which: values.rope_factors.get(f"rope_factors_{which}") for which in ("short", "long")}
    found = {f"{which}_factor": list(map(shortest, factors)) for which, factors in lists.items() if factors}
    if len(found) != 2:
        raise SourceError(
            f"{values.path} should contain 'rope_factors_short.weight' and 'rope_factors_long.weight', but contains "
            "only one of them. Download the file again"
        )
    return {"rope_type": "longrope"} | found


_ROTARY = Rotary(1e4, is_partial=True)
PHI_3 = ModelType(
    name="phi3",
    defaults=ROTARY
    | decoder_defaults(32064, 3072, 8192, 32, 32, kv=None, longest=4096)
    | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "sliding_window": None},
    checks=Checks(("rms_norm_eps", 1e-5), SILU, _ROTARY, every_layer),
    optional_part=OPTIONAL_OUTPUT_LAYER,
)
FAMILY = Family(
    name="phi3",
    title="Phi-3",
    model_types=(PHI_3,),
    gguf=(
        GgufArchitecture(
            name="phi3",
            config=_gguf,
            block_names=_GGUF_BLOCK,
            rope_factors=frozenset({"rope_factors_long.weight", "rope_factors_short.weight"}),
        ),
    ),
)
