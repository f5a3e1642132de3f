"""RoBERTa and XLM-RoBERTa: BERT without token types, whose first two positions are padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from shardload.families.bert import (
    BASE_SIZES,
    BERT_DEFAULTS,
    GGUF_BLOCK,
    GGUF_TOP,
    LARGE_SIZES,
    ONLY,
    exported_encoder,
    gguf_entries,
    published_encoder,
    tensors_without_pooler,
)
from shardload.families.parts.checks import Checks
from shardload.families.parts.config import SIZES, Config
from shardload.families.parts.conversion import Export, LayerSettings, VariablePart, ZeroRows
from shardload.families.parts.gguf import GgufArchitecture, PreTokenizer, Undo
from shardload.families.parts.tensors import TensorSpec
from shardload.families.record import Family, ModelType

_ZEROS = (ZeroRows("embeddings.position_embeddings.weight", 2), ZeroRows("embeddings.token_type_embeddings.weight"))
"""What KerasHub's classes lack: two positions, of masked tokens only, and a token type that all tokens have."""


def _tensors(config: Config) -> Iterator[TensorSpec]:
    for spec in tensors_without_pooler(config):
        yield replace(spec, is_zero=spec.name == _ZEROS[1].tensor)


def _positions_of_xlm(backbone: Any) -> Iterator[VariablePart]:
    """Yield where the positions are, to which KerasHub's converter adds the token type."""
    positions = backbone.embeddings.position_embedding.position_embeddings
    rows, hidden = positions.shape
    yield VariablePart(positions, (0, 0), (rows, hidden), _ZEROS[0].tensor, (hidden, 1), offset=2 * hidden)


def _no_parts(backbone: Any) -> Iterator[VariablePart]:
    return iter(())


def _exported(model_type: str, class_name: str, parts: Callable[[Any], Iterator[VariablePart]] = _no_parts) -> Export:
    def config(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
        return {
            **exported_encoder(backbone, layers, model_type, class_name),
            "max_position_embeddings": backbone.max_sequence_length + 2,
            "type_vocab_size": 1,
            "pad_token_id": 1,
        }

    return Export(config, model_types=(model_type,), parts=parts, without_pooler=True, zeros=_ZEROS)


def _published(model_type: str, class_name: str, *, vocab: int, **sizes: int) -> dict[str, Any]:
    rest = {"max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}
    return {**published_encoder(model_type, class_name, vocab=vocab, **sizes, **rest), "layer_norm_eps": 1e-5}


ROBERTA = ModelType(
    name="roberta",
    defaults=BERT_DEFAULTS | {"vocab_size": 50265},
    checks=Checks(("layer_norm_eps", 1e-12), ("hidden_act", "gelu")),
    only={**ONLY, "pad_token_id": (1,)},  # KerasHub's converter always skips the first two rows
    attends_both_ways=True,
    prefix="roberta",
    heads=r"lm_head\.|classifier\.|qa_outputs\.",
    has_pooler_outside=True,
    tensors=_tensors,
    tensor_fields=(*SIZES, "max_position_embeddings", "type_vocab_size"),
)
XLM_ROBERTA = replace(ROBERTA, name="xlm-roberta", defaults=BERT_DEFAULTS)
_GGUF_ROBERTA = GgufArchitecture(
    name="bert",
    model_types=("roberta",),
    # _GGUF_ROBERTA leaves out the first two positions, which are padding.
    config=lambda values: gguf_entries(values, "roberta", "RobertaModel", padding=2),
    applies=lambda values: values.entries.get("tokenizer.ggml.model") == "gpt2",
    block_names=GGUF_BLOCK,
    top_names=GGUF_TOP,
    block="encoder.layer",
    undone={"position_embd": Undo.DROP_TWO},
)
_GGUF_XLM_ROBERTA = replace(
    _GGUF_ROBERTA,
    model_types=("xlm-roberta",),
    config=lambda values: gguf_entries(values, "xlm-roberta", "XLMRobertaModel", padding=2),
    applies=lambda values: values.entries.get("tokenizer.ggml.model") == "t5",
)
FAMILY = Family(
    name="roberta",
    title="RoBERTa",
    model_types=(ROBERTA, XLM_ROBERTA),
    sizes={
        "roberta_base": _published("roberta", "RobertaModel", vocab=50265, **BASE_SIZES),
        "roberta_large": _published("roberta", "RobertaModel", vocab=50265, **LARGE_SIZES),
        "xlm_roberta_base": _published("xlm-roberta", "XLMRobertaModel", vocab=250002, **BASE_SIZES),
        "xlm_roberta_large": _published("xlm-roberta", "XLMRobertaModel", vocab=250002, **LARGE_SIZES),
    },
    exports={
        "RobertaBackbone": _exported("roberta", "RobertaModel"),
        "XLMRobertaBackbone": _exported("xlm-roberta", "XLMRobertaModel", _positions_of_xlm),
    },
    gguf=(_GGUF_ROBERTA, _GGUF_XLM_ROBERTA),
    pre_tokenizers={"roberta-bpe": PreTokenizer(None, surrounds_texts=True)},
)
