"""Qwen 3 and its mixture of experts."""

from __future__ import annotations

from typing import Any

from shardload.families.parts import export
from shardload.families.parts.checks import RMS, SILU, Checks, after_first_layers, by_layer_type, if_used
from shardload.families.parts.config import Dims, decoder_defaults, published_decoder
from shardload.families.parts.export import Export, LayerSettings
from shardload.families.parts.gguf import BLOCK, EXPERTS, GgufArchitecture
from shardload.families.parts.gguf_values import GgufValues, decoder_entries, expert_entries
from shardload.families.parts.outside import DECODER_HEADS
from shardload.families.parts.rope import Rotary
from shardload.families.parts.tensors import DECODER_FIELDS, DecoderTensors
from shardload.families.qwen2 import DEFAULTS, MOE_DEFAULTS, MOE_FIELDS, experts, lacks_dense_layers
from shardload.families.record import Family, ModelType


def _published(dims: Dims, *, tied: bool) -> dict[str, Any]:
    rest: dict[str, Any] = {"head_dim": 128, "rope_theta": 1000000.0}
    rest |= {"use_sliding_window": False, "sliding_window": None}
    return published_decoder("qwen3", "Qwen3ForCausalLM", dims, vocab=151936, tied=tied, **rest)


def _complete(config: dict[str, Any]) -> None:
    heads = config.get("num_attention_heads")
    if config["head_dim"] is None and isinstance(heads, int) and heads > 0:
        config["head_dim"] = int(config["hidden_size"]) // heads


def _gguf(values: GgufValues) -> dict[str, Any]:
    return decoder_entries(values, "qwen3", "Qwen3ForCausalLM") | {"use_sliding_window": False, "sliding_window": None}


def _gguf_moe(values: GgufValues) -> dict[str, Any]:
    base = decoder_entries(values, "qwen3_moe", "Qwen3MoeForCausalLM") | expert_entries(values)
    return base | {"norm_topk_prob": True, "use_sliding_window": False, "sliding_window": None}


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    windowed = backbone.sliding_window_size is not None
    return {
        **export.plain_decoder_entries(backbone, "qwen3", "Qwen3ForCausalLM"),
        "head_dim": backbone.head_dim,
        "attention_bias": False,
        "use_sliding_window": windowed,
        "sliding_window": backbone.sliding_window_size,
        "max_window_layers": 0 if windowed else backbone.num_layers,
    }


QWEN_3 = ModelType(
    name="qwen3",
    defaults=DEFAULTS | decoder_defaults(151936, 4096, 22016, 32, 32, kv=32, longest=32768) | {"head_dim": 128},
    has_tie_argument=True,
    checks=Checks(RMS, SILU, Rotary(1e4), by_layer_type(after_first_layers, always=False), has_unsized_windows=True),
    heads=DECODER_HEADS,
    tensors=DecoderTensors(normed_heads=True),
    tensor_fields=DECODER_FIELDS,
)
QWEN_3_MOE = ModelType(
    name="qwen3_moe",
    defaults=MOE_DEFAULTS
    | decoder_defaults(151936, 2048, 6144, 24, 32, kv=4, longest=32768)
    | {"head_dim": None, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    complete=_complete,
    renamed={"num_experts": "num_local_experts"},
    lacking=lacks_dense_layers,
    has_tie_argument=True,
    checks=Checks(RMS, SILU, Rotary(1e4), if_used, has_unsized_windows=True),
    heads=DECODER_HEADS,
    tensors=DecoderTensors(normed_heads=True, feed_forward=experts),
    tensor_fields=(*MOE_FIELDS, "decoder_sparse_step"),
)
FAMILY = Family(
    name="qwen3",
    title="Qwen 3",
    model_types=(QWEN_3, QWEN_3_MOE),
    sizes={
        "qwen3_0.6b": _published(Dims(1024, 28, 16, 8, 3072), tied=True),
        "qwen3_8b": _published(Dims(4096, 36, 32, 8, 12288), tied=False),
        "qwen3_14b": _published(Dims(5120, 40, 40, 8, 17408), tied=False),
        "qwen3_32b": _published(Dims(5120, 64, 64, 8, 25600), tied=False),
    },
    gguf=(
        GgufArchitecture(name="qwen3", config=_gguf, block_names=BLOCK),
        GgufArchitecture(name="qwen3moe", config=_gguf_moe, block_names=BLOCK | EXPERTS),
    ),
    exports={"Qwen3Backbone": Export(_export, "qwen2")},
)
