"""Tables that a program only looks up in, such as untied embeddings: split over the batch axis, too.

    rows split over model          every position of the batch axis has all rows: the gradient of the whole table is
                                   added up over the batch axis, however few rows a batch looks up
    rows split over model, batch   the batch is moved to the rows: every device looks the whole batch up in its rows,
                                   and results are added up; backward, the gradients of the results are gathered

The second moves fewer bytes for few tokens and many words. XLA does it by itself wherever rows have that layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardload.layout_search.program import Collective, Program, Value

if TYPE_CHECKING:
    from shardload.layout_search.problem import Assignment, Problem, WeightKind


@dataclass(frozen=True, slots=True)
class Table:
    """How one weight is looked up in, once in a step."""

    dim: int
    """The dim that indices count along."""
    nbytes: int
    """Bytes of the table, and of its gradient, in the dtype that it is read in."""
    found_bytes: int
    """Bytes of the rows that the whole batch looks up."""
    index_bytes: int
    """Bytes of the indices of the whole batch."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What moving the batch adds to the exchanges of a step, or takes from them."""

    kind: Collective
    axes: tuple[str, ...]
    nbytes: float
    """Bytes of the result on each device; negative for an exchange that falls away."""
    seconds: float


def table_of(program: Program, value: Value) -> Table | None:
    """Return how a weight is looked up in, or ``None`` unless that happens exactly once."""
    # By origin: a lookup reads the table after its cast to the compute dtype.
    found = [lookup for lookup in program.lookups if lookup.table.origin is value]
    if len(found) != 1:
        return None
    lookup = found[0]
    return Table(lookup.dim, lookup.table.nbytes, lookup.found.nbytes, lookup.indices.nbytes)


def moves_batch(problem: Problem, weight: WeightKind, assignment: Assignment) -> str | None:
    """Return the batch axis if moving the batch to the rows of a weight is possible and takes less time."""
    table = weight.table
    if table is None or not (weight.trainable and problem.traced.training) or len(problem.pinned) != 1:
        return None
    (axis, batch), *_ = problem.pinned.items()
    rows = weight.kinds[table.dim]
    others = [k for a, k in zip(problem.mesh.axes, assignment, strict=True) if a != axis and problem.sizes[a] > 1]
    # A tied table is multiplied with the batch for the logits, too, and those of the whole batch would cost more.
    read_with_batch = frozenset((rows, batch)) in problem.conflicts
    if problem.sizes[axis] == 1 or read_with_batch or any(kind != rows for kind in others):
        return None
    return axis if sum(d.seconds for d in differences(problem, weight, assignment, axis)) < 0 else None


def differences(problem: Problem, weight: WeightKind, assignment: Assignment, axis: str) -> Iterator[Difference]:
    """Yield how the exchanges of a weight change if the batch, split over ``axis``, is moved to its rows."""
    table = weight.table
    assert table is not None
    axes = zip(problem.mesh.axes, assignment, strict=True)
    own = [a for a, kind in axes if kind is not None and problem.sizes[a] > 1]
    # No longer needed: an all-reduce of the rows that each part of the batch looks up.
    before = table.found_bytes / problem.sizes[axis]
    for other in own:
        yield Difference("all-reduce", (other,), -before, -_seconds(problem, "all-reduce", before, [other]))
    # Instead, the rows of the whole batch are added up over all axes that split the table.
    every = tuple(a for a in problem.mesh.axes if a in (axis, *own))
    yield Difference("all-reduce", every, table.found_bytes, _seconds(problem, "all-reduce", table.found_bytes, every))
    # Backward, every device needs the gradients and indices of the whole batch, to update its own rows.
    for nbytes in (table.found_bytes, table.index_bytes):
        yield Difference("all-gather", (axis,), nbytes, _seconds(problem, "all-gather", nbytes, [axis]))
    # The saving: the gradient of the whole table is no longer added up over the batch axis.
    gradient = table.nbytes / problem.parts(weight.kinds, assignment)
    yield Difference("all-reduce", (axis,), -gradient, -_seconds(problem, "all-reduce", gradient, [axis]))


def _seconds(problem: Problem, kind: Collective, nbytes: float, axes: Sequence[str]) -> float:
    """Return the time over several axes: within groups of the first, then of a share of the result over the next."""
    seconds = 0.0
    for axis in axes:
        seconds += problem.hardware.exchange_s(kind, nbytes, axis=axis, size=problem.sizes[axis])
        nbytes /= problem.sizes[axis]
    return seconds
