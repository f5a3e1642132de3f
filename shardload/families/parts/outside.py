"""Tensors that a backbone or a checkpoint may lack: what several families share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OptionalPart:
    """A part that a KerasHub class always has, but a class of `transformers` may lack."""

    title: str
    names: str
    """Regular expression for the names of its tensors."""
    without: tuple[str, ...]
    """Suffixes of the classes that work without it."""
    output: str
    """What depends on its values."""


POOLER = r"(\w+\.)?pooler\.(dense\.)?(weight|bias)"
DECODER_HEADS = r"score\.|qa_outputs\."
VISION_HEADS = r"classifier\.|decoder\.\d+\."
VISION_POOLER = {r"(model\.)?vision_tower\.(vision_model\.)?head\..+": "the vision tower's pooling head, never called"}
MASK_TOKEN = {r"(\w+\.)?embeddings\.mask_token": "replaces masked patches, in masked training only"}
OPTIONAL_POOLER = OptionalPart(
    "pooler",
    POOLER,
    # A ``BertModel`` may have been created with ``add_pooling_layer=False``.
    ("Model", "ForMaskedLM", "ForCausalLM", "LMHeadModel", "ForTokenClassification", "ForQuestionAnswering"),
    "the pooled output",
)
OPTIONAL_OUTPUT_LAYER = OptionalPart(
    "output layer",
    r"lm_head\.weight",
    ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
    "token_embedding(…, reverse=True)",
)
