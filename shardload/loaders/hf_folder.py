"""Hugging Face folders: ``config.json`` and safetensors, in one file or in shards listed by an index.

    config.json                     {"model_type": …}
    model.safetensors               or
    model.safetensors.index.json    {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors", …}}

If there is no index, all safetensors of a folder are one checkpoint. The index is untrusted: its file names may not
leave the folder, and each tensor must be in the shard that the index names for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from shardload.errors import SourceError, SourceNotFoundError, UnsupportedError
from shardload.loaders import safetensors
from shardload.loaders.contents import (
    CONFIG,
    FileContent,
    all_parts,
    inner_path,
    listing,
    member,
    part_number,
    set_of,
    shards_of,
    unchanging,
)
from shardload.loaders.extents import checked_tensors
from shardload.loaders.hub_preset import is_preset
from shardload.loaders.quantised import dequantised
from shardload.loaders.recognition import refused_folder
from shardload.loaders.registry import FormatSpec
from shardload.manifest import Manifest, Tensor
from shardload.stores.json_files import read_object
from shardload.stores.location import Location
from shardload.units import plural

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_INDEXES = re.compile(r".*\.safetensors\.index(\.[\w-]+)?\.json")
"""Matches names of shard indexes, also of a variant's index: ``model.safetensors.index.fp16.json``."""


def open_folder(folder: Location) -> Manifest:
    """Return the manifest of a Hugging Face folder: configuration from ``config.json``, tensors from safetensors.

    Quantised weights are listed as they are when dequantised, if that is possible.
    """
    return dequantised(open_as_stored(folder))


def open_as_stored(folder: Location) -> Manifest:
    """Return the manifest of a Hugging Face folder with the codes and scales of quantised weights."""
    described = describe_folder(folder)
    return open_bare(folder, format=described.format, config=described.config)


def describe_folder(folder: Location) -> Manifest:
    """Return the manifest of a folder's ``config.json`` alone: it has the model's configuration, but no tensors."""
    config_path = member(folder, CONFIG, named_by=str(folder))
    config = read_object(config_path)
    if not isinstance(config.get("model_type"), str):
        raise SourceError(f"{config_path} should name the architecture as 'model_type', but does not")
    return Manifest(folder, "hf-safetensors", {}, {}, config)


def open_bare(folder: Location, *, format: str = "safetensors", config: Mapping[str, Any] | None = None) -> Manifest:
    """Return the manifest of a folder's safetensors with ``config`` as configuration; ``config.json`` is not read."""
    names = folder.names()
    if _INDEX in names:
        found = open_index(member(folder, _INDEX, named_by=str(folder)))
        if _SINGLE in names and folder / _SINGLE not in found.files:
            raise SourceError(
                f"Cannot tell which checkpoint {folder} means: {_INDEX} lists {plural(len(found.files), 'shard')}, "
                f"and {_SINGLE} is not one of them; transformers would load the file, KerasHub the shards. Move one "
                "of them elsewhere"
            )
    else:
        found = _without_index(folder, names, is_described=CONFIG in names)
    return replace(found, location=folder, format=format, config=config or {})


def open_index(index: Location) -> Manifest:
    """Return the manifest of the shards that a ``*.safetensors.index.json`` lists."""
    weight_map = _weight_map(index)
    with unchanging(index):
        files = shards_of(index, set(weight_map.values()), way_out="Download")
        headers = {shard: safetensors.read_header(file) for shard, file in files.items()}
    stored = {shard: {tensor.name: tensor for tensor in header.tensors} for shard, header in headers.items()}
    tensors = [_find(name, shard, stored, index) for name, shard in weight_map.items()]
    joined = _joined(index, {files[shard]: header for shard, header in headers.items()}, tensors)
    return replace(joined, notes=_unlisted(stored, weight_map, index))


def folder_of(file: Location) -> Location | None:
    """Return the folder that, when opened, loads a weights file with its ``config.json``; ``None`` if there is none."""
    if not file.name.endswith((".safetensors", ".safetensors.index.json")):
        return None
    try:
        if _is_described(file.parent):
            return file.parent if _is_read_with(file.parent, file) else None
        above = file.parent.parent
        return above if _is_described(above) and _lists(above / _INDEX, _below(above, file)) else None
    except (SourceError, SourceNotFoundError):
        # This only asks whether there is such a folder; opening a damaged one reports the damage.
        return None


def open_variant(file: Location) -> Manifest | None:
    """Return the manifest of a model's variant (``model.fp16.safetensors``), with the folder's configuration.

    ``None`` if the file is no variant (same tensors in another dtype, for example), or an index says what to read.
    """
    folder = file.parent
    if not file.name.endswith(".safetensors") or not file.is_file() or not _is_described(folder):
        return None
    names = folder.names()
    if any(map(_INDEXES.fullmatch, names)) or not _shares_tensors(
        folder, file, _files(folder, names, is_described=True)
    ):
        return None
    described = describe_folder(folder)
    note = f"{CONFIG} in {folder} describes the model of {file.name}: loaded this file, and no other variant"
    found = _open_file(file)
    return replace(found, location=folder, format=described.format, config=described.config, notes=(*found.notes, note))


def _is_described(folder: Location) -> bool:
    path = folder / CONFIG
    return path.is_file() and isinstance(read_object(path).get("model_type"), str)


def _is_read_with(folder: Location, file: Location) -> bool:
    """Whether opening the folder loads the checkpoint that ``file`` belongs to, and no second one."""
    names = folder.names()
    if _INDEX in names:
        return file.name == _INDEX or _lists(folder / _INDEX, file.name)
    found = _files(folder, names, is_described=True)
    if file.name not in found:
        return False
    # Of several sets of parts, and of several files with the same tensors, the file means its own.
    if part_number(file.name) is not None:
        return len(set(map(set_of, found))) == 1
    return not _shares_tensors(folder, file, found)


def _shares_tensors(folder: Location, file: Location, names: list[str]) -> bool:
    """Whether a tensor of ``file`` is also, by its name, in another file of ``names``, as in variants of a model."""
    others = [name for name in names if name != file.name]
    own = {tensor.name for tensor in safetensors.read_header(file).tensors} if others else set()
    headers = (safetensors.read_header(folder / name) for name in others)
    return any(tensor.name in own for header in headers for tensor in header.tensors)


def _lists(index: Location, name: str) -> bool:
    return index.is_file() and name in _weight_map(index).values()


def _below(folder: Location, file: Location) -> str:
    """Return a file's path relative to ``folder``, as an index lists it; it is there or in a direct subfolder."""
    return f"{file.parent.name}/{file.name}" if file.parent != folder else file.name


def _weight_map(index: Location) -> dict[str, str]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{index} should contain a 'weight_map' from tensor names to shard files, but does not")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise SourceError(f"{index}: tensor {name!r} should map to a file name, but maps to {str(shard)[:200]}")
    return {name: inner_path(shard) for name, shard in weight_map.items()}


def _find(name: str, shard: str, stored: Mapping[str, Mapping[str, Tensor]], index: Location) -> Tensor:
    if (tensor := stored[shard].get(name)) is not None:
        return tensor
    others = [other for other, tensors in stored.items() if name in tensors]
    where = f"it is in {others[0]}" if others else "it is in none of the listed shards"
    raise SourceError(
        f"{index} lists tensor {name!r} in {shard}, but that file does not contain it; {where}. "
        "Index and shards belong to different checkpoints: download both again"
    )


def _unlisted(
    stored: Mapping[str, Mapping[str, Tensor]], weight_map: Mapping[str, str], index: Location
) -> tuple[str, ...]:
    """Return a note for the report on tensors that shards contain, but the index does not list: they are not loaded."""
    found = [(name, shard) for shard in stored for name in stored[shard] if weight_map.get(name) != shard]
    if not found:
        return ()
    name, shard = found[0]
    what, example = plural(len(found), "unlisted tensor"), ", for example" if len(found) > 1 else ""
    return (f"left out {what}: {index.name} does not assign {name[:200]!r} to {shard}{example}",)


def _without_index(folder: Location, names: list[str], *, is_described: bool) -> Manifest:
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    if len(indexes) == 1 and _SINGLE not in names:  # of a library that calls its files otherwise
        return open_index(member(folder, indexes[0], named_by=str(folder)))
    found = _files(folder, names, is_described=is_described)
    sets: dict[str, list[Location]] = {}
    for name in found:
        sets.setdefault(set_of(name), []).append(member(folder, name, named_by=str(folder)))
    for paths in sets.values():
        all_parts(paths[0])
    headers = {path: safetensors.read_header(path) for paths in sets.values() for path in paths}
    _check_variants(folder, sets, headers)
    return _joined(folder, headers)


def _check_variants(
    folder: Location, sets: Mapping[str, Sequence[Location]], headers: Mapping[Location, safetensors.SafetensorsHeader]
) -> None:
    """Raise if a tensor name is in two checkpoints of a folder, one of them in parts: it is unclear which to load."""
    if not any(part_number(paths[0].name) for paths in sets.values()):
        return
    owner: dict[str, str] = {}
    for paths in sets.values():
        name = paths[0].name
        for tensor in {tensor.name for path in paths for tensor in headers[path].tensors}:
            if (other := owner.setdefault(tensor, name)) != name:
                raise SourceError(
                    f"Cannot tell which checkpoint {folder} means: {tensor!r} is in the files of {other} and of "
                    f"{name}. Open one of these files, which opens all of its parts, or move the others elsewhere"
                )


def _joined(
    location: Location,
    headers: Mapping[Location, safetensors.SafetensorsHeader],
    tensors: Sequence[Tensor] | None = None,
) -> Manifest:
    """Return one manifest for several files with the given headers; ``tensors`` are by default all that these list."""
    sizes = {path: header.file_bytes for path, header in headers.items()}
    if tensors is None:
        tensors = [tensor for header in headers.values() for tensor in header.tensors]
    metadata = {key: value for header in headers.values() for key, value in header.metadata.items()}
    return Manifest(location, "safetensors", checked_tensors(tensors, files=sizes), sizes, metadata=metadata)


def _files(folder: Location, names: list[str], *, is_described: bool) -> list[str]:
    """Return the safetensors to read in a folder without an index: all, or ``model.safetensors`` alone if described."""
    if _SINGLE in names and is_described:
        return [_SINGLE]
    if found := sorted(name for name in names if name.endswith(".safetensors")):
        return found
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        raise UnsupportedError(
            f"{folder} contains only PyTorch pickles, which can run code when opened. "
            "Download the repository's safetensors, or convert them with safetensors.torch.save_file"
        )
    raise refused_folder(folder, names=names) or SourceNotFoundError(
        f"{folder} contains neither {_SINGLE} nor {_INDEX}, but {listing(folder)}. Download the weights, too; "
        "shardload plan needs none"
    )


def _is_single(content: FileContent) -> bool:
    # Check this before reading JSON: a header of 123 bytes makes a safetensors file begin with a brace.
    is_named = content.path.name.lower().endswith(".safetensors") and safetensors.begins_object(content.head)
    return is_named or safetensors.looks_like(content.head, content.size)


def _open_file(path: Location) -> Manifest:
    with closing(path.open()) as file:
        is_single = _is_single(FileContent(path, file))
    if not is_single:
        return open_index(path)
    # A part alone would be a checkpoint with some tensors only.
    if part_number(path.name) is None:
        return safetensors.open_file(path)
    if (index := _index_in(path.parent, path)) is None:
        # What is one level up may be another checkpoint, or not readable.
        with suppress(SourceError, SourceNotFoundError):
            index = _index_in(path.parent.parent, path)
    if index is not None:
        return open_index(index)
    return _joined(path, {part: safetensors.read_header(part) for part in all_parts(path)})


def _index_in(folder: Location, part: Location) -> Location | None:
    for name in filter(_INDEXES.fullmatch, folder.names()):
        index = member(folder, name, named_by=str(part))
        if _lists(index, _below(folder, part)):
            return index
    return None


SPEC = FormatSpec(
    name="hf-safetensors",
    description="a Hugging Face folder with config.json and safetensors",
    is_folder=lambda content: "model_type" in content.config and not is_preset(content),
    open_folder=open_folder,
    describe_folder=describe_folder,
    folder_of=folder_of,
    open_variant=open_variant,
    described_by="hugging-face",
    tensor_names="hugging-face",
    tokenizer="hugging-face",
    keras_files="keras",
    transformers_files=".",
    may_be_codes=True,
)
BARE: FormatSpec = FormatSpec(
    name="safetensors",
    description="a .safetensors file, its index, or a folder of them",
    endings=(".safetensors", ".safetensors.index.json"),
    is_file=lambda content: _is_single(content) or (content.first_shard or "").endswith(".safetensors"),
    is_folder=lambda content: CONFIG not in content.names and any(n.endswith(BARE.endings) for n in content.names),
    open_file=_open_file,
    open_folder=open_bare,
    may_be_codes=True,
)
