"""ALBERT: a BERT whose layers share their weights, in groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardload.families.bert import BERT_DEFAULTS, ONLY, exported_encoder, published_encoder
from shardload.families.parts.checks import Checks
from shardload.families.parts.config import NO_DROPOUT, SIZES, Config
from shardload.families.parts.conversion import Export, LayerSettings
from shardload.families.parts.tensors import OPTIONAL_POOLER, TensorSpec, dense, norm
from shardload.families.record import NO_GGUF, Family, ModelType


def _tensors(config: Config) -> Iterator[TensorSpec]:
    hidden, width, embedding = config["hidden_size"], config["intermediate_size"], config["embedding_size"]
    sizes = {"word": "vocab_size", "position": "max_position_embeddings", "token_type": "type_vocab_size"}
    for name, size in sizes.items():
        yield TensorSpec(f"embeddings.{name}_embeddings.weight", (config[size], embedding))
    yield from norm("embeddings.LayerNorm", embedding)
    yield from dense("encoder.embedding_hidden_mapping_in", embedding, hidden)
    for group in range(config["num_hidden_groups"]):
        for layer in range(config["inner_group_num"]):
            at = f"encoder.albert_layer_groups.{group}.albert_layers.{layer}"
            yield from norm(f"{at}.full_layer_layer_norm", hidden)
            for part in ("query", "key", "value", "dense"):
                yield from dense(f"{at}.attention.{part}", hidden, hidden)
            yield from norm(f"{at}.attention.LayerNorm", hidden)
            yield from dense(f"{at}.ffn", hidden, width)
            yield from dense(f"{at}.ffn_output", width, hidden)
    yield from dense("pooler", hidden, hidden)


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    return {
        **exported_encoder(backbone, layers, "albert", "AlbertModel"),
        "type_vocab_size": backbone.num_segments,
        "embedding_size": backbone.embedding_dim,
        "num_hidden_groups": backbone.num_groups,
        "inner_group_num": backbone.num_inner_repetitions,
    }


def _published(hidden: int, *, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "embedding_size": 128}
    rest = {"num_hidden_groups": 1, "inner_group_num": 1, "hidden_act": "gelu_new"}
    return {**published_encoder("albert", "AlbertModel", vocab=30000, **sizes), **rest}


ALBERT = ModelType(
    name="albert",
    lacks=NO_GGUF,
    defaults=BERT_DEFAULTS
    | NO_DROPOUT
    | dict(zip(SIZES, (30000, 4096, 16384, 12, 64), strict=True))
    | {"embedding_size": 128, "num_hidden_groups": 1, "inner_group_num": 1},
    checks=Checks(("layer_norm_eps", 1e-12), ("hidden_act", "gelu_new")),
    only=ONLY,
    attends_both_ways=True,
    prefix="albert",
    heads=r"predictions\.|sop_classifier\.|classifier\.|qa_outputs\.",
    optional_part=OPTIONAL_POOLER,
    tensors=_tensors,
    tensor_fields=(
        *(*SIZES, "max_position_embeddings", "type_vocab_size"),
        *("embedding_size", "num_hidden_groups", "inner_group_num"),
    ),
)
FAMILY = Family(
    name="albert",
    title="ALBERT",
    model_types=(ALBERT,),
    sizes={
        "albert_base": _published(768, layers=12, heads=12),
        "albert_large": _published(1024, layers=24, heads=16),
        "albert_extra_large": _published(2048, layers=24, heads=16),
        "albert_extra_extra_large": _published(4096, layers=12, heads=64),
    },
    exports={"AlbertBackbone": Export(_export, model_types=("albert",))},
)
