"""A `.weights.h5` of any size in Keras' own layout, without a model of that size.

Keras decides the structure: a *twin* (the same layers, a few numbers wide) is saved by Keras itself, each of its
variables filled with its own number. That file shows which dataset belongs to which variable; the same groups and
attributes are then written with the real shapes, with space reserved for the data, and the caller writes the
bytes at the returned offsets::

    twin.weights.h5   layers/dense/vars/0 = [[7, 7], [7, 7]]     variable 7
    model.weights.h5  layers/dense/vars/0   (3584, 14336) bf16   Slot(7, offset=81920, …)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from shardload.writers import Wanted
from shardload.writers.h5 import reserve


@dataclass(frozen=True, slots=True)
class Slot:
    """The location of one variable's bytes."""

    variable: int
    """Number of the variable in ``model.variables``."""
    offset: int
    """First byte in the file."""


def write_skeleton(
    path: str, twin: str, *, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]
) -> tuple[Slot, ...]:
    """Lay out ``path`` like ``twin``, with real shapes and dtypes; return the slots in file order.

    Args:
        path: File to make; its size is reserved, its data is not written.
        twin: File that Keras saved, each variable filled with its number.
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
        # Keras allocates in saving order, not in the alphabetical order of a visit.
        wanted = [(number, Wanted(name, shapes[number], np.dtype(dtypes[number]))) for _, name, number in sorted(found)]
        slots = tuple(Slot(number, reserve(target, tensor)) for number, tensor in wanted)
    return tuple(sorted(slots, key=lambda slot: slot.offset))
