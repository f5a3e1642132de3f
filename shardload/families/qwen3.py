"""Qwen 3, and its mixtures of experts."""

from __future__ import annotations

from typing import Any

from shardload.families.parts.checks import RMS_EPSILON, SILU, Checks, after_first_layers, by_layer_type, if_used
from shardload.families.parts.config import Dims, decoder_defaults, published_decoder
from shardload.families.parts.conversion import Export, LayerSettings, exported_plain_decoder
from shardload.families.parts.gguf import BLOCK, EXPERTS, GgufArchitecture
from shardload.families.parts.gguf_values import decoder_entries, expert_entries
from shardload.families.parts.rope import Rotary
from shardload.families.parts.tensors import DECODER_FIELDS, DECODER_HEADS, DecoderTensors
from shardload.families.qwen import (
    MOE_DEFAULTS,
    MOE_FIELDS,
    QWEN_DEFAULTS,
    experts,
    exported_experts,
    lacking_dense_layers,
    matrices_of_experts,
)
from shardload.families.record import Family, ModelType


def _published_qwen_3(dims: Dims, *, tied: bool) -> dict[str, Any]:
    rest: dict[str, Any] = {"head_dim": 128, "rope_theta": 1000000.0}
    rest |= {"use_sliding_window": False, "sliding_window": None}
    return published_decoder("qwen3", "Qwen3ForCausalLM", dims, vocab=151936, tied=tied, **rest)


def _published_qwen_3_moe(dims: Dims, *, width: int) -> dict[str, Any]:
    rest: dict[str, Any] = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": width}
    rest |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return {
        **_published_qwen_3(dims, tied=False),
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **rest,
    }


def _complete_qwen_3_moe(config: dict[str, Any]) -> None:
    heads = config.get("num_attention_heads")
    if config["head_dim"] is None and isinstance(heads, int) and heads > 0:
        config["head_dim"] = int(config["hidden_size"]) // heads


_NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}


def _export_qwen_3(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    windowed = backbone.sliding_window_size is not None
    return {
        **exported_plain_decoder(backbone, "qwen3", "Qwen3ForCausalLM"),
        "head_dim": backbone.head_dim,
        "attention_bias": False,
        "use_sliding_window": windowed,
        "sliding_window": backbone.sliding_window_size,
        "max_window_layers": 0 if windowed else backbone.num_layers,
    }


def _export_qwen_3_moe(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    return {
        **exported_plain_decoder(backbone, "qwen3_moe", "Qwen3MoeForCausalLM"),
        **exported_experts(backbone),
        "head_dim": backbone.head_dim,
        "attention_bias": False,
        "router_aux_loss_coef": backbone.router_aux_loss_coefficient,
        "use_sliding_window": backbone.sliding_window_size is not None,
        "sliding_window": backbone.sliding_window_size,
    }


QWEN_3 = ModelType(
    name="qwen3",
    defaults=QWEN_DEFAULTS | decoder_defaults(151936, 4096, 22016, 32, 32, kv=32, longest=32768) | {"head_dim": 128},
    has_tie_argument=True,
    checks=Checks(
        RMS_EPSILON, SILU, Rotary(1e4), by_layer_type(after_first_layers, always=False), has_unsized_windows=True
    ),
    heads=DECODER_HEADS,
    tensors=DecoderTensors(normed_heads=True),
    tensor_fields=DECODER_FIELDS,
)
QWEN_3_MOE = ModelType(
    name="qwen3_moe",
    defaults=MOE_DEFAULTS
    | decoder_defaults(151936, 2048, 6144, 24, 32, kv=4, longest=32768)
    | {"head_dim": None, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    complete=_complete_qwen_3_moe,
    renamed={"num_experts": "num_local_experts"},
    lacking=lacking_dense_layers,
    has_tie_argument=True,
    checks=Checks(RMS_EPSILON, SILU, Rotary(1e4), if_used, has_unsized_windows=True),
    heads=DECODER_HEADS,
    tensors=DecoderTensors(normed_heads=True, feed_forward=experts),
    tensor_fields=(*MOE_FIELDS, "decoder_sparse_step"),
)
FAMILY = Family(
    name="qwen3",
    title="Qwen 3",
    model_types=(QWEN_3, QWEN_3_MOE),
    sizes={
        "qwen3_0.6b": _published_qwen_3(Dims(1024, 28, 16, 8, 3072), tied=True),
        "qwen3_8b": _published_qwen_3(Dims(4096, 36, 32, 8, 12288), tied=False),
        "qwen3_14b": _published_qwen_3(Dims(5120, 40, 40, 8, 17408), tied=False),
        "qwen3_32b": _published_qwen_3(Dims(5120, 64, 64, 8, 25600), tied=False),
        "qwen3_30b_a3b": _published_qwen_3_moe(Dims(2048, 48, 32, 4, 6144), width=768),
        "qwen3_235b_a22b": _published_qwen_3_moe(Dims(4096, 94, 64, 4, 12288), width=1536),
    },
    aliases={"qwen3_moe_30b_a3b": "qwen3_30b_a3b", "qwen3_moe_235b_a22b": "qwen3_235b_a22b"},
    dense_experts=("Qwen3MoeExperts",),
    gguf=(
        GgufArchitecture(
            name="qwen3",
            model_types=("qwen3",),
            config=lambda values: decoder_entries(values, "qwen3", "Qwen3ForCausalLM") | _NO_WINDOW,
            block_names=BLOCK,
        ),
        GgufArchitecture(
            name="qwen3moe",
            model_types=("qwen3_moe",),
            config=lambda values: (
                decoder_entries(values, "qwen3_moe", "Qwen3MoeForCausalLM")
                | expert_entries(values)
                | {"norm_topk_prob": True, **_NO_WINDOW}
            ),
            block_names=BLOCK | EXPERTS,
        ),
    ),
    exports={
        "Qwen3Backbone": Export(_export_qwen_3, "qwen2", ("qwen3",)),
        "Qwen3MoeBackbone": Export(_export_qwen_3_moe, "qwen2", ("qwen3_moe",), matrices_of_experts),
    },
)
