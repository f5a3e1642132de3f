"""Solve the planning problem as a mixed-integer linear program, with SciPy's HiGHS.

Binary variables say which axis splits which kind of group, and where a weight is only stored split. For every
combination of kinds that some operation, weight or buffer has, a share variable per assignment of axes to kinds makes
the costs, which are products of those decisions, linear: the shares of one combination add up to one, and their
marginals are the binaries. So all mesh axes are chosen together, and the optimum is exact for the cost model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from shardload.errors import LayoutError
from shardload.layout_search.batch_moves import differences, moves_batch
from shardload.layout_search.problem import Assignment, Problem, WeightKind
from shardload.layout_search.program import UNSPLIT
from shardload.sharding.layout import Layout, Spec
from shardload.units import plural

SMALL_BYTES = 1 << 16
"""A variable of fewer bytes is not stored split where its use needs it whole: the gather costs more than it saves.
Where nothing fits otherwise, it is, see `Demand.small`."""
TIME_LIMIT_S = 60.0
"""After this time HiGHS returns the best decisions it has."""
TIE_BREAK = 1e-4
"""Weight of time where memory is minimised: of equal memory, the faster wins."""

Moment = tuple[tuple[tuple[int, ...], float], ...]
"""What is stored at one moment of the program: kinds of dims, and bytes."""


@dataclass(frozen=True, slots=True)
class WeightOption:
    """One layout of a kind of weights."""

    spec: Spec
    assignment: Assignment
    """The axes that the operations which read the weight are split by, too."""
    stored: tuple[tuple[str, int], ...]
    """Axes that only split the storage, with the dim: the weight is gathered for use."""
    moved: str = ""
    """The batch axis where it splits the rows of a table, too: the batch is moved to them."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a plan must achieve, and what it may use."""

    minimise: Literal["time", "memory"] = "time"
    limit_bytes: float | None = None
    """Per device, for weights, gradients, slots and ``buffers``."""
    state_limit_bytes: float | None = None
    """Per device, for weights alone."""
    storage_axes: tuple[str, ...] = ()
    """Axes that may split the storage of any large weight."""
    small: bool = False
    """Whether that of weights below `SMALL_BYTES` may be split too."""
    buffers: tuple[Moment, ...] = ()
    """Moments at which everything must fit."""
    forced: tuple[tuple[int, str, bool], ...] = ()
    """Decisions taken beforehand: kind, axis and whether it is split."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The decisions of an optimum."""

    split: frozenset[tuple[int, str]]
    """Kinds and axes that split them."""
    options: tuple[WeightOption, ...]
    """The layout of each kind of weights."""
    seconds: float


def state_bytes(problem: Problem, weight: WeightKind, option: WeightOption) -> float:
    """Return bytes on each device of one weight, and in training of its gradient and slots."""
    layout = Layout(problem.mesh, option.spec)
    local = weight.nbytes / math.prod(layout.parts)
    return 2 * local + weight.slot_bytes(layout) if problem.traced.training and weight.trainable else local


def weight_options(problem: Problem, weight: WeightKind, demand: Demand) -> Iterator[WeightOption]:
    """Yield the layouts that a kind of weights can have."""
    for assignment in problem.assignments(weight.kinds):
        base: list[tuple[str, ...]] = [()] * len(weight.shape)
        for axis, kind in zip(problem.mesh.axes, assignment, strict=True):
            if kind is not None and problem.sizes[axis] > 1:
                base[weight.kinds.index(kind)] += (axis,)
        moved = moves_batch(problem, weight, assignment)
        if moved is not None and weight.table is not None:
            spec = list(base)
            spec[weight.table.dim] += (moved,)
            if weight.allows(Layout(problem.mesh, tuple(spec))) and _may_have(weight, tuple(spec)):
                yield WeightOption(weight.pin or tuple(spec), assignment, (), moved)
        free = [a for a, k in zip(problem.mesh.axes, assignment, strict=True) if k is None and problem.sizes[a] > 1]
        for stored in _storage(problem, weight, free, demand):
            spec = list(base)
            for axis, dim in stored:
                spec[dim] += (axis,)
            layout = Layout(problem.mesh, tuple(spec))
            if weight.allows(layout) and _may_have(weight, layout.spec):
                yield WeightOption(weight.pin or layout.spec, assignment, stored)


def _may_have(weight: WeightKind, spec: Spec) -> bool:
    # As sets: a pin may name the axes of a dim in another order, and keeps its own.
    return weight.pin is None or [set(axes) for axes in spec] == [set(axes) for axes in weight.pin]


def _storage(
    problem: Problem, weight: WeightKind, free: Sequence[str], demand: Demand
) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield the ways to store a weight split over axes that do not split its use."""
    found: list[tuple[tuple[str, int], ...]] = [()]
    for axis in free:
        if weight.pin is None and not _may_store(problem, weight, axis, demand):
            continue
        dims = [d for d, n in enumerate(weight.shape) if n % problem.sizes[axis] == 0]
        found += [(*before, (axis, d)) for before in found for d in dims]
    yield from found


def _may_store(problem: Problem, weight: WeightKind, axis: str, demand: Demand) -> bool:
    if weight.nbytes < SMALL_BYTES and not demand.small:
        return False
    if axis in demand.storage_axes:
        return True
    # An axis for weights that cannot split the use of this one may still split its storage, instead of copies.
    splits_weights = problem.mesh.axis_kind(axis) != "batch"
    return splits_weights and not any((k, axis) in problem.candidates for k in weight.kinds)


def gather_s(problem: Problem, weight: WeightKind, option: WeightOption) -> float:
    """Return the seconds to gather a weight for use, forward and backward; negative if moving the batch saves time."""
    if option.moved:
        return sum(d.seconds for d in differences(problem, weight, option.assignment, option.moved))
    once = sum(seconds for _, _, seconds in gathers(problem, weight, option))
    return once * (2 if problem.traced.training else 1)


def gathers(
    problem: Problem, weight: WeightKind, option: WeightOption
) -> Iterator[tuple[tuple[str, ...], float, float]]:
    """Yield how a weight that is stored split is gathered once: axes, bytes of the result on each device, and seconds.

    XLA gathers dim by dim, the last one first, each over all axes that split it.
    """
    hardware, sizes = problem.hardware, problem.sizes
    local = weight.nbytes / problem.parts(weight.kinds, option.assignment)
    local /= math.prod(sizes[axis] for axis, _ in option.stored)
    for dim in reversed(range(len(weight.shape))):
        axes = tuple(axis for axis, of_dim in option.stored if of_dim == dim)
        if axes:
            size = math.prod(sizes[axis] for axis in axes)
            local *= size
            slowest = min(axes, key=hardware.rate_of)
            yield axes, local, hardware.exchange_s("all-gather", local, axis=slowest, size=size)


def solve(problem: Problem, demand: Demand) -> Solution | None:
    """Return the best decisions, or ``None`` where no decision meets the limits.

    Raises:
        LayoutError: When a pinned layout is impossible, or the solver gives up.
    """
    model = _Model(problem, demand)
    result = model.run()
    if result is None:
        return None
    split = frozenset(key for key, column in model.binaries.items() if result[column] > 0.5)
    # The solver's integers are 0.9999997 or so: take the largest share, and compare with 0.5 above.
    chosen = [max(columns, key=lambda pair: result[pair[1]])[0] for columns in model.options]
    pinned = {(kind, axis) for axis, kind in problem.pinned.items()}
    return Solution(split | pinned, tuple(chosen), model.seconds(result))


def _impossible(problem: Problem, weight: WeightKind) -> LayoutError:
    """Build the error for a pinned weight that cannot have its layout."""
    path = problem.traced.weights[weight.members[0]][0].path
    layout = Layout(problem.mesh, weight.pin or ((),) * len(weight.shape))
    parts = math.prod(layout.parts)
    why, fix = f"its shape is {weight.shape} on the mesh {problem.mesh}", "Change or remove the pin"
    # A kernel that divides may have a factor in the optimizer's state that does not.
    if refused := [slot.shape[0] for slot in weight.slots if not slot.allows(layout)]:
        factor = f"a factor of {plural(refused[0], 'row')}"
        why = f"the optimizer keeps {factor} for it, not a multiple of {plural(parts, 'device')}"
        fix = "Change the pin, or pass uneven='replicate' to the optimizer"
    return LayoutError(f"Cannot pin {path!r} to {layout}: {why}. {fix}")


@dataclass(slots=True)
class _Model:
    """The columns and rows of the linear program."""

    problem: Problem
    demand: Demand
    binaries: dict[tuple[int, str], int] = field(default_factory=dict)
    options: list[list[tuple[WeightOption, int]]] = field(default_factory=list)
    _integral: list[int] = field(default_factory=list)
    _time: list[float] = field(default_factory=list)
    """Seconds of each column."""
    _objective: list[float] = field(default_factory=list)
    """What is minimised."""
    _rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)
    _shares: dict[tuple[int, ...], list[tuple[Assignment, int]]] = field(default_factory=dict)
    _memory: list[dict[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # The decisions, then the costs that depend on them, then the limits.
        for key in self.problem.candidates:
            self.binaries[key] = self._column(integral=True)
        for kind, axis, value in self.demand.forced:
            if (kind, axis) in self.binaries:
                self._rows.append(({self.binaries[kind, axis]: 1.0}, float(value), float(value)))
        self._exclusive()
        for work in self.problem.work:
            for assignment, column in self._share(work.kinds):
                self._time[column] += work.count * self.problem.work_s(work, assignment)
        state = self._weights()
        self._memory = [state]
        for moment in self.demand.buffers:
            self._memory.append(self._with_buffers(state, moment))
        self._objective = list(self._time)
        self._limit()

    def _column(self, *, integral: bool = False) -> int:
        self._integral.append(int(integral))
        self._time.append(0.0)
        return len(self._time) - 1

    def _exclusive(self) -> None:
        """An axis splits one dim of a tensor at most, and a dim is split no finer than its length divides."""
        for (kind, axis), column in self.binaries.items():
            for (other, again), second in self.binaries.items():
                if column >= second:
                    continue
                # Two decisions exclude each other if they split two dims of one tensor over one axis, or one dim over
                # two axes whose product does not divide it.
                clash = axis == again and frozenset((kind, other)) in self.problem.conflicts
                both = self.problem.sizes[axis] * self.problem.sizes[again]
                if clash or (kind == other and self.problem.length[kind] % both):
                    self._rows.append(({column: 1.0, second: 1.0}, 0.0, 1.0))
        for taken, batch in self.problem.pinned.items():
            for (kind, axis), column in self.binaries.items():
                if axis == taken and frozenset((kind, batch)) in self.problem.conflicts:
                    self._rows.append(({column: 1.0}, 0.0, 0.0))

    def _share(self, kinds: tuple[int, ...]) -> list[tuple[Assignment, int]]:
        """Return the share columns of a combination of kinds."""
        kinds = tuple(sorted(set(kinds) - {UNSPLIT}))
        if kinds in self._shares:
            return self._shares[kinds]
        # Shares need not be integers: once the binaries are, their marginals leave one assignment a share of 1.
        made = [(assignment, self._column()) for assignment in self.problem.assignments(kinds)]
        self._shares[kinds] = made
        self._rows.append((dict.fromkeys((c for _, c in made), 1.0), 1.0, 1.0))
        self._marginals(made, kinds)
        return made

    def _marginals(self, made: Sequence[tuple[Assignment, int]], kinds: tuple[int, ...]) -> None:
        for i, axis in enumerate(self.problem.mesh.axes):
            for kind in kinds:
                if (kind, axis) in self.binaries:
                    row = {column: 1.0 for assignment, column in made if assignment[i] == kind}
                    self._rows.append(({**row, self.binaries[kind, axis]: -1.0}, 0.0, 0.0))

    def _weights(self) -> dict[int, float]:
        """Add the options of every kind of weights, and return the memory they take."""
        memory: dict[int, float] = {}
        only: dict[int, float] = {}
        for weight in self.problem.weights:
            found = [
                # The marginals fix only how a weight is used: how it is stored is a decision of its own, so an integer.
                (o, self._column(integral=bool(o.stored or o.moved)))
                for o in weight_options(self.problem, weight, self.demand)
            ]
            if not found:
                raise _impossible(self.problem, weight)
            self.options.append(found)
            self._rows.append((dict.fromkeys((c for _, c in found), 1.0), 1.0, 1.0))
            # A weight is split for use as the operations that read it are.
            self._marginals([(o.assignment, c) for o, c in found], tuple(sorted(set(weight.kinds) - {UNSPLIT})))
            count = len(weight.members)
            for option, column in found:
                memory[column] = count * state_bytes(self.problem, weight, option)
                only[column] = count * weight.nbytes / np.prod(Layout(self.problem.mesh, option.spec).parts, initial=1)
                self._time[column] += count * gather_s(self.problem, weight, option)
        if self.demand.state_limit_bytes is not None:
            self._rows.append((only, 0.0, self.demand.state_limit_bytes))
        return memory

    def _with_buffers(
        self, state: dict[int, float], moment: Sequence[tuple[tuple[int, ...], float]]
    ) -> dict[int, float]:
        total: dict[int, float] = defaultdict(float, state)
        for kinds, nbytes in moment:
            for assignment, column in self._share(kinds):
                total[column] += nbytes / self.problem.parts(kinds, assignment)
        return dict(total)

    def _limit(self) -> None:
        if self.demand.minimise == "memory":
            # Minimise the largest of all moments: one more column, which no moment may exceed, in units of `whole`.
            whole = max(sum(self._memory[0].values()), 1.0)
            worst = sum(self._time) or 1.0
            peak = self._column()
            self._objective = [*(TIE_BREAK * t / worst for t in self._objective), 1.0]
            self._rows += [({**memory, peak: -whole}, -np.inf, 0.0) for memory in self._memory]
        elif self.demand.limit_bytes is not None:
            self._rows += [(memory, 0.0, self.demand.limit_bytes) for memory in self._memory]

    def run(self) -> np.ndarray | None:
        """Solve, and return the value of every column."""
        count = len(self._time)
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
            options={"time_limit": TIME_LIMIT_S, "mip_rel_gap": 1e-6},
        )
        # Status 2 is infeasible, which is an answer. Without decisions for any other reason, the solver gave up.
        if found.x is None and found.status != 2:
            raise LayoutError(f"Cannot plan: the solver stopped with {found.message!r}")
        return None if found.x is None else np.asarray(found.x)

    def seconds(self, result: np.ndarray) -> float:
        """Return the time of a step under the decisions."""
        return float(np.dot(self._time, result))
