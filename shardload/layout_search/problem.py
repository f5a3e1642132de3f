"""The planning problem: which mesh axis splits which dim group, and what operations cost then.

A *dim group*, identified by a number, is what a plan decides about: an axis splits all its dims or none. It joins all
factors of the traced program that play the same part, such as those of the hidden dims of all layers of a transformer.
Equal operations and equal weights are merged, too. So the size of the problem depends on how many different layers a
model has.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.errors import LayoutError, UsageError
from shardload.keras_bridge.recomputation import Recompute
from shardload.layout_search.lifetimes import Lifetimes, lifetimes
from shardload.layout_search.optimizer_memory import OptimizerMemory, Slot
from shardload.layout_search.program import CollectiveKind, Exchange, Factors, Operation, Program
from shardload.layout_search.tracing import Traced
from shardload.sharding.layout import Layout, Spec
from shardload.sharding.mesh import MeshSpec

_LEAST_DECIDED_BYTES = 1 << 10
"""A search makes no decision about dims that only variables of fewer bytes have, such as seeds of layers."""
_ROUNDS = 3
"""In how many rounds a search compares factors (which dims that must be split alike share), to find those that play the
same part in equal layers. The first round compares the operations and weights that have the factors. Each later round
goes one step further: to the operations and weights that share other factors with these. Factors that no round tells
apart become one decision: a mesh axis splits all of them or none."""
NO_USE = ("batch", "fsdp", "sequence")
"""Kinds of mesh axes that split examples or storage, but no dim of a weight while operations use it."""
Assignment = tuple[int | None, ...]
"""One way to split a tensor: for each mesh axis, in the order of the mesh, the dim group (dims that are split alike)
that the axis splits, or ``None`` if it splits none."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of one device and of the links of each mesh axis, from which a search estimates the time of a step.

    The defaults are those of a TPU v5e at about half of its peak rates: 197 TFLOP/s in bfloat16, 819 GB/s of memory
    bandwidth, and 45 GB/s per link and direction (https://cloud.google.com/tpu/docs/v5e).
    """

    flops_per_s: float = 1e14
    memory_bytes_per_s: float = 6e11
    link_bytes_per_s: float = 4.5e10
    """Bandwidth of the links along each axis that has no entry in ``axis_bytes_per_s``."""
    latency_s: float = 1e-6
    """Least seconds for each of the steps in which a collective sends data. A ring of k devices has k - 1 steps."""
    axis_bytes_per_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.axis_bytes_per_s, Mapping):
            raise LayoutError(
                f"Cannot plan with axis_bytes_per_s={self.axis_bytes_per_s!r:.60}: expected a bandwidth for each axis, "
                "such as {'data': 1e10}"
            )
        # An infinite rate would make all plans cost the same; 0 and NaN give no cost at all.
        rates = (self.flops_per_s, self.memory_bytes_per_s, self.link_bytes_per_s, *self.axis_bytes_per_s.values())
        every: tuple[Any, ...] = (*rates, self.latency_s)
        finite = not any(isinstance(n, bool) or not isinstance(n, Real) or not math.isfinite(n) for n in every)
        if not finite or min(rates) <= 0 or self.latency_s < 0:
            raise LayoutError(f"Cannot plan with {self}: rates must be positive and the latency not negative")
        for name in ("flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "latency_s"):
            object.__setattr__(self, name, float(getattr(self, name)))  # plans are JSON, which has no numbers of NumPy
        axes = {axis: float(rate) for axis, rate in self.axis_bytes_per_s.items()}
        object.__setattr__(self, "axis_bytes_per_s", axes)

    @classmethod
    def of(cls, given: Hardware | None) -> Hardware:
        """Return the ``hardware`` argument of a caller, or the default for ``None``; raise if it is no `Hardware`."""
        if given is not None and not isinstance(given, cls):
            raise UsageError(
                f"Cannot plan with hardware={given!r:.60}: expected a shardload.parallel.Hardware, such as "
                "Hardware(link_bytes_per_s=2e11)"
            )
        return cls() if given is None else given

    def on(self, mesh: MeshSpec, parts: Mapping[str, tuple[str, ...]]) -> Hardware:
        """Return the rates for a mesh whose axes are divided into ``parts``, each with the bandwidth of its axis."""
        rates = {p: rate for axis, rate in self.axis_bytes_per_s.items() for p in parts.get(axis, ()) if p in mesh.axes}
        return replace(self, axis_bytes_per_s=rates)

    def check(self, mesh: MeshSpec) -> None:
        """Raise unless the mesh has every axis for which ``axis_bytes_per_s`` gives a bandwidth."""
        if unknown := sorted(set(self.axis_bytes_per_s) - set(mesh.axes)):
            raise LayoutError(
                f"Cannot plan on {mesh}: axis_bytes_per_s has a bandwidth for {unknown}, expected axes of the mesh"
            )

    def rate_of(self, axis: str) -> float:
        """Return the bandwidth of the links along an axis, in bytes per second."""
        return self.axis_bytes_per_s.get(axis, self.link_bytes_per_s)

    def exchange_s(self, kind: CollectiveKind, nbytes: float, *, axes: Sequence[str], size: int) -> float:
        """Return the seconds of a collective over k = ``size`` devices whose result has ``nbytes`` on each of them.

        An all-reduce moves 2(k-1)/k of the result, an all-gather (k-1)/k, a collective-permute all of it. Over several
        mesh axes, it is as fast as the slowest of their links.
        """
        if size == 1:
            return 0.0
        rate = min(map(self.rate_of, axes))
        if kind == "collective-permute":
            return nbytes / rate + self.latency_s
        # A ring takes k - 1 steps, in each of which a device passes on 1/k of the result. An all-reduce is a
        # reduce-scatter and an all-gather: two rounds.
        passes = 2 if kind == "all-reduce" else 1
        return passes * (size - 1) * (nbytes / size / rate + self.latency_s)

    def compute_s(self, flops: float, nbytes: float) -> float:
        """Return the seconds of work on one device: those of arithmetic plus those of reading and writing memory."""
        return flops / self.flops_per_s + nbytes / self.memory_bytes_per_s


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
    in_backward: bool = True
    """Whether the backward pass of a training step reads the variables: a bias, for example, it does not."""
    embedding: EmbeddingUse | None = None
    """Sizes of the lookup, if the variable is an embedding that a step looks rows up in exactly once, or ``None``."""

    @property
    def all_groups(self) -> Factors:
        """The dim groups (dims split alike) of all dims, each once and in order of their numbers."""
        return tuple(sorted({*itertools.chain(*self.dim_groups)}))

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

    @property
    def all_groups(self) -> Factors:
        """The dim groups (dims split alike) on which the cost of the operations depends."""
        of_exchanges = (dim for e in self.exchanges for dim in (e.split, e.dims, e.unless))
        return tuple(sorted({*self.dim_groups, *itertools.chain(*of_exchanges)}))


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers of activations: for each, its bytes over all devices, when it is needed, and its dim groups."""

    nbytes: NDArray[np.float64]
    first: NDArray[np.int64]
    """The first moment at which each buffer is needed."""
    last: NDArray[np.int64]
    kind: NDArray[np.int64]
    """For each buffer, the index of its dim groups in ``dim_groups``."""
    dim_groups: tuple[Factors, ...]

    def live(self, moments: int, shards: Sequence[int]) -> NDArray[np.float64]:
        """Return the bytes on a device at each moment; ``shards`` has a number for each of ``dim_groups``."""
        local = self.nbytes / np.asarray(shards, float)[self.kind]
        change = np.zeros(moments + 1)
        np.add.at(change, self.first, local)
        np.add.at(change, self.last + 1, -local)
        return np.cumsum(change)

    def at(self, moment: int) -> dict[Factors, float]:
        """Return, for each of the dim groups, the bytes over all devices that are needed at a moment."""
        alive = (self.first <= moment) & (moment <= self.last)
        found = np.bincount(self.kind[alive], self.nbytes[alive], len(self.dim_groups))
        return {groups: nbytes for groups, nbytes in zip(self.dim_groups, found, strict=True) if nbytes}


@dataclass(slots=True)
class Problem:
    """What a search decides for one mesh, and what it costs: groups of dims to split, weights, operations."""

    mesh: MeshSpec
    asked: MeshSpec
    """The mesh that the caller gave; ``mesh`` may have parts of its axes instead of the axes."""
    hardware: Hardware
    traced: Traced
    dim_group_of: Mapping[int, int]
    """For each factor of the traced program (which dims that must be split alike share), the number of its dim group. A
    dim group joins the factors that play the same part in equal layers."""
    length: Mapping[int, int]
    """For each dim group, the length of its factors. The number of parts must divide it."""
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
    fixed_s: float = 0.0
    """Seconds of the work that takes the same time under every plan, which the time of a plan does not include."""
    update_bytes: int = 0
    """Bytes that the optimizer's update needs on every device besides its slots, for what it gathers there."""
    candidates: tuple[tuple[int, str], ...] = ()
    """The decisions of the plan: pairs of a dim group (dims that are split alike) and a mesh axis that may split it."""
    sizes: Mapping[str, int] = field(default_factory=dict)

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
        found = (self.dim_group_of.get(factor) for factor in self.traced.program.factors(dims))
        return tuple(k for k in found if k is not None)

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

    def exchange(self, exchange: Exchange, assignment: Assignment) -> tuple[tuple[str, ...], float, float]:
        """Return the axes, the seconds and the result's bytes per device of a collective, if axes split dims so.

        Without axes, the collective is not needed.
        """
        axes = self.axes_of(exchange.split, assignment)
        if not axes or (exchange.unless and self.is_fully_split(exchange.unless, assignment)):
            return (), 0.0, 0.0
        # The exchange runs within groups along these axes; other axes have cut the result already.
        others = tuple(None if axis in axes else k for axis, k in zip(self.mesh.axes, assignment, strict=True))
        local = exchange.nbytes / self.shard_count(exchange.dims, others)
        size = math.prod(self.sizes[axis] for axis in axes)
        if exchange.kind == "collective-permute":
            local /= size
        return axes, self.hardware.exchange_s(exchange.kind, local, axes=axes, size=size), local

    def work_s(self, work: WorkKind, assignment: Assignment) -> float:
        """Return the seconds of one operation with its collectives, if axes split dims as in ``assignment``."""
        parts = self.shard_count(work.dim_groups, assignment)
        compute = self.hardware.compute_s(work.flops / parts, work.nbytes / parts)
        return compute + sum(self.exchange(e, assignment)[1] for e in work.exchanges)


def make_problem(
    traced: Traced,
    mesh: MeshSpec,
    hardware: Hardware,
    *,
    batch_axes: Sequence[str],
    pins: Mapping[int, Spec],
    optimizer: OptimizerMemory,
    asked: MeshSpec | None = None,
    remat: Mapping[str, Recompute] | None = None,
) -> Problem:
    """Turn a traced program into decisions and costs for the solver; ``pins`` are fixed layouts by ``id(variable)``."""
    program = traced.program
    dim_groups = _dim_groups(traced)
    length = {dim_group: program.length(factor) for factor, dim_group in dim_groups.items()}
    sizes = {axis: mesh.axis_size(axis) for axis in mesh.axes}
    problem = Problem(
        mesh,
        asked or mesh,
        hardware,
        traced,
        dim_groups,
        length,
        (),
        (),
        frozenset(),
        {},
        lifetimes(traced, remat or {}),
        update_bytes=optimizer.update_bytes,
        sizes=sizes,
    )
    # Decided beforehand: the batch axes split the batch, as far as they divide.
    batch = problem.groups_of(traced.batch)
    problem.pinned = _batch_split(problem, batch, batch_axes)
    # An axis can split one dim of a tensor. So two dim groups in one tensor exclude each other on an axis, and one that
    # a tensor has twice (a square kernel within a residual stream) cannot be split at all.
    tuples = {tuple(itertools.chain(*map(problem.groups_of, dims))) for dims in program.tensors}
    twice = {k for groups in tuples for k in groups if groups.count(k) > 1}
    problem.conflicts = frozenset(
        frozenset(pair) for groups in tuples for pair in itertools.combinations(sorted(set(groups)), 2)
    )
    problem.weights = _weights(problem, pins, optimizer.slots)
    sliced = {*problem.groups_of(tuple(program.slicing()))}
    problem.candidates = tuple(_candidates(problem, exclude=twice | {*batch} | sliced))
    # Last, as work on dims that nothing can split is left out.
    relevant = {k for k, _ in problem.candidates} | set(problem.pinned.values())
    problem.work, problem.fixed_s = _work(problem, relevant)
    problem.buffers = _buffers(problem, relevant)
    return problem


def _buffers(problem: Problem, relevant: set[int]) -> Buffers | None:
    """Return the buffers of activations, once for each time that a value needs one; ``None`` if there are none."""
    weights = {id(value) for _, value in problem.traced.weights}
    values = (v for v in problem.traced.program.values if v.view_of is None and id(v) not in weights)
    spans = [(v, span) for v in values for span in problem.lifetimes.of(v)]
    if not spans:
        return None
    numbers: dict[Factors, int] = {}
    kinds = [
        numbers.setdefault(tuple(sorted({*problem.groups_of(v.factors)} & relevant)), len(numbers)) for v, _ in spans
    ]
    first, last = np.array([span for _, span in spans]).T
    return Buffers(np.array([float(v.nbytes) for v, _ in spans]), first, last, np.array(kinds), tuple(numbers))


def divided_mesh(traced: Traced, mesh: MeshSpec, *, batch_axes: Sequence[str]) -> MeshSpec:
    """Return a mesh with the axes for weights divided in two where heads, or other dims, ask for it.

    An axis of 64 devices cannot split 8 key heads. Divided into 8 x 8, its first part splits them, and its second part
    has copies, while 128 query heads are split over both.
    """
    sliced = traced.program.slicing()
    for axis in mesh.axes_of("model"):
        votes: Counter[int] = Counter()
        for variable, value in traced.weights:
            for dim in map(traced.program.factors, value.dims):
                major = math.gcd(traced.program.length(dim[0]), mesh.axis_size(axis)) if dim else 1
                # What is divided already, or sliced, gains nothing.
                if variable.trainable and 1 < major < mesh.axis_size(axis) and dim[0] not in sliced:
                    votes[major] += value.nbytes
        if votes and axis not in batch_axes and not {f"{axis}_1", f"{axis}_2"} & {*mesh.axes}:
            # Of equal votes, the larger: more devices share the work.
            mesh = mesh.divided(axis, max(votes, key=lambda major: (votes[major], major)))
    return mesh


def _batch_split(problem: Problem, batch: Factors, axes: Sequence[str]) -> dict[str, int]:
    """Return which dim group each axis splits if ``axes`` split the batch: a minor factor after all of the major."""
    left = [[k, problem.length[k]] for k in batch]
    found = {}
    for axis in axes:
        while left and left[0][1] == 1:
            del left[0]
        if left and left[0][1] % problem.sizes[axis] == 0:
            found[axis] = left[0][0]
            left[0][1] //= problem.sizes[axis]
    return found


def _candidates(problem: Problem, *, exclude: set[int]) -> Iterator[tuple[int, str]]:
    # Dims of small variables alone (seeds, scalars of layers) would add decisions of no effect.
    large = [w for w in problem.weights if w.nbytes >= _LEAST_DECIDED_BYTES]
    of_weights = sorted({k for w in large for k in w.all_groups} - exclude)
    for axis in problem.mesh.axes:
        size, taken = problem.sizes[axis], problem.pinned.get(axis)
        if size == 1 or taken is not None or problem.mesh.axis_kind(axis) in NO_USE:
            continue
        for dim_group in of_weights:
            if problem.length[dim_group] % size == 0:
                yield dim_group, axis


def _dim_groups(traced: Traced) -> dict[int, int]:
    """Return, for each factor of the program, the number of its dim group: one for the same factors of equal layers."""
    program = traced.program
    uses = Counter(_signature(program, op) for op in program.operations)
    for variable, value in traced.weights:
        about = "weight", value.shape, value.itemsize, bool(variable.trainable)
        uses[program.factors(value.factors), about] += 1
    batch = program.factors(traced.batch)
    # Sorted, so that every process numbers the dim groups alike and arrives at the same plan.
    factors = sorted({*itertools.chain(*(dims for dims, _ in uses)), *batch})
    colour: dict[int, Any] = {f: (program.length(f), f in batch) for f in factors}
    # Each round adds to a factor's colour those of its neighbours: weights and operations that have it in a dim, with
    # the position and all other dims. Colours are hashes, as nested tuples would grow with every round.
    for _ in range(_ROUNDS):
        seen: dict[int, Counter[Any]] = {f: Counter() for f in factors}
        for (dims, about), count in uses.items():
            colours = tuple(colour[f] for f in dims)
            for i, f in enumerate(dims):
                seen[f][hash((i, about, colours))] += count
        colour = {f: hash((colour[f], frozenset(seen[f].items()))) for f in factors}
    # By first occurrence, not by hash: hashes of strings differ between processes.
    numbers: dict[Any, int] = {}
    dim_groups = {f: numbers.setdefault(colour[f], len(numbers)) for f in factors}
    # Apart, or one decision would split two dims of a tensor over the same axis.
    clash: set[int] = set()
    for tensor in program.tensors:
        meeting = Counter(dim_groups[f] for f in {*itertools.chain(*map(program.factors, tensor))} & dim_groups.keys())
        clash |= {dim_group for dim_group, count in meeting.items() if count > 1}
    following = itertools.count(len(numbers))
    return {f: next(following) if k in clash else k for f, k in dim_groups.items()}


def _signature(program: Program, op: Operation) -> tuple[Factors, tuple[Any, ...]]:
    """Return the factors of an operation's dims, and a tuple of all else, which is equal for equal work."""
    dims = [*program.factors(op.dims)]
    exchanges = []
    for e in op.exchanges:
        # Positions in `dims` instead of factors, which differ from layer to layer.
        ends = [len(dims)]
        for part in (e.split, e.dims, e.unless):
            dims += program.factors(part)
            ends.append(len(dims))
        exchanges.append((e.kind, e.nbytes, *ends))
    return tuple(dims), (op.name, op.flops, op.nbytes, tuple(exchanges))


def _weights(
    problem: Problem, pins: Mapping[int, Spec], slots: Mapping[int, tuple[Slot, ...]]
) -> tuple[WeightKind, ...]:
    lookups = problem.traced.program.lookups
    # Blocks that recompute read all of their weights again.
    read = None if problem.lifetimes.remat else _read_in_backward(problem.traced)
    members: dict[WeightKind, list[int]] = defaultdict(list)
    for i, (variable, value) in enumerate(problem.traced.weights):
        dims = tuple(map(problem.groups_of, value.dims))
        pin, own = pins.get(id(variable)), slots.get(id(variable), ())
        # By origin: a lookup reads the embedding after its cast to the compute dtype.
        uses = [
            EmbeddingUse(lookup.dim, lookup.embedding.nbytes, lookup.rows.nbytes, lookup.indices.nbytes)
            for lookup in lookups
            if lookup.embedding.origin is value
        ]
        use = uses[0] if len(uses) == 1 else None
        again = read is None or id(value) in read
        kind = WeightKind(value.shape, value.nbytes, dims, bool(variable.trainable), pin, own, (), again, use)
        members[kind].append(i)
    return tuple(replace(kind, members=tuple(positions)) for kind, positions in members.items())


def _read_in_backward(traced: Traced) -> set[int]:
    """Return the ``id`` of each value that the backward pass reads, as it is or converted to another dtype."""
    found = set()
    for value in traced.program.values:
        if value.last_use > traced.boundary:
            origin = value.root
            while origin.cast_of is not None:
                origin = origin.cast_of.root
            found.add(id(origin))
    return found


def _work(problem: Problem, relevant: set[int]) -> tuple[tuple[WorkKind, ...], float]:
    """Return the operations whose time depends on the plan, and the seconds of all others.

    Operations of equal cost are merged, with their count.
    """

    def groups(dims: Factors) -> Factors:
        return tuple(sorted({*problem.groups_of(dims)} & relevant))

    merged: Counter[WorkKind] = Counter()
    fixed_s = 0.0
    for at, op in enumerate(problem.traced.program.operations):
        times = 2 if at in problem.lifetimes.again else 1
        exchanges = tuple(
            # All of `unless` counts: what no axis can split is not fully split.
            Exchange(e.kind, split, e.nbytes, groups(e.dims), tuple(sorted({*problem.groups_of(e.unless)})))
            for e in op.exchanges
            if (split := groups(e.split))
        )
        dims = groups(op.dims)
        # The rest takes the same time under every plan, so the time of a step does not count it.
        if dims or exchanges:
            merged[WorkKind(op.name, dims, op.flops, op.nbytes, exchanges)] += times
        else:
            fixed_s += times * problem.hardware.compute_s(op.flops, op.nbytes)
    return tuple(replace(kind, count=count) for kind, count in merged.items()), fixed_s
