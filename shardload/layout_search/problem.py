"""The planning problem: which mesh axis splits which group of dims, and what operations cost then.

The program's groups are merged where they play the same part (the hidden dims of all layers of a transformer), and so
are operations and weights: the size of the problem depends on the kinds of layers, not on their number.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardload.layout_search.batch_moves import Table, table_of
from shardload.layout_search.hardware import Hardware
from shardload.layout_search.optimizer_memory import OptimizerNeeds, Slot
from shardload.layout_search.program import UNSPLIT, Exchange, Program, Value
from shardload.layout_search.tracing import Traced
from shardload.sharding.layout import Layout, Spec
from shardload.sharding.mesh import MeshSpec

SMALL_BYTES = 1 << 10
"""Dims that only smaller variables have are not split: seeds, scalars of layers."""
ROUNDS = 3
"""How many steps away groups and operations are compared before two groups count as the same kind."""
Assignment = tuple[int | None, ...]
"""For each mesh axis, the kind of group that it splits, or ``None``."""


@dataclass(frozen=True, slots=True)
class WeightKind:
    """Variables with the same shape, dtype, slots and kinds of dims."""

    shape: tuple[int, ...]
    nbytes: int
    kinds: tuple[int, ...]
    trainable: bool
    pin: Spec | None
    """The layout that the user has fixed."""
    slots: tuple[Slot, ...]
    """The state of the optimizer for each of them."""
    members: tuple[int, ...]
    """Positions of the variables in `Traced.weights`."""
    table: Table | None = None
    """How it is looked up in, if that is all that a step does with it."""

    def allows(self, layout: Layout) -> bool:
        """Whether the optimizer can split its state for this layout."""
        return layout.divides(self.shape) and all(slot.allows(layout) for slot in self.slots)

    def slot_bytes(self, layout: Layout) -> float:
        """Return the bytes of the slots of one of them on each device."""
        return sum(slot.device_bytes(layout) for slot in self.slots)


@dataclass(frozen=True, slots=True)
class WorkKind:
    """Operations with the same work, exchanges and kinds of dims."""

    name: str
    kinds: tuple[int, ...]
    flops: float
    nbytes: float
    exchanges: tuple[Exchange, ...]
    """Their ``group`` and ``dims`` are kinds."""
    count: int


@dataclass(slots=True)
class Problem:
    """Kinds of groups, weights and work on one mesh."""

    mesh: MeshSpec
    hardware: Hardware
    traced: Traced
    kind_of: Mapping[int, int]
    """From a group to its kind."""
    length: Mapping[int, int]
    """Of each kind: what the number of devices that split it must divide."""
    weights: tuple[WeightKind, ...]
    work: tuple[WorkKind, ...]
    conflicts: frozenset[frozenset[int]]
    """Pairs of kinds that one tensor has both of."""
    pinned: Mapping[str, int]
    """The kind that an axis splits in any case: the batch."""
    update_bytes: int = 0
    """As in `OptimizerNeeds`."""
    candidates: tuple[tuple[int, str], ...] = ()
    """Every kind and axis between which the plan can choose."""
    sizes: Mapping[str, int] = field(default_factory=dict)

    def assignments(self, kinds: Sequence[int]) -> Iterator[Assignment]:
        """Yield every way to split ``kinds``: for each axis one of them, or none."""
        allowed = set(self.candidates)
        choices: list[list[int | None]] = []
        for axis in self.mesh.axes:
            if axis in self.pinned:
                choices.append([self.pinned[axis] if self.pinned[axis] in kinds else None])
            else:
                choices.append([None, *(k for k in dict.fromkeys(kinds) if (k, axis) in allowed)])
        yield from itertools.product(*choices)

    def parts(self, kinds: Sequence[int], assignment: Assignment) -> int:
        """Return into how many parts an assignment splits a tensor with these kinds of dims."""
        return math.prod(
            self.sizes[axis]
            for axis, kind in zip(self.mesh.axes, assignment, strict=True)
            if kind in kinds and kind is not None
        )

    def exchange_s(self, exchange: Exchange, assignment: Assignment) -> tuple[float, float]:
        """Return the seconds that an exchange takes under an assignment, and the bytes of its results."""
        seconds = moved = 0.0
        for i, axis in enumerate(self.mesh.axes):
            if assignment[i] != exchange.group:
                continue
            # The exchange runs within groups along this axis; other axes have cut the result already.
            others = tuple(None if j == i else kind for j, kind in enumerate(assignment))
            local = exchange.nbytes / self.parts(exchange.dims, others)
            if exchange.kind == "collective-permute":
                local /= self.sizes[axis]
            seconds += self.hardware.exchange_s(exchange.kind, local, axis=axis, size=self.sizes[axis])
            moved += local
        return seconds, moved

    def work_s(self, work: WorkKind, assignment: Assignment) -> float:
        """Return the seconds that one operation of a kind takes, with its exchanges."""
        parts = self.parts(work.kinds, assignment)
        compute = self.hardware.compute_s(work.flops / parts, work.nbytes / parts)
        return compute + sum(self.exchange_s(e, assignment)[0] for e in work.exchanges)


def make_problem(
    traced: Traced,
    mesh: MeshSpec,
    hardware: Hardware,
    *,
    batch_axis: str,
    pins: Mapping[int, Spec],
    optimizer: OptimizerNeeds,
) -> Problem:
    """Reduce a traced program to the kinds that a plan decides about.

    Args:
        traced: The program.
        mesh: The mesh.
        hardware: The costs.
        batch_axis: The axis that splits the first dim of every input, where it divides.
        pins: Layouts that are fixed, by ``id(variable)``.
        optimizer: What the optimizer needs.
    """
    program = traced.program
    kinds = _kinds(traced)
    # Decided beforehand: the batch axis splits the batch, if it divides.
    batch = {kinds[program.group(n)] for n in traced.batch}
    length = _lengths(program, kinds)
    sizes = {axis: mesh.axis_size(axis) for axis in mesh.axes}
    pinned = {}
    if batch and all(length[k] % sizes[batch_axis] == 0 for k in batch):
        pinned = {batch_axis: min(batch)}
    # An axis can split one dim of a tensor. So two kinds in one tensor exclude each other on an axis, and a kind that a
    # tensor has twice (a square kernel within a residual stream) cannot be split at all.
    tuples = {tuple(_kind(program, kinds, n) for n in dims) for dims in program.tensors}
    twice = {k for dims in tuples for k in dims if k != UNSPLIT and dims.count(k) > 1}
    conflicts = frozenset(
        frozenset(pair) for dims in tuples for pair in itertools.combinations(sorted(set(dims) - {UNSPLIT}), 2)
    )
    weights = _weights(traced, kinds, pins, optimizer.slots)
    problem = Problem(
        mesh, hardware, traced, kinds, length, weights, (), conflicts, pinned, optimizer.update_bytes, sizes=sizes
    )
    apart = {_kind(program, kinds, n) for n in program.apart}
    problem.candidates = tuple(_candidates(problem, exclude=twice | batch | apart))
    # Last, as work on dims that nothing can split is left out.
    problem.work = _work(program, kinds, {k for k, _ in problem.candidates} | set(pinned.values()))
    return problem


def _kind(program: Program, kinds: Mapping[int, int], node: int) -> int:
    return UNSPLIT if node == UNSPLIT else kinds.get(program.group(node), UNSPLIT)


def _candidates(problem: Problem, *, exclude: set[int]) -> Iterator[tuple[int, str]]:
    # Dims of small variables alone (seeds, scalars of layers) would add decisions of no effect.
    large = [w for w in problem.weights if w.nbytes >= SMALL_BYTES]
    of_weights = sorted({k for w in large for k in w.kinds if k != UNSPLIT} - exclude)
    for axis in problem.mesh.axes:
        size, taken = problem.sizes[axis], problem.pinned.get(axis)
        if size == 1 or taken is not None or problem.mesh.axis_kind(axis) == "batch":
            continue
        for kind in of_weights:
            if problem.length[kind] % size == 0:
                yield kind, axis


def _lengths(program: Program, kinds: Mapping[int, int]) -> dict[int, int]:
    found: dict[int, int] = defaultdict(int)
    for group, kind in kinds.items():
        found[kind] = math.gcd(found[kind], program.length(group))
    return dict(found)


def _kinds(traced: Traced) -> dict[int, int]:
    """Number the kinds of groups: two are of one kind if operations and weights see them alike.

    This is colour refinement on the graph of groups, weights and operations, for `ROUNDS` rounds. Two groups of one
    kind that meet in one tensor are kept apart.
    """
    program = traced.program
    operations = Counter(_signature(program, op) for op in program.operations)
    weights = [(tuple(program.group(n) for n in v.dims), (v.shape, v.itemsize, w.trainable)) for w, v in traced.weights]
    seen_in = itertools.chain(*(dims for dims, _ in weights), *(dims for dims, _ in operations))
    # Sorted, so that every process numbers the kinds alike and arrives at the same plan.
    groups = sorted({*seen_in, *(program.group(n) for n in traced.batch)} - {UNSPLIT})
    colour: dict[int, Any] = {g: (program.length(g), any(program.group(n) == g for n in traced.batch)) for g in groups}
    # Each round adds to a group's colour those of its neighbours: weights and operations that have it as a dim, with
    # the position and all other dims. Colours are hashes, as nested tuples would grow with every round.
    for _ in range(ROUNDS):
        seen: dict[int, Counter[Any]] = {g: Counter() for g in groups}
        for dims, about in weights:
            colours = tuple(colour.get(g) for g in dims)
            for i, g in enumerate(dims):
                if g != UNSPLIT:
                    seen[g][hash(("weight", i, about, colours))] += 1
        for (dims, about), count in operations.items():
            colours = tuple(colour.get(g) for g in dims)
            for i, g in enumerate(dims):
                if g != UNSPLIT:
                    seen[g][hash((i, about, colours))] += count
        colour = {g: hash((colour[g], frozenset(seen[g].items()))) for g in groups}
    # By first occurrence, not by hash: hashes of strings differ between processes.
    numbers: dict[Any, int] = {}
    kinds = {g: numbers.setdefault(colour[g], len(numbers)) for g in groups}
    return _apart(program, kinds)


def _signature(program: Program, op: Any) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Return an operation's groups, and everything else about it."""
    dims = [program.group(n) for n in op.dims]
    exchanges = []
    for e in op.exchanges:
        start = len(dims)
        dims += [program.group(e.group), *(program.group(n) for n in e.dims)]
        # Positions in `dims` instead of groups, which differ from layer to layer.
        exchanges.append((e.kind, e.nbytes, start, len(dims)))
    return tuple(dims), (op.name, op.flops, op.nbytes, tuple(exchanges))


def _apart(program: Program, kinds: dict[int, int]) -> dict[int, int]:
    """Give groups of one kind that meet in one tensor kinds of their own."""
    members: dict[int, list[int]] = defaultdict(list)
    for group, kind in kinds.items():
        members[kind].append(group)
    clash: set[int] = set()
    for dims in program.tensors:
        groups = {program.group(n) for n in dims if n != UNSPLIT} & kinds.keys()
        counted = Counter(kinds[g] for g in groups)
        clash |= {kind for kind, count in counted.items() if count > 1}
    # Otherwise, one decision would split two dims of that tensor over the same axis.
    following = itertools.count(len(members))
    return {g: next(following) if k in clash else k for g, k in kinds.items()}


def _weights(
    traced: Traced, kinds: Mapping[int, int], pins: Mapping[int, Spec], slots: Mapping[int, tuple[Slot, ...]]
) -> tuple[WeightKind, ...]:
    program = traced.program
    kinds_of: dict[WeightKind, list[int]] = defaultdict(list)
    for i, (variable, value) in enumerate(traced.weights):
        dims = tuple(_kind(program, kinds, n) for n in value.dims)
        pin, own = pins.get(id(variable)), slots.get(id(variable), ())
        alike = WeightKind(
            value.shape, value.nbytes, dims, bool(variable.trainable), pin, own, (), table_of(program, value)
        )
        kinds_of[alike].append(i)
    return tuple(replace(kind, members=tuple(members)) for kind, members in kinds_of.items())


def _work(program: Program, kinds: Mapping[int, int], relevant: set[int]) -> tuple[WorkKind, ...]:
    """Merge operations that differ in dims that are never split."""

    def kind(node: int) -> int:
        found = _kind(program, kinds, node)
        return found if found in relevant else UNSPLIT

    merged: Counter[Any] = Counter()
    for op in program.operations:
        exchanges = tuple(
            Exchange(e.kind, k, e.nbytes, tuple(sorted({kind(n) for n in e.dims} - {UNSPLIT})))
            for e in op.exchanges
            if (k := kind(e.group)) != UNSPLIT
        )
        dims = tuple(sorted({kind(n) for n in op.dims} - {UNSPLIT}))
        # The rest takes the same time under every plan, so the time of a step does not count it.
        if dims or exchanges:
            merged[op.name, dims, op.flops, op.nbytes, exchanges] += 1
    return tuple(
        WorkKind(name, dims, flops, nbytes, exchanges, count)
        for (name, dims, flops, nbytes, exchanges), count in merged.items()
    )


def stored_values(traced: Traced) -> list[Value]:
    """Return values that need buffers of their own, without the weights."""
    weights = {id(value) for _, value in traced.weights}
    return [v for v in traced.program.values if v.stored and v.view_of is None and id(v) not in weights]
