"""Layouts that a search keeps fixed: users' rules for classes of layers, and the caller's pins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from shardload.errors import LayoutError, UsageError
from shardload.layout_search.layout_plan import LayoutPlan
from shardload.layout_search.plan_matching import planned_variables
from shardload.layouts import model_variables
from shardload.layouts import rules as rule_sets
from shardload.layouts.role_layouts import place
from shardload.layouts.roles import by_layer_rules, roles
from shardload.sharding.layout import Spec
from shardload.sharding.mesh import MeshSpec


def fixed_specs(model: Any, mesh: MeshSpec, pins: Any) -> dict[int, Spec]:
    """Return the layouts that are fixed, by ``id(variable)``: those of users' layer rules, then those of ``pins``.

    Args:
        model: The model.
        mesh: The mesh.
        pins: As for `shardload.parallel.search`.

    Raises:
        LayoutError: When a pin is impossible, matches nothing, or is for another model or mesh.
        UsageError: When ``pins`` has another form.
    """
    ruled = by_layer_rules(layer for layer, _ in model_variables.layers(model))
    # Pins come last and win: they are for this search, a layer rule is for every layout.
    fixed = {id(v): place(v, ruled[id(v)], mesh).layout.spec for v in model.variables if id(v) in ruled}
    if isinstance(pins, LayoutPlan):
        return fixed | _of_plan(model, mesh, pins)
    return fixed if pins is None else fixed | _of_rules(model, mesh, _rules(pins, mesh))


def _of_plan(model: Any, mesh: MeshSpec, plan: LayoutPlan) -> dict[int, Spec]:
    if plan.mesh != mesh:
        raise LayoutError(
            f"Cannot pin the layouts of a plan for {plan.mesh} on the mesh {mesh}. Pass a plan for {mesh}"
        )
    return {id(v): planned.spec for v, planned in planned_variables(model, plan)}


def _of_rules(model: Any, mesh: MeshSpec, rules: rule_sets.RuleSet) -> dict[int, Spec]:
    pinned = rule_sets.apply(rules, model.variables, mesh=mesh, found=roles(model, by_user=True))
    # As a layout, a rule that does not divide falls back with a report. A pin must hold exactly or fail.
    for refused in (v.fallback for v in pinned.values() if v.fallback is not None):
        raise LayoutError(
            f"Cannot pin {refused.variable!r} to {refused.wanted}: {refused.why}. Change or remove the pin"
        )
    return {key: v.layout.spec for key, v in pinned.items()}


def _rules(pins: Any, mesh: MeshSpec) -> rule_sets.RuleSet:
    if isinstance(pins, keras.distribution.LayoutMap):  # which is a mapping too
        found = rule_sets.from_layout_map(pins, mesh, origin="the pinned LayoutMap")
        for rule in found.rules:
            if rule.is_of_outputs:
                raise LayoutError(
                    f"Cannot pin {rule.pattern!r}: it is for the output of a layer, expected the path of a variable. A "
                    "search decides about outputs itself; remove the rule"
                )
        return found
    if isinstance(pins, Mapping):
        return rule_sets.from_mapping(pins, origin="the pins")
    raise UsageError(
        f"Cannot plan with pins={pins!r:.80}: expected rules such as {{'dense/kernel': (None, 'model')}}, a LayoutMap, "
        "or a LayoutPlan"
    )
