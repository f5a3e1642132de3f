"""Entry point of this package: from a model and a mesh to a layout for every variable.

`roles` says which dims to split, best first, and `auto` decides by what the mesh divides. Several answers for one
variable win in this order::

    users' layer rules ► pairs in a functional model's graph ► the outer block ► the variable's own layer ► its shape
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardload.errors import LayoutError, did_you_mean
from shardload.keras_bridge import distributions
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.model_state import spread_slots
from shardload.parallel import model_variables
from shardload.parallel import rules as rule_sets
from shardload.parallel.auto import decide_layouts
from shardload.parallel.gathering import gathered_outputs
from shardload.parallel.layout_search.layout_plan import LayoutPlan
from shardload.parallel.layout_search.searching import search
from shardload.parallel.plan_matching import planned_variables
from shardload.parallel.result import LayoutChoice, VariableLayout
from shardload.parallel.role import Role, Wants
from shardload.parallel.roles import roles
from shardload.sharding.devices import has_mesh, mesh_spec
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec
from shardload.typing import LayoutLike, MeshLike, PathLike

MODES = ("auto", "keras_hub", "replicated", "search")


def choose(model: Any, mesh: MeshLike | MeshSpec, layout: LayoutLike = "auto") -> LayoutChoice:
    """Choose a layout for every variable of a built model.

    Reads layer objects, shapes and dtypes only, so the variables may have no values yet.

    Args:
        model: A built Keras model.
        mesh: The mesh, such as ``"data=2,model=4"``; what its axes split follows from their names
            (`shardload.sharding.mesh`).
        layout: ``auto``, ``keras_hub`` (the backbone class' own ``get_layout_map``), ``replicated``, ``search`` (see
            `shardload.parallel.search`), a plan of that search or the path of its JSON file, a mapping of rules, a
            ``LayoutMap`` or a distribution of ``keras.distribution``, or the path of a rules file (see
            `shardload.parallel.rules`).

    Raises:
        LayoutError: When the mode is unknown, the class has no map, or a rule cannot be applied.
        UsageError: When ``model`` is not a Keras model.
    """
    model_variables.check_model(model, to="choose layouts for")
    mesh, variables = mesh_spec(mesh), model_variables.all_variables(model)
    if distributions.is_distribution(layout):
        return _by_distribution(model, mesh, layout)
    if isinstance(layout, str) and layout == "search":
        return _by_plan(model, mesh, search(model, mesh))
    if (plan := given_plan(layout)) is not None:
        return _by_plan(model, mesh, plan)
    mode, rule_set = _rule_set(model, mesh, layout)
    # 'replicated' does not call users' layer rules: it must stay a way out of a broken one.
    found = roles(model, by_user=mode != "replicated")
    if rule_set is None:
        fixed = {} if mode == "auto" else _replicate(variables, mesh, rule=mode)
    else:
        # Rules name the model's own variables; an optimizer's slots follow them.
        fixed = rule_sets.apply(rule_set, model.variables, mesh=mesh, found=found)
        if rule_set.default == "replicated":
            fixed |= _replicate(_unmatched(variables, found, fixed), mesh, rule="default")
    placed = _with_spread_slots(model, decide_layouts(variables, found, mesh, fixed=fixed), mesh.batch_axis)
    # A LayoutMap may have rules for activations; otherwise split features are gathered between blocks.
    own = distributions.activation_layouts(layout) if mode == "layout_map" else gathered_outputs(model, placed)
    return LayoutChoice(mesh, mode, {key: placed[key] for key in variables}, activations=own)


def _by_distribution(model: Any, mesh: MeshSpec, distribution: Any) -> LayoutChoice:
    own = mesh_spec(distribution.device_mesh)
    if own != mesh:
        raise LayoutError(f"Cannot use this {type(distribution).__name__} on the mesh {mesh}: its own is {own}")
    if (layout := distributions.layout_of_models(distribution)) is not None:
        return choose(model, mesh, layout)
    variables, found = model_variables.all_variables(model), roles(model, by_user=False)
    # Any other distribution is asked variable by variable, as Keras would ask it.
    fixed = rule_sets.by_distribution(distribution, model.variables, mesh=mesh, found=found)
    placed = decide_layouts(variables, found, mesh, fixed=fixed)
    placed = _with_spread_slots(model, placed, distribution.batch_dim_name)
    return LayoutChoice(
        mesh,
        "distribution",
        {key: placed[key] for key in variables},
        batch_axis=distribution.batch_dim_name,
        activations=distribution.get_tensor_layout,
        rule_notes=rule_sets.unmatched(distributions.layout_map_of(distribution), [v.path for v in model.variables]),
    )


def _with_spread_slots(model: Any, placed: dict[int, VariableLayout], batch_axis: str) -> dict[int, VariableLayout]:
    """Give slots that their optimizer spreads over further axes those layouts."""

    # A spread slot has its weight's layout, with more axes.
    def layout_of(variable: Any) -> Layout | None:
        return placed[id(variable)].layout if id(variable) in placed else None

    spread = spread_slots(model, layout_of, batch_axis=batch_axis)
    return placed | {
        key: replace(placed[key], layout=layout, rule=f"{placed[key].rule}, spread")
        for key, layout in spread.items()
        if key in placed and layout != placed[key].layout
    }


def given_plan(layout: Any) -> LayoutPlan | None:
    """Return a layout that is a plan, or read it from its JSON file; ``None`` for other layouts.

    Raises:
        LayoutError: When the file is not a plan.
    """
    if isinstance(layout, LayoutPlan):
        return layout
    if isinstance(layout, str | os.PathLike) and Path(layout).suffix == ".json" and Path(layout).exists():
        return LayoutPlan.load(layout)
    return None


def check_layout(layout: Any) -> None:
    """Check a layout given as text or a path: it names a layout, or a file that is a plan or has rules.

    Raises:
        LayoutError: Otherwise.
    """
    if isinstance(layout, str | os.PathLike) and str(layout) not in MODES and given_plan(layout) is None:
        _rules_in(layout)


def _by_plan(model: Any, mesh: MeshSpec, plan: LayoutPlan) -> LayoutChoice:
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
    placed = _with_spread_slots(model, decide_layouts(variables, known, mesh, fixed=fixed), plan.batch_axis)
    by_id = {key: placed[key] for key in variables}
    return LayoutChoice(mesh, "search", by_id, batch_axis=plan.batch_axis, uses=uses)


def _rule_set(model: Any, mesh: MeshSpec, layout: Any) -> tuple[str, rule_sets.RuleSet | None]:
    if not isinstance(layout, str | os.PathLike):
        if isinstance(layout, Mapping) and not has_mesh(layout):
            return "rules", rule_sets.from_mapping(layout)
        if not has_mesh(layout):
            raise LayoutError(f"Cannot use {layout!r:.80} as layout. Supported: {_forms()}")
        return "layout_map", rule_sets.from_layout_map(layout, mesh, origin="the LayoutMap")
    if layout == "keras_hub":
        return "keras_hub", _keras_hub_rules(model, mesh)
    if layout in MODES:
        return str(layout), None
    return str(layout), _rules_in(layout)


def _rules_in(file: PathLike) -> rule_sets.RuleSet:
    if not Path(file).exists():
        raise LayoutError(
            f"Unknown layout {str(file)!r}, and no file has that name.{did_you_mean(str(file), MODES)} "
            f"Supported: {_forms()}"
        )
    return rule_sets.read_rules(Path(file))


def _forms() -> str:
    return (
        "'auto', 'keras_hub', 'replicated', 'search', a LayoutPlan, {'dense/kernel': (None, 'model')}, a LayoutMap, "
        "ModelParallel or DataParallel of keras.distribution, or the path of a rules file (TOML) or a plan (JSON)"
    )


def _keras_hub_rules(model: Any, mesh: MeshSpec) -> rule_sets.RuleSet:
    backbone = backbone_of(model)
    name = type(backbone).__name__
    make = getattr(type(backbone), "get_layout_map", None)
    if make is None:
        raise LayoutError(f"{name} has no layout map of its own. Use layout='auto', a LayoutMap, or a rules file")
    if len(mesh.axes) < 2:
        raise LayoutError(f"The layout map of {name} needs a mesh with two axes, got {mesh}; write it as 1x{mesh.size}")
    from keras.distribution import DeviceMesh

    names = [f"cpu:{i}" for i in range(mesh.size)]  # placeholders: a LayoutMap uses only their number
    # KerasHub's maps take one axis for weights and one for data, by any name.
    weight_axes = (*mesh.axes_of("model"), *mesh.axes_of("expert"), *mesh.axes_of("fsdp"))
    if not weight_axes:
        raise LayoutError(f"The layout map of {name} needs an axis that splits weights, got {mesh}; name one model")
    layout_map = make(
        DeviceMesh(mesh.sizes, mesh.axes, names),
        model_parallel_dim_name=weight_axes[0],
        data_parallel_dim_name=next(axis for axis in (mesh.batch_axis, *mesh.axes) if axis != weight_axes[0]),
    )
    return rule_sets.from_layout_map(layout_map, mesh, origin=f"{name}.get_layout_map")


def _replicate(variables: dict[int, Any], mesh: MeshSpec, *, rule: str) -> dict[int, VariableLayout]:
    return {k: VariableLayout.of(v, Layout.replicated(mesh, len(v.shape)), rule) for k, v in variables.items()}


def _unmatched(variables: dict[int, Any], found: dict[int, Role], fixed: dict[int, VariableLayout]) -> dict[int, Any]:
    """Return variables left to the default, without slots: slots follow their variable, as in Keras."""
    slots = {k for k, role in found.items() if not isinstance(role, Wants) and role.rule == "slot"}
    return {k: v for k, v in variables.items() if k not in fixed and k not in slots}
