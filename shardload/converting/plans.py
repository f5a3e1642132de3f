"""A conversion as data: what it will write (`ConversionPlan`), and what it has written (`ConvertReport`)."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardload.converting.computing import StoredValue
from shardload.errors import UnsupportedError
from shardload.loaders.file_pieces import TensorPlace, Wanted
from shardload.manifest import View, c_strides
from shardload.reports import printable
from shardload.units import format_bytes, plural


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


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The report of one conversion."""

    source: str
    """The source; of `shardload.save_as`, the name of the model."""
    target: str
    format: str
    """Format of the target, as in `shardload.inspect`."""
    tensors: int
    n_bytes: int
    """Bytes of all tensors as written."""
    resumed: int
    """Number of tensors that an interrupted run had already copied."""
    seconds: float
    notes: tuple[str, ...]
    """What of the source the target lacks, or stores in another form."""
    preparing_s: float = 0.0
    """Part of ``seconds`` before anything was written: imports, opening the source, building the model, making its
    tokenizer."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)

    def __str__(self) -> str:
        spent = f"{self.seconds:.1f} s"
        if self.preparing_s >= 1:
            spent += f", {self.preparing_s:.1f} s of them to prepare"
        what = f"{plural(self.tensors, 'tensor')}, {format_bytes(self.n_bytes)}, {spent}"
        resumed = f"; {self.resumed} were copied by an interrupted run" if self.resumed else ""
        lines = [f"{self.target}: {self.format}, {what}{resumed}", *(f"note: {note}" for note in self.notes)]
        return "\n".join(printable(line) for line in lines)

    def _repr_html_(self) -> str:
        """The text, for notebooks."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def __repr__(self) -> str:
        notes = f", {plural(len(self.notes), 'note')}" if self.notes else ""
        return (
            f"<ConvertReport {self.target} ({self.format}): {plural(self.tensors, 'tensor')}, "
            f"{format_bytes(self.n_bytes)}{notes}; print it for all>"
        )
