"""The files next to a checkpoint's weights: configurations, tokenizers, licences. Also the preprocessor of a preset.

There are two kinds: files that KerasHub reads, and files that Hugging Face's libraries read. A checkpoint has one kind
where its own library expects them, and the other in a subfolder, so that a round trip loses nothing::

    format         KerasHub's files in           Hugging Face's files in
    preset         .                             transformers/
    safetensors    keras/                        .
    orbax          shardload/keras/              shardload/transformers/

KerasHub cannot generate text from a preset without a preprocessor, so one is made from Hugging Face's tokenizer files.
Where KerasHub has only a tokenizer (BERT), the preset has only that. In the other direction, a preset's tokenizer files
become Hugging Face's:

    vocabulary.spm                tokenizer.model: the same file
    vocabulary.json, merges.txt   tokenizer.json, with the word-splitting expression of the family (Llama 3, Qwen), or
                                  the same files under other names (GPT-2)
    vocabulary.txt                vocab.txt: the same file (BERT)
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardload.errors import UnsafeSourceError, UnsupportedError, WriteError, is_of_system, reason_text
from shardload.families.parts.gguf import GgufTokenizer
from shardload.families.registry import exports, families, model_type_of
from shardload.hub import kerashub
from shardload.hub.config_forms import config_beside
from shardload.hub.described import save_description
from shardload.hub.kerashub import text_classes
from shardload.loaders import spec_of
from shardload.loaders.contents import member
from shardload.loaders.gguf.loader import TokenizerMetadata
from shardload.loaders.hub_preset import SPEC as PRESET
from shardload.manifest import Manifest
from shardload.stores.json_files import parse_object, read_object
from shardload.stores.local import located, temporary_folder
from shardload.text.gguf_tokenizer import CONTROL, NORMAL, files_of, tokenizer_files

KERAS, TRANSFORMERS = "keras", "transformers"
CONFIG_ENTRY = "shardload_transformers"
"""Key of Hugging Face's configuration in the JSON file next to Keras' weights, for a conversion back to that format."""
STATE = "state.json"
"""Name of the JSON file, among KerasHub's, with variables that weights files cannot store, such as a dropout's seed."""
_WEIGHTS = (".h5", ".weights.json", ".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")
_OTHERS = (".gguf", ".msgpack", ".onnx", ".ckpt", ".keras", ".pkl")
_OF_MODELS = frozenset(
    {
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "merges.txt"),
        *("generation_config.json", "preprocessor_config.json", "processor_config.json", "preprocessor.json"),
        *("chat_template.jinja", "chat_template.json", "metadata.json", "task.json", "image_converter.json"),
        *("README.md", "LICENSE", "LICENSE.txt", "NOTICE"),
    }
)
"""Usual file names in checkpoints. A symbolic link with such a name is copied even if it leads out of the folder,
because no private file has such a name."""
_MAX_BYTES = 1 << 30
"""Most bytes of a file to copy along with the weights; a larger one is taken for weights in another format."""


@dataclass(frozen=True, slots=True)
class Companions:
    """A checkpoint's files besides weights, such as configurations and tokenizers, in one mapping for each library."""

    keras: Mapping[str, Path] = field(default_factory=dict)
    transformers: Mapping[str, Path | bytes] = field(default_factory=dict)
    """Hugging Face's files: relative path → the file to copy, or the content to write."""
    notes: tuple[str, ...] = ()

    def config(self, family: str, name: str = "config.json") -> dict[str, Any] | None:
        """Return the JSON file ``name`` of ``family`` (``keras``, ``transformers``) as a dict; ``None`` without one."""
        path = getattr(self, family).get(name)
        if path is None:
            return None
        return parse_object(path, path=name) if isinstance(path, bytes) else read_object(path)


def companions_of(manifest: Manifest) -> Companions:
    """Return the files next to a checkpoint's weights; of a GGUF file, tokenizer files made from its header."""
    source, spec = manifest.location.local_folder(), spec_of(manifest)
    if spec.tokenizer == "header":
        if not any(key.startswith("tokenizer.ggml.") for key in manifest.metadata):
            return Companions()
        try:
            files = tokenizer_files(manifest)
        except Exception as error:  # of any kind, also from SentencePiece or tokenizers: the weights do not need them
            if is_of_system(error):
                raise
            return Companions(notes=(f"the tokenizer in the GGUF file was left out: {error}",))
        return Companions({}, files, ("the tokenizer was rebuilt from the header of the GGUF file",))
    one, other = spec.keras_files, spec.transformers_files
    if one is None or other is None:
        # The file next to Keras' weights may have Hugging Face's configuration.
        beside = (config_beside(manifest) or {}) if spec.described_by == "keras-sidecar" else {}
        original = beside.get(CONFIG_ENTRY)
        return Companions(
            {}, {"config.json": json.dumps(original, indent=2).encode()} if isinstance(original, dict) else {}
        )
    keras, left_out = _files(source / one, skip=other)
    transformers, also = _files(source / other, skip=one)
    return Companions(keras, transformers, {one: left_out, other: also}.get(".", ()))


def _files(folder: Path, *, skip: str) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Return a folder's files but weights, by relative path, without the subfolder ``skip``; and notes on omissions."""
    found: dict[str, Path] = {}
    left_out = []
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        name = path.relative_to(folder).as_posix()
        # Hidden folders belong to other tools: .git, the .cache of a download.
        parts = name.split("/")
        if parts[0] == skip or any(part.startswith(".") for part in parts) or not path.is_file():
            continue
        if not is_weights(name):
            if path.is_symlink() and _may_be_private(path, folder, name):
                left_out.append(f"{name} was left out: it is a link to a file outside the folder")
            elif name.endswith(_OTHERS) or path.stat().st_size > _MAX_BYTES:
                left_out.append(f"{name} was left out: it seems to contain weights in another format")
            else:
                found[name] = path
    return found, tuple(left_out)


def _may_be_private(path: Path, folder: Path, name: str) -> bool:
    """Whether a link may lead to a private file (``notes -> ~/.ssh/id_rsa``), so that a copy could publish a secret."""
    target = path.resolve()
    if target.is_relative_to(folder.resolve()):
        return False
    try:
        member(located(path.parent), path.name, named_by=str(folder))
    except UnsafeSourceError:
        return True
    # A link farm has links to files of the same name; id_rsa has that name, too.
    return target.name == path.name and name != "config.json" and path.name not in _OF_MODELS


def is_weights(name: str) -> bool:
    """Whether a file's name tells that it contains weights, or is an index of files that do."""
    return name.endswith(_WEIGHTS)


def copy_files(files: Mapping[str, Path] | Mapping[str, Path | bytes], folder: Path) -> None:
    """Copy or write small files into ``folder``, by their relative paths."""
    for name, found in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(found, bytes):
            target.write_bytes(found)
        else:
            # Not copy_files(): a read-only mode would come along, and `keras_family` rewrites some of these files.
            shutil.copyfile(found, target)


_log = logging.getLogger(__name__)
_OF_TRANSFORMERS = ("tokenizer.model", "tokenizer.json", "vocab.json", "vocab.txt")
_VOCABULARIES = (*_OF_TRANSFORMERS, "tekken.json")


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """KerasHub's preprocessor or tokenizer for a preset: without one, the preset's model cannot take text."""

    layer: Any = None
    """A preprocessor or a tokenizer; ``None`` if there is neither."""
    notes: tuple[str, ...] = ()
    """Sentences for the report: why no preprocessor or tokenizer could be made, although the source has tokenizer
    files."""


def preprocessing_of(model: Any, manifest: Manifest, companions: Companions) -> Preprocessing:
    """Return the model's own preprocessor; else one made from the source's tokenizer files; else only a tokenizer.

    If TensorFlow is not installed, some preprocessors can still be written to a preset, but not applied to text.
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
            copy_files(_completed(files), folder)
            return Preprocessing(_made(model, replace(manifest, location=located(folder))))
    except WriteError:  # of the temporary folder
        raise
    except Exception as error:  # damaged, missing or unknown files may cause any error
        if is_of_system(error):
            raise
        kept = f"the preset has no tokenizer, only its files in {TRANSFORMERS}/"
        return Preprocessing(notes=(f"{kept}: KerasHub cannot read them: {reason_text(error)}",))


def write_description(model: Any, found: Preprocessing, folder: Path) -> None:
    """Write KerasHub's files of a model and its preprocessor, except weights, as ``save_to_preset`` does.

    ``task.json`` names the preprocessor only if all its files could be written, because KerasHub would look for them. A
    model built from a training step has a tokenizer without a vocabulary, so its files cannot be written.
    """
    layer = found.layer
    named = layer if hasattr(layer, "tokenizer") and hasattr(type(model), "preprocessor_cls") else None
    save_description(model, folder, extra={}, preprocessor=named)
    if layer is None or _save(layer, folder) or not (description := folder / "task.json").is_file():
        return
    written = json.loads(description.read_text(encoding="utf-8"))
    written["config"]["preprocessor"] = None
    description.write_text(json.dumps(written, indent=4), encoding="utf-8")


def _completed(files: Mapping[str, Path | bytes]) -> Mapping[str, Path | bytes]:
    """Return ``files`` with the vocabulary files that KerasHub reads, if they can be made from ``tokenizer.json``."""
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
    """Make KerasHub's preprocessor for a model, or only its tokenizer if there is none or it cannot be made."""
    preprocessor, tokenizer = text_classes(model)
    if tokenizer is None:
        raise UnsupportedError(f"KerasHub has no tokenizer class for {type(model).__name__}")
    if preprocessor is not None:
        try:
            return kerashub.make_preprocessor(preprocessor, manifest, usable=False)
        except Exception as error:  # it may need more than a tokenizer, such as an image converter
            if is_of_system(error):
                raise
            _log.info("No preprocessor for %s: %s", manifest.source, error)
    return kerashub.preset_tokenizer(manifest, tokenizer)


def _save(layer: Any, folder: Path) -> bool:
    """Write all files of a preprocessor or tokenizer, or none; return whether they were written."""
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


_TOKENIZER = "assets/tokenizer"
_PIECES = f"{_TOKENIZER}/vocabulary.spm"


def hugging_face_tokenizer(
    companions: Companions, manifest: Manifest, *, backbone: str, model_type: str
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Make Hugging Face's tokenizer files if only KerasHub's exist; return their contents by file name, and notes."""
    # The source's own files are copied as they are; only what would be missing is made.
    kept, own = companions.keras, companions.transformers
    if not own.keys().isdisjoint(_OF_TRANSFORMERS) or kept.keys().isdisjoint((_PIECES, "tokenizer.json")):
        return {}, ()
    family = model_type_of({"model_type": model_type})
    if _PIECES in kept:
        config = json.dumps({"tokenizer_class": family.tokenizer_class}).encode()
        return {"tokenizer.model": kept[_PIECES].read_bytes(), "tokenizer_config.json": config}, ()
    if (tokenizer := family.keras_tokenizer) is not None:
        names = {f"{_TOKENIZER}/{own}": name for own, name in tokenizer.files.items()}
        if not names.keys() <= kept.keys():
            return {}, ("the tokenizer was not written for Hugging Face: the source lacks some of its files",)
        found = {name: kept[path].read_bytes() for path, name in names.items()}
        if (kind := tokenizer.lower_case_class) is not None:
            settings = read_object(kept["tokenizer.json"]).get("config", {})
            lower = {"tokenizer_class": kind, "do_lower_case": bool(settings.get("lowercase", False))}
            found["tokenizer_config.json"] = json.dumps(lower).encode()
        return found, ()
    # A GGUF header describes the same kind of tokenizer, and `text` can already write one as tokenizer.json.
    try:
        folder = located(kept["tokenizer.json"].parent)
        layer = kerashub.preset_tokenizer(replace(manifest, location=folder, format=PRESET.name))
        export = exports().get(backbone)
        if export is None or export.pre_tokenizer is None:
            raise UnsupportedError(f"no pre-tokenizer is known for {backbone}")
        return files_of(_metadata(layer, export.pre_tokenizer), manifest.source, model_type), ()
    except Exception as error:  # its files may cause any error; its kind may be unknown
        if is_of_system(error):
            raise
        _log.info("No tokenizer of %s for Hugging Face: %s", manifest.source, error)
        *some, last = (each.title for each in families() if each.exports)
        known = f"{', '.join(some)} and {last}"
        return {}, (f"the tokenizer was not written for Hugging Face: only those of {known} can be converted",)


def _metadata(layer: Any, pattern: str) -> TokenizerMetadata:
    """Describe KerasHub's byte-pair tokenizer ``layer`` in the form of a GGUF header.

    shardload makes Hugging Face's tokenizer files from such headers, so no other code is needed for KerasHub's
    tokenizers. ``pattern``: GGUF's name of the rule that first splits a text into words, such as ``qwen2``.
    """
    tokens = {int(number): word for word, number in layer.vocabulary.items()}
    special = set(layer.unsplittable_tokens or ())
    # A vocabulary may have gaps, but in a header a token's position is its number.
    listed = tuple(tokens.get(i, f"<unused {i}>") for i in range(max(tokens) + 1))
    ids = {"bos": getattr(layer, "start_token_id", None), "eos": getattr(layer, "end_token_id", None)}
    return TokenizerMetadata(
        model=GgufTokenizer.BYTE_PAIRS,
        pre=pattern,
        tokens=listed,
        scores=np.array([], np.float32),
        token_types=np.array([CONTROL if word in special else NORMAL for word in listed], np.int32),
        merges=tuple(layer.merges),
        special_ids={name: int(number) for name, number in ids.items() if number is not None},
        flags={},
        chat_template=None,
    )
