"""A conversion as data: what it will write (`ConversionPlan`), and what it has written (`ConvertReport`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardload.converting.computing import StoredValue
from shardload.errors import UnsupportedError
from shardload.loaders.file_pieces import TensorPlace, Wanted
from shardload.manifest import View, c_strides
from shardload.reports import printable
from shardload.reports.markup import ShownAsText
from shardload.sharding.layout import Bounds
from shardload.units import format_bytes, plural


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One tensor of the target, or a part of it, and the variable that provides its value."""

    wanted: Wanted
    value: StoredValue
    view: View
    """Which elements of the target's tensor the variable fills."""
    box: Bounds | None = None
    """The part of the variable that is in this tensor, if it has several; the view is valid for indices in it only."""


@dataclass(frozen=True, slots=True, eq=False)
class ConversionPlan:
    """Everything that a conversion will write, decided before it writes: tensors, small files, and their places."""

    format: str
    """Name of the result's format, by which it is opened again to check it."""
    copies: tuple[Copy, ...]
    make: Callable[[Path], tuple[TensorPlace, ...]]
    """Function that writes all files, with space for the values, to a new path, and returns where each tensor goes."""
    sidecars: Mapping[str, bytes]
    """If the target is a file: the content of each small file to write next to it, by file name."""
    undescribed: str | None = None
    """Name of the JSON file, next to a weights file, that readers take for the description of its model. It is set if
    the conversion writes no such file: an old one would describe another model, and must be removed. ``None`` if the
    conversion writes the file, or readers look for none."""
    notes: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()
    """If the target is an index: the file names of the shards next to it."""
    shard_bytes: int | None = None
    """Most bytes of tensors in one file, if the caller gave a limit: it decides which tensor goes to which file."""
    is_copy: bool = False
    """Whether the conversion copies a Hugging Face folder tensor by tensor, without building a model."""
    is_keras_file: bool = False
    """Whether the target has Keras' weights alone: one file ``NAME.weights.h5``, or several that an index
    ``NAME.weights.json`` lists. Unlike other targets, these files do not describe their model."""
    is_file: bool = False
    """Whether the target is a single safetensors file, and not a folder."""
    omitted: tuple[str, ...] = ()
    """Optimizers, as paths in the model, whose state this conversion leaves out although Keras would write it."""

    @property
    def tensors(self) -> dict[str, tuple[Copy, ...]]:
        """Tensor name → the copies that fill the tensor, several if variables share it (a fused kernel)."""
        found: dict[str, list[Copy]] = {}
        for copy in self.copies:
            found.setdefault(copy.wanted.name, []).append(copy)
        return {name: tuple(copies) for name, copies in found.items()}

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors to write."""
        # The parts of a fused tensor are copies with one `Wanted`: count it once.
        return sum(copies[0].wanted.nbytes for copies in self.tensors.values())


class NoPlaceError(UnsupportedError):
    """The target's format cannot store something that the model has; ``instead``: names of formats that can."""

    def __init__(self, why: str, *, instead: tuple[str, ...] = ("h5", "orbax")) -> None:
        super().__init__(f"{why}. Choose the format {' or '.join(instead)}")
        self.why, self.instead = why, instead


def whole(name: str, value: StoredValue, dtypes: Mapping[int, Any]) -> Copy:
    """Plan to fill tensor ``name`` with a whole variable; ``dtypes``: ``id`` of variables → dtypes to write them in."""
    shape = tuple(value.variable.shape)
    return Copy(Wanted(name, shape, dtypes[id(value.variable)]), value, View(name, 0, shape, c_strides(shape)))


@dataclass(frozen=True, slots=True)
class ConvertReport(ShownAsText):
    """The report of a conversion, or of a model saved with `save_as`: what was written, and what the target lacks."""

    source: str
    """The checkpoint that was converted; for `shardload.save_as`, the name of the model."""
    target: str
    format: str
    """Name of the target's format, as `shardload.inspect` shows it for such a checkpoint."""
    tensors: int
    n_bytes: int
    """Number of bytes of all tensors in the target."""
    resumed: int
    """Number of tensors that were complete already, because an earlier run was interrupted after it wrote them."""
    seconds: float
    notes: tuple[str, ...]
    """Sentences on what the target lacks of the source, or stores in another form."""
    preparing_s: float = 0.0
    """The part of ``seconds`` before the first write: imports, opening the source, building its model and tokenizer."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        spent = f"{self.seconds:.1f} s"
        if self.preparing_s >= 1:
            spent += f", {self.preparing_s:.1f} s of them to prepare"
        what = f"{plural(self.tensors, 'tensor')}, {format_bytes(self.n_bytes)}, {spent}"
        resumed = f"; {self.resumed} were copied by an interrupted run" if self.resumed else ""
        lines = [f"{self.target}: {self.format}, {what}{resumed}", *(f"note: {note}" for note in self.notes)]
        return "\n".join(printable(line) for line in lines)

    def __repr__(self) -> str:
        notes = f", {plural(len(self.notes), 'note')}" if self.notes else ""
        return (
            f"<ConvertReport {self.target} ({self.format}): {plural(self.tensors, 'tensor')}, "
            f"{format_bytes(self.n_bytes)}{notes}; print it for all>"
        )
