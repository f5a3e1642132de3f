"""The facts that a report states, each as a value of its own, and notes that code acts on.

What such a note says is its kind, and its words are for people::

    Note("the step has no optimizer state; …", NoteKind.OPTIMIZER_UNCHANGED) ─► report.notes ─► of_kind(notes, …)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from shardload.sharding.layout import Fallback


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One device of the mesh."""

    id: int
    """The device's id in JAX; in a plan, its position in the mesh."""
    platform: str
    """``cpu``, ``gpu`` or ``tpu``; in a plan, ``planned``."""
    bytes: int
    """Bytes of weights on the device after the load."""


@dataclass(frozen=True, slots=True)
class ByteCounts:
    """Bytes of the checkpoint that were needed, and that were read."""

    needed: int
    """Bytes on disk with values that the model needs."""
    read: int
    """Bytes read from disk; more than ``needed`` if skipping would have taken longer than reading, or if tensors were
    compared to find copies (`LoadReport.outside`)."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Wall-clock seconds per stage; ``None`` if a stage did not run."""

    build: float | None
    """Building the model without allocating it; ``None`` if it existed already."""
    plan: float | None
    """Reading headers, mapping names, choosing layouts, planning reads."""
    transfer: float | None
    """Reading tensor data and placing it on devices; ``None`` in a plan."""
    total: float
    """The whole load: these stages and `other`."""
    imports: float | None = None
    """Importing KerasHub, which also imports TensorFlow where that is installed, and starting JAX's devices; the first
    load of a process only. Keras and JAX are imported before a load, with shardload's own modules."""

    @property
    def other(self) -> float:
        """What the stages leave of the total: opening the source, and what comes between the stages."""
        counted = (self.imports, self.build, self.plan, self.transfer)
        return max(0.0, self.total - math.fsum(s for s in counted if s is not None and math.isfinite(s)))

    def named(self) -> dict[str, float | None]:
        """Return all of them in order; all before the last one add up to it."""
        stages = {"imports": self.imports, "build": self.build, "plan": self.plan, "transfer": self.transfer}
        return {**stages, "other": self.other, "total": self.total}


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Host memory of the load, without the shards of CPU devices."""

    budget: int
    """Limit on the bytes of staging buffers."""
    peak_staging: int
    """Highest number of bytes in staging buffers; in a plan, the predicted one."""


@dataclass(frozen=True, slots=True)
class LayoutSummary:
    """How variables are spread over the mesh."""

    sharded: int
    """Variables split over at least one axis."""
    replicated: int
    """Variables that are complete on every device."""
    fallbacks: tuple[Fallback, ...] = ()
    """Variables that did not get the layout requested by their rule."""


@dataclass(frozen=True, slots=True)
class Cast:
    """A variable whose dtype differs from what the checkpoint stores."""

    variable: str
    stored: str
    """Dtype in the checkpoint."""
    loaded: str
    """Dtype in the model."""


@dataclass(frozen=True, slots=True)
class Outside:
    """A tensor outside the architecture that the checkpoint's configuration describes."""

    tensor: str
    reason: str
    """Why the model computes the same without it."""


@dataclass(frozen=True, slots=True)
class Mismatched:
    """A variable that was left alone because its tensor has another shape."""

    variable: str
    tensor: str
    """Name of the tensor; empty if a layer raised before it read any tensor."""
    expected: tuple[int, ...] | None
    """The variable's shape; ``None`` if a layer raised for another reason."""
    found: tuple[int, ...] | None
    """The shape in the checkpoint."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a plan fits devices of a given size."""

    device_memory: int
    """Memory of one device in bytes."""
    per_device_max: int
    """Bytes of weights on the fullest device."""
    fits: bool
    smallest_mesh: str | None
    """The smallest mesh on which the weights fit, as text; ``None`` if none was found."""


class NoteKind(Enum):
    """What a note says."""

    OPTIMIZER_UNCHANGED = auto()
    """The step has no state for an optimizer that ``fit`` uses, so it stays as it is."""
    BATCHES_RECOUNTED = auto()
    """The count of batches was converted for another ``gradient_accumulation_steps``."""
    AVERAGES = auto()
    """Which of the two the weights are: moving averages (``use_ema``), or the weights in training."""
    ASSETS = auto()
    """What became of files that layers save (vocabularies), where they were not just loaded."""
    TENSOR_NOT_STORED = auto()
    """A converter asked for a tensor that the checkpoint does not have."""


class Note(str):
    """A note with its kind; most notes are plain strings, because no code asks what they say."""

    __slots__ = ("kind",)
    kind: NoteKind

    def __new__(cls, text: str, kind: NoteKind) -> Note:
        """Make a string that knows its kind."""
        note = super().__new__(cls, text)
        note.kind = kind
        return note

    def __reduce__(self) -> tuple[type[Note], tuple[str, NoteKind]]:
        """Let copies and pickles keep the kind."""
        return Note, (str(self), self.kind)


def of_kind(notes: Iterable[str], kind: NoteKind) -> tuple[str, ...]:
    """Return the notes of one kind."""
    return tuple(note for note in notes if getattr(note, "kind", None) is kind)
