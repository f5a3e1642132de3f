"""Keras' weights, in one ``.weights.h5`` file or in shards: tensors have the paths of their datasets as names.

A file with a name like ``model_00001.weights.h5`` is a part of the checkpoint ``model.weights.json``, or a whole file
that a user named after a step. A group ``vars`` in the root shows that it is whole, or the first of several parts.

Sharded weights are an index, ``model.weights.json``, and the HDF5 files that it lists::

    {"weight_map": {"/layers/dense/vars": "model_00000.weights.h5",
                    "/layers/dense_1/vars": ["model_00000.weights.h5", "model_00001.weights.h5"]}}

The variables of a group may be in several shards; each variable is in one. The index is untrusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from shardload.errors import SourceError, SourceNotFoundError
from shardload.loaders.contents import FileContent, group_above, inner_path, refuse_part, shards_of, unchanging
from shardload.loaders.extents import checked_tensors
from shardload.loaders.registry import FormatSpec
from shardload.manifest import Manifest, Tensor
from shardload.stores.json_files import read_object
from shardload.stores.location import Location

_PART = re.compile(r"(?P<stem>.+)_\d{5}\.weights\.h5")
_MAGIC = b"\x89HDF\r\n\x1a\n"


def open_file(path: Location) -> Manifest:
    """Return the manifest of a ``.weights.h5`` file; for a shard that an index lists, that of the whole checkpoint."""
    # Imported late: formats are listed and recognised without h5py.
    from shardload.loaders.hdf5 import datasets as hdf5

    part = _PART.fullmatch(path.name)
    if part is not None and lists(index := path.parent / f"{part['stem']}.weights.json", path.name):
        return open_index(index)
    region = hdf5.FileRegion.whole(path)
    files = {path: region.nbytes}
    content = hdf5.read_tensors(region)
    if part is not None and not content.is_whole:
        raise SourceNotFoundError(
            f"{path} is one of several parts, but {path.parent} lacks their index {index.name}. Copy the index and all "
            "parts there; to open this part alone, rename it"
        )
    if not content.is_whole:
        refuse_part(path)
    return Manifest(path, "keras-h5", checked_tensors(content.tensors, files=files), files, notes=content.notes)


def is_hdf5(content: FileContent) -> bool:
    """Whether a file has HDF5's signature at its start, or after a user block of 512, 1024, 2048 … bytes."""
    offset = 0
    while offset + len(_MAGIC) <= content.size:
        if content.read(offset, len(_MAGIC)) == _MAGIC:
            return True
        offset = 2 * offset or 512
    return False


def open_index(index: Location) -> Manifest:
    """Return the manifest of a ``*.weights.json`` and its shards."""
    # Imported late: formats are listed and recognised without h5py.
    from shardload.loaders.hdf5 import datasets as hdf5

    document = read_object(index)
    groups = _groups(document.get("weight_map"), index)
    tensors: list[Tensor] = []
    notes: list[str] = []
    with unchanging(index):
        shards = shards_of(index, {shard for listed in groups.values() for shard in listed}, way_out="Copy")
        regions = {name: hdf5.FileRegion.whole(file) for name, file in shards.items()}
        for shard, region in regions.items():
            content = hdf5.read_tensors(region)
            _check_shard(shard, content.tensors, groups, index)
            tensors += content.tensors
            notes += content.notes
    files = {region.path: region.nbytes for region in regions.values()}
    metadata = document.get("metadata")
    found = checked_tensors(tensors, files=files)
    described = metadata if isinstance(metadata, dict) else {}
    return Manifest(index, "keras-sharded-h5", found, files, metadata=described, notes=tuple(notes))


def lists(index: Location, name: str) -> bool:
    """Whether the index of shards ``index`` exists, and lists a file of this name."""
    if not index.is_file():
        return False
    return any(name in listed for listed in _groups(read_object(index).get("weight_map"), index).values())


def _groups(weight_map: object, index: Location) -> dict[str, tuple[str, ...]]:
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{index} should contain a 'weight_map' from groups of variables to shards, but does not")
    found = {}
    for group, shards in weight_map.items():
        listed = shards if isinstance(shards, list) else [shards]
        if not listed or not all(isinstance(shard, str) for shard in listed):
            raise SourceError(f"{index}: group {group!r} should map to one or more file names, not {str(shards)[:200]}")
        # Keras writes "/layers/dense/vars"; names of datasets have no leading slash here.
        found[group.strip("/")] = tuple(map(inner_path, listed))
    return found


def _check_shard(shard: str, stored: Iterable[Tensor], groups: Mapping[str, tuple[str, ...]], index: Location) -> None:
    # Index and shard are compared both ways: by groups, as the index does not list single variables.
    present = {group_above(tensor.name, groups) for tensor in stored}
    placed = {group for group, shards in groups.items() if shard in shards}
    if absent := sorted(placed - present):
        raise SourceError(
            f"{index} lists variables of {absent[0]!r} in {shard}, but that file has none. "
            "Index and shards belong to different checkpoints; copy or save both again"
        )
    if stray := sorted(present - placed):
        said = ", ".join(groups.get(stray[0], ())) or "no file"
        raise SourceError(
            f"{shard} contains variables of {stray[0]!r}, which {index} lists in {said}. "
            "Index and shards belong to different checkpoints; copy or save both again"
        )


SPEC = FormatSpec(
    name="keras-h5",
    description="a Keras .weights.h5 file",
    endings=(".weights.h5", ".h5", ".hdf5"),
    is_file=is_hdf5,
    open_file=open_file,
    described_by="keras-sidecar",
    tensor_names="keras",
)
SHARDED = FormatSpec(
    name="keras-sharded-h5",
    description="a Keras .weights.json with its shards",
    endings=(".weights.json",),
    # Any index that is not one of safetensors, which is checked first.
    is_file=lambda content: content.first_shard is not None,
    open_file=open_index,
    part_format="keras-h5",
    described_by="keras-sidecar",
    tensor_names="keras",
)
