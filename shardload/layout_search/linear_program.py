"""Solve the planning problem as a mixed-integer linear program, with SciPy's HiGHS.

Binary variables say whether an axis splits a dim group, and whether a weight is stored split. A cost depends on several
of these decisions at once: it is a product of them. *Share* variables make the program linear. An operation, weight or
buffer has dims of a few dim groups, and each way to split these groups over axes has a share. One way is, for example,
heads over ``model`` and batch over ``data``. Constraints tie shares to the binary variables: of all ways to split the
same groups, the one that was decided for has the share 1, and all others have 0. A cost is then a sum over shares. So
all mesh axes are decided together, and the optimum is exact for the cost model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from shardload.errors import DoesNotFitError, LayoutError
from shardload.layout_search.plan_parts import DeviceBytes
from shardload.layout_search.problem import Assignment, BufferKind, Problem, WeightKind
from shardload.layout_search.weight_options import (
    LEAST_STORED_BYTES,
    WeightOption,
    copied_bytes,
    weight_exchanges,
    weight_options,
    weight_state_bytes,
)
from shardload.sharding.layout import Layout
from shardload.units import format_bytes, format_bytes_down, format_bytes_up, plural

_TIME_LIMIT_S = 60.0
"""Seconds after which the solver (HiGHS) stops, and returns the best decisions that it has found so far."""
_TIE_BREAK = 1e-4
"""Factor of the step time in the sum that is minimised to save memory. It is small, so that time only decides between
solutions that need equal memory."""


@dataclass(frozen=True, slots=True)
class _Moment:
    """What is stored at one moment of a step, besides the weights, gradients and slots."""

    buffers: tuple[tuple[BufferKind, float], ...]
    """For each kind of buffers, the sum of the bytes over all devices."""
    copies: tuple[tuple[int, float], ...] = ()
    """For each kind of weights, how many copies for use there are if these are stored split."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One task for the solver: what it minimises, which limits it keeps, and which decisions it may take."""

    minimise: Literal["time", "memory"] = "time"
    limit_bytes: float | None = None
    """Most bytes of weights, gradients, slots and activations on a device at each moment in ``buffers``, if limited."""
    weight_limit_bytes: float | None = None
    """Most bytes of weights on a device. A search without memory limit tries several, and compares the solutions."""
    storage_axes: tuple[str, ...] = ()
    """Mesh axes that may split any large weight in storage only: devices then gather the weight for use."""
    small: bool = False
    """Whether weights of less than 64 KiB (`weight_options.LEAST_STORED_BYTES`) may be split in storage, too."""
    buffers: tuple[_Moment, ...] = ()
    """Moments of a step at which activations count, and are limited or minimised. To keep the linear program small, a
    search starts with none, and adds the moment at which its last solution stores most."""
    forced: tuple[tuple[int, str, bool], ...] = ()
    """Decisions that the solver must take, to find their cost: a dim group, an axis, and whether the axis splits it."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The decisions that the solver took, and the time of a step with them."""

    split: frozenset[tuple[int, str]]
    """Pairs of a dim group (dims that are split alike) and a mesh axis that splits it."""
    options: tuple[WeightOption, ...]
    """The chosen layout for each kind of weights (weights that are split alike), in the order of `Problem.weights`."""
    seconds: float


def solve(problem: Problem, demand: Demand) -> Solution | None:
    """Return the best solution of a planning problem, or ``None`` if no solution keeps the limits of ``demand``."""
    model = _Model(problem, demand)
    result = model.run()
    if result is None:
        return None
    split = frozenset(key for key, column in model.binaries.items() if result[column] > 0.5)
    # The solver's integers are 0.9999997 or so: take the largest share, and compare with 0.5 above.
    chosen = [max(columns, key=lambda pair: result[pair[1]])[0] for columns in model.options]
    pinned = {(dim_group, axis) for axis, dim_group in problem.pinned.items()}
    return Solution(split | pinned, tuple(chosen), float(np.dot(model.time, result)))


@dataclass(slots=True)
class _Model:
    """A linear program as the solver takes it: a matrix with a column for each variable, a row for each constraint."""

    problem: Problem
    demand: Demand
    binaries: dict[tuple[int, str], int] = field(default_factory=dict)
    """For each pair of a dim group (dims that are split alike) and a mesh axis, a column. Its variable is 1 if the axis
    splits the dim group, and else 0."""
    options: list[list[tuple[WeightOption, int]]] = field(default_factory=list)
    """For each kind of weights (weights that are split alike), pairs of a possible layout and a column. The variable of
    the column is 1 if the layout is chosen, and else 0."""
    _integral: list[int] = field(default_factory=list)
    time: list[float] = field(default_factory=list)
    """For each column, the seconds that a step takes longer if the variable of the column is 1 instead of 0."""
    _objective: list[float] = field(default_factory=list)
    """For each column, the coefficient of its variable in the sum that is minimised."""
    _rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)
    _shares: dict[tuple[int, ...], list[tuple[Assignment, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The decisions, then the costs that depend on them, then the limits.
        for key in self.problem.candidates:
            self.binaries[key] = self._column(integral=True)
        for dim_group, axis, value in self.demand.forced:
            if (dim_group, axis) in self.binaries:
                self._rows.append(({self.binaries[dim_group, axis]: 1.0}, float(value), float(value)))
        self._exclusive()
        for work in self.problem.work:
            for assignment, column in self._share(work.all_groups):
                self.time[column] += work.count * self.problem.work_s(work, assignment)
        state = self._weights()
        memory = [state]
        for moment in self.demand.buffers:
            at_moment: dict[int, float] = defaultdict(float, state)
            for kind, nbytes in moment.buffers:
                for assignment, column in self._share(kind.all_groups):
                    at_moment[column] += nbytes * self.problem.buffer_part(kind, assignment)
            for of_weights, count in moment.copies:
                for option, column in self.options[of_weights]:
                    at_moment[column] += count * copied_bytes(self.problem, self.problem.weights[of_weights], option)
            memory.append(dict(at_moment))
        self._objective = list(self.time)
        if self.demand.minimise == "memory":
            # Minimise the largest of all moments: one more column, which no moment may exceed, in units of `whole`.
            whole = max(sum(state.values()), 1.0)
            worst = sum(self.time) or 1.0
            peak = self._column()
            self._objective = [*(_TIE_BREAK * t / worst for t in self._objective), 1.0]
            self._rows += [({**total, peak: -whole}, -np.inf, 0.0) for total in memory]
        elif self.demand.limit_bytes is not None:
            self._rows += [(total, 0.0, self.demand.limit_bytes) for total in memory]

    def _column(self, *, integral: bool = False) -> int:
        self._integral.append(int(integral))
        self.time.append(0.0)
        return len(self.time) - 1

    def _exclusive(self) -> None:
        """Add constraints: a mesh axis splits at most one dim of a tensor; axes that split one dim divide it evenly."""
        for (dim_group, axis), column in self.binaries.items():
            for (other, again), second in self.binaries.items():
                if column >= second:
                    continue
                # Two decisions exclude each other if they split two dims of one tensor over one axis, or one dim over
                # two axes whose product does not divide it.
                clash = axis == again and frozenset((dim_group, other)) in self.problem.conflicts
                both = self.problem.sizes[axis] * self.problem.sizes[again]
                if clash or (dim_group == other and self.problem.length[dim_group] % both):
                    self._rows.append(({column: 1.0, second: 1.0}, 0.0, 1.0))
        for taken, batch in self.problem.pinned.items():
            for (dim_group, axis), column in self.binaries.items():
                if axis == taken and frozenset((dim_group, batch)) in self.problem.conflicts:
                    self._rows.append(({column: 1.0}, 0.0, 0.0))

    def _share(self, dim_groups: tuple[int, ...]) -> list[tuple[Assignment, int]]:
        """Return a pair for each way to split some dim groups over the mesh: the way, and the column of its share."""
        if dim_groups in self._shares:
            return self._shares[dim_groups]
        # Shares need not be integers: once the binaries are, their marginals leave one assignment a share of 1.
        made = [(assignment, self._column()) for assignment in self.problem.assignments(dim_groups)]
        self._shares[dim_groups] = made
        self._rows.append((dict.fromkeys((c for _, c in made), 1.0), 1.0, 1.0))
        self._marginals(made, dim_groups)
        return made

    def _marginals(self, made: Sequence[tuple[Assignment, int]], dim_groups: tuple[int, ...]) -> None:
        for i, axis in enumerate(self.problem.mesh.axes):
            for dim_group in dim_groups:
                if (dim_group, axis) in self.binaries:
                    row = {column: 1.0 for assignment, column in made if assignment[i] == dim_group}
                    self._rows.append(({**row, self.binaries[dim_group, axis]: -1.0}, 0.0, 0.0))

    def _weights(self) -> dict[int, float]:
        """Add a column for each layout that a kind of weights can have; return the bytes that each needs per device."""
        memory: dict[int, float] = {}
        only: dict[int, float] = {}
        for weight in self.problem.weights:
            found = [
                # The marginals fix only how a weight is used: how it is stored is a decision of its own, so an integer.
                (o, self._column(integral=bool(o.stored or o.moved)))
                for o in weight_options(
                    self.problem, weight, storage_axes=self.demand.storage_axes, small=self.demand.small
                )
            ]
            if not found:
                path = self.problem.traced.weights[weight.members[0]][0].path
                layout = Layout(self.problem.mesh, weight.pin or ((),) * len(weight.shape))
                why, fix = f"its shape is {weight.shape} on the mesh {self.problem.mesh}", "Change or remove the pin"
                # A kernel that divides may have a factor in the optimizer's state that does not.
                if refused := [slot.shape[0] for slot in weight.slots if not slot.allows(layout)]:
                    factor, parts = f"a factor of {plural(refused[0], 'row')}", math.prod(layout.parts)
                    why = f"the optimizer keeps {factor} for it, not a multiple of {plural(parts, 'device')}"
                    fix = "Change the pin, or pass uneven='replicate' to the optimizer"
                raise LayoutError(f"Cannot pin {path!r} to {layout}: {why}. {fix}")
            self.options.append(found)
            self._rows.append((dict.fromkeys((c for _, c in found), 1.0), 1.0, 1.0))
            # A weight is split for use as the operations that read it are.
            self._marginals([(o.assignment, c) for o, c in found], weight.all_groups)
            count = len(weight.members)
            for option, column in found:
                memory[column] = count * weight_state_bytes(self.problem, weight, option)
                only[column] = count * weight.nbytes / np.prod(Layout(self.problem.mesh, option.spec).parts, initial=1)
                self.time[column] += count * sum(e.seconds for e in weight_exchanges(self.problem, weight, option))
        if self.demand.weight_limit_bytes is not None:
            self._rows.append((only, 0.0, self.demand.weight_limit_bytes))
        return memory

    def run(self) -> np.ndarray | None:
        """Run the solver, and return the value of each column's variable; ``None`` if none keep all constraints."""
        # Imported only for a search: it takes a third of the time of importing everything that a load needs.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        count = len(self.time)
        data, rows, columns, low, high = [], [], [], [], []
        for i, (row, lower, upper) in enumerate(self._rows):
            # HiGHS has absolute tolerances of about 1e-7, and rows are in bytes or in counts: scale each to 1.
            scale = max((abs(v) for v in row.values()), default=1.0) or 1.0
            rows += [i] * len(row)
            columns += list(row)
            data += [v / scale for v in row.values()]
            low.append(lower / scale)
            high.append(upper / scale)
        matrix = csr_array((data, (rows, columns)), shape=(len(self._rows), count))
        upper_bounds = np.ones(count)
        if self.demand.minimise == "memory":
            # The peak, the last column, may exceed its unit; shares and binaries are at most 1.
            upper_bounds[-1] = np.inf
        scale = max(*map(abs, self._objective), 1e-30)
        found = milp(
            np.array(self._objective) / scale,
            constraints=LinearConstraint(matrix, low, high),
            integrality=np.array(self._integral),
            bounds=Bounds(np.zeros(count), upper_bounds),
            options={"time_limit": _TIME_LIMIT_S, "mip_rel_gap": 1e-6},
        )
        # Status 2 is infeasible, which is an answer. Without decisions for any other reason, the solver gave up.
        if found.x is None and found.status != 2:
            raise LayoutError(
                f"Cannot plan: the solver stopped without a solution: {found.message!r}. Try a mesh with fewer axes"
            )
        return None if found.x is None else np.asarray(found.x)


# ---- what is minimised: the product of time and memory, or time within a memory limit ----------------

_TRADE_OFFS = (1.02, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
"""A search without memory limit tries each of these limits on the bytes of weights, and keeps the solution with the
least product of time and memory. The limits are multiples of the least bytes that any solution needs."""
MOMENTS = 4
"""How often, at most, a search adds a moment of a step to those at which memory is limited, and solves again.

Each time it adds the moment at which its last solution stores most. Limits at all moments would make the linear program
too large."""


def optimum(problem: Problem, limit: int | None) -> tuple[Demand, Solution]:
    """Return the `Demand` that the solver got, and its best solution, with at most ``limit`` bytes on each device."""
    mesh = problem.mesh
    # Under a limit any axis may store weights split. Without one, only an axis that is named for it.
    storage_axes = tuple(
        a for a in mesh.axes if mesh.axis_size(a) > 1 and (limit is not None or mesh.axis_kind(a) == "fsdp")
    )
    demand = Demand(storage_axes=storage_axes)
    return _best_product(problem, demand) if limit is None else _within(problem, demand, limit)


def _best_product(problem: Problem, demand: Demand) -> tuple[Demand, Solution]:
    """Return the `Demand` and the solution with the least product of step time and bytes of weights per device."""
    # A product is not linear. So solve for time under rising limits of memory, and take the best product of the curve.
    least = state_memory(problem, _solved(problem, replace(demand, minimise="memory"))).weights
    best: tuple[float, Demand, Solution] | None = None
    whole = sum(w.nbytes * len(w.members) for w in problem.weights)
    for factor in _TRADE_OFFS:
        tried = replace(demand, weight_limit_bytes=least * factor)
        solution = _solved(problem, tried)
        product = solution.seconds * state_memory(problem, solution).weights
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
        raise LayoutError(f"Cannot plan on {problem.asked}: the pinned layouts contradict each other. Remove some pins")
    return solution


def _within(problem: Problem, demand: Demand, limit: int) -> tuple[Demand, Solution]:
    """Return the `Demand` that the solver got, and its fastest solution within ``limit`` bytes per device."""
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
    # Where they are much of the least, an error is to say what is left if they are split, too.
    if not demand.small and (least.total - small_bytes <= limit or small_bytes > least.total // 50):
        return _within(problem, replace(demand, small=True, buffers=()), limit)
    what, way_out = "activations", "Use a larger mesh, a smaller batch, or a limit of that size"
    # A larger mesh does not help: the update gathers state on every device.
    if least.activations <= problem.update_bytes:
        what = "memory for the optimizer's update, on any mesh"
        way_out = "Use a limit of that size, or let AdamW update more of the weights (REKLS: max_dimension, adamw_for)"
    raise DoesNotFitError(
        f"No layout on {problem.asked} needs at most {format_bytes_down(limit)} per device. The least found is "
        f"{format_bytes_up(least.total)}: {format_bytes(least.total - least.activations)} of weights, gradients and "
        f"slots, and {format_bytes(least.activations)} of {what}{_recomputed(problem)}. {way_out}"
        f"{_accumulating(problem, solution, least)}",
        least_bytes=least.total,
        hint="; search_compiled (plan --compile) finds out whether the compiled step needs less",
    )


def _recomputed(problem: Problem) -> str:
    kinds = [kind for kind, mode in problem.lifetimes.remat.items() if mode == "full"]
    return f", although each {' and '.join(kinds)} recomputes everything" if kinds else ""


def _accumulating(problem: Problem, solution: Solution, least: DeviceBytes) -> str:
    """Return a sentence on how much half of the rows at a time would need, if that is less; else nothing."""
    _, moment = activation_peak(problem, solution)
    nbytes = [copied_bytes(problem, weight, option) for weight, option in chosen_options(problem, solution)]
    copied = sum(count * nbytes[kind] for kind, count in moment.copies)
    # Sums of gradients are as large as the gradients. Copies of weights stay as they are.
    needed = least.total - int(least.activations - copied) // 2 + least.gradients
    if not problem.traced.training or least.activations <= problem.update_bytes or needed >= least.total:
        return ""
    return (
        f". With half of the rows at a time, it needs about {format_bytes_up(needed)} (plan --microbatches 2, or half "
        "of the batch and an optimizer with gradient_accumulation_steps=2)"
    )


def fastest_that_fits(problem: Problem, demand: Demand) -> tuple[Demand, Solution | None]:
    """Return the `Demand` that the solver got last, and the fastest solution within its limit, or ``None``."""
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
    """Return the solution that needs least memory, and the bytes that it needs on a device: an error names them."""
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


# ---- the memory of a solution ------------------------------------------------------------------------


def chosen_options(problem: Problem, solution: Solution) -> Iterator[tuple[WeightKind, WeightOption]]:
    """Yield pairs of a kind of weights (weights that are split alike) and the layout that a solution chose for them."""
    return zip(problem.weights, solution.options, strict=True)


def state_memory(problem: Problem, solution: Solution) -> DeviceBytes:
    """Return the bytes of weights, gradients and slots on each device under a solution, with 0 for activations."""
    weights = gradients = slots = 0.0
    for weight, option in chosen_options(problem, solution):
        layout, count = Layout(problem.mesh, option.spec), len(weight.members)
        local = weight.nbytes / math.prod(layout.parts) * count
        weights += local
        if weight.trainable and problem.traced.training:
            gradients += local
            slots += weight.slot_bytes(layout) * count
    return DeviceBytes(round(weights), round(gradients), round(slots), 0)


def splits_part_of_axis(problem: Problem, solution: Solution, parts: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether a solution splits any weight over one part of a mesh axis but not along with the others."""
    divided = [own for own in parts.values() if len(own) > 1]
    for option in solution.options:
        for axes in (axes for axes in option.spec if axes):
            joined = ",".join(axes)
            for own in divided:
                joined = joined.replace(",".join(own), "")
            if any(part in joined.split(",") for own in divided for part in own):
                return True
    return False


def activation_peak(problem: Problem, solution: Solution) -> tuple[int, _Moment]:
    """Return the most bytes of activations that a device stores at one moment, and what is stored at that moment.

    Copies of weights that are stored split, and gathered for use, count as activations. The update of an optimizer is
    one more moment. It stores no activations, but the bytes in ``problem.update_bytes``.
    """
    update = problem.update_bytes, _Moment(((BufferKind(()), float(problem.update_bytes)),))
    moments = problem.traced.program.clock + 1
    live, buffers, copies = np.zeros(moments), problem.buffers, problem.copies
    if buffers is not None:
        parts = [problem.buffer_part(kind, assignment_of(problem, solution, kind.all_groups)) for kind in buffers.kinds]
        live = live + buffers.live(moments, parts)
    if copies is not None:
        nbytes = [copied_bytes(problem, weight, option) for weight, option in chosen_options(problem, solution)]
        live = live + copies.live(moments, nbytes)
    at = int(np.argmax(live))
    if live[at] < problem.update_bytes:
        return update
    # By kind, so that the solver can weigh what other decisions would make of the same moment.
    return int(live[at]), _Moment(
        tuple(sorted(buffers.at(at).items())) if buffers is not None else (),
        tuple(sorted(copies.at(at).items())) if copies is not None else (),
    )


def assignment_of(problem: Problem, solution: Solution, dim_groups: Sequence[int]) -> Assignment:
    """Return, for each mesh axis, which of the ``dim_groups`` of a tensor it splits in a solution, or ``None``."""
    return tuple(next((k for k in dim_groups if (k, axis) in solution.split), None) for axis in problem.mesh.axes)
