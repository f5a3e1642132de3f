"""The tokenizers that a GGUF header can describe."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Expressions differ mostly in how they split numbers: up to three digits at a time, one by one, or not at all.
WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Words of a text; ``%s`` says how many digits are one."""


class GgufTokenizer(StrEnum):
    """Supported values of ``tokenizer.ggml.model``: algorithms, named after the first model of each in llama.cpp."""

    SENTENCEPIECE = "llama"
    BYTE_PAIRS = "gpt2"
    SPACED_PAIRS = "gemma4"
    """Pieces as in SentencePiece, and merges."""
    WORD_PIECES = "bert"
    UNIGRAMS = "t5"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is split into words before byte pairs are merged: a value of ``tokenizer.ggml.pre``."""

    words: str | None
    """Expression that finds words; ``None``: GPT-2's, which is built into tokenizers."""
    takes_whole_words: bool = False
    """Whether a word that is in the vocabulary is taken as it is, even if no merges lead to it."""
    starts_texts: bool = False
    """Whether a text begins with the start token, if the header does not say."""
    surrounds_texts: bool = False
    """Whether the model has tokens before and after each text, as encoders do, not a start token before a prompt."""
