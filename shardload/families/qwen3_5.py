"""Qwen 3.5 and its mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from shardload.families.record import Family, ModelType

QWEN_3_5 = ModelType(
    name="qwen3_5",
    only={"hidden_act": ("silu", "swish", None)},
    outside={r"mtp\..+": "layers that predict several tokens ahead, which transformers leaves out too"},
)
FAMILY = Family(
    name="qwen3_5",
    title="Qwen 3.5",
    model_types=(QWEN_3_5, replace(QWEN_3_5, name="qwen3_5_moe")),
    gguf_refused=dict.fromkeys(
        ("qwen35", "qwen35moe"), "it stores -exp(A_log), from which A_log cannot be recovered bit for bit"
    ),
)
