"""ESM, a BERT of proteins with rotary positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.bert import published_encoder
from shardload.families.parts.checks import ROPE, Checks, SameAttribute
from shardload.families.parts.config import BASE, DROPOUT, SIZES, Config
from shardload.families.parts.conversion import Export, LayerSettings
from shardload.families.parts.tensors import TensorSpec, dense, norm
from shardload.families.record import NO_GGUF, Family, ModelType


def _lacking_absolute_positions(config: Config, name: str) -> str | None:
    if (positions := config.get("position_embedding_type", "absolute")) == "rotary":
        return None
    return (
        f"config.json sets position_embedding_type={positions!r}, but {name} counts absolute positions from 0, "
        "and transformers from pad_token_id + 1; expected 'rotary'"
    )


def _tensors(config: Config) -> Iterator[TensorSpec]:
    hidden, width = config["hidden_size"], config["intermediate_size"]
    yield TensorSpec("embeddings.word_embeddings.weight", (config["vocab_size"], hidden))
    if config.get("emb_layer_norm_before"):
        yield from norm("embeddings.layer_norm", hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{i}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            yield from dense(f"{at}.attention.{part}", hidden, hidden)
        yield from norm(f"{at}.attention.LayerNorm", hidden)
        yield from dense(f"{at}.intermediate.dense", hidden, width)
        yield from dense(f"{at}.output.dense", width, hidden)
        yield from norm(f"{at}.LayerNorm", hidden)
    yield from norm("encoder.emb_layer_norm_after", hidden)


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    if not backbone.use_bias or layers.activation != "gelu":
        feature = "without biases" if not backbone.use_bias else f"with the activation {layers.activation}"
        raise UnsupportedError(f"Cannot write ESM {feature} for Hugging Face")
    return {
        "model_type": "esm",
        "architectures": ["EsmModel"],
        "vocab_size": backbone.vocabulary_size,
        "hidden_size": backbone.hidden_dim,
        "num_hidden_layers": backbone.num_layers,
        "num_attention_heads": backbone.num_heads,
        "intermediate_size": backbone.intermediate_dim,
        "max_position_embeddings": backbone.max_sequence_length,
        "layer_norm_eps": backbone.layer_norm_eps,
        "position_embedding_type": backbone.position_embedding_type,
        "rope_theta": backbone.max_wavelength,
        "emb_layer_norm_before": backbone.use_pre_layer_norm,
        "token_dropout": False,
        "pad_token_id": backbone.pad_token_id,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), backbone.dropout),
    }


def _published(hidden: int, *, layers: int) -> dict[str, Any]:
    """Return the ``config.json`` of a published ESM-2; its ``token_dropout``, which KerasHub's class lacks, is off."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 20}
    rest = {"layer_norm_eps": 1e-5, "position_embedding_type": "rotary", "token_dropout": False, "pad_token_id": 1}
    longest = {"max_position_embeddings": 1026, "emb_layer_norm_before": False}
    return {**published_encoder("esm", "EsmModel", vocab=33, **sizes), **rest, **longest}


ESM = ModelType(
    name="esm",
    lacks=NO_GGUF,
    defaults=BASE | DROPOUT | {"max_position_embeddings": 1026, "position_embedding_type": "absolute"},
    lacking=_lacking_absolute_positions,
    checks=Checks(
        ("layer_norm_eps", 1e-12),
        attributes={"rope_theta": SameAttribute("max_wavelength", 1e4, ROPE)},
        arguments={"rope_theta": "max_wavelength"},
    ),
    only={"token_dropout": (False, None), "is_decoder": (False, None)},
    attends_both_ways=True,
    heads=r"lm_head\.|classifier\.|(esm\.)?contact_head\.",
    has_pooler_outside=True,
    tensors=_tensors,
    tensor_fields=SIZES,
)
FAMILY = Family(
    name="esm",
    title="ESM",
    model_types=(ESM,),
    sizes={
        "esm2_t6_8M": _published(320, layers=6),
        "esm2_t12_35M": _published(480, layers=12),
        "esm2_t30_150M": _published(640, layers=30),
        "esm2_t33_650M": _published(1280, layers=33),
    },
    exports={"ESMBackbone": Export(_export, model_types=("esm",), without_pooler=True)},
)
