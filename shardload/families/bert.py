"""BERT and the encoders that follow it: RoBERTa, XLM-RoBERTa, ALBERT, DistilBERT, ESM (for proteins), and BART."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.parts.checks import ROPE, Checks, SameAttribute
from shardload.families.parts.config import BASE, DROPOUT, NO_DROPOUT, SIZES, Config
from shardload.families.parts.conversion import Export, LayerSettings
from shardload.families.parts.gguf import GgufArchitecture, PreTokenizer, Undo
from shardload.families.parts.gguf_values import GgufValues, model_entries
from shardload.families.parts.tensors import OPTIONAL_POOLER, TensorSpec, affine, norm
from shardload.families.record import Family, KerasTokenizer, ModelType

_DEFAULTS = BASE | DROPOUT | {"vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2}
# If the type is null, transformers 4 adds no positions; 5 ignores the field and adds absolute positions.
_ONLY: dict[str, tuple[Any, ...]] = {"is_decoder": (False, None), "position_embedding_type": ("absolute",)}


def _published_bert(*, hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "vocab_size": 30522,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
    }


_GGUF_TOP = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
_GGUF_BLOCK = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}


def _gguf_entries(values: GgufValues, model_type: str, class_name: str, *, padding: int) -> dict[str, Any]:
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


def _has_word_pieces(values: GgufValues) -> bool:
    """Whether a GGUF file of the architecture ``bert`` has BERT's tokenizer; if not, its model is a RoBERTa."""
    return values.entries.get("tokenizer.ggml.model") not in ("t5", "gpt2")


def _bert_tensors(config: Config) -> Iterator[TensorSpec]:
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    sizes = {"word": "vocab_size", "position": "max_position_embeddings", "token_type": "type_vocab_size"}
    for name, size in sizes.items():
        yield TensorSpec(f"embeddings.{name}_embeddings.weight", (config[size], hidden))
    yield from norm("embeddings.LayerNorm", hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            yield from affine(f"{at}.attention.self.{part}", (hidden, hidden), out=hidden)
        yield from affine(f"{at}.attention.output.dense", (hidden, hidden), out=hidden)
        yield from norm(f"{at}.attention.output.LayerNorm", hidden)
        yield from affine(f"{at}.intermediate.dense", (intermediate, hidden), out=intermediate)
        yield from affine(f"{at}.output.dense", (hidden, intermediate), out=hidden)
        yield from norm(f"{at}.output.LayerNorm", hidden)
    yield from affine("pooler.dense", (hidden, hidden), out=hidden)


def _export_bert(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "vocab_size": backbone.vocabulary_size,
        "hidden_size": backbone.hidden_dim,
        "num_hidden_layers": backbone.num_layers,
        "num_attention_heads": backbone.num_heads,
        "intermediate_size": backbone.intermediate_dim,
        "max_position_embeddings": backbone.max_sequence_length,
        "type_vocab_size": backbone.num_segments,
        "hidden_act": layers.activation,
        "layer_norm_eps": layers.epsilon,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), backbone.dropout),
    }


BERT = ModelType(
    name="bert",
    defaults=_DEFAULTS,
    checks=Checks(("layer_norm_eps", 1e-12), ("hidden_act", "gelu"), arguments={"type_vocab_size": "num_segments"}),
    only=_ONLY,
    attends_both_ways=True,
    prefix="bert",
    heads=r"cls\.|classifier\.|qa_outputs\.",
    optional_part=OPTIONAL_POOLER,
    tensors=_bert_tensors,
    tensor_fields=(*SIZES, "max_position_embeddings", "type_vocab_size"),
    keras_tokenizer=KerasTokenizer({"vocabulary.txt": "vocab.txt"}, "BertTokenizer"),
)
BERT_FAMILY = Family(
    name="bert",
    title="BERT",
    model_types=(BERT,),
    sizes={
        "bert_base": _published_bert(hidden=768, layers=12, heads=12),
        "bert_large": _published_bert(hidden=1024, layers=24, heads=16),
    },
    gguf=(
        GgufArchitecture(
            name="bert",
            config=lambda values: _gguf_entries(values, "bert", "BertModel", padding=0),
            applies=lambda values: _has_word_pieces(values) and values.rows("token_types.weight") is not None,
            block_names=_GGUF_BLOCK,
            top_names=_GGUF_TOP,
            block="encoder.layer",
        ),
    ),
    exports={"BertBackbone": Export(_export_bert)},
)


ROBERTA = ModelType(
    name="roberta",
    defaults=_DEFAULTS | {"vocab_size": 50265},
    checks=Checks(("layer_norm_eps", 1e-12), ("hidden_act", "gelu")),
    only={**_ONLY, "pad_token_id": (1,)},  # KerasHub's converter always skips the first two rows
    attends_both_ways=True,
    prefix="roberta",
    heads=r"lm_head\.|classifier\.|qa_outputs\.",
    has_pooler_outside=True,
)
XLM_ROBERTA = replace(ROBERTA, name="xlm-roberta", defaults=_DEFAULTS)
_GGUF_ROBERTA = GgufArchitecture(
    name="bert",
    # _GGUF_ROBERTA leaves out the first two positions, which are padding.
    config=lambda values: _gguf_entries(values, "roberta", "RobertaModel", padding=2),
    applies=lambda values: values.entries.get("tokenizer.ggml.model") == "gpt2",
    block_names=_GGUF_BLOCK,
    top_names=_GGUF_TOP,
    block="encoder.layer",
    undone={"position_embd": Undo.DROP_TWO},
)
_GGUF_XLM_ROBERTA = replace(
    _GGUF_ROBERTA,
    config=lambda values: _gguf_entries(values, "xlm-roberta", "XLMRobertaModel", padding=2),
    applies=lambda values: values.entries.get("tokenizer.ggml.model") == "t5",
)
ROBERTA_FAMILY = Family(
    name="roberta",
    title="RoBERTa",
    model_types=(ROBERTA, XLM_ROBERTA),
    gguf=(_GGUF_ROBERTA, _GGUF_XLM_ROBERTA),
    pre_tokenizers={"roberta-bpe": PreTokenizer(None, surrounds_texts=True)},
)


ALBERT = ModelType(
    name="albert",
    defaults=_DEFAULTS
    | NO_DROPOUT
    | dict(zip(SIZES, (30000, 4096, 16384, 12, 64), strict=True))
    | {"embedding_size": 128, "num_hidden_groups": 1, "inner_group_num": 1},
    checks=Checks(("layer_norm_eps", 1e-12), ("hidden_act", "gelu_new")),
    only=_ONLY,
    attends_both_ways=True,
    prefix="albert",
    heads=r"predictions\.|sop_classifier\.|classifier\.|qa_outputs\.",
    optional_part=OPTIONAL_POOLER,
)
ALBERT_FAMILY = Family(name="albert", title="ALBERT", model_types=(ALBERT,))


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


DISTILBERT = ModelType(
    name="distilbert",
    defaults={"vocab_size": 30522, "dim": 768, "hidden_dim": 3072, "n_layers": 6, "n_heads": 12}
    | {"max_position_embeddings": 512, "dropout": 0.1},
    checks=Checks(None, ("activation", "gelu")),
    attends_both_ways=True,
    prefix="distilbert",
    heads=r"vocab_(transform|layer_norm|projector)\.|(pre_)?classifier\.|qa_outputs\.",
)
DISTILBERT_FAMILY = Family(
    name="distilbert",
    title="DistilBERT",
    model_types=(DISTILBERT,),
    gguf=(
        GgufArchitecture(
            name="bert",
            config=_gguf_distilbert,
            applies=lambda values: _has_word_pieces(values) and values.rows("token_types.weight") is None,
            block_names=_DISTILBERT_BLOCK,
            top_names={name: hf for name, hf in _GGUF_TOP.items() if name != "token_types"},
            block="transformer.layer",
        ),
    ),
)


def _lacking_absolute_positions(config: Config, name: str) -> str | None:
    if (positions := config.get("position_embedding_type", "absolute")) == "rotary":
        return None
    return (
        f"config.json sets position_embedding_type={positions!r}, but {name} counts absolute positions from 0, "
        "and transformers from pad_token_id + 1; expected 'rotary'"
    )


ESM = ModelType(
    name="esm",
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
)
ESM_FAMILY = Family(name="esm", title="ESM", model_types=(ESM,))


_BART_PARTS = ("encoder", "decoder")


def _lacking_two_sizes(config: Config, name: str) -> str | None:
    """Return an error's text if encoder and decoder differ in size, which KerasHub cannot build; else ``None``."""
    for size in ("layers", "attention_heads", "ffn_dim"):
        pair = [f"{part}_{size}" for part in _BART_PARTS]
        if all(key in config for key in pair) and config[pair[0]] != config[pair[1]]:
            values = " and ".join(f"{key}={config[key]}" for key in pair)
            return f"config.json sets {values}, but {name} uses one number for both"
    return None


BART = ModelType(
    name="bart",
    defaults={"vocab_size": 50265, "d_model": 1024, "num_hidden_layers": 12, "max_position_embeddings": 1024}
    | {f"{part}_layers": 12 for part in _BART_PARTS}
    | {f"{part}_attention_heads": 16 for part in _BART_PARTS}
    | {f"{part}_ffn_dim": 4096 for part in _BART_PARTS}
    | {"dropout": 0.1},
    renamed={"num_hidden_layers": "encoder_layers"},
    lacking=_lacking_two_sizes,
    checks=Checks(
        None,
        ("activation_function", "gelu"),
        attributes={"decoder_attention_heads": SameAttribute("num_heads", 16, ("decoder_attention_heads",))},
    ),
    only={"scale_embedding": (False, None)},
    heads=r"classification_head\.|qa_outputs\.",
)
BART_FAMILY = Family(name="bart", title="BART", model_types=(BART,))
