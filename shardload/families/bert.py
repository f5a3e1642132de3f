"""BERT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardload.families.parts.checks import Checks
from shardload.families.parts.config import BASE, DROPOUT, SIZES, Config
from shardload.families.parts.conversion import Export, LayerSettings
from shardload.families.parts.gguf import GgufArchitecture
from shardload.families.parts.gguf_values import GgufValues, model_entries
from shardload.families.parts.tensors import OPTIONAL_POOLER, TensorSpec, dense, norm
from shardload.families.record import Family, KerasTokenizer, ModelType

BERT_DEFAULTS = BASE | DROPOUT | {"vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2}
# If the type is null, transformers 4 adds no positions; 5 ignores the field and adds absolute positions.
ONLY: dict[str, tuple[Any, ...]] = {"is_decoder": (False, None), "position_embedding_type": ("absolute",)}


def published_encoder(model_type: str, class_name: str, *, vocab: int, **sizes: int) -> dict[str, Any]:
    """Return the ``config.json`` of a published encoder with BERT's fields, of which ``sizes`` are those that vary."""
    return {
        "model_type": model_type,
        "architectures": [class_name],
        "vocab_size": vocab,
        "intermediate_size": 4 * sizes["hidden_size"],
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        **sizes,
    }


BASE_SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
LARGE_SIZES = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}


GGUF_TOP = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
GGUF_BLOCK = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}


def gguf_entries(values: GgufValues, model_type: str, class_name: str, *, padding: int) -> dict[str, Any]:
    """Return the ``config.json`` of a GGUF ``bert`` file, from which KerasHub's converter builds the model.

    The file leaves out the first ``padding`` rows of the position embedding, but transformers counts them.
    """
    positions = values.rows("position_embd.weight") or values.count("context_length")
    return model_entries(values, model_type, class_name) | {
        "hidden_size": values.count("embedding_length"),
        "intermediate_size": values.count("feed_forward_length"),
        "num_hidden_layers": values.count("block_count"),
        "num_attention_heads": values.count("attention.head_count"),
        "max_position_embeddings": positions + padding,
        "type_vocab_size": values.rows("token_types.weight") or 1,
        "layer_norm_eps": values.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu",
    }


def has_word_pieces(values: GgufValues) -> bool:
    """Whether a GGUF file of the architecture ``bert`` has BERT's tokenizer; if not, its model is a RoBERTa."""
    return values.entries.get("tokenizer.ggml.model") not in ("t5", "gpt2")


def tensors_without_pooler(config: Config) -> Iterator[TensorSpec]:
    """Yield the tensors of BERT, and of models with its layers, but for the pooler."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    sizes = {"word": "vocab_size", "position": "max_position_embeddings", "token_type": "type_vocab_size"}
    for name, size in sizes.items():
        yield TensorSpec(f"embeddings.{name}_embeddings.weight", (config[size], hidden))
    yield from norm("embeddings.LayerNorm", hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            yield from dense(f"{at}.attention.self.{part}", hidden, hidden)
        yield from dense(f"{at}.attention.output.dense", hidden, hidden)
        yield from norm(f"{at}.attention.output.LayerNorm", hidden)
        yield from dense(f"{at}.intermediate.dense", hidden, intermediate)
        yield from dense(f"{at}.output.dense", intermediate, hidden)
        yield from norm(f"{at}.output.LayerNorm", hidden)


def _bert_tensors(config: Config) -> Iterator[TensorSpec]:
    yield from tensors_without_pooler(config)
    yield from dense("pooler.dense", config["hidden_size"], config["hidden_size"])


def exported_encoder(backbone: Any, layers: LayerSettings, model_type: str, class_name: str) -> dict[str, Any]:
    """Return the ``config.json`` entries of an exported encoder that has BERT's fields."""
    return {
        "model_type": model_type,
        "architectures": [class_name],
        "vocab_size": backbone.vocabulary_size,
        "hidden_size": backbone.hidden_dim,
        "num_hidden_layers": backbone.num_layers,
        "num_attention_heads": backbone.num_heads,
        "intermediate_size": backbone.intermediate_dim,
        "max_position_embeddings": backbone.max_sequence_length,
        "hidden_act": layers.activation,
        "layer_norm_eps": layers.epsilon,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), backbone.dropout),
    }


def _export_bert(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    return {**exported_encoder(backbone, layers, "bert", "BertModel"), "type_vocab_size": backbone.num_segments}


BERT = ModelType(
    name="bert",
    defaults=BERT_DEFAULTS,
    checks=Checks(("layer_norm_eps", 1e-12), ("hidden_act", "gelu"), arguments={"type_vocab_size": "num_segments"}),
    only=ONLY,
    attends_both_ways=True,
    prefix="bert",
    heads=r"cls\.|classifier\.|qa_outputs\.",
    optional_part=OPTIONAL_POOLER,
    tensors=_bert_tensors,
    tensor_fields=(*SIZES, "max_position_embeddings", "type_vocab_size"),
    keras_tokenizer=KerasTokenizer({"vocabulary.txt": "vocab.txt"}, "BertTokenizer"),
)
FAMILY = Family(
    name="bert",
    title="BERT",
    model_types=(BERT,),
    sizes={
        "bert_base": published_encoder("bert", "BertModel", vocab=30522, **BASE_SIZES),
        "bert_large": published_encoder("bert", "BertModel", vocab=30522, **LARGE_SIZES),
    },
    gguf=(
        GgufArchitecture(
            name="bert",
            model_types=("bert",),
            config=lambda values: gguf_entries(values, "bert", "BertModel", padding=0),
            applies=lambda values: has_word_pieces(values) and values.rows("token_types.weight") is not None,
            block_names=GGUF_BLOCK,
            top_names=GGUF_TOP,
            block="encoder.layer",
        ),
    ),
    exports={"BertBackbone": Export(_export_bert, model_types=("bert",))},
)
