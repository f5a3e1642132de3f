"""Make the problem of a traced program on a mesh: what can be split, and what that costs.

Equal operations and equal weights are merged. So the size of the problem depends on how many different layers a model
has.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardload.keras_bridge.recomputation import Recompute
from shardload.layout_search.dim_groups import DimGroups
from shardload.layout_search.hardware import Hardware
from shardload.layout_search.lifetimes import Lifetimes, lifetimes
from shardload.layout_search.optimizer_memory import OptimizerMemory, Slot
from shardload.layout_search.problem import (
    NO_USE,
    BufferKind,
    Buffers,
    Copies,
    EmbeddingUse,
    Problem,
    SequenceSplit,
    WeightKind,
    WorkKind,
)
from shardload.layout_search.program import Exchange, Factors, Operation, Program, Value
from shardload.layout_search.tracing import Traced
from shardload.layouts.kv_cache import KvCache
from shardload.sharding.layout import Spec
from shardload.sharding.mesh import MeshSpec

_LEAST_DECIDED_BYTES = 1 << 10
"""A search makes no decision about dims that only variables of fewer bytes have, such as seeds of layers."""


def make_problem(
    traced: Traced,
    dim_groups: DimGroups,
    mesh: MeshSpec,
    hardware: Hardware,
    *,
    batch_axes: Sequence[str],
    pins: Mapping[int, Spec],
    optimizer: OptimizerMemory,
    asked: MeshSpec | None = None,
    remat: Mapping[str, Recompute] | None = None,
    split_sequence: bool = False,
    kv_cache: KvCache | None = None,
) -> Problem:
    """Turn a traced program into decisions and costs for the solver; ``pins`` are fixed layouts by ``id(variable)``.

    With ``split_sequence``, activations are split along their sequence wherever the axes for weights split no other dim
    of theirs.
    """
    program = traced.program
    sizes = {axis: mesh.axis_size(axis) for axis in mesh.axes}
    problem = Problem(
        mesh,
        asked or mesh,
        hardware,
        traced,
        dim_groups,
        (),
        (),
        frozenset(),
        {},
        lifetimes(traced, remat or {}, fused_attention=hardware.fused_attention),
        update_bytes=optimizer.update_bytes,
        sizes=sizes,
    )
    # Decided beforehand: the batch axes split the batch, as far as they divide.
    batch = problem.groups_of(traced.batch)
    problem.pinned = _batch_split(problem, batch, batch_axes)
    along = [axis for axis in mesh.axes_of("sequence") if axis not in batch_axes]
    for dim in traced.sequences:
        # An encoder and a decoder may have sequences of their own: an axis splits those that it divides.
        problem.pinned |= _batch_split(problem, problem.groups_of(dim), [a for a in along if a not in problem.pinned])
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
    problem.sequence = sequence_split(problem) if split_sequence else None
    # Last, as work on dims that nothing can split is left out.
    relevant = {k for k, _ in problem.candidates} | set(problem.pinned.values())
    copies: list[SequenceCopy] = []
    if problem.sequence is not None:
        copies = sequence_copies(problem, relevant)
        relevant |= problem.sequence.dim_groups
    problem.kv_cache = {} if kv_cache is None else _cached(problem, kv_cache, batch)
    problem.work, problem.fixed_s = _work(problem, relevant, copies)
    problem.buffers = _buffers(problem, relevant, copies)
    problem.copies = _copies(problem)
    return problem


def sequence_split(problem: Problem) -> SequenceSplit | None:
    """Return how activations can be split along their sequence; ``None`` if no sequence divides over the axes."""
    axes = tuple(a for a in problem.mesh.axes_of("model") if problem.sizes[a] > 1 and a not in problem.pinned)
    size = math.prod(problem.sizes[axis] for axis in axes)
    found = {
        group
        for dim in problem.traced.sequences
        for group in problem.groups_of(dim)
        if len(problem.groups_of(dim)) == 1 and problem.length[group] % size == 0
    } - {*problem.pinned.values()}
    return SequenceSplit(axes, frozenset(found), size) if axes and found else None


@dataclass(frozen=True, slots=True)
class SequenceCopy:
    """A value that may be split along its sequence, and operations that read it whole, if certain dims are split."""

    value: Value
    foreign: Factors
    """The dim groups (dims split alike) that the operations have, and the value does not."""
    same_as: Factors
    """Dim groups of other operations that read the value whole if they are split, and share its copy then."""
    first: int
    last: int
    """The moments at which the operations read the value for the first and the last time."""


def sequence_copies(problem: Problem, relevant: set[int]) -> list[SequenceCopy]:
    """Return what has to be gathered along the sequence, with the lifetimes of the gathered copies.

    Operations that read the same value share a copy. A block that recomputes has one in its forward and one in its
    backward pass.
    """
    program, life = problem.traced.program, problem.lifetimes
    found: dict[tuple[int, str, bool], dict[frozenset[int], list[int]]] = {}
    values: dict[int, Value] = {}
    for read in program.reads:
        value = read.value.root
        foreign = frozenset(problem.groups_of(read.dims)) & relevant - {*problem.groups_of(value.factors)}
        if not foreign or not problem.in_sequence(value):
            continue
        values[id(value)] = value
        begins = life.begins.get(read.block)
        moments = [(read.in_backward and begins is not None, read.clock)]
        if begins is not None and read.operation in life.again:
            moments.append((True, begins))
        for again, at in moments:
            key = id(value), read.block if begins is not None else "", again
            found.setdefault(key, {}).setdefault(foreign, []).append(at)
    made = []
    for (of, _, _), sets in found.items():
        # What is gathered for some dims serves all operations that have one of them: queries, keys and values have
        # the same heads, but the dims of a head may differ.
        served = set[int]()
        for one in sorted(sets, key=lambda groups: (-len(groups), *sorted(groups))):
            if one - served:
                times = [t for other, read_at in sets.items() if other & one for t in read_at]
                own, before = tuple(sorted(one - served)), tuple(sorted(served))
                made.append(SequenceCopy(values[of], own, before, min(times), max(times)))
                served |= one
    return made


def _buffers(problem: Problem, relevant: set[int], copies: Sequence[SequenceCopy]) -> Buffers | None:
    """Return the buffers of activations, once for each time that a value needs one; ``None`` if there are none."""
    weights = {id(value) for _, value in problem.traced.weights}
    values = (v for v in problem.traced.program.values if v.view_of is None and id(v) not in weights)

    def kind(value: Value, foreign: Factors = ()) -> BufferKind:
        groups = tuple(sorted({*problem.groups_of(value.factors)} & relevant))
        return BufferKind(groups, problem.in_sequence(value), foreign)

    spans = [(v.nbytes, kind(v), span) for v in values for span in problem.lifetimes.of(v)]
    spans += [(copy.value.nbytes, kind(copy.value, copy.foreign), (copy.first, copy.last)) for copy in copies]
    # Sums are whole along their sequence before they are scattered. All-reduces have whole results, too: that of a
    # gradient is kept until the gradients of all uses are added up.
    all_reduced, boundary = not problem.hardware.reduce_scatter, problem.traced.boundary
    for value, dims in problem.traced.program.sums if problem.sequence is not None else ():
        over = tuple(sorted({*problem.groups_of(dims)} & relevant - {*problem.groups_of(value.factors)}))
        if over and problem.in_sequence(value):
            spans.append((value.nbytes, kind(value, over), (value.born, value.born)))
            if all_reduced:
                until = value.root.last_use if value.born > boundary else value.born
                spans.append((value.nbytes, kind(value, over), (value.born, until)))
    whole_step = 0, problem.traced.program.clock
    spans += [(nbytes, BufferKind(groups), whole_step) for groups, nbytes in problem.kv_cache.items()]
    if not spans:
        return None
    numbers: dict[BufferKind, int] = {}
    kinds = [numbers.setdefault(kind, len(numbers)) for _, kind, _ in spans]
    first, last = np.array([span for *_, span in spans]).T
    return Buffers(np.array([float(n) for n, *_ in spans]), first, last, np.array(kinds), tuple(numbers))


def _cached(problem: Problem, cache: KvCache, batch: Factors) -> dict[Factors, int]:
    """Return the bytes of a KV cache by dim groups: its rows are split as the batch is, its heads as those of keys."""
    values = {id(variable): value for variable, value in problem.traced.weights}
    heads = {problem.groups_of(values[id(variable)].dims[dim]) for variable, dim in cache.keys}
    of_heads = heads.pop() if len(heads) == 1 else ()
    parts = math.prod(problem.sizes[axis] for axis, group in problem.pinned.items() if group in batch)
    of_rows = batch if cache.rows % parts == 0 else ()
    found: Counter[Factors] = Counter()
    for one in cache.arrays:
        groups = (() if one.rows is None else of_rows) + (() if one.heads is None else of_heads)
        found[tuple(sorted({*groups}))] += math.prod(one.shape) * one.itemsize
    return dict(found)


def _copies(problem: Problem) -> Copies | None:
    """Return the copies of weights that a step needs if they are stored split."""
    traced = problem.traced
    found: list[tuple[int, int, int, int]] = []
    for kind, weight in enumerate(problem.weights):
        for i in weight.members:
            _, value = traced.weights[i]
            spans = [*problem.lifetimes.of_weight(traced, value)]
            found += [(kind, *span, 1) for span in spans]
            if spans and (gradient := traced.gradients.get(id(value))) is not None:
                # A whole gradient, and what an all-reduce makes of it: a reduce-scatter makes a part.
                born, count = gradient.root.born, 1 if problem.hardware.reduce_scatter else 2
                found.append((kind, born, born, count))
    return Copies(*np.array(found, np.int64).T) if found else None


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


def _weights(
    problem: Problem, pins: Mapping[int, Spec], slots: Mapping[int, tuple[Slot, ...]]
) -> tuple[WeightKind, ...]:
    lookups = problem.traced.program.lookups
    forward, backward = _read_in_passes(problem.traced, problem.lifetimes)
    summed = problem.traced.summed
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
        kind = WeightKind(
            value.shape,
            value.nbytes,
            dims,
            bool(variable.trainable),
            pin,
            own,
            (),
            (id(value) in forward) + (id(value) in backward),
            _gathered_as(problem.traced.program, variable, value),
            summed.get(id(value), ()),
            use,
        )
        members[kind].append(i)
    return tuple(replace(kind, members=tuple(positions)) for kind, positions in members.items())


def _gathered_as(program: Program, variable: Any, value: Value) -> str:
    read_as = program.read_as[id(value)]
    # A variable that the step changes leaves it in its own dtype.
    if not variable.trainable or len(read_as) != 1:
        return ""
    (dtype,) = read_as
    return dtype if dtype and jnp.dtype(dtype).itemsize < value.itemsize else ""


def _read_in_passes(traced: Traced, lifetimes: Lifetimes) -> tuple[set[int], set[int]]:
    """Return the ``id`` of each value that the forward and the backward pass read, as it is or in another dtype."""
    program = traced.program
    forward = {id(value.base) for value in program.values if value.root.forward_use}
    backward = {id(value.base) for value in program.values if value.last_use > traced.boundary}
    # Blocks that recompute read all of their weights again.
    equations = (equation for block in lifetimes.begins for equation in program.equations[block])
    backward |= {id(value.base) for equation in equations for value in equation.operands}
    return forward, backward if traced.training else set()


def _work(problem: Problem, relevant: set[int], copies: Sequence[SequenceCopy]) -> tuple[tuple[WorkKind, ...], float]:
    """Return the operations whose time depends on the plan, and the seconds of all others.

    Operations of equal cost are merged, with their count.
    """

    def groups(own: Factors) -> Factors:
        return tuple(sorted({*own} & relevant))

    def works_in_sequence(op: Operation) -> bool:
        sequence = problem.sequence
        return sequence is not None and op.from_weights and not sequence.dim_groups & {*op.minor}

    fused = problem.traced.scores if problem.hardware.fused_attention else frozenset()
    scores = {frozenset(problem.groups_of((*one,))) for one in fused}

    def written(op: Operation) -> float:
        # A fused kernel keeps scores to itself.
        return 0 if any(one <= {*op.dims} for one in scores) else op.nbytes

    merged: Counter[WorkKind] = Counter()
    fixed_s = 0.0
    known = problem.dim_groups
    done = np.bincount(known.kind, minlength=len(known.kinds))
    done += np.bincount(known.kind[[*problem.lifetimes.again]], minlength=len(known.kinds))
    for op, times in zip(known.kinds, map(int, done), strict=True):
        exchanges = tuple(
            # All of `unless` counts: what no axis can split is not fully split.
            Exchange(e.kind, split, e.nbytes, groups(e.dims), tuple(sorted({*e.unless})))
            for e in op.exchanges
            if (split := groups(e.split))
        )
        dims = groups(op.dims)
        # The rest takes the same time under every plan, so the time of a step does not count it.
        if dims or exchanges:
            merged[WorkKind(op.name, dims, op.flops, written(op), exchanges, 0, works_in_sequence(op))] += times
        else:
            fixed_s += times * problem.hardware.compute_s(op.flops, written(op))
    for copy in copies:
        gather = Exchange(
            "all-gather",
            copy.foreign,
            copy.value.nbytes,
            groups(problem.groups_of(copy.value.factors)),
            along_sequence=True,
            same_as=copy.same_as,
        )
        merged[WorkKind("gather of a sequence", (), 0, 0, (gather,), 0, in_sequence=True)] += 1
    return tuple(replace(kind, count=count) for kind, count in merged.items()), fixed_s
