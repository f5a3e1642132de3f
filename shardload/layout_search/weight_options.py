"""The layouts that a kind of weights can have, and what each costs: memory, gathers, and moving the batch.

A weight is split like the operations that read it. It may be stored split over further axes: devices then gather it
before use, as in fully sharded data parallelism.

If a step uses an embedding for a lookup and nothing else, the batch axis may split its rows, too. Compare two layouts:

    rows split over model          each position of a batch axis has all rows: the gradient of the whole embedding is
                                   added up over the batch axis, however few rows a batch looks up
    rows split over model, batch   the batch is moved to the rows: every device looks the whole batch up in its rows,
                                   and results are added up; backward, the gradients of the results are gathered

The second layout moves fewer bytes if the vocabulary is large and a batch has few tokens. XLA moves the batch by itself
where rows are split like this.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from shardload.layout_search.problem import NO_USE, Assignment, Problem, WeightKind
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
    moved: tuple[str, ...] = ()
    """The batch axes, if they also split the rows of an embedding: every device then looks the whole batch up in its
    own rows. Else empty."""


def weight_state_bytes(problem: Problem, weight: WeightKind, option: WeightOption) -> float:
    """Return the bytes of one weight on each device; in training, its gradient and optimizer slots are included."""
    layout = Layout(problem.mesh, option.spec)
    local = weight.nbytes / math.prod(layout.parts)
    return 2 * local + weight.slot_bytes(layout) if problem.traced.training and weight.trainable else local


def copied_bytes(problem: Problem, weight: WeightKind, option: WeightOption) -> float:
    """Return the bytes on each device of a copy of one weight for use; 0 if it is used as it is stored."""
    return weight.gathered_bytes / problem.shard_count(weight.all_groups, option.assignment) if option.stored else 0.0


def weight_options(
    problem: Problem, weight: WeightKind, *, storage_axes: Collection[str], small: bool
) -> Iterator[WeightOption]:
    """Yield each layout that weights of one kind can have: each way to split them in use, and further in storage.

    ``storage_axes`` are mesh axes that may split any weight in storage only: devices gather it before use. Weights
    below `LEAST_STORED_BYTES` are split so only if ``small`` is true, or if a pin says so. Layouts that contradict a
    pin or do not divide are left out.
    """
    for assignment in problem.assignments(weight.all_groups):
        use = _use(problem, weight, assignment)
        if use is None:
            continue
        # The ways to store a weight split over axes that do not split its use: each with the dim it splits.
        ways: list[tuple[tuple[str, int], ...]] = [()]
        for axis, dim_group in zip(problem.mesh.axes, assignment, strict=True):
            is_free = dim_group is None and problem.sizes[axis] > 1
            if is_free and (weight.pin is not None or _may_store(problem, weight, axis, storage_axes, small)):
                dims = [d for d, n in enumerate(weight.shape) if n % problem.sizes[axis] == 0]
                ways += [(*before, (axis, d)) for before in ways for d in dims]
        options = [WeightOption(use, assignment, stored) for stored in ways]
        moved = moves_batch(problem, weight, assignment)
        if moved and weight.embedding is not None:
            stored = tuple((axis, weight.embedding.dim) for axis in moved)
            options.insert(0, WeightOption(use, assignment, stored, moved))
        for option in options:
            spec = list(use)
            for axis, dim in option.stored:
                spec[dim] += (axis,)
            # As sets: a pin may name the axes of a dim in another order, and keeps its own.
            as_pinned = weight.pin is None or list(map(set, spec)) == list(map(set, weight.pin))
            if as_pinned and weight.allows(Layout(problem.mesh, tuple(spec))):
                stored = () if option.moved else option.stored
                yield replace(option, spec=weight.pin or tuple(spec), stored=stored)


def _use(problem: Problem, weight: WeightKind, assignment: Assignment) -> Spec | None:
    """Return how operations use a weight if axes split dims as in ``assignment``; ``None`` if no layout says that."""
    use: list[tuple[str, ...]] = []
    for dim_groups in weight.dim_groups:
        axes: tuple[str, ...] = ()
        for at, dim_group in enumerate(dim_groups):
            splitting = problem.axes_of((dim_group,), assignment)
            # Parts of a dim are ranges of its entries, so a minor factor is split after all of the major ones.
            if splitting and not problem.is_fully_split(dim_groups[:at], assignment):
                return None
            axes += splitting
        use.append(axes)
    return tuple(use)


def _may_store(problem: Problem, weight: WeightKind, axis: str, storage_axes: Collection[str], small: bool) -> bool:
    if weight.nbytes < LEAST_STORED_BYTES and not small:
        return False
    if axis in storage_axes:
        return True
    # An axis for weights that cannot split the use of this one may still split its storage, instead of copies.
    splits_weights = problem.mesh.axis_kind(axis) not in NO_USE
    return splits_weights and not any((k, axis) in problem.candidates for k in weight.all_groups)


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
    yield from _scattered(problem, weight, option)
    local = weight.gathered_bytes / problem.shard_count(weight.all_groups, option.assignment)
    local /= math.prod(sizes[axis] for axis, _ in option.stored)
    for dim in reversed(range(len(weight.shape))):
        axes = tuple(axis for axis, of_dim in option.stored if of_dim == dim)
        if axes and weight.passes:
            size = math.prod(sizes[axis] for axis in axes)
            local *= size
            seconds = hardware.exchange_s("all-gather", local, axes=axes, size=size)
            # Gathered weights are not kept for the backward pass.
            yield WeightExchange("all-gather", axes, weight.passes, local, weight.passes * seconds)


def _scattered(problem: Problem, weight: WeightKind, option: WeightOption) -> Iterator[WeightExchange]:
    """Yield reduce-scatters of gradients in the place of all-reduces, if all batch axes split a weight's storage."""
    stored, batch = {axis for axis, _ in option.stored}, {*problem.groups_of(problem.traced.batch)}
    axes = tuple(a for a, k in problem.pinned.items() if k in batch and problem.sizes[a] > 1)
    if not problem.hardware.reduce_scatter or option.moved or not axes or not {*axes} <= stored:
        return
    size = math.prod(problem.sizes[axis] for axis in axes)
    for nbytes in weight.summed:
        local = nbytes / problem.shard_count(weight.all_groups, option.assignment)
        before = problem.hardware.exchange_s("all-reduce", local, axes=axes, size=size)
        after = problem.hardware.exchange_s("reduce-scatter", local / size, axes=axes, size=size)
        yield WeightExchange("all-reduce", axes, -1, -local, -before)
        yield WeightExchange("reduce-scatter", axes, 1, local / size, after)


def moves_batch(problem: Problem, weight: WeightKind, assignment: Assignment) -> tuple[str, ...]:
    """Return the batch axes if they should split an embedding's rows, too, as that saves time; else none."""
    embedding, batch = weight.embedding, {*problem.pinned.values()}
    axes = tuple(axis for axis in problem.mesh.axes if axis in problem.pinned and problem.sizes[axis] > 1)
    if embedding is None or not (weight.trainable and problem.traced.training) or not axes:
        return ()
    # Looked-up rows are then split along their sequence, not added up as a whole.
    if problem.sequence is not None:
        return ()
    rows = weight.dim_groups[embedding.dim]
    splitting = zip(problem.mesh.axes, assignment, strict=True)
    others = [k for a, k in splitting if a not in axes and problem.sizes[a] > 1]
    # A tied embedding is multiplied with the batch for the logits, too, and those of the whole batch would cost more.
    read_with_batch = any(frozenset((row, dim)) in problem.conflicts for row in rows for dim in batch)
    if len(rows) != 1 or read_with_batch or any(dim_group != rows[0] for dim_group in others):
        return ()
    return axes if sum(c.seconds for c in batch_move(problem, weight, assignment, axes)) < 0 else ()


def batch_move(
    problem: Problem, weight: WeightKind, assignment: Assignment, batch_axes: Sequence[str]
) -> Iterator[WeightExchange]:
    """Yield the collectives that a step adds or saves if the batch axes also split an embedding's rows."""
    embedding = weight.embedding
    assert embedding is not None

    def change(kind: CollectiveKind, axes: Sequence[str], nbytes: float, sign: int = 1) -> WeightExchange:
        size = math.prod(problem.sizes[axis] for axis in axes)
        seconds = problem.hardware.exchange_s(kind, nbytes, axes=axes, size=size)
        return WeightExchange(kind, tuple(axes), sign, sign * nbytes, sign * seconds)

    own = problem.axes_of(weight.all_groups, assignment)
    # No longer needed: an all-reduce of the rows that each part of the batch looks up.
    if own:
        parts = math.prod(problem.sizes[axis] for axis in batch_axes)
        yield change("all-reduce", own, embedding.rows_bytes / parts, -1)
    # Instead, the rows of the whole batch are added up over all axes that split the embedding.
    yield change("all-reduce", [a for a in problem.mesh.axes if a in (*batch_axes, *own)], embedding.rows_bytes)
    # Backward, every device needs the gradients and indices of the whole batch, to update its own rows.
    for nbytes in (embedding.rows_bytes, embedding.index_bytes):
        yield change("all-gather", batch_axes, nbytes)
    # The saving: the gradient of the whole embedding is no longer added up over the batch axes.
    gradient = embedding.nbytes / problem.shard_count(weight.all_groups, assignment)
    yield change("all-reduce", batch_axes, gradient, -1)
