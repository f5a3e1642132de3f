"""Write Keras' ``.weights.h5`` files without the values: groups, and datasets with reserved space.

layers/dense/vars           a group; if the saved object has a name, it is in the attribute ``name``: "dense"
layers/dense/vars/0         a dataset; bfloat16 is stored as two opaque bytes and an attribute ``dtype``
"""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from shardload.errors import UnsupportedError
from shardload.loaders.contents import group_above
from shardload.loaders.file_pieces import FilePiece, TensorPlace, Wanted, grouped


def write_skeleton(path: Path, tensors: Sequence[Wanted], *, names: Mapping[str, str]) -> tuple[TensorPlace, ...]:
    """Make a ``.weights.h5`` file without the values; return where the values of each tensor belong.

    ``names`` maps each group of variables (``layers/dense/vars``), even an empty one, to its layer's name (``dense``).
    """
    with h5py.File(path, "w") as file:
        for group, name in names.items():
            file.require_group(group).attrs["name"] = name
        return tuple(TensorPlace(t.name, (FilePiece("", reserve(file, t), 0, t.size),)) for t in tensors)


def write_shards(
    index: Path, tensors: Sequence[Wanted], *, names: Mapping[str, str], shard_bytes: int
) -> tuple[TensorPlace, ...]:
    """Make ``.weights.h5`` shards without values, and their index, as `write_skeleton` makes a single file."""
    places: list[TensorPlace] = []
    weight_map: dict[str, list[str]] = {}
    groups = grouped(tensors, shard_bytes)
    for shard, group in zip(shard_names(index.name, tensors, shard_bytes=shard_bytes), groups, strict=True):
        paths = dict.fromkeys(group_above(tensor.name, names) for tensor in group)
        named = {name: names[name] for name in paths if name in names}
        # Each shard is an ordinary weights file: a group that is spread over shards is in each of them.
        made = write_skeleton(index.with_name(shard), group, names=named)
        places += [TensorPlace(p.name, tuple(replace(piece, path=shard) for piece in p.pieces)) for p in made]
        for name in paths:
            weight_map.setdefault(f"/{name}", []).append(shard)
    # Keras lists the files of a group with several variables, and the file of a group with one.
    several = collections.Counter(group_above(tensor.name, names) for tensor in tensors)
    listed = {name: found if several[name[1:]] > 1 else found[0] for name, found in weight_map.items()}
    text = {"metadata": {"total_size": sum(t.nbytes for t in tensors)}, "weight_map": listed}
    index.write_text(json.dumps(text, indent=4), encoding="utf-8")
    return tuple(places)


def shard_names(index: str, tensors: Sequence[Wanted], *, shard_bytes: int) -> tuple[str, ...]:
    """Return the shards' file names, numbered from 0, as Keras opens number 0 without looking into the index."""
    stem = index.removesuffix(".weights.json")
    return tuple(f"{stem}_{i:05}.weights.h5" for i in range(len(grouped(tensors, shard_bytes))))


def reserve(file: Any, tensor: Wanted) -> int:
    """Make a contiguous dataset for a tensor, like Keras, but without values; return the byte offset of its data."""
    # Allocated at once and never filled, so that the offset is known and the file stays sparse until values come.
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    # HDF5 has no bfloat16: Keras stores two opaque bytes and names the dtype in an attribute.
    is_bfloat16 = tensor.dtype.name == "bfloat16"
    if not is_bfloat16 and not hasattr(np, tensor.dtype.name):
        raise UnsupportedError(
            f"Cannot write tensor {tensor.name!r} to HDF5: Keras cannot store {tensor.dtype} there. Choose another "
            "--dtype"
        )
    kind = h5py.h5t.py_create(np.dtype("V2" if is_bfloat16 else tensor.dtype.name), logical=True)
    group, _, key = tensor.name.rpartition("/")
    where = file.require_group(group) if group else file
    made = h5py.Dataset(h5py.h5d.create(where.id, key.encode(), kind, h5py.h5s.create_simple(tensor.shape), plist))
    if is_bfloat16:
        made.attrs["dtype"] = "bfloat16"
    return int(made.id.get_offset()) if tensor.size else 0  # an empty dataset has no space and thus no offset
