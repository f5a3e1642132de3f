"""RoBERTa and XLM-RoBERTa, whose positions start at ``pad_token_id + 1``."""

from __future__ import annotations

from dataclasses import replace

from shardload.families.bert import DEFAULTS, GGUF_BLOCK, GGUF_TOP, ONLY, gguf_entries
from shardload.families.parts.checks import Checks
from shardload.families.parts.gguf import GgufArchitecture, Undo
from shardload.families.parts.gguf_tokenizer import PreTokenizer
from shardload.families.record import Family, ModelType

ROBERTA = ModelType(
    name="roberta",
    defaults=DEFAULTS | {"vocab_size": 50265},
    checks=Checks(("layer_norm_eps", 1e-12), ("hidden_act", "gelu")),
    only={**ONLY, "pad_token_id": (1,)},  # KerasHub's converter always skips the first two rows
    attends_both_ways=True,
    prefix="roberta",
    heads=r"lm_head\.|classifier\.|qa_outputs\.",
    has_pooler_outside=True,
)
XLM_ROBERTA = replace(ROBERTA, name="xlm-roberta", defaults=DEFAULTS)
GGUF = GgufArchitecture(
    name="bert",
    # GGUF leaves out the first two positions, which are padding.
    config=lambda values: gguf_entries(values, "roberta", "RobertaModel", padding=2),
    applies=lambda values: values.entries.get("tokenizer.ggml.model") == "gpt2",
    block_names=GGUF_BLOCK,
    top_names=GGUF_TOP,
    block="encoder.layer",
    undone={"position_embd": Undo.DROP_TWO},
)
GGUF_XLM = replace(
    GGUF,
    config=lambda values: gguf_entries(values, "xlm-roberta", "XLMRobertaModel", padding=2),
    applies=lambda values: values.entries.get("tokenizer.ggml.model") == "t5",
)
FAMILY = Family(
    name="roberta",
    title="RoBERTa",
    model_types=(ROBERTA, XLM_ROBERTA),
    gguf=(GGUF, GGUF_XLM),
    pre_tokenizers={"roberta-bpe": PreTokenizer(None, surrounds_texts=True)},
)
