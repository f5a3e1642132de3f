"""A `.weights.h5` of any size in Keras' own layout, without a model of that size.

Keras decides the structure: a *twin* (the same layers, a few numbers wide) is saved by Keras itself, each of its
variables filled with its own number. That file says which dataset holds which variable; the same groups and
attributes are then laid out with the real shapes, space reserved but not written, and the caller fills in the
bytes at the offsets it gets back::

    twin.weights.h5   layers/dense/vars/0 = [[7, 7], [7, 7]]     variable 7
    model.weights.h5  layers/dense/vars/0   (3584, 14336) bf16   Slot(7, offset=81920, …)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np


@dataclass(frozen=True, slots=True)
class Slot:
    """Where the bytes of one variable belong."""

    variable: int
    """Number of the variable in ``model.variables``."""
    offset: int
    """First byte in the file."""


def write_skeleton(
    path: str, twin: str, *, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]
) -> tuple[Slot, ...]:
    """Lay out ``path`` like ``twin``, with real shapes and dtypes; returns the slots in file order.

    Args:
        path: File to make; its size is reserved, its data is not written.
        twin: What Keras saved, each variable filled with its number.
        shapes: Shape of each variable.
        dtypes: Keras dtype of each variable.
    """
    with h5py.File(twin, "r") as source, h5py.File(path, "w") as target:
        found: list[tuple[int, str, int]] = []

        def copy(name: str, node: Any) -> None:
            if isinstance(node, h5py.Dataset):
                found.append((node.id.get_offset(), name, int(np.ravel(node[()])[0])))
            else:
                target.require_group(name).attrs.update(node.attrs)

        source.visititems(copy)
        target.attrs.update(source.attrs)
        # Keras allocates in the order it saves, which is not the alphabetical order of a visit.
        slots = tuple(
            Slot(number, _reserve(target, name, shapes[number], dtypes[number])) for _, name, number in sorted(found)
        )
    return tuple(sorted(slots, key=lambda slot: slot.offset))


def _reserve(file: Any, name: str, shape: tuple[int, ...], dtype: str) -> int:
    """Make one contiguous dataset as Keras does; returns the byte offset of its data."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    # HDF5 has no bfloat16: Keras writes two opaque bytes and names the dtype in an attribute.
    stored = np.dtype("V2") if dtype == "bfloat16" else np.dtype(dtype)
    kind = h5py.h5t.py_create(stored, logical=True)
    made = h5py.Dataset(h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(shape), plist))
    if dtype == "bfloat16":
        made.attrs["dtype"] = "bfloat16"
    return int(made.id.get_offset())
