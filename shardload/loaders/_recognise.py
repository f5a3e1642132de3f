"""Which format a path holds, told by its bytes and its folder's contents; an ending that says otherwise is an error."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardload.errors import SourceError, SourceNotFoundError, UnsupportedError
from shardload.loaders import orbax, safetensors
from shardload.loaders.folder import entries, listing, member
from shardload.manifest import Manifest
from shardload.stores import local
from shardload.stores.json_files import read_object

FORMATS: Mapping[str, str] = {
    "keras-h5": "a Keras .weights.h5 file",
    "keras-sharded-h5": "a Keras .weights.json with its shards",
    "keras-archive": "a .keras archive",
    "keras-hub-preset": "a KerasHub preset folder",
    "hf-safetensors": "a Hugging Face folder with config.json and safetensors",
    "safetensors": "a .safetensors file, its index, or a folder of them",
    "gguf": "a .gguf file",
    "orbax": "an Orbax checkpoint: a step's folder, or the folder of the steps",
}
"""Every format that opens, in words."""

_FILE_OPENERS = {
    "keras-h5": ("keras_h5", "open_file"),
    "keras-sharded-h5": ("keras_sharded", "open_index"),
    "keras-archive": ("keras_archive", "open_file"),
    "safetensors": ("safetensors", "open_file"),
    "safetensors-index": ("hf_folder", "open_index"),
    "gguf": ("gguf", "open_file"),
}
_FOLDER_OPENERS = {
    "keras-hub-preset": ("hub_preset", "open_folder"),
    "hf-safetensors": ("hf_folder", "open_folder"),
    "safetensors": ("hf_folder", "open_bare"),
    "orbax": ("orbax", "open_orbax"),
}
_ENDINGS = {
    ".h5": "keras-h5",
    ".hdf5": "keras-h5",
    ".keras": "keras-archive",
    ".safetensors": "safetensors",
    ".safetensors.index.json": "safetensors-index",
    ".weights.json": "keras-sharded-h5",
    ".gguf": "gguf",
}
"""What an ending promises; HDF5 never starts like a zip, so a lie shows."""
_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_HEAD_BYTES = 64


def open_manifest(path: str | os.PathLike[str], *, format: str | None = None) -> Manifest:
    """Read the headers of a checkpoint.

    Args:
        path: A file or a folder.
        format: One of `FORMATS`, to insist on it; by default the content tells.

    Returns:
        What lies where. No tensor data has been read.

    Raises:
        SourceNotFoundError: When there is nothing at ``path``, or a shard is missing.
        SourceError: When the checkpoint contradicts itself or its ending.
        UnsupportedError: When it is none of `FORMATS`.
    """
    name = os.fspath(path)
    if format is not None and format not in FORMATS:
        raise UnsupportedError(f"There is no format {format!r}; there are {', '.join(FORMATS)}")
    if "\0" in name:
        raise SourceError(f"{name!r} is not a file name: it contains a NUL character")
    where = Path(name).absolute()
    try:
        is_folder = where.is_dir()
    except OSError as error:
        raise SourceError(
            f"{name[:300]} cannot be looked at: {error.strerror}. Check the path and its rights"
        ) from error
    return _open_folder(where, format) if is_folder else _open_file(str(where), format)


def recognise(path: str | os.PathLike[str]) -> str:
    """Which of `FORMATS` a path holds, from a look at it: no header is read, and files in a folder may be damaged.

    Raises:
        SourceNotFoundError: When there is nothing at ``path``.
        SourceError: When it cannot be looked at, or holds several.
        UnsupportedError: When it is none of `FORMATS`.
    """
    where = Path(path).absolute()
    found = _recognise_folder(where) if where.is_dir() else _recognise_file(str(where))
    return "safetensors" if found == "safetensors-index" else found


def _open_file(path: str, format: str | None) -> Manifest:
    found = _recognise_file(path)
    promised = next((kind for ending, kind in _by_length(_ENDINGS) if path.lower().endswith(ending)), None)
    public = "safetensors" if found == "safetensors-index" else found
    if format is None and promised is not None and promised != found:
        raise SourceError(
            f"{path} ends like {FORMATS.get(promised, promised)}, but its content is {FORMATS[public]}. "
            f"Rename it, or insist with format={public!r} (--format {public})"
        )
    if format is not None and format != public:
        raise SourceError(f"{path} should be {FORMATS[format]}, but its content is {FORMATS[public]}")
    return _call(*_FILE_OPENERS[found], path)


def _recognise_file(path: str) -> str:
    with local.opened(path) as (fd, size):
        if not size:
            raise SourceError(f"{path} is empty (0 bytes). The download or the save did not finish; repeat it")
        head = local.read_header(fd, min(size, _HEAD_BYTES), offset=0, path=path, what="the first bytes")
        user_block = not head.startswith(_HDF5_MAGIC) and _has_user_block(fd, size, path)
    if head.startswith(b"GGUF"):
        return "gguf"
    if head.startswith(b"PK\x03\x04"):
        return "keras-archive"
    # Before JSON: a header of 123 bytes makes a safetensors file begin with a brace.
    if safetensors.looks_like(head, size) or (path.lower().endswith(".safetensors") and head[8:9] == b"{"):
        return "safetensors"
    if head.startswith(_HDF5_MAGIC) or user_block:
        return "keras-h5"
    if head.lstrip().startswith(b"{"):
        return _recognise_json(path)
    raise _unknown(path, head, size)


def _has_user_block(fd: int, size: int, path: str) -> bool:
    """Whether HDF5's signature stands after a user block of 512, 1024, 2048 … bytes."""
    at = 512
    while at + len(_HDF5_MAGIC) <= size:
        if local.read_header(fd, len(_HDF5_MAGIC), offset=at, path=path, what="the signature") == _HDF5_MAGIC:
            return True
        at *= 2
    return False


def _recognise_json(path: str) -> str:
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnsupportedError(
            f"{path} is JSON, but no index: it has no 'weight_map'. Open the folder it lies in instead"
        )
    first = next(iter(weight_map.values()))
    first = first[0] if isinstance(first, list) and first else first
    return "safetensors-index" if str(first).endswith(".safetensors") else "keras-sharded-h5"


def _unknown(path: str, head: bytes, size: int) -> SourceError | UnsupportedError:
    if head.startswith(b"version https://git-lfs"):
        return SourceError(f"{path} is a Git LFS pointer, not the file itself. Fetch it with: git lfs pull")
    if head.lstrip()[:1] == b"<":
        return SourceError(f"{path} is a web page, not a checkpoint: the download was refused. Log in and repeat it")
    if head[:1] == b"\x80" and head[1:2] in {b"\x02", b"\x03", b"\x04", b"\x05"}:
        return UnsupportedError(f"{path} is a Python pickle, which can run code when opened. Convert it to safetensors")
    ending = next((kind for ending, kind in _by_length(_ENDINGS) if path.lower().endswith(ending)), None)
    promise = f"ends like {FORMATS.get(ending, ending)}, but " if ending else ""
    reason = f"{promise}begins with {head[:16]!r} ({size} bytes), which is no format known here"
    kind = SourceError if ending else UnsupportedError
    return kind(f"{path} {reason}. Supported are: {_supported()}")


def _open_folder(folder: Path, format: str | None) -> Manifest:
    found = format or _recognise_folder(folder)
    if found in _FOLDER_OPENERS:
        return _call(*_FOLDER_OPENERS[found], folder)
    return _open_file(str(member(folder, _single(folder, found), named_by=str(folder))), format)


def _recognise_folder(folder: Path) -> str:
    names = entries(folder)
    if orbax.is_checkpoint(folder):
        return "orbax"
    if "config.json" in names:
        config_path = member(folder, "config.json", named_by=str(folder))
        return _recognise_config(config_path, read_object(config_path))
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "safetensors"
    kinds = {kind for ending, kind in _ENDINGS.items() if any(name.endswith(ending) for name in names)}
    if kinds >= {"keras-sharded-h5", "keras-h5"}:
        kinds.remove("keras-h5")
    if len(kinds) == 1:
        return kinds.pop()
    if kinds:
        raise SourceError(f"{folder} holds checkpoints of several formats ({listing(folder)}); name one of its files")
    if orbax.steps(folder):
        return "orbax"
    raise UnsupportedError(f"{folder} holds no checkpoint: in it is {listing(folder)}. Supported are: {_supported()}")


def _recognise_config(path: Path, config: Mapping[str, Any]) -> str:
    if "registered_name" in config or "class_name" in config:
        return "keras-hub-preset"
    if "model_type" in config:
        return "hf-safetensors"
    if "architecture" in config:
        raise UnsupportedError(f"{path} describes a timm model; KerasHub converts it: save that with save_to_preset")
    raise SourceError(
        f"{path} should describe a model by 'registered_name' (Keras) or 'model_type' (Hugging Face), but has only "
        f"{', '.join(sorted(config)[:8]) or 'no keys'}. Open the weights file itself to load it into a model of yours"
    )


def _single(folder: Path, format: str) -> str:
    endings = tuple(ending for ending, kind in _ENDINGS.items() if kind == format)
    names = [name for name in entries(folder) if name.lower().endswith(endings)]
    if len(names) == 1:
        return names[0]
    if not names:
        raise SourceNotFoundError(f"{folder} should hold {FORMATS[format]}, but holds {listing(folder)}")
    raise SourceError(f"{folder} holds {len(names)} of them ({', '.join(names[:8])}); name one")


def _by_length(endings: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted(endings.items(), key=lambda item: -len(item[0]))


def _call(module: str, function: str, path: str | os.PathLike[str]) -> Manifest:
    opener = getattr(importlib.import_module(f"shardload.loaders.{module}"), function)
    manifest: Manifest = opener(path)
    return manifest


def _supported() -> str:
    return "; ".join(FORMATS.values())
