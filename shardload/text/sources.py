"""Find the tokenizer of a source, and of a model that was loaded from one."""

from __future__ import annotations

from typing import Any

from shardload.errors import UnsupportedError, suggests_arguments
from shardload.keras_bridge.model_records import record_of
from shardload.loaders import spec_of
from shardload.manifest import Manifest
from shardload.resolve.opening import open_source
from shardload.stores.fingerprint import Fingerprint
from shardload.text.tokenizer import Tokenizer, from_keras_hub, tokenizer_of
from shardload.typing import PathLike


@suggests_arguments
def tokenizer(source: PathLike, *, format: str | None = None) -> Tokenizer:
    """Return the tokenizer of a checkpoint: that of a GGUF header, a Hugging Face folder or a KerasHub preset.

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


def remember(model: Any, manifest: Manifest) -> None:
    """Store the source of a model for `tokenizer_for`, if it may have a tokenizer."""
    form, record = spec_of(manifest).tokenizer, record_of(model)
    if form is not None:
        record.text_source, record.tokenizer = manifest, None
        record.text_header = Fingerprint.of(manifest.files if form == "header" else ())


def tokenizer_for(model: Any) -> Tokenizer:
    """Return the tokenizer of the source that shardload loaded a model from, else that of its own preprocessor.

    Raises:
        UnsupportedError: When neither exists.
        TransferError: When the file with the tokenizer changed since the load.
    """
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
