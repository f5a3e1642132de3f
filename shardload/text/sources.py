"""Find the tokenizer of a source, and of a model that was loaded from one."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from shardload.errors import UnsupportedError, suggests_arguments
from shardload.loaders import spec_of
from shardload.manifest import Manifest
from shardload.resolve.opening import open_source
from shardload.stores.fingerprint import Fingerprint
from shardload.text.tokenizer import Tokenizer, from_keras_hub, tokenizer_of
from shardload.typing import PathLike


@dataclass(slots=True)
class _Loaded:
    """The source of a model's weights."""

    manifest: Manifest
    header: Fingerprint
    """Of the file whose header has the tokenizer, if it is in a header."""
    tokenizer: Tokenizer | None = None
    """Kept after the first use: rebuilding it from a header takes longer than tokenizing a short text."""


# Weak, and outside the model: a dropped model frees its entry, and Keras neither tracks nor saves it.
_loaded: weakref.WeakKeyDictionary[Any, _Loaded] = weakref.WeakKeyDictionary()


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
    form = spec_of(manifest).tokenizer
    if form is not None:
        _loaded[model] = _Loaded(manifest, Fingerprint.of(manifest.files if form == "header" else ()))


def manifest_of(model: Any) -> Manifest | None:
    """Return the source of a model's tokenizer, if `remember` stored one."""
    return _loaded[model].manifest if model in _loaded else None


def tokenizer_for(model: Any) -> Tokenizer:
    """Return the tokenizer of the source that shardload loaded a model from, else that of its own preprocessor.

    Raises:
        UnsupportedError: When neither exists.
        TransferError: When the file with the tokenizer changed since the load.
    """
    # A preprocessor without a source: KerasHub loaded the model.
    if model not in _loaded:
        if (layer := getattr(getattr(model, "preprocessor", None), "tokenizer", None)) is not None:
            return from_keras_hub(layer)
        raise UnsupportedError(
            f"Cannot find the tokenizer of {model.name!r}: it has no preprocessor, and shardload loaded it from no "
            "source that has a tokenizer. Pass one: tokenizer=shardload.tokenizer(source)"
        )
    found = _loaded[model]
    if found.tokenizer is None:
        found.header.check()
        found.tokenizer = tokenizer_of(found.manifest)
    return found.tokenizer
