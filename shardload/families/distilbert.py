"""DistilBERT, with half of the layers of BERT, and without token types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.bert import GGUF_TOP, has_word_pieces
from shardload.families.parts.checks import Checks
from shardload.families.parts.config import Config
from shardload.families.parts.conversion import Export, LayerSettings
from shardload.families.parts.gguf import GgufArchitecture
from shardload.families.parts.gguf_values import GgufValues, model_entries
from shardload.families.parts.tensors import TensorSpec, dense, norm
from shardload.families.record import Family, ModelType

_DISTILBERT_BLOCK = {
    "attn_q": "attention.q_lin",
    "attn_k": "attention.k_lin",
    "attn_v": "attention.v_lin",
    "attn_output": "attention.out_lin",
    "attn_output_norm": "sa_layer_norm",
    "ffn_up": "ffn.lin1",
    "ffn_down": "ffn.lin2",
    "layer_output_norm": "output_layer_norm",
}


def _gguf_distilbert(values: GgufValues) -> dict[str, Any]:
    epsilon = values.number("attention.layer_norm_epsilon")
    layers, heads = values.count("block_count"), values.count("attention.head_count")
    hidden, intermediate = values.count("embedding_length"), values.count("feed_forward_length")
    # KerasHub's class has no argument for it.
    if epsilon != 1e-12:
        raise UnsupportedError(
            f"Cannot build the DistilBERT of {values.path}: layer_norm_epsilon is {epsilon}, expected 1e-12, the only "
            "value that KerasHub's class computes with. Load another DistilBERT"
        )
    return model_entries(values, "distilbert", "DistilBertModel") | {
        "dim": hidden,
        "hidden_dim": intermediate,
        "n_layers": layers,
        "n_heads": heads,
        "activation": "gelu",
        "max_position_embeddings": values.rows("position_embd.weight") or values.count("context_length"),
    }


def _tensors(config: Config) -> Iterator[TensorSpec]:
    hidden, width = config["dim"], config["hidden_dim"]
    yield TensorSpec("embeddings.word_embeddings.weight", (config["vocab_size"], hidden))
    yield TensorSpec("embeddings.position_embeddings.weight", (config["max_position_embeddings"], hidden))
    yield from norm("embeddings.LayerNorm", hidden)
    for i in range(config["n_layers"]):
        at = f"transformer.layer.{i}"
        for part in ("q", "k", "v", "out"):
            yield from dense(f"{at}.attention.{part}_lin", hidden, hidden)
        yield from norm(f"{at}.sa_layer_norm", hidden)
        yield from dense(f"{at}.ffn.lin1", hidden, width)
        yield from dense(f"{at}.ffn.lin2", width, hidden)
        yield from norm(f"{at}.output_layer_norm", hidden)


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    return {
        "model_type": "distilbert",
        "architectures": ["DistilBertModel"],
        "vocab_size": backbone.vocabulary_size,
        "dim": backbone.hidden_dim,
        "hidden_dim": backbone.intermediate_dim,
        "n_layers": backbone.num_layers,
        "n_heads": backbone.num_heads,
        "activation": layers.activation,
        "max_position_embeddings": backbone.max_sequence_length,
        "dropout": backbone.dropout,
        "sinusoidal_pos_embds": False,
    }


DISTILBERT = ModelType(
    name="distilbert",
    defaults={"vocab_size": 30522, "dim": 768, "hidden_dim": 3072, "n_layers": 6, "n_heads": 12}
    | {"max_position_embeddings": 512, "dropout": 0.1},
    checks=Checks(None, ("activation", "gelu")),
    attends_both_ways=True,
    prefix="distilbert",
    heads=r"vocab_(transform|layer_norm|projector)\.|(pre_)?classifier\.|qa_outputs\.",
    tensors=_tensors,
    tensor_fields=("vocab_size", "dim", "hidden_dim", "n_layers", "n_heads", "max_position_embeddings"),
)
FAMILY = Family(
    name="distilbert",
    title="DistilBERT",
    model_types=(DISTILBERT,),
    sizes={
        "distil_bert_base": {
            "model_type": "distilbert",
            "architectures": ["DistilBertModel"],
            "vocab_size": 30522,
            "dim": 768,
            "hidden_dim": 3072,
            "n_layers": 6,
            "n_heads": 12,
            "activation": "gelu",
            "max_position_embeddings": 512,
        },
    },
    exports={"DistilBertBackbone": Export(_export, model_types=("distilbert",))},
    gguf=(
        GgufArchitecture(
            name="bert",
            model_types=("distilbert",),
            config=_gguf_distilbert,
            applies=lambda values: has_word_pieces(values) and values.rows("token_types.weight") is None,
            block_names=_DISTILBERT_BLOCK,
            top_names={name: hf for name, hf in GGUF_TOP.items() if name != "token_types"},
            block="transformer.layer",
        ),
    ),
)
