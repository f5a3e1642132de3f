"""Layouts that a caller gives for a model: a `LayoutChoice` for it, a plan, or pins (fixed layouts) of a search.

The variables of a model are matched with those of a plan:

    the same paths                                   ─► by path
    paths that differ in numbers only (dense_7)      ─► in order: the same layers, built again
    no path in common                                ─► in order, if all shapes agree: the same layers under other names
    anything else                                    ─► an error, with the variables that the plan does not have
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from shardload.errors import LayoutError, UsageError, require_callable_with
from shardload.layout_search.layout_plan import LayoutPlan
from shardload.layout_search.plan_parts import PlannedVariable
from shardload.layouts import model_variables
from shardload.layouts import rules as rule_sets
from shardload.layouts.choice import LayoutChoice, VariableLayout
from shardload.layouts.choosing import with_spread_slots
from shardload.layouts.model_variables import check_model
from shardload.layouts.role_layouts import decide_layouts, lay_out
from shardload.layouts.roles import roles
from shardload.layouts.rules import roles_by_layer_rules
from shardload.sharding.layout import Layout, Spec
from shardload.sharding.mesh import MeshSpec
from shardload.units import is_function, plural

_NUMBER = re.compile(r"_(\d+)$")
_MOST_PROBLEMS = 3
"""How many differences between a model's variables and those of a plan an error lists at most."""
GivenLayouts = LayoutChoice | LayoutPlan | Callable[[Any], LayoutChoice | LayoutPlan]
"""What a caller may give as layouts: a `LayoutChoice`, a `LayoutPlan`, or a function that returns one for a model."""


def choice_for(model: Any, given: GivenLayouts) -> LayoutChoice:
    """Return ``given`` as a `LayoutChoice` for a model; raise if it is for another model or lacks a weight's layout."""
    check_model(model, to="take layouts for")
    match given:
        case LayoutChoice():
            return _complete(model, given)
        case LayoutPlan():
            return choose_by_plan(model, given.mesh, given)
        case _ if is_function(given):
            require_callable_with(given, model, name="choice")
            return choice_for(model, given(model))
    raise UsageError(
        f"Cannot take layouts from {given!r:.80}: expected a LayoutChoice or a LayoutPlan. Call "
        "shardload.parallel.choose(model, mesh, layout)"
    )


def _complete(model: Any, choice: LayoutChoice) -> LayoutChoice:
    """Return ``choice`` if it has a layout for each weight of a model; else raise, as it may be for another model."""
    weights = list(model.weights)
    # By path as well: Python reuses the id of a variable that is gone.
    strange = [v for v in weights if (planned := choice.by_id.get(id(v))) is None or planned.path != v.path]
    if not strange:
        return choice
    what = (
        "they are for another model object"
        if len(strange) == len(weights)
        else f"they were chosen before {plural(len(strange), 'weight')} existed, such as {strange[0].path!r}"
    )
    raise LayoutError(
        f"Cannot use these layouts for the model {model.name!r}: {what}. Call shardload.parallel.choose(model, mesh, "
        "layout) for this one"
    )


def choose_by_plan(model: Any, mesh: MeshSpec, plan: LayoutPlan) -> LayoutChoice:
    """Return the layouts of a plan as a `LayoutChoice` for a model; optimizer slots are split like their weights."""
    if mesh.parts_in(plan.mesh) is None:
        raise LayoutError(f"Cannot use the plan for {plan.mesh} on the mesh {mesh}. Plan again for this mesh")
    mesh = plan.mesh  # a plan may divide an axis in two: the layouts are for its mesh
    # `uses` has the weights that the plan stores split further than they are used: a bound model gathers them.
    fixed, uses, dtypes = {}, {}, {}
    for variable, planned in planned_variables(model, plan):
        # By identity, not by path: several variables may have one path.
        fixed[id(variable)] = VariableLayout.of(variable, Layout(mesh, planned.spec), f"search: {planned.reason}")
        if planned.stored:
            uses[id(variable)] = Layout(mesh, planned.used)
            dtypes[id(variable)] = planned.gathered_as
    variables, known = model_variables.all_variables(model), roles(model, by_user=False)
    placed = with_spread_slots(model, decide_layouts(variables, known, mesh, fixed=fixed), plan.batch_axes)
    by_id = {key: placed[key] for key in variables}
    return LayoutChoice(
        mesh,
        "search",
        by_id,
        batch_axes=plan.batch_axes,
        uses=uses,
        gather_dtypes=dtypes,
        remat=plan.remat,
        call_layouts=plan.call_layouts,
    )


def planned_variables(model: Any, plan: LayoutPlan) -> list[tuple[Any, PlannedVariable]]:
    """Pair each variable of a model with its layout in a plan, by path or order; raise if they do not match."""
    variables, by_path = list(model.variables), {v.path: v for v in plan.variables}
    if [tuple(v.shape) for v in variables] == [v.shape for v in plan.variables]:
        in_order = list(zip(variables, plan.variables, strict=True))
        if _renumbered([v.path for v in variables], [v.path for v in plan.variables]):
            return in_order  # several variables may have one path
        # Not one name in common: a renamed model. With some in common, order could mix up layers of equal shapes.
        if not any(v.path in by_path for v in variables):
            return in_order
    counts = Counter(v.path for v in plan.variables)
    problems = []
    for variable in variables:
        planned, shape = by_path.get(variable.path), tuple(variable.shape)
        if planned is None:
            problems.append(f"{variable.path!r} is not in the plan")
        elif counts[variable.path] > 1:
            problems.append(f"{variable.path!r} is the path of {plural(counts[variable.path], 'variable')} of the plan")
        elif planned.shape != shape:
            problems.append(f"{variable.path!r} has shape {shape}, not {planned.shape}")
    if problems:
        more = f" and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
        raise LayoutError(
            f"Cannot use the plan of {plan.model!r} for {model.name!r}: {', '.join(problems[:_MOST_PROBLEMS])}{more}. "
            "Plan this model with shardload.parallel.search"
        )
    return [(v, by_path[v.path]) for v in variables]


def _renumbered(paths: Sequence[str], planned: Sequence[str]) -> bool:
    """Whether two lists of paths differ only in numbers (``dense_3``), and the numbers are in the same order in both.

    Keras numbers layers without a name in the order in which they are made, across all models of a process. So the same
    model has other numbers if it is built again, and a plan for it still fits.
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
    following = (pair for pairs in numbers.values() for pair in itertools.pairwise(sorted(pairs)))
    return all(old < next_old and new < next_new for (old, new), (next_old, next_new) in following)


def _parts(path: str) -> list[tuple[str, int]]:
    """Split a path at its slashes, and each part into name and number: ``block/dense_3`` ─► (block, 0), (dense, 3)."""
    return [(_NUMBER.sub("", part), int(n[1]) if (n := _NUMBER.search(part)) else 0) for part in path.split("/")]


# ---- pins of a search ----------------------------------------------------------------------------


def fixed_specs(model: Any, mesh: MeshSpec, pins: Any) -> dict[int, Spec]:
    """Return the layouts that a search may not change, by ``id(variable)``: ``pins`` and rules of layer classes."""
    ruled = roles_by_layer_rules(layer for layer, _ in model_variables.nested_layers(model))
    # Pins come last and win: they are for this search, a layer rule is for every layout.
    fixed = {id(v): lay_out(v, ruled[id(v)], mesh).layout.spec for v in model.variables if id(v) in ruled}
    if pins is None:
        return fixed
    if isinstance(pins, LayoutPlan):
        if pins.mesh != mesh:
            raise LayoutError(
                f"Cannot pin the layouts of a plan for {pins.mesh} on the mesh {mesh}. Pass a plan for {mesh}"
            )
        return fixed | {id(v): planned.spec for v, planned in planned_variables(model, pins)}
    if isinstance(pins, keras.distribution.LayoutMap):  # which is a mapping too
        rules = rule_sets.from_layout_map(pins, mesh, origin="the pinned LayoutMap")
        for rule in (rule for rule in rules.rules if rule.is_of_outputs):
            raise LayoutError(
                f"Cannot pin {rule.pattern!r}: it is for the output of a layer, expected the path of a variable. A "
                "search decides about outputs itself; remove the rule"
            )
    elif isinstance(pins, Mapping):
        rules = rule_sets.from_mapping(pins, origin="the pins")
    else:
        raise UsageError(
            f"Cannot plan with pins={pins!r:.80}: expected rules such as {{'dense/kernel': (None, 'model')}}, a "
            "LayoutMap, or a LayoutPlan"
        )
    pinned = rule_sets.apply(rules, model.variables, mesh=mesh, roles=roles(model, by_user=True))
    # As a layout, a rule that does not divide falls back with a report. A pin must hold exactly or fail.
    for refused in (v.fallback for v in pinned.values() if v.fallback is not None):
        raise LayoutError(
            f"Cannot pin {refused.variable!r} to {refused.wanted}: {refused.why}. Change or remove the pin"
        )
    return fixed | {key: v.layout.spec for key, v in pinned.items()}
