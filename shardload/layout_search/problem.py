"""The planning problem: which mesh axis splits which dim group, and what operations cost then.

A *dim group*, identified by a number, is what a plan decides about: an axis splits all dims of the group or none. It
joins all groups of the traced program that play the same part, such as the hidden dims of all layers of a transformer.
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

from shardload.errors import LayoutError, UsageError
from shardload.layout_search.optimizer_memory import OptimizerMemory, Slot
from shardload.layout_search.program import UNSPLIT, CollectiveKind, Exchange, Program
from shardload.layout_search.tracing import Traced
from shardload.sharding.layout import Layout, Spec
from shardload.sharding.mesh import MeshSpec

_LEAST_DECIDED_BYTES = 1 << 10
"""A search makes no decision about dims that only variables of fewer bytes have, such as seeds of layers."""
_ROUNDS = 3
"""In how many rounds a search compares groups of dims (dims that must be split alike), to find those that play the same
part in equal layers. The first round compares the operations and weights that have dims of the groups. Each later round
goes one step further: to the operations and weights that share other dims with these. Groups that no round tells apart
become one decision: a mesh axis splits all of them or none."""
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

    def check(self, mesh: MeshSpec) -> None:
        """Raise unless the mesh has every axis for which ``axis_bytes_per_s`` gives a bandwidth."""
        if unknown := sorted(set(self.axis_bytes_per_s) - set(mesh.axes)):
            raise LayoutError(
                f"Cannot plan on {mesh}: axis_bytes_per_s has a bandwidth for {unknown}, expected axes of the mesh"
            )

    def rate_of(self, axis: str) -> float:
        """Return the bandwidth of the links along an axis, in bytes per second."""
        return self.axis_bytes_per_s.get(axis, self.link_bytes_per_s)

    def exchange_s(self, kind: CollectiveKind, nbytes: float, *, axis: str, size: int) -> float:
        """Return the seconds of a collective over k = ``size`` devices whose result has ``nbytes`` on each of them.

        An all-reduce moves 2(k-1)/k of the result, an all-gather (k-1)/k, a collective-permute all of it.
        """
        if size == 1:
            return 0.0
        rate = self.rate_of(axis)
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
    dim_groups: tuple[int, ...]
    """For each dim of the variables, the number of its dim group (dims split alike); `UNSPLIT` if it is in none."""
    trainable: bool
    pin: Spec | None
    """The layout that the user has fixed for the variables; ``None`` if the search may choose it."""
    slots: tuple[Slot, ...]
    """The arrays that the optimizer keeps for each of the variables, such as two moments for Adam."""
    members: tuple[int, ...]
    """Positions of the variables in `Traced.weights`, which lists all variables of the model."""
    embedding: EmbeddingUse | None = None
    """Sizes of the lookup, if the variable is an embedding that a step looks rows up in exactly once, or ``None``."""

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
    flops: float
    nbytes: float
    exchanges: tuple[Exchange, ...]
    """Collectives that the operations need if certain dims are split. `Exchange.group` and `Exchange.dims` are numbers
    of dim groups here (dims that are split alike), not of single dims."""
    count: int = 0


@dataclass(slots=True)
class Problem:
    """What a search decides for one mesh, and what it costs: groups of dims to split, weights, operations."""

    mesh: MeshSpec
    hardware: Hardware
    traced: Traced
    dim_group_of: Mapping[int, int]
    """For each group of the traced program (dims that must be split alike), the number of its dim group. A dim group
    joins the groups that play the same part in equal layers."""
    length: Mapping[int, int]
    """For each dim group, the greatest common divisor of its dims' lengths. The number of parts must divide it."""
    weights: tuple[WeightKind, ...]
    work: tuple[WorkKind, ...]
    conflicts: frozenset[frozenset[int]]
    """Pairs of dim groups that occur in one tensor: a mesh axis can split only one of the two."""
    pinned: Mapping[str, int]
    """Maps the batch axis to the dim group of the batch, which it always splits. Empty if the size of the axis does not
    divide the length of the batch."""
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

    def shard_count(self, dim_groups: Sequence[int], assignment: Assignment) -> int:
        """Return the number of shards of a tensor with these dim groups, if axes split dims as in ``assignment``."""
        return math.prod(
            self.sizes[axis]
            for axis, dim_group in zip(self.mesh.axes, assignment, strict=True)
            if dim_group in dim_groups and dim_group is not None
        )

    def exchange_s(self, exchange: Exchange, assignment: Assignment) -> tuple[float, float]:
        """Return the seconds of a collective, and its result's bytes per device, if axes split as in ``assignment``."""
        seconds = moved = 0.0
        for i, axis in enumerate(self.mesh.axes):
            if assignment[i] != exchange.group:
                continue
            # The exchange runs within groups along this axis; other axes have cut the result already.
            others = tuple(None if j == i else dim_group for j, dim_group in enumerate(assignment))
            local = exchange.nbytes / self.shard_count(exchange.dims, others)
            if exchange.kind == "collective-permute":
                local /= self.sizes[axis]
            seconds += self.hardware.exchange_s(exchange.kind, local, axis=axis, size=self.sizes[axis])
            moved += local
        return seconds, moved

    def work_s(self, work: WorkKind, assignment: Assignment) -> float:
        """Return the seconds of one operation with its collectives, if axes split dims as in ``assignment``."""
        parts = self.shard_count(work.dim_groups, assignment)
        compute = self.hardware.compute_s(work.flops / parts, work.nbytes / parts)
        return compute + sum(self.exchange_s(e, assignment)[0] for e in work.exchanges)


def make_problem(
    traced: Traced,
    mesh: MeshSpec,
    hardware: Hardware,
    *,
    batch_axis: str,
    pins: Mapping[int, Spec],
    optimizer: OptimizerMemory,
) -> Problem:
    """Turn a traced program into decisions and costs for the solver; ``pins`` are fixed layouts by ``id(variable)``."""
    program = traced.program
    dim_groups = _dim_groups(traced)
    # Decided beforehand: the batch axis splits the batch, if it divides.
    batch = {dim_groups[program.group(n)] for n in traced.batch}
    length: dict[int, int] = defaultdict(int)
    for group, dim_group in dim_groups.items():
        length[dim_group] = math.gcd(length[dim_group], program.length(group))
    sizes = {axis: mesh.axis_size(axis) for axis in mesh.axes}
    pinned = {}
    if batch and all(length[k] % sizes[batch_axis] == 0 for k in batch):
        pinned = {batch_axis: min(batch)}
    # An axis can split one dim of a tensor. So two dim groups in one tensor exclude each other on an axis, and one that
    # a tensor has twice (a square kernel within a residual stream) cannot be split at all.
    tuples = {tuple(_dim_group(program, dim_groups, n) for n in dims) for dims in program.tensors}
    twice = {k for dims in tuples for k in dims if k != UNSPLIT and dims.count(k) > 1}
    conflicts = frozenset(
        frozenset(pair) for dims in tuples for pair in itertools.combinations(sorted(set(dims) - {UNSPLIT}), 2)
    )
    weights = _weights(traced, dim_groups, pins, optimizer.slots)
    problem = Problem(
        mesh, hardware, traced, dim_groups, length, weights, (), conflicts, pinned, optimizer.update_bytes, sizes=sizes
    )
    sliced = {_dim_group(program, dim_groups, n) for n in program.sliced}
    problem.candidates = tuple(_candidates(problem, exclude=twice | batch | sliced))
    # Last, as work on dims that nothing can split is left out.
    problem.work = _work(program, dim_groups, {k for k, _ in problem.candidates} | set(pinned.values()))
    return problem


def _dim_group(program: Program, dim_groups: Mapping[int, int], node: int) -> int:
    return UNSPLIT if node == UNSPLIT else dim_groups.get(program.group(node), UNSPLIT)


def _candidates(problem: Problem, *, exclude: set[int]) -> Iterator[tuple[int, str]]:
    # Dims of small variables alone (seeds, scalars of layers) would add decisions of no effect.
    large = [w for w in problem.weights if w.nbytes >= _LEAST_DECIDED_BYTES]
    of_weights = sorted({k for w in large for k in w.dim_groups if k != UNSPLIT} - exclude)
    for axis in problem.mesh.axes:
        size, taken = problem.sizes[axis], problem.pinned.get(axis)
        if size == 1 or taken is not None or problem.mesh.axis_kind(axis) == "batch":
            continue
        for dim_group in of_weights:
            if problem.length[dim_group] % size == 0:
                yield dim_group, axis


def _dim_groups(traced: Traced) -> dict[int, int]:
    """Return, for each group of the program, the number of its dim group: one number for groups of equal layers."""
    program = traced.program
    uses = Counter(_signature(program, op) for op in program.operations)
    for variable, value in traced.weights:
        about = "weight", value.shape, value.itemsize, bool(variable.trainable)
        uses[tuple(map(program.group, value.dims)), about] += 1
    # Sorted, so that every process numbers the dim groups alike and arrives at the same plan.
    groups = sorted({*itertools.chain(*(dims for dims, _ in uses)), *map(program.group, traced.batch)} - {UNSPLIT})
    colour: dict[int, Any] = {g: (program.length(g), any(program.group(n) == g for n in traced.batch)) for g in groups}
    # Each round adds to a group's colour those of its neighbours: weights and operations that have it as a dim, with
    # the position and all other dims. Colours are hashes, as nested tuples would grow with every round.
    for _ in range(_ROUNDS):
        seen: dict[int, Counter[Any]] = {g: Counter() for g in groups}
        for (dims, about), count in uses.items():
            colours = tuple(colour.get(g) for g in dims)
            for i, g in enumerate(dims):
                if g != UNSPLIT:
                    seen[g][hash((i, about, colours))] += count
        colour = {g: hash((colour[g], frozenset(seen[g].items()))) for g in groups}
    # By first occurrence, not by hash: hashes of strings differ between processes.
    numbers: dict[Any, int] = {}
    dim_groups = {g: numbers.setdefault(colour[g], len(numbers)) for g in groups}
    # Apart, or one decision would split two dims of a tensor over the same axis.
    clash: set[int] = set()
    for dims in program.tensors:
        meeting = Counter(dim_groups[g] for g in set(map(program.group, dims)) & dim_groups.keys())
        clash |= {dim_group for dim_group, count in meeting.items() if count > 1}
    following = itertools.count(len(numbers))
    return {g: next(following) if k in clash else k for g, k in dim_groups.items()}


def _signature(program: Program, op: Any) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Return the groups of an operation's dims, and a tuple of all else: operations with equal tuples do equal work."""
    dims = [program.group(n) for n in op.dims]
    exchanges = []
    for e in op.exchanges:
        start = len(dims)
        dims += [program.group(e.group), *(program.group(n) for n in e.dims)]
        # Positions in `dims` instead of groups, which differ from layer to layer.
        exchanges.append((e.kind, e.nbytes, start, len(dims)))
    return tuple(dims), (op.name, op.flops, op.nbytes, tuple(exchanges))


def _weights(
    traced: Traced, dim_groups: Mapping[int, int], pins: Mapping[int, Spec], slots: Mapping[int, tuple[Slot, ...]]
) -> tuple[WeightKind, ...]:
    program = traced.program
    members: dict[WeightKind, list[int]] = defaultdict(list)
    for i, (variable, value) in enumerate(traced.weights):
        dims = tuple(_dim_group(program, dim_groups, n) for n in value.dims)
        pin, own = pins.get(id(variable)), slots.get(id(variable), ())
        # By origin: a lookup reads the embedding after its cast to the compute dtype.
        uses = [
            EmbeddingUse(lookup.dim, lookup.embedding.nbytes, lookup.rows.nbytes, lookup.indices.nbytes)
            for lookup in program.lookups
            if lookup.embedding.origin is value
        ]
        use = uses[0] if len(uses) == 1 else None
        kind = WeightKind(value.shape, value.nbytes, dims, bool(variable.trainable), pin, own, (), use)
        members[kind].append(i)
    return tuple(replace(kind, members=tuple(positions)) for kind, positions in members.items())


def _work(program: Program, dim_groups: Mapping[int, int], relevant: set[int]) -> tuple[WorkKind, ...]:
    """Return the operations whose time depends on the plan; operations of equal cost are merged, with their count."""

    def dim_group(node: int) -> int:
        found = _dim_group(program, dim_groups, node)
        return found if found in relevant else UNSPLIT

    merged: Counter[WorkKind] = Counter()
    for op in program.operations:
        exchanges = tuple(
            Exchange(e.kind, k, e.nbytes, tuple(sorted({dim_group(n) for n in e.dims} - {UNSPLIT})))
            for e in op.exchanges
            if (k := dim_group(e.group)) != UNSPLIT
        )
        dims = tuple(sorted({dim_group(n) for n in op.dims} - {UNSPLIT}))
        # The rest takes the same time under every plan, so the time of a step does not count it.
        if dims or exchanges:
            merged[WorkKind(op.name, dims, op.flops, op.nbytes, exchanges)] += 1
    return tuple(replace(kind, count=count) for kind, count in merged.items())
