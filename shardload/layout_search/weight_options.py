"""The layouts that a kind of weights can have, and what each costs: memory, gathers, and moving the batch.

A weight is split like the operations that read it. It may be stored split over further axes: devices then gather it
before use, as in fully sharded data parallelism.

If a step uses an embedding for a lookup and nothing else, the batch axis may split its rows, too. Compare two layouts:

    rows split over model          each position of the batch axis has all rows: the gradient of the whole embedding is
                                   added up over the batch axis, however few rows a batch looks up
    rows split over model, batch   the batch is moved to the rows: every device looks the whole batch up in its rows,
                                   and results are added up; backward, the gradients of the results are gathered

The second layout moves fewer bytes if the vocabulary is large and a batch has few tokens. XLA moves the batch by itself
where rows are split like this.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from shardload.layout_search.problem import Assignment, Problem, WeightKind
from shardload.layout_search.program import CollectiveKind
from shardload.sharding.layout import Layout, Spec

LEAST_STORED_BYTES = 1 << 16
"""Variables of fewer bytes are not split in storage, because gathering them before use would cost more than the split
saves. They are stored split only if no layout fits the memory limit otherwise."""


@dataclass(frozen=True, slots=True)
class WeightOption:
    """One possible layout of a kind of weights (split alike): how they are split in use, and how in storage."""

    spec: Spec
    assignment: Assignment
    """For each mesh axis, the dim group (dims that are split alike) that it splits while operations use the weight."""
    stored: tuple[tuple[str, int], ...]
    """(axis, dim) pairs: the axis splits this dim of the weight in storage only; the weight is gathered before use."""
    moved: str = ""
    """The batch axis, if it also splits the rows of an embedding: every device then looks the whole batch up in its own
    rows. Else empty."""


def weight_state_bytes(problem: Problem, weight: WeightKind, option: WeightOption) -> float:
    """Return the bytes of one weight on each device; in training, its gradient and optimizer slots are included."""
    layout = Layout(problem.mesh, option.spec)
    local = weight.nbytes / math.prod(layout.parts)
    return 2 * local + weight.slot_bytes(layout) if problem.traced.training and weight.trainable else local


def weight_options(
    problem: Problem, weight: WeightKind, *, storage_axes: Collection[str], small: bool
) -> Iterator[WeightOption]:
    """Yield each layout that weights of one kind can have: each way to split them in use, and further in storage.

    ``storage_axes`` are mesh axes that may split any weight in storage only: devices gather it before use. Weights
    below `LEAST_STORED_BYTES` are split so only if ``small`` is true, or if a pin says so. Layouts that contradict a
    pin or do not divide are left out.
    """
    for assignment in problem.assignments(weight.dim_groups):
        use: list[tuple[str, ...]] = [()] * len(weight.shape)
        for axis, dim_group in zip(problem.mesh.axes, assignment, strict=True):
            if dim_group is not None and problem.sizes[axis] > 1:
                use[weight.dim_groups.index(dim_group)] += (axis,)
        # The ways to store a weight split over axes that do not split its use: each with the dim it splits.
        ways: list[tuple[tuple[str, int], ...]] = [()]
        for axis, dim_group in zip(problem.mesh.axes, assignment, strict=True):
            is_free = dim_group is None and problem.sizes[axis] > 1
            if is_free and (weight.pin is not None or _may_store(problem, weight, axis, storage_axes, small)):
                dims = [d for d, n in enumerate(weight.shape) if n % problem.sizes[axis] == 0]
                ways += [(*before, (axis, d)) for before in ways for d in dims]
        options = [WeightOption(tuple(use), assignment, stored) for stored in ways]
        moved = moves_batch(problem, weight, assignment)
        if moved is not None and weight.embedding is not None:
            options.insert(0, WeightOption(tuple(use), assignment, ((moved, weight.embedding.dim),), moved))
        for option in options:
            spec = list(use)
            for axis, dim in option.stored:
                spec[dim] += (axis,)
            # As sets: a pin may name the axes of a dim in another order, and keeps its own.
            as_pinned = weight.pin is None or list(map(set, spec)) == list(map(set, weight.pin))
            if as_pinned and weight.allows(Layout(problem.mesh, tuple(spec))):
                stored = () if option.moved else option.stored
                yield replace(option, spec=weight.pin or tuple(spec), stored=stored)


def _may_store(problem: Problem, weight: WeightKind, axis: str, storage_axes: Collection[str], small: bool) -> bool:
    if weight.nbytes < LEAST_STORED_BYTES and not small:
        return False
    if axis in storage_axes:
        return True
    # An axis for weights that cannot split the use of this one may still split its storage, instead of copies.
    splits_weights = problem.mesh.axis_kind(axis) != "batch"
    return splits_weights and not any((k, axis) in problem.candidates for k in weight.dim_groups)


@dataclass(frozen=True, slots=True)
class WeightExchange:
    """A collective that the layout of one weight adds to a step, or saves: such as a gather if it is stored split."""

    kind: CollectiveKind
    axes: tuple[str, ...]
    count: int
    """How many more times a step runs the collective than if the weight were stored just as operations use it. Negative
    if the layout saves runs: ``nbytes`` and ``seconds`` are then negative, too."""
    nbytes: float
    """Bytes on each device of the result of one run of the collective; negative if the layout saves the run."""
    seconds: float
    """Seconds that all ``count`` runs of the collective take in a step; negative if the layout saves them."""


def weight_exchanges(problem: Problem, weight: WeightKind, option: WeightOption) -> Iterator[WeightExchange]:
    """Yield the collectives that a weight's layout adds to a step or saves: `batch_move`, and gathers before use."""
    if option.moved:
        yield from batch_move(problem, weight, option.assignment, option.moved)
    hardware, sizes = problem.hardware, problem.sizes
    local = weight.nbytes / problem.shard_count(weight.dim_groups, option.assignment)
    local /= math.prod(sizes[axis] for axis, _ in option.stored)
    # Gathered weights are not kept for the backward pass, so they are gathered again.
    times = 2 if problem.traced.training else 1
    for dim in reversed(range(len(weight.shape))):
        axes = tuple(axis for axis, of_dim in option.stored if of_dim == dim)
        if axes:
            size = math.prod(sizes[axis] for axis in axes)
            local *= size
            seconds = hardware.exchange_s("all-gather", local, axis=min(axes, key=hardware.rate_of), size=size)
            yield WeightExchange("all-gather", axes, times, local, times * seconds)


def moves_batch(problem: Problem, weight: WeightKind, assignment: Assignment) -> str | None:
    """Return the batch axis if it should split an embedding's rows, too, as that saves time; else ``None``."""
    embedding = weight.embedding
    if embedding is None or not (weight.trainable and problem.traced.training) or len(problem.pinned) != 1:
        return None
    (axis, batch), *_ = problem.pinned.items()
    rows = weight.dim_groups[embedding.dim]
    others = [k for a, k in zip(problem.mesh.axes, assignment, strict=True) if a != axis and problem.sizes[a] > 1]
    # A tied embedding is multiplied with the batch for the logits, too, and those of the whole batch would cost more.
    read_with_batch = frozenset((rows, batch)) in problem.conflicts
    if problem.sizes[axis] == 1 or read_with_batch or any(dim_group != rows for dim_group in others):
        return None
    return axis if sum(c.seconds for c in batch_move(problem, weight, assignment, axis)) < 0 else None


def batch_move(problem: Problem, weight: WeightKind, assignment: Assignment, axis: str) -> Iterator[WeightExchange]:
    """Yield the collectives that a step adds or saves if the batch axis ``axis`` also splits an embedding's rows."""
    embedding = weight.embedding
    assert embedding is not None

    def change(kind: CollectiveKind, axes: tuple[str, ...], nbytes: float, sign: int = 1) -> WeightExchange:
        # Within groups of the first axis, then of a share of the result over the next.
        seconds, share = 0.0, nbytes
        for over in axes:
            seconds += problem.hardware.exchange_s(kind, share, axis=over, size=problem.sizes[over])
            share /= problem.sizes[over]
        return WeightExchange(kind, axes, sign, sign * nbytes, sign * seconds)

    splitting = zip(problem.mesh.axes, assignment, strict=True)
    own = [a for a, dim_group in splitting if dim_group is not None and problem.sizes[a] > 1]
    # No longer needed: an all-reduce of the rows that each part of the batch looks up.
    for other in own:
        yield change("all-reduce", (other,), embedding.rows_bytes / problem.sizes[axis], -1)
    # Instead, the rows of the whole batch are added up over all axes that split the embedding.
    yield change("all-reduce", tuple(a for a in problem.mesh.axes if a in (axis, *own)), embedding.rows_bytes)
    # Backward, every device needs the gradients and indices of the whole batch, to update its own rows.
    for nbytes in (embedding.rows_bytes, embedding.index_bytes):
        yield change("all-gather", (axis,), nbytes)
    # The saving: the gradient of the whole embedding is no longer added up over the batch axis.
    gradient = embedding.nbytes / problem.shard_count(weight.dim_groups, assignment)
    yield change("all-reduce", (axis,), gradient, -1)
