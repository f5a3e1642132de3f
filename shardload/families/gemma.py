"""Gemma and Gemma 2, which share a class of KerasHub."""

from __future__ import annotations

from typing import Any

from shardload.families.parts.checks import (
    RMS_EPSILON,
    TANH,
    Caps,
    Checks,
    by_layer_type,
    first_slides,
)
from shardload.families.parts.config import Dims, decoder_defaults, published_decoder
from shardload.families.parts.conversion import Export, LayerSettings, exported_decoder
from shardload.families.parts.gguf import BLOCK, SANDWICH, GgufArchitecture
from shardload.families.parts.gguf_values import GgufValues, decoder_entries
from shardload.families.parts.rope import Rotary
from shardload.families.parts.tensors import DECODER_FIELDS, DECODER_HEADS, DecoderTensors
from shardload.families.record import Family, ModelType

ONE_WAY = {"use_bidirectional_attention": (False, None)}
DECODER: dict[str, Any] = {
    "heads": DECODER_HEADS,
    "tensor_fields": DECODER_FIELDS,
    "norms_minus_one": True,
    "tokenizer_class": "GemmaTokenizer",
}


def _published_gemma(dims: Dims) -> dict[str, Any]:
    return published_decoder("gemma", "GemmaForCausalLM", dims, vocab=256000, head_dim=256)


def _published_gemma_2(dims: Dims, *, head_dim: int = 256, scalar: int = 256) -> dict[str, Any]:
    caps: dict[str, Any] = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    heads: dict[str, Any] = {"head_dim": head_dim, "query_pre_attn_scalar": scalar}
    return published_decoder("gemma2", "Gemma2ForCausalLM", dims, vocab=256000, **heads, **caps, sliding_window=4096)


def attention_scalar(base: dict[str, Any], *, largest_layers: int) -> int:
    """Return the ``query_pre_attn_scalar`` (its root divides attention scores) of a GGUF file, which does not store it.

    It is the size of a head or, in the 27B model, hidden size / heads. That model has ``largest_layers`` layers.
    """
    if base["num_hidden_layers"] == largest_layers:
        return int(base["hidden_size"] // base["num_attention_heads"])
    return int(base["head_dim"])


def _gguf_gemma_2(values: GgufValues) -> dict[str, Any]:
    base = decoder_entries(values, "gemma2", "Gemma2ForCausalLM")
    return base | {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": attention_scalar(base, largest_layers=46),
        # Files may omit these three keys; the values are llama.cpp's defaults.
        "attn_logit_softcapping": values.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.number("final_logit_softcapping", 30.0),
        "sliding_window": values.number("attention.sliding_window", 4096),
    }


def _export_gemma(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    is_second = backbone.use_post_ffw_norm
    kind = ("gemma2", "Gemma2ForCausalLM") if is_second else ("gemma", "GemmaForCausalLM")
    common = {
        **exported_decoder(backbone, *kind),
        "intermediate_size": backbone.intermediate_dim // 2,  # KerasHub counts gate and up projection together
        "head_dim": backbone.head_dim,
        # Gemma's activation is read from the first name, Gemma 2's from the second.
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
    }
    if not is_second:
        return common
    return {
        **common,
        "query_pre_attn_scalar": exported_scalar(backbone),
        "attn_logit_softcapping": backbone.attention_logit_soft_cap,
        "final_logit_softcapping": backbone.final_logit_soft_cap,
        "sliding_window": backbone.sliding_window_size,
    }


def exported_scalar(backbone: Any) -> int:
    """Return a ``query_pre_attn_scalar``: the head size if ``query_head_dim_normalize``, else hidden size / heads."""
    normalised = backbone.query_head_dim_normalize
    return int(backbone.head_dim if normalised else backbone.hidden_dim // backbone.num_query_heads)


GEMMA = ModelType(
    name="gemma",
    defaults=decoder_defaults(256000, 3072, 24576, 28, 16, kv=16, longest=8192) | {"head_dim": 256},
    checks=Checks(
        RMS_EPSILON,
        ("hidden_act", TANH),
        Rotary(1e4),
        has_activation=TANH,
        # Gemma's first configurations meant the tanh form.
        activation_names={"gelu": TANH},
    ),
    only=ONE_WAY,
    tensors=DecoderTensors(norms_minus_one=True),
    **DECODER,
)
GEMMA_2 = ModelType(
    name="gemma2",
    defaults=decoder_defaults(256000, 2304, 9216, 26, 8, kv=4, longest=8192)
    | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    checks=Checks(
        RMS_EPSILON,
        ("hidden_activation", TANH),
        Rotary(1e4),
        by_layer_type(first_slides),
        TANH,
        caps=Caps(scores=50.0, logits=30.0),
    ),
    only=ONE_WAY,
    tensors=DecoderTensors(norms_minus_one=True, sandwich=True),
    **DECODER,
)
GEMMA_FAMILY = Family(
    name="gemma",
    title="Gemma",
    model_types=(GEMMA, GEMMA_2),
    # 27B scales queries by hidden / heads instead of head_dim.
    sizes={
        "gemma_2b": _published_gemma(Dims(2048, 18, 8, 1, 16384)),
        "gemma_7b": _published_gemma(Dims(3072, 28, 16, 16, 24576)),
        "gemma2_2b": _published_gemma_2(Dims(2304, 26, 8, 4, 9216)),
        "gemma2_9b": _published_gemma_2(Dims(3584, 42, 16, 8, 14336)),
        "gemma2_27b": _published_gemma_2(Dims(4608, 46, 32, 16, 36864), head_dim=128, scalar=144),
    },
    aliases={"gemma2_7b": "gemma2_9b"},
    alias_notes={"gemma2_7b": "Gemma 2 was never released at 7B"},
    gguf=(
        GgufArchitecture(
            name="gemma",
            model_types=("gemma",),
            config=lambda values: decoder_entries(values, "gemma", "GemmaForCausalLM") | {"tie_word_embeddings": True},
            block_names=BLOCK,
            norms_plus_one=True,
        ),
        GgufArchitecture(
            name="gemma2",
            model_types=("gemma2",),
            config=_gguf_gemma_2,
            block_names=SANDWICH,
            norms_plus_one=True,
        ),
    ),
    exports={"GemmaBackbone": Export(_export_gemma, model_types=("gemma", "gemma2"))},
)
