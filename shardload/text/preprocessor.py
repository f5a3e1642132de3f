"""KerasHub's preprocessor for a model: ``model.generate("text")`` works as after ``from_preset``.

A model from a folder gets it while it is built (`shardload.hub.kerashub`); from a GGUF file it is made later:

    load ─► attach: looks at names and types only ─► first use ─► header ─► Hugging Face's files ─► KerasHub

On first use (`shardload.hub.preprocessors`) the tokens of a text are compared with those of the file's own tokenizer,
because KerasHub splits some texts differently (byte pairs of models other than Llama 3).
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shardload.errors import UnsupportedError
from shardload.hub import kerashub
from shardload.hub.preprocessors import defer_preprocessor, reads_tokenizer
from shardload.hub.tensorflow import lacks_tensorflow
from shardload.loaders import spec_of
from shardload.loaders.gguf import tokenizer_metadata
from shardload.manifest import Manifest
from shardload.stores.fingerprint import Fingerprint
from shardload.stores.local import located
from shardload.text.gguf_files import files_of
from shardload.text.gguf_tokenizer import check_supported, of_metadata

INSTEAD = "Use shardload.generate(model, prompts)"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files in a folder with a tokenizer, of which one is enough."""
PROBE = "It's 2 o'clock:\n\n  x = [12345, 0.5]\ttabs, naïve 日本語 \U0001f600"
"""Where tokenizers differ: contractions, spaces, digits, other scripts."""


def attach(model: Any, manifest: Manifest) -> str | None:
    """Give a task from a GGUF file its preprocessor on first use; return why it cannot generate, for the report."""
    cls = getattr(type(model), "preprocessor_cls", None)
    if cls is None or model.preprocessor is not None or not hasattr(model, "generate"):
        return None
    in_header = spec_of(manifest).tokenizer == "header"
    if (why := (_why_none if in_header else _why_none_built)(cls, manifest)) is not None:
        return f"model.preprocessor is None: {why}"
    if in_header:
        files = Fingerprint.of(manifest.files)
        defer_preprocessor(model, lambda: _made(cls, manifest, files))
    return None


def _why_none_built(cls: Any, manifest: Manifest) -> str | None:
    """Return why KerasHub could not make the preprocessor of a source that has a tokenizer."""
    has_vocabulary = any((Path(manifest.source) / name).is_file() for name in VOCABULARIES)
    was_saved = (manifest.config.get("config") or {}).get("preprocessor") is not None
    if (has_vocabulary or was_saved) and lacks_tensorflow(cls):
        return _lacks_tensorflow(cls)
    if not has_vocabulary:
        return None
    try:
        kerashub.make_preprocessor(cls, manifest)
    except Exception as error:  # of any kind: its files may be damaged, or missing
        return f"KerasHub's {cls.__name__} cannot read the tokenizer: {str(error).rstrip('.')}. {INSTEAD}"
    return None


def _lacks_tensorflow(cls: Any) -> str:
    return f"KerasHub's {cls.__name__} requires TensorFlow, which was not found. {INSTEAD}"


def _why_none(cls: Any, manifest: Manifest) -> str | None:
    """Return why KerasHub cannot make a preprocessor, as far as the types tell."""
    values, source = manifest.metadata, manifest.source
    if not values.get("tokenizer.ggml.tokens"):
        return f"{source} contains no tokenizer. Pass token ids to the model"
    kind = str(values.get("tokenizer.ggml.model", ""))
    try:
        check_supported(kind, str(values.get("tokenizer.ggml.pre", "default")), source)
    except UnsupportedError as error:
        return str(error)
    if not reads_tokenizer(cls, sentencepiece=kind == "llama"):
        form = "SentencePiece" if kind == "llama" else "byte pairs"
        return f"the tokenizer in {source} is {form}, which KerasHub's {cls.__name__} cannot read. {INSTEAD}"
    if lacks_tensorflow(cls):
        return _lacks_tensorflow(cls)
    return None


def _made(cls: Any, manifest: Manifest, files: Fingerprint) -> Any:
    """Make the preprocessor; return ``None``, with a warning, if KerasHub cannot."""
    try:
        files.check()
        found = tokenizer_metadata(manifest.location)
        made = _of_files(cls, manifest, files_of(found, manifest.source, str(manifest.config.get("model_type"))))
        same = _ids(made) == of_metadata(found, manifest.source).encode(PROBE)
    except Exception as error:  # KerasHub's, TensorFlow's and SentencePiece's may be of any kind
        warnings.warn(f"Cannot make the preprocessor of {manifest.source}: {error}. {INSTEAD}", stacklevel=2)
        return None
    if not same:
        warnings.warn(
            f"KerasHub's {cls.__name__} splits some texts into other tokens than the tokenizer in {manifest.source}. "
            f"For the file's own tokens: {INSTEAD}",
            stacklevel=2,
        )
    return made


def _of_files(cls: Any, manifest: Manifest, files: Mapping[str, bytes]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        return kerashub.make_preprocessor(cls, replace(manifest, location=located(folder)))


def _ids(preprocessor: Any) -> list[int]:
    """Return the token ids of `PROBE` as a prompt."""
    prompt = preprocessor.generate_preprocess([PROBE], sequence_length=len(PROBE.encode()) + 1)
    return [int(i) for i in np.asarray(prompt["token_ids"])[0][np.asarray(prompt["padding_mask"])[0]]]
