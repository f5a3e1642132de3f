"""Find the tokenizer of a source, and of a model that was loaded from one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardload.errors import MissingExtraError, SourceError, TransferError, UnsupportedError, suggests_arguments
from shardload.keras_bridge.model_records import record_of
from shardload.loaders import spec_of
from shardload.manifest import Manifest
from shardload.resolve.opening import open_source
from shardload.stores.location import Fingerprint
from shardload.text.gguf_tokenizer import rebuild
from shardload.text.tokenizer import TURN_ENDS, ByteIds, HuggingFace, Tokenizer, from_keras_hub, from_sentencepiece
from shardload.typing import PathLike


@suggests_arguments
def tokenizer(source: PathLike, *, format: str | None = None) -> Tokenizer:
    """Return the tokenizer of a checkpoint: that of a GGUF header, a Hugging Face folder or a KerasHub preset.

    Examples:
        ```python
        tokenizer = shardload.tokenizer("gemma3_270m")
        ids = tokenizer.encode("The capital of France is")
        print(ids, tokenizer.decode(ids))
        ```

    Args:
        source: As for `shardload.load`. Only headers and tokenizer files are read.
        format: As for `shardload.load`.

    Returns:
        An object with ``encode(text) -> list[int]``, which adds the tokens that the model expects before a prompt,
        ``decode(ids) -> str`` and ``stop_ids``.

    Raises:
        SourceNotFoundError: When the name resolves to nothing.
        UnsupportedError: When the source has no tokenizer, or one of an unsupported type.
        SourceError: When its tokenizer is damaged.
        MissingExtraError: When the package that reads the tokenizer is not installed.
    """
    return tokenizer_of(open_source(source, format, described=True, verify=False).manifest)


def record_text_source(model: Any, manifest: Manifest) -> None:
    """Remember which source a model was loaded from, to read its tokenizer on first use; not if its format has none."""
    form, record = spec_of(manifest).tokenizer, record_of(model)
    if form is not None:
        record.text_source, record.tokenizer = manifest, None
        record.text_header = Fingerprint.of(manifest.files if form == "header" else ())


def tokenizer_for(model: Any) -> Tokenizer:
    """Return the tokenizer of the source that a model was loaded from, else the one in the model's preprocessor."""
    record = record_of(model)
    # A preprocessor without a source: KerasHub loaded the model.
    if record.text_source is None or record.text_header is None:
        if (layer := getattr(getattr(model, "preprocessor", None), "tokenizer", None)) is not None:
            return from_keras_hub(layer)
        raise UnsupportedError(
            f"Cannot find the tokenizer of {model.name!r}: it has no preprocessor, and shardload loaded it from no "
            "source that has a tokenizer. Pass one: tokenizer=shardload.tokenizer(source)"
        )
    found: Tokenizer | None = record.tokenizer
    if found is None:
        record.text_header.check()
        found = record.tokenizer = tokenizer_of(record.text_source)
    return found


def tokenizer_of(manifest: Manifest) -> Tokenizer:
    """Load the tokenizer of an opened checkpoint, or raise if it has none."""
    folder = manifest.location.local_folder()
    found: Tokenizer | None = None
    try:
        match spec_of(manifest).tokenizer:
            case "header":
                found = rebuild(manifest.location)
            case "hugging-face":
                found = _hugging_face(folder, manifest)
            case "keras-hub" if (folder / "tokenizer.json").is_file():
                from shardload.hub import kerashub

                found = from_keras_hub(kerashub.preset_tokenizer(manifest))
    # Errors of shardload say enough. All others come from packages that parse the vocabulary.
    except (UnsupportedError, SourceError, TransferError, MissingExtraError):
        raise
    except ImportError as error:
        raise MissingExtraError.explaining(error, needed_for="Reading this tokenizer", extra="hub") from error
    except Exception as error:  # tokenizers raises plain Exception, sentencepiece RuntimeError and OSError
        raise SourceError(f"Cannot read the tokenizer of {manifest.source}: {error}. Load without a prompt") from error
    # `shardload synth` writes no vocabulary, and marks its configurations.
    if found is None and (manifest.config.get("shardload") or {}).get("synthetic") is True:
        inner = manifest.config.get("config") or manifest.config
        return ByteIds(int(inner.get("vocabulary_size") or inner.get("vocab_size") or 256))
    if found is None:
        raise UnsupportedError(
            f"Cannot read a prompt: {manifest.source} has no tokenizer, expected tokenizer.json, tokenizer.model, or a "
            "preset's assets. Add the file, or load without a prompt and pass token ids to the model"
        )
    return found


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


def _declared_stops(folder: Path, manifest: Manifest) -> set[int]:
    """Return the ids that end generation, as ``eos_token_id`` (number or list) in a folder's configurations says."""
    # All of them: which one names the end of a turn differs from model to model.
    text = manifest.config.get("text_config") or {}
    found: set[int] = set()
    for config in (_json(folder / "generation_config.json"), manifest.config, text):
        declared = config.get("eos_token_id")
        found.update(i for i in (declared if isinstance(declared, list) else [declared]) if isinstance(i, int))
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except ValueError as error:
        raise SourceError(f"Cannot read {path}: it is not valid JSON: {error}. Download it again") from error
    return found if isinstance(found, dict) else {}
