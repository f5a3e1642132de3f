"""Choose a layout for every variable of a model on a mesh.

`roles` says which dims of a variable to split, best first, and `role_layouts` takes the first one that the mesh divides
evenly. If `roles` finds several answers for one variable, the leftmost of these wins::

    users' layer rules ► pairs in a functional model's graph ► the outer block ► the variable's own layer ► its shape
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from shardload.errors import LayoutError, did_you_mean
from shardload.keras_bridge import distributions
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.model_state import slot_layouts
from shardload.layouts import model_variables
from shardload.layouts import rules as rule_sets
from shardload.layouts.choice import LayoutChoice, VariableLayout
from shardload.layouts.model_variables import is_kind
from shardload.layouts.role_layouts import Follows, decide_layouts
from shardload.layouts.roles import roles
from shardload.sharding.devices import has_mesh
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec
from shardload.typing import PathLike

MODES = ("auto", "keras_hub", "replicated", "search")


def choose_by_rules(model: Any, mesh: MeshSpec, layout: Any) -> LayoutChoice:
    """Choose layouts as ``layout`` says: a mode (``"auto"`` …), rules, or a LayoutMap, but no `LayoutPlan`."""
    variables = model_variables.all_variables(model)
    mode, rule_set = _rule_set(model, mesh, layout)
    if mode == "auto":
        mesh.check_no_stages()
    # 'replicated' does not call users' layer rules: it must stay a way out of a broken one.
    known = roles(model, variables, by_user=mode != "replicated")
    if rule_set is None:
        fixed = {} if mode == "auto" else _replicate(variables, mesh, rule=mode)
    else:
        # Rules name the model's own variables; an optimizer's slots follow them.
        fixed = rule_sets.apply(rule_set, model.variables, mesh=mesh, roles=known)
        if rule_set.default == "replicated":
            # Slots are left to follow their variable, as in Keras.
            slots = {k for k, role in known.items() if isinstance(role, Follows) and role.rule == "slot"}
            unmatched = {k: v for k, v in variables.items() if k not in fixed and k not in slots}
            fixed |= _replicate(unmatched, mesh, rule="default")
    placed = with_spread_slots(model, decide_layouts(variables, known, mesh, fixed=fixed), mesh.batch_axes)
    # A LayoutMap may have rules for activations; otherwise split features are gathered between blocks.
    own = distributions.activation_layouts(layout) if mode == "layout_map" else gathered_outputs(model, placed)
    return LayoutChoice(mesh, mode, {key: placed[key] for key in variables}, activations=own)


def choose_by_distribution(model: Any, mesh: MeshSpec, distribution: Any) -> LayoutChoice:
    """Return the layouts that a Keras distribution gives to variables; optimizer slots get those of their weights."""
    variables = model_variables.all_variables(model)
    known = roles(model, variables, by_user=False)
    fixed = rule_sets.by_distribution(distribution, model.variables, mesh=mesh, roles=known)
    placed = decide_layouts(variables, known, mesh, fixed=fixed)
    placed = with_spread_slots(model, placed, (distribution.batch_dim_name,))
    return LayoutChoice(
        mesh,
        "distribution",
        {key: placed[key] for key in variables},
        batch_axes=(distribution.batch_dim_name,),
        activations=distribution.get_tensor_layout,
        rule_notes=rule_sets.unmatched(distributions.layout_map_of(distribution), [v.path for v in model.variables]),
    )


def with_spread_slots(
    model: Any, placed: dict[int, VariableLayout], batch_axes: tuple[str, ...]
) -> dict[int, VariableLayout]:
    """Return ``placed``, but with optimizer slots split over more axes than their weights, if that is set (ZeRO-1)."""

    # A spread slot has its weight's layout, with more axes.
    def layout_of(variable: Any) -> Layout | None:
        return placed[id(variable)].layout if id(variable) in placed else None

    spread = slot_layouts(model, layout_of, batch_axes=batch_axes)
    return placed | {
        key: replace(placed[key], layout=layout, rule=f"{placed[key].rule}, spread")
        for key, layout in spread.items()
        if key in placed and layout != placed[key].layout
    }


def _rule_set(model: Any, mesh: MeshSpec, layout: Any) -> tuple[str, rule_sets.RuleSet | None]:
    if isinstance(layout, str | os.PathLike):
        if layout == "keras_hub":
            return "keras_hub", _keras_hub_rules(model, mesh)
        return str(layout), None if layout in MODES else rules_in_file(layout)
    if has_mesh(layout):
        return "layout_map", rule_sets.from_layout_map(layout, mesh, origin="the LayoutMap")
    if isinstance(layout, Mapping):
        return "rules", rule_sets.from_mapping(layout)
    raise LayoutError(f"Cannot use {layout!r:.80} as layout. Supported: {_forms()}")


def rules_in_file(file: PathLike) -> rule_sets.RuleSet:
    """Read the layout rules in a TOML file. If it is missing, the error also lists the named layouts (``"auto"`` …)."""
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
        raise LayoutError(
            f"Cannot use layout='keras_hub': {name} has no layout map of its own. Use layout='auto', a LayoutMap, or a "
            "rules file"
        )
    if len(mesh.axes) < 2:
        raise LayoutError(f"The layout map of {name} needs a mesh with two axes, got {mesh}; write it as 1x{mesh.size}")
    from keras.distribution import DeviceMesh

    names = [f"cpu:{i}" for i in range(mesh.size)]  # placeholders: a LayoutMap uses only their number
    # KerasHub's maps take one axis for weights and one for data, by any name.
    weight_axes = (*mesh.axes_of("model"), *mesh.axes_of("expert"), *mesh.axes_of("fsdp"))
    if not weight_axes:
        raise LayoutError(
            f"The layout map of {name} needs an axis that splits weights, got {mesh}. Name one of the axes 'model'"
        )
    layout_map = make(
        DeviceMesh(mesh.sizes, mesh.axes, names),
        model_parallel_dim_name=weight_axes[0],
        data_parallel_dim_name=next(axis for axis in (*mesh.batch_axes, *mesh.axes) if axis != weight_axes[0]),
    )
    return rule_sets.from_layout_map(layout_map, mesh, origin=f"{name}.get_layout_map")


def _replicate(variables: dict[int, Any], mesh: MeshSpec, *, rule: str) -> dict[int, VariableLayout]:
    return {k: VariableLayout.of(v, Layout.replicated(mesh, len(v.shape)), rule) for k, v in variables.items()}


# ---- features that are whole between blocks ------------------------------------------------------------

_WHOLE_FEATURES = PartitionSpec(PartitionSpec.UNCONSTRAINED)
"""Sharding for the output of a layer: XLA chooses how to split the batch dim, and the other dims are not split."""
_Layers = Sequence[tuple[Any, Sequence[Any]]]
"""A list of pairs: each layer of a model, and the direct sub-layers of that layer."""
_OTHER_NORMS = ("Batch", "Group", "Instance", "Spectral", "Unit")
"""Words in the class names of normalisation layers that do not normalise over all features of a token.

Their outputs stay as XLA splits them, while those of other normalisation layers are gathered."""


def gathered_outputs(model: Any, placed: Mapping[int, VariableLayout]) -> Callable[[str], Any] | None:
    """Return a function that says which outputs of layers XLA shall gather, so that no features are split there.

    The function takes the path of an output. It returns `_WHOLE_FEATURES` to gather it, or ``None`` to leave it to XLA.
    There is no function (``None``) if nothing splits features between blocks.

    Features are split by an embedding whose vocabulary does not divide evenly, and by a kernel whose outputs do not.
    XLA would keep them split through every block: GPT-2 with two layers and its head compiles, on 1x4, to 15
    all-reduces and 5 all-gathers, and with these outputs gathered, to 4 and 2
    (docs/design/0024-distribution-and-wrapper.md)::

        embedding ─► [gather] ─► norm ─► [gather] ─► block ─► norm ─► [gather] ─► head
    """
    splits = any(own.fallback is not None and not own.layout.is_replicated for own in placed.values())
    every = list(model_variables.nested_layers(model))
    norms = _norms(every)
    gathered = _sources(every, placed) if norms else []
    if splits or gathered:
        gathered += norms
    if splits:
        # Recurrent layers with one output: a head that reads split features would split their every step.
        gathered += [layer for layer, _ in every if is_kind(layer, "RNN") and not layer.return_state]
    paths = {f"{layer.path}/output" for layer in gathered if getattr(layer, "path", None)}
    return (lambda path: _WHOLE_FEATURES if path in paths else None) if paths else None


def _sources(every: _Layers, placed: Mapping[int, VariableLayout]) -> list[Any]:
    """Return embeddings and convolutions whose output features are split, because the last dim of their weights is."""
    layers = []
    for layer, children in every:
        own = {v.name: placed[id(v)] for v in model_variables.own_variables(layer, children) if id(v) in placed}
        found = own.get("embeddings" if is_kind(layer, "Embedding") else "kernel")
        # A kernel in a pair has another rule (column, row), and its features are reduced within the pair.
        begins = is_kind(layer, "Embedding") or (found is not None and found.rule == "channels")
        if found is not None and begins and found.layout.parts[-1] > 1:
            layers.append(layer)
    return layers


def _norms(every: _Layers) -> list[Any]:
    """Return the norms over all features of a token; norms in attention see one head each, and heads may stay split."""
    norms: list[Any] = []
    in_attention: set[int] = set()  # norms of queries and keys there are of single heads
    for layer, children in every:
        name = type(layer).__name__
        if id(layer) in in_attention or "Attention" in name:
            in_attention |= set(map(id, children))
        elif "Norm" in name and not any(other in name for other in _OTHER_NORMS):
            vectors = all(len(v.shape) == 1 for v in model_variables.own_variables(layer, children))
            norms += [layer] if vectors else []
    return norms
