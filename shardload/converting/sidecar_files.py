"""The small files next to a checkpoint's weights: configurations, tokenizers, licences.

KerasHub and Hugging Face have different families of these files. Each format has its own family where its library
expects it, and the other family in a folder, so that a round trip loses nothing::

                   KerasHub's                    Hugging Face's
    preset         .                             transformers/
    safetensors    keras/                        .
    orbax          shardload/keras/              shardload/transformers/
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardload.errors import UnsafeSourceError, is_of_system
from shardload.hub.sidecar import config_beside
from shardload.loaders import spec_of
from shardload.loaders.folder import member
from shardload.manifest import Manifest
from shardload.stores.json_files import parse_object, read_object
from shardload.stores.local import located
from shardload.text.gguf_files import tokenizer_files

KERAS, TRANSFORMERS = "keras", "transformers"
ENTRY = "shardload_transformers"
"""Name of the entry with Hugging Face's configuration in the file next to Keras' weights; Keras ignores it."""
STATE = "state.json"
"""File in the Keras family with values of other variables (seeds), for formats that cannot store them."""
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
"""Names that no private file has: of these, links of link farms are followed."""
MAX_BYTES = 1 << 30
"""Most bytes of one file; larger files are assumed to be weights."""


@dataclass(frozen=True, slots=True)
class Companions:
    """Both families of small files, by path relative to the folder of their family."""

    keras: Mapping[str, Path] = field(default_factory=dict)
    transformers: Mapping[str, Path | bytes] = field(default_factory=dict)
    """The files, or the content of new files."""
    notes: tuple[str, ...] = ()

    def config(self, family: str, name: str = "config.json") -> dict[str, Any] | None:
        """Return the content of one of the JSON files; ``None`` if it does not exist.

        Raises:
            SourceError: When it is not a JSON object.
        """
        path = getattr(self, family).get(name)
        if path is None:
            return None
        return parse_object(path, path=name) if isinstance(path, bytes) else read_object(path)


def companions_of(manifest: Manifest) -> Companions:
    """Return the small files next to the weights of a source."""
    source, spec = Path(manifest.source), spec_of(manifest)
    if spec.tokenizer == "header":
        return _of_header(manifest)
    one, other = spec.keras_files, spec.transformers_files
    if one is None or other is None:
        return _of_sidecar(manifest) if spec.described_by == "keras-sidecar" else Companions()
    keras, left_out = _files(source / one, skip=other)
    transformers, also = _files(source / other, skip=one)
    return Companions(keras, transformers, {one: left_out, other: also}.get(".", ()))


def _of_sidecar(manifest: Manifest) -> Companions:
    """Return Hugging Face's configuration, if the file next to Keras' weights has it."""
    found = (config_beside(manifest) or {}).get(ENTRY)
    return (
        Companions({}, {"config.json": json.dumps(found, indent=2).encode()})
        if isinstance(found, dict)
        else Companions()
    )


def _of_header(manifest: Manifest) -> Companions:
    """Return the tokenizer, rebuilt from a GGUF header, as Hugging Face's files; empty without one, or with a note."""
    if not any(key.startswith("tokenizer.ggml.") for key in manifest.metadata):
        return Companions()
    try:
        files = tokenizer_files(manifest)
    except Exception as error:  # of any kind, also from SentencePiece or tokenizers: the weights do not need them
        if is_of_system(error):
            raise
        return Companions(notes=(f"the tokenizer in the GGUF file was left out: {error}",))
    return Companions({}, files, ("the tokenizer was rebuilt from the header of the GGUF file",))


def _files(folder: Path, *, skip: str) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Return files by relative path, and notes on omitted files."""
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
            elif name.endswith(_OTHERS) or path.stat().st_size > MAX_BYTES:
                left_out.append(f"{name} was left out: it seems to contain weights in another format")
            else:
                found[name] = path
    return found, tuple(left_out)


def _may_be_private(path: Path, folder: Path, name: str) -> bool:
    """Whether a link could make a file public that is none of the checkpoint's, such as ``notes -> ~/.ssh/id_rsa``."""
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
    """Whether a file of this name contains weights or is an index of weights files."""
    return name.endswith(_WEIGHTS)


def copy(files: Mapping[str, Path] | Mapping[str, Path | bytes], folder: Path) -> None:
    """Copy one family into a folder."""
    for name, found in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(found, bytes):
            target.write_bytes(found)
        else:
            # Not copy(): a read-only mode would come along, and `keras_family` rewrites some of these files.
            shutil.copyfile(found, target)
