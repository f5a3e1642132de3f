"""The planning problem: which mesh axis splits which dim group, and what operations then cost.

A *dim group*, identified by a number, is what a plan decides about: an axis splits all its dims or none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from shardload.layout_search.dim_groups import DimGroups
from shardload.layout_search.hardware import Hardware
from shardload.layout_search.lifetimes import Lifetimes
from shardload.layout_search.optimizer_memory import Slot
from shardload.layout_search.program import CollectiveKind, Exchange, Factors, Value
from shardload.layout_search.tracing import Traced
from shardload.sharding.layout import Layout, Spec
from shardload.sharding.mesh import MeshSpec

NO_USE = ("batch", "fsdp", "sequence")
"""Kinds of mesh axes that split examples or storage, but no dim of a weight while operations use it."""
Assignment = tuple[int | None, ...]
"""One way to split a tensor: for each mesh axis, in the order of the mesh, the dim group (dims that are split alike)
that the axis splits, or ``None`` if it splits none."""


@dataclass(frozen=True, slots=True)
class EmbeddingUse:
    """Sizes of a step's only lookup in an embedding, to estimate whether the batch axis should split its rows, too."""

    dim: int
    """The dim of the embedding along which the indices count: usually 0, its rows."""
    nbytes: int
    """Bytes of the whole embedding, and of its gradient, in the dtype in which the step reads it."""
    rows_bytes: int
    """Bytes of the rows that the whole batch looks up, over all devices."""
    index_bytes: int
    """Bytes of the indices with which the whole batch looks rows up, over all devices."""


@dataclass(frozen=True, slots=True)
class WeightKind:
    """Variables that every plan splits alike, as their shapes, dtypes, slots and dim groups are equal."""

    shape: tuple[int, ...]
    nbytes: int
    dim_groups: tuple[Factors, ...]
    """For each dim of the variables, the numbers of its dim groups (dims split alike): one for each factor of the dim,
    the major one first. Usually a dim has one."""
    trainable: bool
    pin: Spec | None
    """The layout that the user has fixed for the variables; ``None`` if the search may choose it."""
    slots: tuple[Slot, ...]
    """The arrays that the optimizer keeps for each of the variables, such as two moments for Adam."""
    members: tuple[int, ...]
    """Positions of the variables in `Traced.weights`, which lists all variables of the model."""
    passes: int = 1
    """How many passes of a step read the variables, and gather them if they are stored split: the forward pass, and of
    training also the backward pass, which does not read a bias, for example. 0 if the step does not use them."""
    gathered_as: str = ""
    """The dtype in which a step gathers the variables if they are stored split: the one to which all operations convert
    them, if it is smaller than their own; else empty."""
    summed: tuple[float, ...] = ()
    """Bytes of each all-reduce over the batch whose results make up the gradient of one variable."""
    embedding: EmbeddingUse | None = None
    """Sizes of the lookup, if the variable is an embedding that a step looks rows up in exactly once, or ``None``."""

    @property
    def all_groups(self) -> Factors:
        """The dim groups (dims split alike) of all dims, each once and in order of their numbers."""
        return tuple(sorted({*itertools.chain(*self.dim_groups)}))

    @property
    def gathered_bytes(self) -> int:
        """Bytes of one variable in the dtype in which it is gathered, over all devices."""
        return math.prod(self.shape) * jnp.dtype(self.gathered_as).itemsize if self.gathered_as else self.nbytes

    def allows(self, layout: Layout) -> bool:
        """Whether a layout splits the variables evenly, and also each of their slots that must be split evenly."""
        return layout.divides(self.shape) and all(slot.allows(layout) for slot in self.slots)

    def slot_bytes(self, layout: Layout) -> float:
        """Return the bytes of one variable's optimizer slots on each device, if the variable has this layout."""
        return sum(slot.device_bytes(layout) for slot in self.slots)


@dataclass(frozen=True, slots=True)
class WorkKind:
    """Operations that cost the same under every plan, merged into one: equal work, collectives and dim groups."""

    name: str
    dim_groups: tuple[int, ...]
    """The dim groups (dims split alike) whose split divides the work over devices."""
    flops: float
    nbytes: float
    exchanges: tuple[Exchange, ...]
    """Collectives that the operations need if certain dims are split. They have numbers of dim groups (dims that are
    split alike) in the place of factors."""
    count: int = 0
    in_sequence: bool = False
    """Whether devices can do the work for parts of a sequence, if the search splits sequences."""

    @property
    def all_groups(self) -> Factors:
        """The dim groups (dims split alike) on which the cost of the operations depends."""
        of_exchanges = (dim for e in self.exchanges for dim in (e.split, e.dims, e.unless))
        return tuple(sorted({*self.dim_groups, *itertools.chain(*of_exchanges)}))


@dataclass(frozen=True, slots=True)
class SequenceSplit:
    """How activations are split along their sequence, where no dim of features or heads is split over these axes."""

    axes: tuple[str, ...]
    dim_groups: frozenset[int]
    """The dim groups (dims split alike) of sequences."""
    size: int
    """Number of devices along ``axes``."""


class BufferKind(NamedTuple):
    """Buffers that take the same part of their bytes on each device, under every plan."""

    dim_groups: Factors
    in_sequence: bool = False
    """Whether the buffers are split along their sequence, if the search splits sequences and no other dim of theirs."""
    gathered_for: Factors = ()
    """Dim groups (dims split alike) of operations. If these split one, the buffers are copies that are gathered for
    them along the sequence; if not, there are no such copies."""

    @property
    def all_groups(self) -> Factors:
        """The dim groups on which the bytes on a device depend."""
        return tuple(sorted({*self.dim_groups, *self.gathered_for}))


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers of activations: for each, its bytes over all devices, when it is needed, and its kind."""

    nbytes: NDArray[np.float64]
    first: NDArray[np.int64]
    """The first moment at which each buffer is needed."""
    last: NDArray[np.int64]
    kind: NDArray[np.int64]
    """For each buffer, the index of its kind in ``kinds``."""
    kinds: tuple[BufferKind, ...]

    def live(self, moments: int, parts: Sequence[float]) -> NDArray[np.float64]:
        """Return the bytes on a device at each moment; ``parts`` has the part that it stores of each of ``kinds``."""
        return _live(moments, self.first, self.last, self.nbytes * np.asarray(parts, float)[self.kind])

    def at(self, moment: int) -> dict[BufferKind, float]:
        """Return, for each kind of buffers, the bytes over all devices that are needed at a moment."""
        alive = (self.first <= moment) & (moment <= self.last)
        found = np.bincount(self.kind[alive], self.nbytes[alive], len(self.kinds))
        return {kind: nbytes for kind, nbytes in zip(self.kinds, found, strict=True) if nbytes}


def _live(
    moments: int, first: NDArray[np.int64], last: NDArray[np.int64], local: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the bytes that are needed at each moment, of arrays of ``local`` bytes each."""
    change = np.zeros(moments + 1)
    np.add.at(change, first, local)
    np.add.at(change, last + 1, -local)
    return np.cumsum(change)[:moments]


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of weights that a step needs where these are stored split: gathered for use, and gradients of such."""

    kind: NDArray[np.int64]
    """For each copy, the index of the weight's kind in `Problem.weights`."""
    first: NDArray[np.int64]
    """The first moment at which it is needed."""
    last: NDArray[np.int64]
    count: NDArray[np.int64]
    """How many copies of one weight are needed at once."""

    def live(self, moments: int, nbytes: Sequence[float]) -> NDArray[np.float64]:
        """Return the bytes on a device at each moment; ``nbytes`` has those of one copy, for each kind of weights."""
        return _live(moments, self.first, self.last, self.count * np.asarray(nbytes, float)[self.kind])

    def at(self, moment: int) -> dict[int, float]:
        """Return how many copies of weights of each kind are needed at a moment."""
        alive = (self.first <= moment) & (moment <= self.last)
        found = np.bincount(self.kind[alive], self.count[alive])
        return {kind: count for kind, count in enumerate(map(float, found)) if count}


@dataclass(slots=True)
class Problem:
    """What a search decides for one mesh, and what it costs: groups of dims to split, weights, operations."""

    mesh: MeshSpec
    asked: MeshSpec
    """The mesh that the caller gave; ``mesh`` may have parts of its axes instead of the axes."""
    hardware: Hardware
    traced: Traced
    dim_groups: DimGroups
    weights: tuple[WeightKind, ...]
    work: tuple[WorkKind, ...]
    conflicts: frozenset[frozenset[int]]
    """Pairs of dim groups that occur in one tensor: a mesh axis can split only one of the two."""
    pinned: Mapping[str, int]
    """Maps each batch axis to the dim group of the batch, which it always splits. An axis that cannot divide the batch
    is left out."""
    lifetimes: Lifetimes = field(default_factory=Lifetimes)
    """What changes if blocks of the model recompute their values in the backward pass."""
    buffers: Buffers | None = None
    copies: Copies | None = None
    """Copies of weights, for those that a solution stores split; ``None`` if there can be none."""
    fixed_s: float = 0.0
    """Seconds of the work that takes the same time under every plan, which the time of a plan does not include."""
    update_bytes: int = 0
    """Bytes that the optimizer's update needs on every device besides its slots, for what it gathers there."""
    candidates: tuple[tuple[int, str], ...] = ()
    """The decisions of the plan: pairs of a dim group (dims that are split alike) and a mesh axis that may split it."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    sequence: SequenceSplit | None = None
    """How activations are split along their sequence; ``None`` if they are not."""
    kv_cache: Mapping[Factors, int] = field(default_factory=dict)
    """Bytes of the KV cache over all devices, by the dim groups (dims split alike) of its arrays. The buffers have them
    too, at every moment."""

    def assignments(self, dim_groups: Sequence[int]) -> Iterator[Assignment]:
        """Yield every way to split a tensor with these dim groups over the mesh: an axis splits one of them or none."""
        allowed = set(self.candidates)
        choices: list[list[int | None]] = []
        for axis in self.mesh.axes:
            if axis in self.pinned:
                choices.append([self.pinned[axis] if self.pinned[axis] in dim_groups else None])
            else:
                choices.append([None, *(k for k in dict.fromkeys(dim_groups) if (k, axis) in allowed)])
        yield from itertools.product(*choices)

    def groups_of(self, dims: Factors) -> Factors:
        """Return the dim groups (dims split alike) of some factors, in their order; of factors without one, none."""
        return self.dim_groups.of(dims)

    @property
    def length(self) -> Mapping[int, int]:
        """For each dim group, the length of its factors."""
        return self.dim_groups.length

    def shard_count(self, dim_groups: Sequence[int], assignment: Assignment) -> int:
        """Return the number of shards of a tensor with these dim groups, if axes split dims as in ``assignment``."""
        return math.prod(self.sizes[axis] for axis in self.axes_of(dim_groups, assignment))

    def axes_of(self, dim_groups: Sequence[int], assignment: Assignment) -> tuple[str, ...]:
        """Return the mesh axes of more than one device that split any of ``dim_groups``, in the order of the mesh."""
        pairs = zip(self.mesh.axes, assignment, strict=True)
        return tuple(a for a, k in pairs if k is not None and k in dim_groups and self.sizes[a] > 1)

    def is_fully_split(self, dim_groups: Sequence[int], assignment: Assignment) -> bool:
        """Whether dims of each of ``dim_groups`` are split into single entries, if axes split as in ``assignment``."""
        return all(self.shard_count((k,), assignment) == self.length[k] for k in dim_groups)

    def sequence_axes(self, dim_groups: Sequence[int], assignment: Assignment) -> tuple[str, ...]:
        """Return the axes that split the sequence of what has these dim groups: none, if they split another dim."""
        sequence = self.sequence
        if sequence is None or not sequence.dim_groups & {*dim_groups}:
            return ()
        return () if {*sequence.axes} & {*self.axes_of(dim_groups, assignment)} else sequence.axes

    def in_sequence(self, value: Value) -> bool:
        """Whether a value is split along its sequence where axes split no other dim of it: only activations are."""
        if self.sequence is None or not value.from_weights:
            return False
        factors = [self.traced.program.factors(dim) for dim in value.dims]
        # After another factor, it is no range of the dim's entries: tokens of a batch whose rows are merged.
        minor = {*self.groups_of(tuple(itertools.chain(*(dim[1:] for dim in factors))))}
        dims = self.sequence.dim_groups
        return bool(dims & {*self.groups_of(value.factors)}) and not dims & minor

    def buffer_part(self, kind: BufferKind, assignment: Assignment) -> float:
        """Return which part of a buffer each device stores, if axes split dims as in ``assignment``."""
        parts = self.shard_count(kind.dim_groups, assignment)
        along = self.sequence_axes(kind.dim_groups, assignment) if kind.in_sequence else ()
        if kind.gathered_for:
            copied = along and {*along} & {*self.axes_of(kind.gathered_for, assignment)}
            return 1 / parts if copied else 0.0
        return 1 / parts / math.prod(self.sizes[axis] for axis in along)

    def exchange(
        self, exchange: Exchange, work: WorkKind, assignment: Assignment
    ) -> tuple[CollectiveKind, tuple[str, ...], float, float]:
        """Return a collective's kind, axes, seconds and result's bytes per device, if axes split dims so.

        Without axes, the collective is not needed.
        """
        kind, axes = exchange.kind, self.axes_of(exchange.split, assignment)
        none: tuple[CollectiveKind, tuple[str, ...], float, float] = kind, (), 0.0, 0.0
        # Whether the sequence of the result, and that of the work, is split over axes that split nothing else of it.
        of_result = self.sequence_axes(exchange.dims, assignment) if work.in_sequence else ()
        of_work = self.sequence_axes(work.all_groups, assignment) if work.in_sequence else ()
        if exchange.along_sequence:
            axes = of_result if {*axes} & {*of_result} else ()
            of_result = ()
        elif of_work and self.sequence is not None and self.sequence.dim_groups & {*exchange.split}:
            axes = tuple(axis for axis in self.mesh.axes if axis in (*axes, *of_work))
        if not axes or (exchange.unless and self.is_fully_split(exchange.unless, assignment)):
            return none
        # The exchange runs within groups along these axes; other axes have cut the result already.
        others = tuple(None if axis in axes else k for axis, k in zip(self.mesh.axes, assignment, strict=True))
        local = exchange.nbytes / self.shard_count(exchange.dims, others)
        size = math.prod(self.sizes[axis] for axis in axes)
        if of_result and not {*of_result} & {*axes}:
            local /= math.prod(self.sizes[axis] for axis in of_result)
        elif of_result and not of_work and kind == "all-reduce" and self.hardware.reduce_scatter:
            # Each device needs only its part of the sequence of the sum.
            kind, local = "reduce-scatter", local / size
        if kind == "collective-permute":
            local /= size
        return kind, axes, self.hardware.exchange_s(kind, local, axes=axes, size=size), local

    def work_s(self, work: WorkKind, assignment: Assignment) -> float:
        """Return the seconds of one operation with its collectives, if axes split dims as in ``assignment``."""
        parts = self.shard_count(work.dim_groups, assignment)
        if work.in_sequence and self.sequence is not None and self.sequence.dim_groups & {*work.dim_groups}:
            parts *= math.prod(self.sizes[axis] for axis in self.sequence_axes(work.all_groups, assignment))
        compute = self.hardware.compute_s(work.flops / parts, work.nbytes / parts)
        return compute + sum(self.exchange(e, work, assignment)[2] for e in work.exchanges)
