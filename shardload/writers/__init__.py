"""Writers: one file per format, each making the files of a checkpoint with everything in them but the values.

    Wanted(name, shape, dtype) ─► safetensors │ h5 │ orbax ─► TensorPlace(name, shape, dtype, pieces)

A `FilePiece` is a run of a tensor's row-major elements that lies at an offset of a file, so that values are copied
in with plain positional writes, in any order and in little memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Wanted:
    """One tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A run of a tensor's elements in one file."""

    path: str
    """Relative to what is being written; empty where that is a single file."""
    offset: int
    """Byte offset of the first element in the file."""
    start: int
    """First element, counted in row-major order."""
    count: int
    """Number of elements."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where the elements of one tensor belong."""

    name: str
    pieces: tuple[FilePiece, ...]
    """Ascending, without gaps."""

    def to_json(self) -> dict[str, Any]:
        """As one object."""
        return {"name": self.name, "pieces": [[p.path, p.offset, p.start, p.count] for p in self.pieces]}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> TensorPlace:
        """What `to_json` made."""
        return cls(str(found["name"]), tuple(FilePiece(*piece) for piece in found["pieces"]))


def grouped(tensors: Sequence[Wanted], shard_bytes: int) -> list[list[Wanted]]:
    """As ``transformers`` and Keras cut into files: in order, a new one where the next tensor would not fit."""
    groups: list[list[Wanted]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    return groups


__all__ = ["FilePiece", "TensorPlace", "Wanted", "grouped"]
