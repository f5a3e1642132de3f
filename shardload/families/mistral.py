"""Mistral, and Mixtral, its mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardload.families.parts import export
from shardload.families.parts.checks import RMS, SILU, Checks, every_layer
from shardload.families.parts.config import ROTARY, Config, Dims, decoder_defaults, published_decoder
from shardload.families.parts.export import Export, LayerSettings
from shardload.families.parts.gguf_values import GgufValues
from shardload.families.parts.outside import DECODER_HEADS, OPTIONAL_OUTPUT_LAYER
from shardload.families.parts.rope import Rotary
from shardload.families.parts.tensors import DECODER_FIELDS, DecoderTensors, Spec, gated_mlp
from shardload.families.record import Family, ModelType


def gguf_mistral(window: int | None) -> dict[str, Any]:
    """Return the entries of a GGUF file of the architecture ``llama`` that differ from Llama's."""
    return {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}


def gguf_mixtral(values: GgufValues, base: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a GGUF file of the architecture ``llama`` with experts."""
    return base | {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "sliding_window": values.number("attention.sliding_window", None),
    }


MIXTRAL_BLOCK = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
"""GGUF part of a block → Hugging Face's, of experts."""


def _experts(config: Config, layer: int, at: str) -> Iterator[Spec]:
    yield Spec(f"{at}.block_sparse_moe.gate.weight", (config["num_local_experts"], config["hidden_size"]))
    for i in range(config["num_local_experts"]):
        yield from gated_mlp(config, f"{at}.block_sparse_moe.experts.{i}", names=("w1", "w3", "w2"))


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    config = export.plain_decoder_entries(backbone, "mistral", "MistralForCausalLM")
    return {**config, "head_dim": backbone.head_dim, "sliding_window": backbone.sliding_window}


_DEFAULTS = ROTARY | decoder_defaults(32000, 4096, 14336, 32, 32, kv=8, longest=131072)
MISTRAL = ModelType(
    name="mistral",
    defaults=_DEFAULTS | {"sliding_window": 4096},
    checks=Checks(RMS, SILU, Rotary(1e4), every_layer),
    heads=DECODER_HEADS,
    optional_part=OPTIONAL_OUTPUT_LAYER,
    tensors=DecoderTensors(reads_attention_bias=False),
    tensor_fields=DECODER_FIELDS,
    rounded_to="float16",
)
MIXTRAL = ModelType(
    name="mixtral",
    defaults=_DEFAULTS
    | {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None}
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False},
    checks=Checks(("rms_norm_eps", 1e-5), SILU, Rotary(1e6), every_layer),
    heads=DECODER_HEADS,
    optional_part=OPTIONAL_OUTPUT_LAYER,
    tensors=DecoderTensors(reads_attention_bias=False, feed_forward=_experts),
    tensor_fields=(*DECODER_FIELDS, "num_local_experts"),
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
    exports={"MistralBackbone": Export(_export)},
)
