"""Keras' ``.weights.h5``: its groups, their names, and contiguous datasets whose space is reserved.

layers/dense/vars           attribute ``name`` = "dense", for everything Keras saves that has a name
layers/dense/vars/0         a dataset; bfloat16 as two opaque bytes and an attribute ``dtype``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from shardload.errors import UnsupportedError
from shardload.writers import Piece, Place, Wanted


def write_skeleton(path: Path, tensors: Sequence[Wanted], *, names: Mapping[str, str]) -> tuple[Place, ...]:
    """Make the file; says where the values belong.

    Args:
        path: File to make, over whatever is there.
        tensors: Named as Keras names them, ``layers/dense/vars/0``.
        names: Group (``layers/dense/vars``) → the name of what is saved there; also groups without tensors.

    Raises:
        UnsupportedError: When HDF5 has no such dtype.
    """
    with h5py.File(path, "w") as file:
        for group, name in names.items():
            file.require_group(group).attrs["name"] = name
        return tuple(Place(t.name, (Piece("", reserve(file, t), 0, t.size),)) for t in tensors)


def reserve(file: Any, tensor: Wanted) -> int:
    """Make one contiguous dataset as Keras does; returns the byte offset of its data."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    is_bfloat16 = tensor.dtype.name == "bfloat16"
    if not is_bfloat16 and tensor.dtype.isbuiltin != 1:
        raise UnsupportedError(f"Tensor {tensor.name!r} is {tensor.dtype}, which Keras cannot store in HDF5")
    kind = h5py.h5t.py_create(np.dtype("V2") if is_bfloat16 else tensor.dtype, logical=True)
    group, _, key = tensor.name.rpartition("/")
    where = file.require_group(group) if group else file
    made = h5py.Dataset(h5py.h5d.create(where.id, key.encode(), kind, h5py.h5s.create_simple(tensor.shape), plist))
    if is_bfloat16:
        made.attrs["dtype"] = "bfloat16"
    return int(made.id.get_offset()) if tensor.size else 0
