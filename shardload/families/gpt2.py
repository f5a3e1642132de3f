"""GPT-2, whose ``Conv1D`` stores matrices as (in, out)."""

from __future__ import annotations

from typing import Any

from shardload.families.parts.checks import Checks
from shardload.families.record import Family, ModelType


def _published(*, hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 50257,
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
    }


GPT_2 = ModelType(
    name="gpt2",
    defaults={"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "resid_pdrop": 0.1},
    checks=Checks(
        ("layer_norm_epsilon", 1e-5), ("activation_function", "gelu_new"), arguments={"n_inner": "intermediate_dim"}
    ),
    only={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False, None)},
    heads=r"score\.|classifier\.|qa_outputs\.|multiple_choice_head\.",
)
FAMILY = Family(
    name="gpt2",
    title="GPT-2",
    model_types=(GPT_2,),
    sizes={
        "gpt2_base": _published(hidden=768, layers=12, heads=12),
        "gpt2_extra_large": _published(hidden=1600, layers=48, heads=25),
    },
    aliases={"gpt2": "gpt2_base"},
)
