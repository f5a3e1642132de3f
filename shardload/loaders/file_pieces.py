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
    """A tensor that a new file shall contain: name, shape and dtype, but no values."""

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
    """A run of consecutive elements of a tensor (in row-major order), and where in a file it is to be written."""

    path: str
    """Path of the file, relative to the checkpoint's folder; empty if the checkpoint is a single file."""
    offset: int
    """Byte offset in the file at which the first of the elements belongs."""
    start: int
    """Index of the first of the elements in the flattened tensor."""
    count: int
    """Number of elements in the run."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor's elements belong in files that were made without values; they are copied there later."""

    name: str
    pieces: tuple[FilePiece, ...]
    """Runs of elements, each with its place in a file; together, in order, they are the whole tensor."""

    def to_json(self) -> dict[str, Any]:
        """Return this place as a JSON object, for the notes by which an interrupted conversion or save continues."""
        return {"name": self.name, "pieces": [[p.path, p.offset, p.start, p.count] for p in self.pieces]}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> TensorPlace:
        """Rebuild a place from the JSON object that `to_json` returned."""
        return cls(str(found["name"]), tuple(FilePiece(*piece) for piece in found["pieces"]))


WriteFile = Callable[[Path, Sequence[Wanted], dict[str, Any]], tuple[TensorPlace, ...]]
"""Type of a function that makes a model's file without the values. It gets the file's path, the tensors and Keras'
serialised configuration of the model; it returns where each tensor's values belong."""


def grouped(tensors: Sequence[Wanted], shard_bytes: int) -> list[list[Wanted]]:
    """Divide tensors, in order, among files of at most ``shard_bytes``; a larger tensor gets a file of its own."""
    groups: list[list[Wanted]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    return groups
