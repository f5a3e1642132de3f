"""Solve the planning problem as a mixed-integer linear program, with SciPy's HiGHS.

Binary variables say which axis splits which dim group, and where a weight is only stored split. For every combination
of dim groups that some operation, weight or buffer has, a share variable per assignment of axes makes the costs, which
are products of those decisions, linear: the shares of one combination add up to one, and their marginals are the
binaries. So all mesh axes are chosen together, and the optimum is exact for the cost model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from shardload.errors import LayoutError
from shardload.layout_search.problem import Assignment, Problem, WeightKind
from shardload.layout_search.program import UNSPLIT
from shardload.layout_search.weight_options import WeightOption, gather_s, weight_options, weight_state_bytes
from shardload.sharding.layout import Layout
from shardload.units import plural

TIME_LIMIT_S = 60.0
"""After this time HiGHS returns the best decisions it has."""
TIE_BREAK = 1e-4
"""Weight of time where memory is minimised: of equal memory, the faster wins."""

Moment = tuple[tuple[tuple[int, ...], float], ...]
"""What is stored at one moment of the program: bytes, by the dim groups of the values."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a plan must achieve, and what it may use."""

    minimise: Literal["time", "memory"] = "time"
    limit_bytes: float | None = None
    """Limit on each device for weights, gradients, slots and ``buffers``."""
    weight_limit_bytes: float | None = None
    """Limit on each device for weights alone."""
    storage_axes: tuple[str, ...] = ()
    """Axes that may split the storage of any large weight."""
    small: bool = False
    """Whether the storage of weights below `weight_options.LEAST_STORED_BYTES` may be split too."""
    buffers: tuple[Moment, ...] = ()
    """Moments at which everything must fit."""
    forced: tuple[tuple[int, str, bool], ...] = ()
    """Decisions taken beforehand: dim group, axis and whether the axis splits it."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The decisions of an optimum."""

    split: frozenset[tuple[int, str]]
    """Each dim group with an axis that splits it."""
    options: tuple[WeightOption, ...]
    """The layout of each of `Problem.weights`."""
    seconds: float


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
    pinned = {(dim_group, axis) for axis, dim_group in problem.pinned.items()}
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
        for dim_group, axis, value in self.demand.forced:
            if (dim_group, axis) in self.binaries:
                self._rows.append(({self.binaries[dim_group, axis]: 1.0}, float(value), float(value)))
        self._exclusive()
        for work in self.problem.work:
            for assignment, column in self._share(work.dim_groups):
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
        """Return the share columns of a combination of dim groups."""
        dim_groups = tuple(sorted(set(dim_groups) - {UNSPLIT}))
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
        """Add the options of every kind of weights, and return the memory they take."""
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
                raise _impossible(self.problem, weight)
            self.options.append(found)
            self._rows.append((dict.fromkeys((c for _, c in found), 1.0), 1.0, 1.0))
            # A weight is split for use as the operations that read it are.
            self._marginals([(o.assignment, c) for o, c in found], tuple(sorted(set(weight.dim_groups) - {UNSPLIT})))
            count = len(weight.members)
            for option, column in found:
                memory[column] = count * weight_state_bytes(self.problem, weight, option)
                only[column] = count * weight.nbytes / np.prod(Layout(self.problem.mesh, option.spec).parts, initial=1)
                self._time[column] += count * gather_s(self.problem, weight, option)
        if self.demand.weight_limit_bytes is not None:
            self._rows.append((only, 0.0, self.demand.weight_limit_bytes))
        return memory

    def _with_buffers(
        self, state: dict[int, float], moment: Sequence[tuple[tuple[int, ...], float]]
    ) -> dict[int, float]:
        total: dict[int, float] = defaultdict(float, state)
        for dim_groups, nbytes in moment:
            for assignment, column in self._share(dim_groups):
                total[column] += nbytes / self.problem.shard_count(dim_groups, assignment)
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
