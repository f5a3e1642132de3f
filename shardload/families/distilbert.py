"""DistilBERT."""

from __future__ import annotations

from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.bert import GGUF_TOP, has_word_pieces
from shardload.families.parts.checks import Checks
from shardload.families.parts.gguf import GgufArchitecture
from shardload.families.parts.gguf_values import GgufValues, model_entries
from shardload.families.record import Family, ModelType

_GGUF_BLOCK = {
    "attn_q": "attention.q_lin",
    "attn_k": "attention.k_lin",
    "attn_v": "attention.v_lin",
    "attn_output": "attention.out_lin",
    "attn_output_norm": "sa_layer_norm",
    "ffn_up": "ffn.lin1",
    "ffn_down": "ffn.lin2",
    "layer_output_norm": "output_layer_norm",
}


def _gguf(values: GgufValues) -> dict[str, Any]:
    epsilon = values.number("attention.layer_norm_epsilon")
    layers, heads = values.count("block_count"), values.count("attention.head_count")
    hidden, intermediate = values.count("embedding_length"), values.count("feed_forward_length")
    # KerasHub's class has no argument for it.
    if epsilon != 1e-12:
        raise UnsupportedError(
            f"{values.path}: layer_norm_epsilon is {epsilon}, expected 1e-12, as in every DistilBERT"
        )
    return model_entries(values, "distilbert", "DistilBertModel") | {
        "dim": hidden,
        "hidden_dim": intermediate,
        "n_layers": layers,
        "n_heads": heads,
        "activation": "gelu",
        "max_position_embeddings": values.rows("position_embd.weight") or values.count("context_length"),
    }


DISTILBERT = ModelType(
    name="distilbert",
    defaults={"vocab_size": 30522, "dim": 768, "hidden_dim": 3072, "n_layers": 6, "n_heads": 12}
    | {"max_position_embeddings": 512, "dropout": 0.1},
    checks=Checks(None, ("activation", "gelu")),
    attends_both_ways=True,
    prefix="distilbert",
    heads=r"vocab_(transform|layer_norm|projector)\.|(pre_)?classifier\.|qa_outputs\.",
)
FAMILY = Family(
    name="distilbert",
    title="DistilBERT",
    model_types=(DISTILBERT,),
    gguf=(
        GgufArchitecture(
            name="bert",
            config=_gguf,
            applies=lambda values: has_word_pieces(values) and values.rows("token_types.weight") is None,
            block_names=_GGUF_BLOCK,
            top_names={name: hf for name, hf in GGUF_TOP.items() if name != "token_types"},
            block="transformer.layer",
        ),
    ),
)
