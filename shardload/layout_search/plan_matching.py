"""Match the variables of a plan with those of a model.

the same paths                                   ─► by path
paths that differ in numbers only (dense_7)      ─► in order: layers that were built again
no path of the plan at all                       ─► in order, if all shapes agree: layers with other names
anything else                                    ─► an error, with the variables that the plan does not have
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from shardload.errors import LayoutError
from shardload.layout_search.layout_plan import LayoutPlan, PlannedVariable
from shardload.layouts import model_variables
from shardload.layouts.choice import LayoutChoice, VariableLayout
from shardload.layouts.choosing import with_spread_slots
from shardload.layouts.role_layouts import decide_layouts
from shardload.layouts.roles import roles
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec
from shardload.units import plural

_NUMBER = re.compile(r"_(\d+)$")
_SHOWN = 3


def choose_by_plan(model: Any, mesh: MeshSpec, plan: LayoutPlan) -> LayoutChoice:
    """Choose the layouts of a plan for the variables of a model.

    Raises:
        LayoutError: When the plan is for another mesh or another model.
    """
    if plan.mesh != mesh:
        raise LayoutError(f"Cannot use the plan for {plan.mesh} on the mesh {mesh}. Plan again for this mesh")
    # `uses` has the weights that the plan stores split further than they are used: a bound model gathers them.
    fixed, uses = {}, {}
    for variable, found in planned_variables(model, plan):
        # By identity, not by path: several variables may have one path.
        fixed[id(variable)] = VariableLayout.of(variable, Layout(mesh, found.spec), f"search: {found.reason}")
        if found.stored:
            uses[id(variable)] = Layout(mesh, found.used)
    variables, known = model_variables.all_variables(model), roles(model, by_user=False)
    placed = with_spread_slots(model, decide_layouts(variables, known, mesh, fixed=fixed), plan.batch_axis)
    by_id = {key: placed[key] for key in variables}
    return LayoutChoice(mesh, "search", by_id, batch_axis=plan.batch_axis, uses=uses)


def planned_variables(model: Any, plan: LayoutPlan) -> list[tuple[Any, PlannedVariable]]:
    """Pair the variables of a model with those of a plan.

    Raises:
        LayoutError: When the plan is for another model, or several of its variables share a path that the model has.
    """
    variables, by_path = list(model.variables), {v.path: v for v in plan.variables}
    if [tuple(v.shape) for v in variables] == [v.shape for v in plan.variables]:
        in_order = list(zip(variables, plan.variables, strict=True))
        if _renumbered([v.path for v in variables], [v.path for v in plan.variables]):
            return in_order  # several variables may have one path
        # Not one name in common: a renamed model. With some in common, order could mix up layers of equal shapes.
        if not any(v.path in by_path for v in variables):
            return in_order
    if problems := _problems(variables, plan):
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise LayoutError(
            f"Cannot use the plan of {plan.model!r} for {model.name!r}: {', '.join(problems[:_SHOWN])}{more}. Plan "
            "this model with shardload.parallel.search"
        )
    return [(v, by_path[v.path]) for v in variables]


def _problems(variables: Sequence[Any], plan: LayoutPlan) -> list[str]:
    by_path, counts = {v.path: v for v in plan.variables}, Counter(v.path for v in plan.variables)
    found = []
    for variable in variables:
        planned, shape = by_path.get(variable.path), tuple(variable.shape)
        if planned is None:
            found.append(f"{variable.path!r} is not in the plan")
        elif counts[variable.path] > 1:
            found.append(f"{variable.path!r} is the path of {plural(counts[variable.path], 'variable')} of the plan")
        elif planned.shape != shape:
            found.append(f"{variable.path!r} has shape {shape}, not {planned.shape}")
    return found


def _renumbered(paths: Sequence[str], planned: Sequence[str]) -> bool:
    """Whether paths differ at most in the numbers of their parts, and these grow as those of the plan do.

    Keras numbers layers without a name in the order in which they are made, across all models of a process.
    """
    numbers: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for path, other in zip(paths, planned, strict=True):
        mine, theirs = _parts(path), _parts(other)
        if [name for name, _ in mine] != [name for name, _ in theirs]:
            return False
        for depth, ((_, new), (_, old)) in enumerate(zip(mine, theirs, strict=True), start=1):
            # Per name and depth: `dense_3` and `conv_3` are counted apart, and so are the layers of each block.
            numbers["/".join(name for name, _ in mine[:depth])].add((old, new))
    # Two layers whose numbers change places are not the same layers built again.
    return all(_increasing(sorted(found)) for found in numbers.values())


def _parts(path: str) -> list[tuple[str, int]]:
    """Return the parts of a path, each without its number, and the number."""
    return [(_NUMBER.sub("", part), int(n[1]) if (n := _NUMBER.search(part)) else 0) for part in path.split("/")]


def _increasing(pairs: Sequence[tuple[int, int]]) -> bool:
    following = itertools.pairwise(pairs)
    return all(old < next_old and new < next_new for (old, new), (next_old, next_new) in following)
