"""Mistral, and Mixtral, its mixture of experts. GGUF files of both have the architecture ``llama``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardload.families.parts.checks import RMS_EPSILON, SILU, Checks, every_layer
from shardload.families.parts.config import ROTARY, Config, Dims, decoder_defaults, published_decoder
from shardload.families.parts.conversion import (
    Export,
    LayerSettings,
    VariablePart,
    expert_matrices,
    exported_plain_decoder,
)
from shardload.families.parts.rope import Rotary
from shardload.families.parts.tensors import (
    DECODER_FIELDS,
    DECODER_HEADS,
    OPTIONAL_OUTPUT_LAYER,
    DecoderTensors,
    TensorSpec,
    gated_mlp,
)
from shardload.families.record import Family, ModelType

MIXTRAL_BLOCK = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
"""GGUF's name of a layer in a mixture of experts → its name in Mixtral's checkpoints; ``{}`` is an expert's number."""


def _experts(config: Config, layer: int, at: str) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{at}.block_sparse_moe.gate.weight", (config["num_local_experts"], config["hidden_size"]))
    for i in range(config["num_local_experts"]):
        yield from gated_mlp(config, f"{at}.block_sparse_moe.experts.{i}", names=("w1", "w3", "w2"))


def _export_mistral(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    config = exported_plain_decoder(backbone, "mistral", "MistralForCausalLM")
    return {**config, "head_dim": backbone.head_dim, "sliding_window": backbone.sliding_window}


def _export_mixtral(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    return {
        **exported_plain_decoder(backbone, "mixtral", "MixtralForCausalLM"),
        "num_local_experts": backbone.num_experts,
        "num_experts_per_tok": backbone.top_k,
        "sliding_window": backbone.sliding_window,
    }


def _experts_of(backbone: Any) -> Iterator[VariablePart]:
    for i, block in enumerate(backbone.transformer_layers):
        bank, at = block._sparse_moe_block.expert_bank, f"model.layers.{i}.block_sparse_moe.experts.{{}}"
        yield from expert_matrices(bank._expert_feedforward_gate_dense, f"{at}.w1.weight")
        yield from expert_matrices(bank._expert_feedforward_output_dense, f"{at}.w2.weight")
        yield from expert_matrices(bank._expert_feedforward_intermediate_dense, f"{at}.w3.weight")


def _published_mixtral(dims: Dims, *, longest: int) -> dict[str, Any]:
    rest: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": longest}
    rest |= {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None}
    return published_decoder("mixtral", "MixtralForCausalLM", dims, vocab=32000, tied=False, **rest)


_MISTRAL_DEFAULTS = ROTARY | decoder_defaults(32000, 4096, 14336, 32, 32, kv=8, longest=131072)
MISTRAL = ModelType(
    name="mistral",
    defaults=_MISTRAL_DEFAULTS | {"sliding_window": 4096},
    checks=Checks(RMS_EPSILON, SILU, Rotary(1e4), every_layer),
    heads=DECODER_HEADS,
    optional_part=OPTIONAL_OUTPUT_LAYER,
    tensors=DecoderTensors(reads_attention_bias=False),
    tensor_fields=DECODER_FIELDS,
    rounded_to="float16",
)
MIXTRAL = ModelType(
    name="mixtral",
    defaults=_MISTRAL_DEFAULTS
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
        "mixtral_8x7b": _published_mixtral(Dims(4096, 32, 32, 8, 14336), longest=32768),
        "mixtral_8x22b": _published_mixtral(Dims(6144, 56, 48, 8, 16384), longest=65536),
    },
    aliases={"mixtral_8_7b": "mixtral_8x7b"},
    dense_experts=("MixtralMoeExperts",),
    exports={
        "MistralBackbone": Export(_export_mistral, model_types=("mistral",)),
        "MixtralBackbone": Export(_export_mixtral, model_types=("mixtral",), parts=_experts_of),
    },
)
