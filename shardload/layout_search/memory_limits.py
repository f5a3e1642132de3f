"""Which optimum: the fastest layouts within the memory of a device, or the best product of time and memory.

What a device needs is weights, gradients and slots, and the activations at the peak of a step. The peak moves with the
decisions, and a limit on every moment would be too many rows of the linear program. So the moment of the last
answer's peak is added to the demand, which is solved again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

import numpy as np

from shardload.errors import DoesNotFitError, LayoutError
from shardload.layout_search.linear_program import Demand, Moment, Solution, solve
from shardload.layout_search.plan_parts import DeviceBytes
from shardload.layout_search.problem import Assignment, Problem, WeightKind, buffered_values
from shardload.layout_search.program import UNSPLIT
from shardload.layout_search.weight_options import LEAST_STORED_BYTES, WeightOption, weight_state_bytes
from shardload.sharding.layout import Layout
from shardload.units import format_bytes, format_bytes_down, format_bytes_up

TRADE_OFFS = (1.02, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
"""Multiples of the least memory for weights that are tried where no device memory is given."""
MOMENTS = 4
"""How often the peak of the last answer is added to the moments that must fit the limit."""


def optimum(problem: Problem, limit: int | None) -> tuple[Demand, Solution]:
    """Return the best solution, and the demand that it meets.

    Args:
        problem: The problem.
        limit: Bytes of each device; without one, the product of step time and bytes of weights is minimised.

    Raises:
        DoesNotFitError: When no layout keeps the limit.
        LayoutError: When pins contradict each other.
    """
    mesh = problem.mesh
    # Under a limit any axis may store weights split. Without one, only an axis that is named for it.
    storage_axes = tuple(
        a for a in mesh.axes if mesh.axis_size(a) > 1 and (limit is not None or mesh.axis_kind(a) == "fsdp")
    )
    demand = Demand(storage_axes=storage_axes)
    return _best_product(problem, demand) if limit is None else _within(problem, demand, limit)


def _best_product(problem: Problem, demand: Demand) -> tuple[Demand, Solution]:
    """Return the solution with the least product of step time and weight bytes per device."""

    def weight_bytes(solution: Solution) -> float:
        return sum(
            w.nbytes / math.prod(Layout(problem.mesh, o.spec).parts) * len(w.members)
            for w, o in chosen_options(problem, solution)
        )

    # A product is not linear. So solve for time under rising limits of memory, and take the best product of the curve.
    least = weight_bytes(_solved(problem, replace(demand, minimise="memory")))
    best: tuple[float, Demand, Solution] | None = None
    whole = sum(w.nbytes * len(w.members) for w in problem.weights)
    for factor in TRADE_OFFS:
        tried = replace(demand, weight_limit_bytes=least * factor)
        solution = _solved(problem, tried)
        product = solution.seconds * weight_bytes(solution)
        # Of equal products, the first, which needs less memory.
        if best is None or product < best[0] * (1 - 1e-6):
            best = product, tried, solution
        # Everything replicated is allowed now: a higher limit changes nothing.
        if least * factor >= whole:
            break
    assert best is not None
    return best[1], best[2]


def _solved(problem: Problem, demand: Demand) -> Solution:
    solution = solve(problem, demand)
    if solution is None:
        raise LayoutError(f"Cannot plan on {problem.mesh}: the pinned layouts contradict each other. Remove some")
    return solution


def _within(problem: Problem, demand: Demand, limit: int) -> tuple[Demand, Solution]:
    """Return the fastest solution whose peak fits; only where there is none, small weights are stored split too."""
    demand, fastest = fastest_that_fits(problem, replace(demand, limit_bytes=float(limit)))
    if fastest is not None:
        return demand, fastest
    solution, least = _least(problem, demand)
    if least.total <= limit:
        return demand, solution
    # Small weights stay whole as long as possible; only if storing them split could suffice, start again with that.
    small_bytes = sum(
        len(w.members) * weight_state_bytes(problem, w, o)
        for w, o in chosen_options(problem, solution)
        if w.nbytes < LEAST_STORED_BYTES
    )
    if not demand.small and least.total - small_bytes <= limit:
        return _within(problem, replace(demand, small=True, buffers=()), limit)
    raise _does_not_fit(problem, least, limit)


def fastest_that_fits(problem: Problem, demand: Demand) -> tuple[Demand, Solution | None]:
    """Return the fastest solution whose peak keeps the limit, if one is found, and the demand with its moments."""
    for _ in range(MOMENTS + 1):
        solution = solve(problem, demand)
        if solution is None or demand.limit_bytes is None:
            return demand, solution
        activations, moment = activation_peak(problem, solution)
        # An answer that keeps the limit at its own peak exceeds it by rounding at most.
        fits = state_memory(problem, solution).total + activations <= demand.limit_bytes
        if fits or moment in demand.buffers:
            return demand, solution
        demand = replace(demand, buffers=(*demand.buffers, moment))
    return demand, None


def _least(problem: Problem, demand: Demand) -> tuple[Solution, DeviceBytes]:
    """Minimise memory, adding moments of the program, and return the best solution on the way, with its memory."""
    demand = replace(demand, minimise="memory", limit_bytes=None)
    best: tuple[Solution, DeviceBytes] | None = None
    for _ in range(MOMENTS):
        solution = _solved(problem, demand)
        activations, moment = activation_peak(problem, solution)
        memory = replace(state_memory(problem, solution), activations=activations)
        if best is None or memory.total < best[1].total:
            best = solution, memory
        if moment in demand.buffers:
            break
        demand = replace(demand, buffers=(*demand.buffers, moment))
    assert best is not None
    return best


def _does_not_fit(problem: Problem, least: DeviceBytes, limit: int) -> DoesNotFitError:
    state = least.total - least.activations
    what, way_out = "activations", "Use a larger mesh, a smaller batch, or a limit of that size"
    # A larger mesh does not help: the update gathers state on every device.
    if least.activations <= problem.update_bytes:
        what = "memory for the optimizer's update, on any mesh"
        way_out = "Use a limit of that size, or let AdamW update more of the weights (REKLS: max_dimension, adamw_for)"
    return DoesNotFitError(
        f"No layout on {problem.mesh} needs at most {format_bytes_down(limit)} per device. The least found is "
        f"{format_bytes_up(least.total)}: {format_bytes(state)} of weights, gradients and slots, and "
        f"{format_bytes(least.activations)} of {what}. {way_out}",
        least_bytes=least.total,
        hint="; search_compiled (plan --compile) finds out whether the compiled step needs less",
    )


# ---- the memory of a solution ------------------------------------------------------------------------


def chosen_options(problem: Problem, solution: Solution) -> Iterator[tuple[WeightKind, WeightOption]]:
    """Yield each kind of weights with its layout."""
    return zip(problem.weights, solution.options, strict=True)


def state_memory(problem: Problem, solution: Solution) -> DeviceBytes:
    """Return the bytes of weights, gradients and slots on each device."""
    weights = gradients = slots = 0.0
    for weight, option in chosen_options(problem, solution):
        layout, count = Layout(problem.mesh, option.spec), len(weight.members)
        local = weight.nbytes / math.prod(layout.parts) * count
        weights += local
        if weight.trainable and problem.traced.training:
            gradients += local
            slots += weight.slot_bytes(layout) * count
    return DeviceBytes(round(weights), round(gradients), round(slots), 0)


def activation_peak(problem: Problem, solution: Solution) -> tuple[int, Moment]:
    """Return the most bytes of stored values at one moment, and what is stored then, by dim groups.

    The update of an optimizer is such a moment: activations are gone then.
    """
    update: tuple[int, Moment] = problem.update_bytes, (((), float(problem.update_bytes)),)
    program = problem.traced.program
    values = buffered_values(problem.traced)
    if not values:
        return update if problem.update_bytes else (0, ())
    relevant = {k for k, _ in problem.candidates} | set(problem.pinned.values())
    dim_groups = [_dim_groups_of(problem, v.dims, relevant) for v in values]
    shards = {k: problem.shard_count(k, assignment_of(problem, solution, k)) for k in set(dim_groups)}
    local = np.array([v.nbytes / shards[k] for v, k in zip(values, dim_groups, strict=True)])
    # Bytes alive at each moment of the program: added at a value's birth, taken off after its last use, summed up.
    births = np.array([v.born for v in values])
    change = np.zeros(program.clock + 2)
    np.add.at(change, births, local)
    np.add.at(change, np.array([v.last_use for v in values]) + 1, -local)
    live = np.cumsum(change)
    at = int(np.argmax(live))
    if live[at] < problem.update_bytes:
        return update
    # By dim groups, so that the solver can weigh what other decisions would make of the same moment.
    stored: dict[tuple[int, ...], float] = defaultdict(float)
    for value, groups in zip(values, dim_groups, strict=True):
        if value.born <= at <= value.last_use:
            stored[groups] += value.nbytes
    return int(live[at]), tuple(sorted(stored.items()))


def _dim_groups_of(problem: Problem, dims: Sequence[int], relevant: Set[int]) -> tuple[int, ...]:
    group = problem.traced.program.group
    found = {problem.dim_group_of.get(group(n), UNSPLIT) for n in dims if n != UNSPLIT}
    return tuple(sorted(found & relevant))


def assignment_of(problem: Problem, solution: Solution, dim_groups: Sequence[int]) -> Assignment:
    """Return for each axis the one of these dim groups that it splits, or ``None``."""
    return tuple(next((k for k in dim_groups if (k, axis) in solution.split), None) for axis in problem.mesh.axes)
