"""The interface `Tokenizer`, and one implementation for each package that tokenises.

    class           used for
    SentencePiece   tokenizer.model of a Hugging Face folder; GGUF files of kind ``llama``
    HuggingFace     tokenizer.json or vocab.json of a Hugging Face folder; all other GGUF files
    KerasHub        KerasHub's presets
    ByteIds         checkpoints without real weights: each UTF-8 byte is a token, and the output has no meaning

Nothing here needs TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

TURN_ENDS = ("<end_of_turn>", "<|eot_id|>", "<|im_end|>")
"""Tokens that end an answer but not the text; they never occur inside an answer."""


class Tokenizer(Protocol):
    """Conversion of text to token ids and back."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of tokens that end a text or an answer: generation stops at them."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with the tokens that the model expects before it (``<bos>``)."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; control tokens, and ids outside of the vocabulary, add nothing to it."""
        ...


@dataclass(frozen=True, slots=True)
class SentencePiece:
    """A `Tokenizer` that wraps a SentencePiece model."""

    processor: Any = field(repr=False)
    stop_ids: tuple[int, ...]
    prefix: tuple[int, ...]
    """Ids to put before every prompt: the start token, or none."""
    control_ids: frozenset[int] = field(default=frozenset(), repr=False)
    """Ids of control tokens (``<bos>``), which decode to no text; the SentencePiece model may not know them as such."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with ``prefix`` before them."""
        return [*self.prefix, *self.processor.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without control tokens and ids outside of the vocabulary."""
        # The embedding of a model may have more rows, as padding, and so generate ids without a piece.
        size = self.processor.vocab_size()
        return str(self.processor.decode([int(i) for i in ids if int(i) < size and int(i) not in self.control_ids]))


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """A `Tokenizer` that wraps a ``tokenizers.Tokenizer``, whose file format is ``tokenizer.json``."""

    inner: Any = field(repr=False)
    stop_ids: tuple[int, ...]
    prefix: tuple[int, ...] = ()
    """Ids to put before every prompt, such as that of the start token; none if the tokenizer itself adds them."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with the tokens that the model expects before it (``<bos>``)."""
        return [*self.prefix, *self.inner.encode(text).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens such as ``<bos>``."""
        return str(self.inner.decode([int(i) for i in ids], skip_special_tokens=True))


@dataclass(frozen=True, slots=True)
class KerasHub:
    """A `Tokenizer` that wraps a KerasHub tokenizer layer."""

    layer: Any = field(repr=False)
    stop_ids: tuple[int, ...]
    prefix: tuple[int, ...]
    """Ids to put before every prompt: the start token, or none."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with ``prefix`` before them."""
        return [*self.prefix, *(int(i) for i in self.layer(text))]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without `stop_ids`, `prefix` and ids outside of the vocabulary."""
        # KerasHub's detokenize keeps special tokens; its preprocessors strip them too.
        dropped, size = {*self.stop_ids, *self.prefix}, self.layer.vocabulary_size()
        return str(self.layer.detokenize([int(i) for i in ids if int(i) < size and int(i) not in dropped]))


@dataclass(frozen=True, slots=True)
class ByteIds:
    """The `Tokenizer` of synthetic checkpoints, which have no vocabulary: text becomes bytes, ids become numbers."""

    vocabulary_size: int
    stop_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of ``text`` as ids."""
        return [byte % self.vocabulary_size for byte in text.encode()] or [0]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the ids as decimal numbers, as there are no words for them."""
        return "".join(f" <{int(i)}>" for i in ids)


def from_sentencepiece(processor: Any, *, stops: set[int], add_bos: bool) -> SentencePiece:
    """Return a SentencePiece model as a `Tokenizer`; generation stops at the model's own end tokens and ``stops``."""
    # piece_to_id returns the unknown id for a missing piece; bos_id and eos_id are -1 if there is none.
    ends = (processor.piece_to_id(token) for token in TURN_ENDS)
    found = {*stops, processor.eos_id(), *(i for i in ends if i != processor.unk_id())}
    prefix = (processor.bos_id(),) if add_bos and processor.bos_id() >= 0 else ()
    return SentencePiece(processor, tuple(sorted(i for i in found if i >= 0)), prefix)


def from_keras_hub(layer: Any) -> KerasHub:
    """Return a KerasHub tokenizer layer as a `Tokenizer`: its start token comes before prompts, its end tokens stop."""
    known = (getattr(layer, name, None) for name in ("end_token_id", "end_token2_id"))
    # Not by token_to_id alone: for a token that it lacks, SentencePiece's layer returns the unknown id.
    vocabulary = layer.get_vocabulary()
    ends = (layer.token_to_id(token) for token in TURN_ENDS if token in vocabulary)
    start = getattr(layer, "start_token_id", None)
    stops = {int(i) for i in (*known, *ends) if i is not None}
    return KerasHub(layer, tuple(sorted(stops)), () if start is None else (int(start),))
