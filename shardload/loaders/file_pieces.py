"""What the writers of all formats share. A writer makes files that lack only the values, which are copied in later.

    Wanted(name, shape, dtype) ─► safetensors │ h5 │ orbax ─► TensorPlace(name, shape, dtype, pieces)

A `FilePiece` says where in a file a run of a tensor's elements (in row-major order) belongs. So values can be copied
in with plain positional writes, in any order and with little memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Wanted:
    """Name, shape and dtype of a tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the tensor's elements in bytes."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Consecutive elements of a tensor, and their place in a file."""

    path: str
    """Path relative to the checkpoint folder; empty if the checkpoint is a single file."""
    offset: int
    """Offset in the file, in bytes, of the piece's first element."""
    start: int
    """Position of the piece's first element among all elements of the tensor, in row-major order."""
    count: int
    """Number of elements in the piece."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where the elements of one tensor belong in the files."""

    name: str
    pieces: tuple[FilePiece, ...]
    """Pieces that together contain every element of the tensor, in order."""

    def to_json(self) -> dict[str, Any]:
        """Return this place as a JSON object."""
        return {"name": self.name, "pieces": [[p.path, p.offset, p.start, p.count] for p in self.pieces]}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> TensorPlace:
        """Rebuild a place from the JSON object that `to_json` returned."""
        return cls(str(found["name"]), tuple(FilePiece(*piece) for piece in found["pieces"]))


WriteFile = Callable[[Path, Sequence[Wanted], dict[str, Any]], tuple[TensorPlace, ...]]
"""Function that makes a file without values from path, tensors and Keras' config; returns the place of each tensor."""


def grouped(tensors: Sequence[Wanted], shard_bytes: int) -> list[list[Wanted]]:
    """Distribute tensors over files of at most ``shard_bytes``: in order, with a new file if a tensor does not fit."""
    groups: list[list[Wanted]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    return groups
