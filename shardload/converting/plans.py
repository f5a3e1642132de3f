"""A conversion as data: the tensors of the target, where each gets its value, and what makes the files around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardload.converting.source import StoredValue
from shardload.manifest import View, c_strides
from shardload.writers import TensorPlace, Wanted


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One tensor of the target, or a part of it, and the variable whose value it gets."""

    wanted: Wanted
    value: StoredValue
    view: View
    """Which elements of the tensor the variable is."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """All that a conversion will write."""

    format: str
    """The result's, by name."""
    copies: tuple[Copy, ...]
    make: Callable[[Path], tuple[TensorPlace, ...]]
    """Writes all files, without the values; takes the result's path, which is not there yet."""
    beside: Mapping[str, bytes]
    """Small files that go beside a target which is a file, by name."""
    notes: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()
    """Names of files that hold tensors, where the target is an index that goes beside them."""
    shard_bytes: int | None = None
    """Most bytes of a file, as asked for; another one makes other files of the same tensors."""

    @property
    def tensors(self) -> dict[str, tuple[Copy, ...]]:
        """By name: what each tensor is made of."""
        found: dict[str, list[Copy]] = {}
        for copy in self.copies:
            found.setdefault(copy.wanted.name, []).append(copy)
        return {name: tuple(copies) for name, copies in found.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(copies[0].wanted.nbytes for copies in self.tensors.values())


def whole(name: str, value: StoredValue, dtypes: Mapping[int, Any]) -> Copy:
    """A tensor that is the variable itself."""
    shape = tuple(value.variable.shape)
    return Copy(Wanted(name, shape, dtypes[id(value.variable)]), value, View(name, 0, shape, c_strides(shape)))
