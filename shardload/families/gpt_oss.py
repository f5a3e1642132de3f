"""GPT-OSS."""

from __future__ import annotations

from typing import Any

from shardload.families.parts.checks import Checks, by_layer_type, first_slides
from shardload.families.parts.config import ROTARY, decoder_defaults
from shardload.families.parts.gguf import GgufArchitecture
from shardload.families.parts.gguf_values import GgufValues, decoder_entries
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


_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}


def _gguf(values: GgufValues) -> dict[str, Any]:
    base = decoder_entries(values, "gpt_oss", "GptOssForCausalLM")
    # YaRN's defaults, which files may omit, and `truncate` as in the configuration that OpenAI released.
    turns = {"beta_fast": 32.0, "beta_slow": 1.0} | (base["rope_scaling"] or {}) | {"truncate": False}
    return base | {
        "num_local_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "sliding_window": values.count("attention.sliding_window"),
        "rope_scaling": turns if base["rope_scaling"] else {"rope_type": "default"},
    }


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
FAMILY = Family(
    name="gpt_oss",
    title="GPT-OSS",
    model_types=(GPT_OSS,),
    gguf=(
        GgufArchitecture(
            name="gpt-oss",
            config=_gguf,
            block_names=_GGUF_BLOCK,
            bare=frozenset({"self_attn.sinks"}),
            fused_experts={"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)},
        ),
    ),
)
