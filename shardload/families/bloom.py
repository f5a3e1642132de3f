"""BLOOM: query, key and value are one matrix in a checkpoint, head by head."""

from __future__ import annotations

from typing import Any

from shardload.families.parts.checks import Checks
from shardload.families.parts.gguf import GgufArchitecture, Undo
from shardload.families.parts.gguf_values import GgufValues, model_entries
from shardload.families.record import Family, ModelType

_GGUF_TOP = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}


def _gguf(values: GgufValues) -> dict[str, Any]:
    return model_entries(values, "bloom", "BloomForCausalLM") | {
        "hidden_size": values.count("embedding_length"),
        "n_layer": values.count("block_count"),
        "n_head": values.count("attention.head_count"),
        "layer_norm_epsilon": values.number("attention.layer_norm_epsilon"),
        "tie_word_embeddings": True,
    }


BLOOM = ModelType(
    name="bloom",
    defaults={"vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8, "layer_norm_epsilon": 1e-5},
    checks=Checks(("layer_norm_epsilon", 1e-5)),
    only={"apply_residual_connection_post_layernorm": (False, None)},
)
FAMILY = Family(
    name="bloom",
    title="BLOOM",
    model_types=(BLOOM,),
    gguf=(
        GgufArchitecture(
            name="bloom",
            config=_gguf,
            block_names=_GGUF_BLOCK,
            top_names=_GGUF_TOP,
            block="transformer.h",
            undone={"attn_qkv": Undo.UNFUSE},
        ),
    ),
)
