"""The memory that a solution needs on each device: weights, gradients, slots, and activations at the peak of a step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

import numpy as np

from shardload.layout_search.layout_plan import DeviceBytes
from shardload.layout_search.problem import Assignment, Problem, WeightKind, stored_values
from shardload.layout_search.program import UNSPLIT
from shardload.layout_search.solving import (
    SMALL_BYTES,
    Demand,
    Moment,
    Solution,
    WeightOption,
    solve,
    state_bytes,
)
from shardload.sharding.layout import Layout

MOMENTS = 4
"""How often the peak of the last answer is added to the moments that must fit the limit."""


def weight_bytes(problem: Problem, solution: Solution) -> float:
    """Return the bytes of weights on each device."""
    return sum(_local(problem, w.nbytes, o) * len(w.members) for w, o in chosen(problem, solution))


def chosen(problem: Problem, solution: Solution) -> Iterator[tuple[WeightKind, WeightOption]]:
    """Yield each kind of weights with its layout."""
    return zip(problem.weights, solution.options, strict=True)


def _local(problem: Problem, nbytes: int, option: WeightOption) -> float:
    return nbytes / math.prod(Layout(problem.mesh, option.spec).parts)


def state_of(problem: Problem, solution: Solution) -> DeviceBytes:
    """Return the bytes of weights, gradients and slots on each device."""
    weights = gradients = slots = 0.0
    for weight, option in chosen(problem, solution):
        local = _local(problem, weight.nbytes, option) * len(weight.members)
        weights += local
        if weight.trainable and problem.traced.training:
            gradients += local
            slots += weight.slot_bytes(Layout(problem.mesh, option.spec)) * len(weight.members)
    return DeviceBytes(round(weights), round(gradients), round(slots), 0)


def fastest_that_fits(problem: Problem, demand: Demand) -> tuple[Demand, Solution | None]:
    """Return the fastest solution whose peak keeps the limit, ``None`` if none is found, and the demand with moments.

    The peak moves with the decisions, and a limit on every moment would be too many rows: the moment of the last
    answer's peak is added to the demand, which is solved again.
    """
    for _ in range(MOMENTS + 1):
        found = solve(problem, demand)
        if found is None or demand.limit_bytes is None:
            return demand, found
        activations, moment = peak(problem, found)
        # An answer that keeps the limit at its own peak exceeds it by rounding at most.
        if state_of(problem, found).total + activations <= demand.limit_bytes or moment in demand.buffers:
            return demand, found
        demand = replace(demand, buffers=(*demand.buffers, moment))
    return demand, None


def small_bytes(problem: Problem, solution: Solution) -> float:
    """Return the bytes on each device of weights below `SMALL_BYTES`, with their gradients and slots."""
    small = [(w, o) for w, o in chosen(problem, solution) if w.nbytes < SMALL_BYTES]
    return sum(len(w.members) * state_bytes(problem, w, o) for w, o in small)


def peak(problem: Problem, solution: Solution) -> tuple[int, Moment]:
    """Return the most bytes of stored values at one moment, and what is stored then by kinds of dims.

    The update of an optimizer is such a moment: activations are gone then.
    """
    update: tuple[int, Moment] = problem.update_bytes, (((), float(problem.update_bytes)),)
    program = problem.traced.program
    values = stored_values(problem.traced)
    if not values:
        return update if problem.update_bytes else (0, ())
    relevant = {k for k, _ in problem.candidates} | set(problem.pinned.values())
    kinds = [_kinds_of(problem, v.dims, relevant) for v in values]
    parts = {k: problem.parts(k, assignment_of(problem, solution, k)) for k in set(kinds)}
    local = np.array([v.nbytes / parts[k] for v, k in zip(values, kinds, strict=True)])
    # Bytes alive at each moment of the program: added at a value's birth, taken off after its last use, summed up.
    births = np.array([v.born for v in values])
    change = np.zeros(program.clock + 2)
    np.add.at(change, births, local)
    np.add.at(change, np.array([v.last_use for v in values]) + 1, -local)
    live = np.cumsum(change)
    at = int(np.argmax(live))
    if live[at] < problem.update_bytes:
        return update
    # By kinds of dims, so that the solver can weigh what other decisions would make of the same moment.
    stored: dict[tuple[int, ...], float] = defaultdict(float)
    for value, of_kinds in zip(values, kinds, strict=True):
        if value.born <= at <= value.last_use:
            stored[of_kinds] += value.nbytes
    return int(live[at]), tuple(sorted(stored.items()))


def _kinds_of(problem: Problem, dims: Sequence[int], relevant: Set[int]) -> tuple[int, ...]:
    group = problem.traced.program.group
    found = {problem.kind_of.get(group(n), UNSPLIT) for n in dims if n != UNSPLIT}
    return tuple(sorted(found & relevant))


def assignment_of(problem: Problem, solution: Solution, kinds: Sequence[int]) -> Assignment:
    """Return which of some kinds each axis splits."""
    return tuple(next((k for k in kinds if (k, axis) in solution.split), None) for axis in problem.mesh.axes)
