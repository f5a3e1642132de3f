"""A conversion as data: the tensors of the target, the source of each value, and functions that make the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardload.converting.computing import StoredValue
from shardload.errors import UnsupportedError
from shardload.manifest import View, c_strides
from shardload.writers import TensorPlace, Wanted


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One tensor of the target, or a part of it, and the variable that provides its value."""

    wanted: Wanted
    value: StoredValue
    view: View
    """The tensor's elements that the variable fills."""


@dataclass(frozen=True, slots=True, eq=False)
class ConversionPlan:
    """Everything that a conversion writes."""

    format: str
    """Name of the result's format."""
    copies: tuple[Copy, ...]
    make: Callable[[Path], tuple[TensorPlace, ...]]
    """Writes all files, without the values; takes the result's path, which must not exist yet."""
    sidecars: Mapping[str, bytes]
    """Name → content of small files that go next to a target that is itself a file."""
    undescribed: str | None = None
    """Name of a description of the model that the target has none of: one next to it would be of another model."""
    notes: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()
    """Names of the shards, if the target is an index next to them."""
    shard_bytes: int | None = None
    """Requested limit on a file's bytes. With another limit, the same tensors go to other files."""
    is_copy: bool = False
    """Whether its tensors are those of the source, whatever model they belong to."""
    is_keras_file: bool = False
    """Whether it is weights alone, for any model with the layers of the source's."""
    omitted: tuple[str, ...] = ()
    """Paths of the optimizers whose state Keras would write, and the result lacks."""

    @property
    def tensors(self) -> dict[str, tuple[Copy, ...]]:
        """Tensor name → the copies that fill it."""
        found: dict[str, list[Copy]] = {}
        for copy in self.copies:
            found.setdefault(copy.wanted.name, []).append(copy)
        return {name: tuple(copies) for name, copies in found.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        # The parts of a fused tensor are copies with one `Wanted`: count it once.
        return sum(copies[0].wanted.nbytes for copies in self.tensors.values())


class NoPlaceError(UnsupportedError):
    """A format has no place for something in a model.

    Args:
        why: The message without a way out, which depends on the call: `targets.plan_for` adds it.
        instead: The formats that have a place, by their names in `convert`.
    """

    def __init__(self, why: str, *, instead: tuple[str, ...] = ("h5", "orbax")) -> None:
        super().__init__(f"{why}. Choose the format {' or '.join(instead)}")
        self.why, self.instead = why, instead


def whole(name: str, value: StoredValue, dtypes: Mapping[int, Any]) -> Copy:
    """Return the copy of a whole variable to a tensor of the same shape."""
    shape = tuple(value.variable.shape)
    return Copy(Wanted(name, shape, dtypes[id(value.variable)]), value, View(name, 0, shape, c_strides(shape)))
