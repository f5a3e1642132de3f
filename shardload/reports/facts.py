"""The records that a report consists of, and notes that code acts on.

Code recognises such a note by the note's kind; the text is for people and may change::

    Note("the step has no optimizer state; …", NoteKind.OPTIMIZER_UNCHANGED) ─► report.notes ─► of_kind(notes, …)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from shardload.sharding.layout import Fallback, Spec


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One device of the mesh, and the bytes of weights on it."""

    id: int
    """The device's id in JAX; in a plan, its position in the mesh."""
    platform: str
    """``cpu``, ``gpu`` or ``tpu``; in a plan, ``planned``."""
    bytes: int
    """Bytes of weights on the device after the load."""


@dataclass(frozen=True, slots=True)
class ByteCounts:
    """How many bytes of the checkpoint the model needed, and how many were read."""

    needed: int
    """Bytes in the checkpoint's files that store values which the model's variables need."""
    read: int
    """Bytes read from disk: more than ``needed`` if reading a gap was faster than skipping it.

    A tensor that no variable uses also counts if it was read to check that the model does not need it: because all its
    values are zero, or because it is a copy of a tensor that is loaded.
    """


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """What this process read from remote stores during a load by way of the cache."""

    read: int
    """Bytes that came from the cache."""
    fetched: int
    """Bytes that came from the stores."""
    stored: int
    """Bytes of these that are in the cache now."""
    left_out: int
    """Bytes of these that are not: the disk did not keep up, or the cache is full of what the load itself uses."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Wall-clock seconds per stage; ``None`` if a stage did not run."""

    build: float | None
    """Seconds for building the model without allocating it; ``None`` if it existed already."""
    plan: float | None
    """Seconds for reading headers, mapping names, choosing layouts, and planning reads."""
    transfer: float | None
    """Seconds for reading tensor data and placing it on devices; ``None`` in a plan."""
    total: float
    """Seconds of the whole load: all stages, and `other`."""
    imports: float | None = None
    """Seconds for importing KerasHub (with TensorFlow, if installed) and for starting JAX's devices, only in the first
    load of a process. Keras and JAX do not count: they are imported before a load, with shardload's own modules."""
    warm_up: float | None = None
    """Seconds for which the load, when all else was done, waited for the steps of ``warm_up`` to be compiled; ``None``
    if none were requested."""
    ready: float | None = None
    """Seconds from the start of the load to the model's first result, which need not follow the load at once: the
    return of the first ``predict``, ``evaluate``, ``generate`` or ``…_on_batch``, or of `shardload.generate`. ``None``
    until then. No part of the total."""

    @property
    def other(self) -> float:
        """Seconds of the total that belong to no stage: opening the source, and the time between stages."""
        counted = (self.imports, self.build, self.plan, self.transfer, self.warm_up)
        return max(0.0, self.total - math.fsum(s for s in counted if s is not None and math.isfinite(s)))

    def named(self) -> dict[str, float | None]:
        """Return the seconds of all stages by name, then their sum, ``total``; then ``ready``, which is no stage."""
        stages = {"imports": self.imports, "build": self.build, "plan": self.plan, "transfer": self.transfer}
        stages["warm_up"] = self.warm_up
        return {**stages, "other": self.other, "total": self.total, "ready": self.ready}


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Host memory used for staging (buffers between disk and devices) in a load; shards on CPU devices do not count."""

    budget: int
    """Most bytes that staging buffers (host memory between disk and devices) may have at a time."""
    peak_staging: int
    """Most bytes that staging buffers had at a time; in a plan, the number predicted."""


@dataclass(frozen=True, slots=True)
class SharedReads:
    """What each host reads and receives if every byte is read by one host, and others that need it get it from there.

    Chunks that decode as a whole may still be read by several hosts, and so are small variables, and those of which no
    dim divides into parts for all hosts.
    """

    read: int
    """Bytes that a host reads, on average."""
    total_read: int
    """Bytes that all hosts read together."""
    received: int
    """Bytes that a host receives from others."""
    exchanged: int
    """Number of variables that hosts exchange; of the others, each host reads what its devices need."""
    is_chosen: bool
    """Whether the load would do so: with ``replicas="auto"``, if that is expected to be faster on accelerators."""
    reasons: tuple[ReadReason, ...] = ()
    """For each variable, how it is read, and why."""


@dataclass(frozen=True, slots=True)
class ClusterBytes:
    """How many bytes left storage in a load by several processes, and how many they exchanged."""

    needed: int
    """Bytes of the checkpoint that the model needs on all devices, each byte counted once."""
    total_read: int
    """Bytes that all processes read together."""
    ratio: float
    """``total_read`` divided by ``needed``: 1 if each byte was read by one process."""
    read: tuple[int, ...]
    """Bytes that each process read."""
    received: tuple[int, ...]
    """Bytes that each process received from others."""
    exchanged: int
    """Number of variables that the processes exchanged."""


@dataclass(frozen=True, slots=True)
class ReadReason:
    """How processes that load together read one variable, and why."""

    variable: str
    strategy: str
    """``alone``: no byte is needed by two of them; ``read``: each reads what it needs; ``broadcast``: one reads."""
    why: str


@dataclass(frozen=True, slots=True)
class HostReads:
    """What each host reads in a planned load by several hosts, which have equally many devices each.

    Unless said otherwise, a host reads what its own devices need, so bytes that devices of several hosts need are read
    by each of these hosts.
    """

    hosts: int
    devices: int
    """Devices of each host: neighbours in the order of the mesh."""
    needed: int
    """Stored bytes that the devices of a host need, each byte counted once; the most of any planned host."""
    read: int
    """Bytes that a host reads, gaps between needed bytes included; the most of any planned host."""
    total_read: int
    """Bytes that all hosts read together."""
    kinds: int
    """Kinds of hosts: those of one kind have the same shards, so they read the same bytes."""
    planned: int
    """Kinds of which one host was planned. If there are more kinds, all numbers of bytes are estimates from these."""
    shared: SharedReads | None = None
    """What hosts read if every byte is read by one of them; ``None`` for one host, or with ``replicas="read"``."""


@dataclass(frozen=True, slots=True)
class VariableUse:
    """One variable: its layout and why it has it, its bytes, and where its value comes from."""

    name: str
    tensor: str
    """Name of the checkpoint's tensor that the variable gets; empty if its value is computed."""
    dtype: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    """Shape of the part that one device has."""
    spec: Spec
    """For each dim, the mesh axes that split it."""
    bytes: int
    """Bytes of the whole variable."""
    device_bytes: int
    """Bytes of the part that one device has."""
    reason: str
    """Why the variable has this layout: its role (``bias``), or the pattern of a user's rule, say."""


@dataclass(frozen=True, slots=True)
class LayoutSummary:
    """How variables are spread over the mesh: how many are split, how many are whole on every device."""

    sharded: int
    """Number of variables split over at least one axis of the mesh."""
    replicated: int
    """Number of variables that every device has completely."""
    fallbacks: tuple[Fallback, ...] = ()
    """Variables that got another layout than their rule asks for, because it does not divide their shape, say."""
    variables: tuple[VariableUse, ...] = ()
    """All variables that get a value from the checkpoint."""


@dataclass(frozen=True, slots=True)
class Cast:
    """A variable whose dtype in the model differs from the dtype of its tensor in the checkpoint."""

    variable: str
    stored: str
    """Dtype in the checkpoint."""
    loaded: str
    """Dtype in the model."""


@dataclass(frozen=True, slots=True)
class Outside:
    """A tensor that is not loaded, as it is no part of the model that the checkpoint's configuration describes."""

    tensor: str
    reason: str
    """Why the model computes the same without the tensor."""


@dataclass(frozen=True, slots=True)
class Mismatched:
    """A variable that was not loaded because its tensor has another shape, or because its layer cannot take it.

    A layer cannot take its tensors if its ``load_own_variables`` raises an error, or if its LoRA rank or alpha differs
    from the saved one.
    """

    variable: str
    """Path of the variable; that of the layer, or of its first variable, if the whole layer is meant."""
    tensor: str
    """Name of the tensor; empty if there is no single one: the value was computed, say, or the whole layer is meant."""
    expected: tuple[int, ...] | None
    """The variable's shape; ``None`` if shapes are not what differs."""
    found: tuple[int, ...] | None
    """The shape in the checkpoint; ``None`` if shapes are not what differs."""


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The KV cache of a model that generates: the keys and values of all tokens so far, in every layer."""

    rows: int
    """Sequences that are generated together."""
    tokens: int
    """Tokens of each sequence, those of the prompt included."""
    bytes: int
    """Bytes of the whole cache."""
    per_device: int
    """Bytes on each device."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether the weights of a plan, and the KV cache if one was asked for, fit devices with a given memory."""

    device_memory: int
    """Memory of one device in bytes."""
    per_device_max: int
    """Bytes of weights, and of the KV cache if one was asked for, on the fullest device."""
    fits: bool
    smallest_mesh: str | None
    """The smallest mesh on which they fit, as text; ``None`` if none was found."""


class NoteKind(Enum):
    """Kinds of notes in a report that other code recognises and acts on; most notes have no kind."""

    OPTIMIZER_UNCHANGED = auto()
    """The restored training step has no state for the optimizer that ``fit`` uses, so the optimizer keeps its own."""
    BATCHES_RECOUNTED = auto()
    """The optimizer's count of batches was changed to fit ``gradient_accumulation_steps``, which was another before."""
    AVERAGES = auto()
    """Tells whether the loaded weights are moving averages (``use_ema``) or the weights being trained."""
    ASSETS = auto()
    """What happened to the files that layers save (vocabularies), if they were not simply loaded."""
    HEAD_OF_ADAPTER = auto()
    """An adapter of PEFT has a trained head (``modules_to_save``) that the model lacks."""
    TENSOR_NOT_STORED = auto()
    """A converter (KerasHub's code that fills a model) asked for a tensor that the checkpoint does not have."""


class Note(str):
    """A note (a string) with a kind that code acts on; all other notes are plain strings."""

    __slots__ = ("kind",)
    kind: NoteKind

    def __new__(cls, text: str, kind: NoteKind) -> Note:
        """Make a string with the attribute ``kind``."""
        note = super().__new__(cls, text)
        note.kind = kind
        return note

    def __reduce__(self) -> tuple[type[Note], tuple[str, NoteKind]]:
        """Return how to rebuild the note, so that copies and pickles keep its kind."""
        return Note, (str(self), self.kind)


def of_kind(notes: Iterable[str], kind: NoteKind) -> tuple[str, ...]:
    """Return the notes of one kind."""
    return tuple(note for note in notes if getattr(note, "kind", None) is kind)
