"""What writers share: there is one per format, and it makes a checkpoint's files complete except for the values.

    Wanted(name, shape, dtype) ─► safetensors │ h5 │ orbax ─► TensorPlace(name, shape, dtype, pieces)

A `FilePiece` is a run of a tensor's row-major elements at an offset in a file, so that values can be copied
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
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of all its elements in bytes."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A run of consecutive elements of a tensor, and where it belongs in a file."""

    path: str
    """Path relative to the checkpoint folder; empty if the checkpoint is a single file."""
    offset: int
    """Byte offset of the first element in the file."""
    start: int
    """Index of the run's first element in the tensor, counted in row-major order."""
    count: int
    """Number of elements."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where the elements of one tensor belong in the files."""

    name: str
    pieces: tuple[FilePiece, ...]
    """The runs of all its elements, from the first to the last, without gaps."""

    def to_json(self) -> dict[str, Any]:
        """Return this place as a JSON object."""
        return {"name": self.name, "pieces": [[p.path, p.offset, p.start, p.count] for p in self.pieces]}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> TensorPlace:
        """Rebuild a place from the JSON object that `to_json` returned."""
        return cls(str(found["name"]), tuple(FilePiece(*piece) for piece in found["pieces"]))


WriteFile = Callable[[Path, Sequence[Wanted], dict[str, Any]], tuple[TensorPlace, ...]]
"""Makes a model's file without the values, from the file's path, its tensors and Keras' description of the model."""


def grouped(tensors: Sequence[Wanted], shard_bytes: int) -> list[list[Wanted]]:
    """Group tensors into files as ``transformers`` and Keras do: in order, a new file if the next one would not fit."""
    groups: list[list[Wanted]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    return groups
