"""KerasHub's preprocessor for the tokenizer of a Hugging Face folder or a GGUF file, and its files in a preset.

KerasHub cannot generate from a preset without a preprocessor: it would look for an ``image_converter.json`` of Gemma 3,
for example. Where it has only a tokenizer for a model (BERT), the preset has that.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardload.converting.sidecar_files import TRANSFORMERS, Companions, copy
from shardload.errors import UnsupportedError, WriteError, is_of_system
from shardload.hub import kerashub, preset_files
from shardload.hub.preprocessors import text_classes
from shardload.loaders import spec_of
from shardload.manifest import Manifest
from shardload.stores.json_files import parse_object, read_object
from shardload.stores.local import located, temporary_folder

_log = logging.getLogger(__name__)
_VOCABULARIES = ("tokenizer.model", "tokenizer.json", "vocab.json", "vocab.txt", "tekken.json")


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """A layer of KerasHub that a preset needs to work on text."""

    layer: Any = None
    """A preprocessor or a tokenizer; ``None`` without either."""
    notes: tuple[str, ...] = ()
    """Why a source with a tokenizer has no layer."""


def preprocessing_of(model: Any, manifest: Manifest, companions: Companions) -> Preprocessing:
    """Return the preprocessor of a task, of a backbone's generating task, or only a tokenizer.

    The layer may need TensorFlow to be used, which writing it does not.
    """
    if (found := getattr(model, "preprocessor", None)) is not None:
        return Preprocessing(found)
    files = companions.transformers
    # A source with Keras' own files has its tokenizer among them, and they are copied.
    if not spec_of(manifest).is_hugging_face or "config.json" in companions.keras:
        return Preprocessing()
    if files.keys().isdisjoint(_VOCABULARIES):
        return Preprocessing()
    # A copy in a temporary folder, because files that KerasHub needs may have to be made (`_completed`).
    try:
        with temporary_folder() as folder:
            copy(_completed(files), folder)
            return Preprocessing(_made(model, replace(manifest, location=located(folder))))
    except WriteError:  # of the temporary folder
        raise
    except Exception as error:  # damaged, missing or unknown files may cause any error
        if is_of_system(error):
            raise
        kept = f"the preset has no tokenizer, only its files in {TRANSFORMERS}/"
        return Preprocessing(notes=(f"{kept}: KerasHub cannot read them: {error}",))


def write(model: Any, found: Preprocessing, folder: Path) -> None:
    """Write KerasHub's files of a model and its preprocessor, except weights, as ``save_to_preset`` does.

    ``task.json`` may name the preprocessor only if all its files exist: KerasHub would look for the vocabulary. A
    model from a training step has a tokenizer without one.
    """
    layer = found.layer
    named = layer if hasattr(layer, "tokenizer") and hasattr(type(model), "preprocessor_cls") else None
    preset_files.save_description(model, folder, extra={}, preprocessor=named)
    if layer is None or _save(layer, folder) or not (description := folder / "task.json").is_file():
        return
    written = json.loads(description.read_text(encoding="utf-8"))
    written["config"]["preprocessor"] = None
    description.write_text(json.dumps(written, indent=4), encoding="utf-8")


def _completed(files: Mapping[str, Path | bytes]) -> Mapping[str, Path | bytes]:
    """Add the vocabulary files of older versions of transformers, which KerasHub reads; newer ones write one file."""
    if "tokenizer.json" not in files:
        return files
    found = files["tokenizer.json"]
    described = parse_object(found, path="tokenizer.json") if isinstance(found, bytes) else read_object(found)
    model = described.get("model") or {}
    if model.get("type") not in ("BPE", "WordPiece"):
        return files
    vocabulary: dict[str, int] = dict(model["vocab"])
    vocabulary |= {token["content"]: token["id"] for token in described.get("added_tokens") or ()}
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    if model["type"] == "WordPiece":  # a line's number is its word's id
        listed = [vocabulary[word] for word in words] == list(range(len(words)))
        return {"vocab.txt": "\n".join(words).encode(), **files} if listed else files
    # Older versions of tokenizers write a merge as one text, newer ones as a pair.
    merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
    made = {"vocab.json": json.dumps(vocabulary), "merges.txt": "\n".join(["#version: 0.2", *merges])}
    return {**{name: content.encode() for name, content in made.items()}, **files}


def _made(model: Any, manifest: Manifest) -> Any:
    """Return the preprocessor, else the tokenizer; raises any error if KerasHub has neither, or cannot make it."""
    preprocessor, tokenizer = text_classes(model)
    if tokenizer is None:
        raise UnsupportedError(f"it has none for {type(model).__name__}")
    if preprocessor is not None:
        try:
            return kerashub.make_preprocessor(preprocessor, manifest, usable=False)
        except Exception as error:  # it may need more than a tokenizer, such as an image converter
            if is_of_system(error):
                raise
            _log.info("No preprocessor for %s: %s", manifest.source, error)
    return kerashub.preset_tokenizer(manifest, tokenizer)


def _save(layer: Any, folder: Path) -> bool:
    """Write all of a preprocessing layer's files, or none."""
    # Apart, then copied, because an error half-way would leave some of the files.
    with tempfile.TemporaryDirectory(dir=folder) as made:
        try:
            layer.save_to_preset(made)
        except Exception as error:  # of any kind: NumPy's, SentencePiece's, KerasHub's
            if is_of_system(error):
                raise
            _log.info("%s is not saved: %s", type(layer).__name__, error)
            return False
        for each in Path(made).iterdir():  # not the folder itself, whose mode is private
            target = folder / each.name
            shutil.copytree(each, target, dirs_exist_ok=True) if each.is_dir() else shutil.copy2(each, target)
    return True
