"""One small interface for the checkpoint's own tokenizer, in whichever form it is stored.

    hugging-face   tokenizer.json ─► tokenizers      tokenizer.model ─► sentencepiece     vocab.json ─► tokenizers
    keras-hub      tokenizer.json, assets/ ─► KerasHub
    header         GGUF's own ─► sentencepiece or tokenizers, rebuilt by `gguf_tokenizer`
    synthetic      UTF-8 bytes as token ids: the output is meaningless, but generation runs

Nothing here needs TensorFlow.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shardload.errors import MissingExtraError, SourceError, UnsupportedError
from shardload.loaders import spec_of
from shardload.manifest import Manifest

TURN_ENDS = ("<end_of_turn>", "<|eot_id|>", "<|im_end|>")
"""Tokens that end an answer but not the text; they never occur inside an answer."""


class Tokenizer(Protocol):
    """Conversion of text to token ids and back."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a text or an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with the tokens that the model expects before it (``<bos>``)."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; control tokens, and ids that the vocabulary lacks, have none."""
        ...


def tokenizer_of(manifest: Manifest) -> Tokenizer:
    """Load the tokenizer of a checkpoint.

    Raises:
        UnsupportedError: When the checkpoint has no tokenizer.
        SourceError: When its tokenizer is damaged.
        MissingExtraError: When the package that reads the tokenizer is not installed.
    """
    folder = Path(manifest.source)
    found: Tokenizer | None = None
    try:
        match spec_of(manifest).tokenizer:
            case "header":
                from shardload.text.gguf_tokenizer import rebuild

                found = rebuild(manifest.location)
            case "hugging-face":
                found = _hugging_face(folder, manifest)
            case "keras-hub":
                found = _keras_hub(manifest)
    # Errors of shardload say enough. All others come from packages that parse the vocabulary.
    except (UnsupportedError, SourceError, MissingExtraError):
        raise
    except ImportError as error:
        raise MissingExtraError.explaining(error, needed_for="Reading this tokenizer", extra="hub") from error
    except Exception as error:  # tokenizers raises plain Exception, sentencepiece RuntimeError and OSError
        raise SourceError(f"Cannot read the tokenizer of {manifest.source}: {error}. Load without a prompt") from error
    # `shardload synth` writes no vocabulary, and marks its configurations.
    if found is None and (manifest.config.get("shardload") or {}).get("synthetic") is True:
        return ByteIds(_vocabulary_size(manifest))
    if found is None:
        raise UnsupportedError(
            f"Cannot read a prompt: {manifest.source} has no tokenizer, expected tokenizer.json, tokenizer.model, or a "
            "preset's assets. Add the file, or load without a prompt and pass token ids to the model"
        )
    return found


@dataclass(frozen=True, slots=True)
class SentencePiece:
    """A SentencePiece model."""

    processor: Any = field(repr=False)
    stop_ids: tuple[int, ...]
    prefix: tuple[int, ...]
    """Ids before every prompt."""
    control_ids: frozenset[int] = field(default=frozenset(), repr=False)
    """Ids without text, in addition to those that SentencePiece marks."""

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return [*self.prefix, *self.processor.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        # The embedding of a model may have more rows, as padding, and so generate ids without a piece.
        size = self.processor.vocab_size()
        return str(self.processor.decode([int(i) for i in ids if int(i) < size and int(i) not in self.control_ids]))


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """A ``tokenizers.Tokenizer``."""

    inner: Any = field(repr=False)
    stop_ids: tuple[int, ...]
    prefix: tuple[int, ...] = ()
    """Ids before every prompt, if the tokenizer itself adds none."""

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return [*self.prefix, *self.inner.encode(text).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        return str(self.inner.decode([int(i) for i in ids], skip_special_tokens=True))


@dataclass(frozen=True, slots=True)
class KerasHub:
    """A KerasHub tokenizer layer."""

    layer: Any = field(repr=False)
    stop_ids: tuple[int, ...]
    prefix: tuple[int, ...]
    """The start token, if the model has one."""

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return [*self.prefix, *(int(i) for i in self.layer(text))]

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        # KerasHub's detokenize keeps special tokens; its preprocessors strip them too.
        dropped, size = {*self.stop_ids, *self.prefix}, self.layer.vocabulary_size()
        return str(self.layer.detokenize([int(i) for i in ids if int(i) < size and int(i) not in dropped]))


@dataclass(frozen=True, slots=True)
class ByteIds:
    """Substitute for synthetic checkpoints without a vocabulary: bytes in, numbers out."""

    vocabulary_size: int
    stop_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of ``text`` as ids."""
        return [byte % self.vocabulary_size for byte in text.encode()] or [0]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the ids as decimal text."""
        return "".join(f" <{int(i)}>" for i in ids)


def _hugging_face(folder: Path, manifest: Manifest) -> Tokenizer | None:
    settings = _json(folder / "tokenizer_config.json")
    stops = _declared_stops(folder, manifest)
    # tokenizer.json first: it is the only one with everything, from normalisation to the start token.
    if (folder / "tokenizer.json").is_file():
        import tokenizers

        return _with_stops(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), stops)
    if (folder / "tokenizer.model").is_file():
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        return from_sentencepiece(processor, stops=stops, add_bos=bool(settings.get("add_bos_token", True)))
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        import tokenizers

        inner = tokenizers.ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
        return _with_stops(inner._tokenizer, stops)
    return None


def _with_stops(inner: Any, stops: set[int]) -> HuggingFace:
    ends = (inner.token_to_id(token) for token in (*TURN_ENDS, "</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>"))
    return HuggingFace(inner, tuple(sorted({*stops, *(i for i in ends if i is not None)})))


def from_sentencepiece(processor: Any, *, stops: set[int], add_bos: bool) -> SentencePiece:
    """Wrap a loaded SentencePiece model with its own stop ids and ``stops``."""
    # piece_to_id returns the unknown id for a missing piece; bos_id and eos_id are -1 if there is none.
    ends = (processor.piece_to_id(token) for token in TURN_ENDS)
    found = {*stops, processor.eos_id(), *(i for i in ends if i != processor.unk_id())}
    prefix = (processor.bos_id(),) if add_bos and processor.bos_id() >= 0 else ()
    return SentencePiece(processor, tuple(sorted(i for i in found if i >= 0)), prefix)


def _declared_stops(folder: Path, manifest: Manifest) -> set[int]:
    """Return ``eos_token_id`` of the generation and model configurations: a number, or a list of numbers."""
    # All of them: which one names the end of a turn differs from model to model.
    text = manifest.config.get("text_config") or {}
    found: set[int] = set()
    for config in (_json(folder / "generation_config.json"), manifest.config, text):
        declared = config.get("eos_token_id")
        found.update(i for i in (declared if isinstance(declared, list) else [declared]) if isinstance(i, int))
    return found


def _keras_hub(manifest: Manifest) -> Tokenizer | None:
    folder = Path(manifest.source)
    if not (folder / "tokenizer.json").is_file():
        return None
    from shardload.hub import kerashub

    return from_keras_hub(kerashub.preset_tokenizer(manifest))


def from_keras_hub(layer: Any) -> KerasHub:
    """Wrap a KerasHub tokenizer layer."""
    known = (getattr(layer, name, None) for name in ("end_token_id", "end_token2_id"))
    # Not by token_to_id alone: for a token that it lacks, SentencePiece's layer returns the unknown id.
    vocabulary = layer.get_vocabulary()
    ends = (layer.token_to_id(token) for token in TURN_ENDS if token in vocabulary)
    start = getattr(layer, "start_token_id", None)
    stops = {int(i) for i in (*known, *ends) if i is not None}
    return KerasHub(layer, tuple(sorted(stops)), () if start is None else (int(start),))


def _vocabulary_size(manifest: Manifest) -> int:
    inner = manifest.config.get("config") or manifest.config
    return int(inner.get("vocabulary_size") or inner.get("vocab_size") or 256)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except ValueError as error:
        raise SourceError(f"Cannot read {path}: it is not valid JSON: {error}. Download it again") from error
    return found if isinstance(found, dict) else {}
