"""Map a file to an existing model by exact names, or by the order of layers and weights; never by similarity.

A tensor of a bare file (one with nothing but tensors) goes to the variable that the caller's map names, or to the one
whose path is the tensor's name. If the name is a key of Keras (``layers/dense/vars/0``: class of the layer, position of
the variable), it goes to the variable that the layer's own ``load_own_variables`` assigns it to.

A file of Keras 2 goes by order, as in Keras:

    file    dense [kernel:0, bias:0]   dropout []   dense_1 [kernel:0, bias:0]   top_level_model_weights [scale:0]
              │                                       │                            │
    model   embed [kernel, bias]  (input_layer)     head [kernel, bias]          its own variables [scale]

Layers without weights are left out on both sides. If file and model differ in the number of layers or weights, that is
an error, also without ``strict``: everything after the first difference would go to the wrong layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardload.errors import MismatchError
from shardload.keras_bridge import Variable
from shardload.keras_bridge.model_state import state_of
from shardload.keras_bridge.variables import unique
from shardload.keras_bridge.weights_files import legacy_weights, own_weights
from shardload.loaders.keras_legacy import LAYERS, OPTIMIZER, TOP_LEVEL
from shardload.manifest import Manifest, Tensor, View
from shardload.mapping.structural import map_keras
from shardload.mapping.variable_map import (
    AssignStep,
    Mismatch,
    VariableMap,
    refused_among,
    split_missing,
    suggestion,
    unknown_tensor,
    unsharded_binding,
    variable_names,
)
from shardload.transfer.planning import Binding
from shardload.units import plural

_NO_STATE = (
    "the optimizer's state in the file was left out: the library that wrote it decides on its order, and Keras 3 does "
    "not load its slots either; training goes on with a new optimizer, at its configured learning rate"
)


def map_by_name(model: Any, manifest: Manifest, *, names: Mapping[str, str] | None = None) -> VariableMap:
    """Map each tensor to the variable in ``names``, else to the one whose path, or key in Keras' files, is its name."""
    variables: dict[str, list[Variable]] = {}
    for variable in state_of(model):
        variables.setdefault(variable.path, []).append(variable)
    chosen = _chosen(variables, manifest, dict(names or {}))
    # Keras' keys have a part "vars" ("layers/dense/vars/0"), and only a layer's own hook knows which variable is 0.
    structural = {n: t for n, t in manifest.tensors.items() if n not in chosen and "vars" in n.split("/")[:-1]}
    base = map_keras(model, dataclasses.replace(manifest, tensors=structural)) if structural else None
    taken: dict[int, str] = {id(v): "the tensor of its structural key" for v in base.provided} if base else {}
    for name, (_, variable) in chosen.items():
        if id(variable) in taken:
            raise MismatchError(
                f"Cannot map two tensors to variable {variable.path!r}: tensor {name!r}, and {taken[id(variable)]}. "
                "Name each variable once"
            )
        taken[id(variable)] = f"tensor {name!r}"
    return _variable_map(model, manifest, chosen, base)


def _chosen(
    variables: Mapping[str, list[Variable]], manifest: Manifest, names: dict[str, str]
) -> dict[str, tuple[Tensor, Variable]]:
    for source, path in names.items():
        if source not in manifest.tensors:
            raise unknown_tensor(source, manifest)
        if path not in variables:
            raise MismatchError(
                f"Cannot map {source!r} to {path!r}: the model has no variable with that path"
                + suggestion(path, variables)
            )
    chosen: dict[str, tuple[Tensor, Variable]] = {}
    for name, tensor in manifest.tensors.items():
        found = variables.get(names.get(name, name), [])
        if len(found) > 1:
            raise MismatchError(
                f"Cannot map tensor {name!r}: {plural(len(found), 'variable')} share the path {found[0].path!r}. "
                "Give their layers different names, or save with model.save_weights"
            )
        if found:
            chosen[name] = (tensor, found[0])
    return chosen


def _variable_map(
    model: Any, manifest: Manifest, chosen: Mapping[str, tuple[Tensor, Variable]], base: VariableMap | None
) -> VariableMap:
    weights = list(model.weights)
    everything = unique([*weights, *state_of(model)])
    names = variable_names(everything)
    fits = {n: pair for n, pair in chosen.items() if pair[0].shape == tuple(pair[1].shape)}
    bindings = tuple(unsharded_binding(v, View.whole(t), names) for t, v in fits.values())
    wrong = tuple(Mismatch.of_shapes(v, t.name, t.shape) for n, (t, v) in chosen.items() if n not in fits)
    provided = [v for _, v in chosen.values()] + ([*base.provided] if base else [])
    missing, missing_variables, state = split_missing(weights, everything, provided, names)
    # What no name matched. A structural key is unused only if the hooks did not read it, either.
    loose = {n for n in manifest.tensors if n not in chosen and (base is None or "vars" not in n.split("/")[:-1])}
    return VariableMap(
        bindings=bindings + (base.bindings if base else ()),
        computed=base.computed if base else (),
        missing=missing,
        missing_variables=missing_variables,
        state=state,
        unused=tuple(n for n in manifest.tensors if n in loose or (base and n in base.unused)),
        skipped=base.skipped if base else (),
        mismatched=wrong + (base.mismatched if base else ()),
        notes=base.notes if base else (),
        steps=(*(AssignStep((b,)) for b in bindings), *(base.steps if base else ())),
        refused=(
            *refused_among(weights, [v for n, (_, v) in chosen.items() if n not in fits], [], names),
            *((names[id(v)], v) for _, v in (base.refused if base else ())),
        ),
    )


class _Pair(NamedTuple):
    owner: Any
    variable: Variable
    tensor: Tensor


def map_by_order(model: Any, manifest: Manifest) -> VariableMap:
    """Map tensors of a Keras 2 file to variables by order: the n-th weight of the n-th layer that has weights."""
    pairs = _ordered_pairs(model, manifest)
    weights = list(model.weights)
    everything = unique([*weights, *state_of(model)])
    names = variable_names(everything)
    # A variable that two layers own keeps the last value, as in Keras.
    fits = [pair for pair in pairs if pair.tensor.shape == tuple(pair.variable.shape)]
    last = list({id(pair.variable): pair for pair in fits}.values())
    wrong = [pair for pair in pairs if pair.tensor.shape != tuple(pair.variable.shape)]
    owners = {id(pair.owner): pair.owner for pair in last}
    bindings: dict[int, list[Binding]] = {owner: [] for owner in owners}
    for pair in last:
        bindings[id(pair.owner)].append(unsharded_binding(pair.variable, View.whole(pair.tensor), names))
    steps = tuple(AssignStep(tuple(bindings[number]), owner) for number, owner in owners.items())
    missing, missing_variables, state = split_missing(weights, everything, [pair.variable for pair in pairs], names)
    used = {pair.tensor.name for pair in pairs}
    left = [name for name in manifest.tensors if name not in used]
    skipped = tuple(name for name in left if name.startswith(OPTIMIZER))
    return VariableMap(
        bindings=tuple(binding for step in steps for binding in step.bindings),
        missing=missing,
        missing_variables=missing_variables,
        state=state,
        unused=tuple(name for name in left if not name.startswith(OPTIMIZER)),
        skipped=skipped,
        mismatched=tuple(Mismatch.of_shapes(pair.variable, pair.tensor.name, pair.tensor.shape) for pair in wrong),
        notes=(_NO_STATE,) if skipped and getattr(model, "optimizer", None) is not None else (),
        steps=steps,
        refused=refused_among(weights, [p.variable for p in wrong], [p.variable for p in last], names),
    )


def _ordered_pairs(model: Any, manifest: Manifest) -> list[_Pair]:
    stored = list(manifest.metadata[LAYERS].items())
    layers = [(layer, found) for layer in model.layers if (found := legacy_weights(layer))]
    if len(stored) != len(layers):
        raise MismatchError(
            f"Cannot load {manifest.source} into {model.name!r} by order: the file has "
            f"{plural(len(stored), 'layer')} with weights ({_some([name for name, _ in stored])}), the model "
            f"{len(layers)} ({_some([layer.name for layer, _ in layers])}). Build the model that was saved"
        )
    pairs: list[_Pair] = []
    for (name, tensors), (layer, variables) in zip(stored, layers, strict=True):
        pairs += _paired_layer(
            manifest, layer, variables, tensors, f"{name!r} of the file and {layer.name!r} of the model"
        )
    if (own := manifest.metadata.get(TOP_LEVEL)) is not None:
        pairs += _paired_layer(manifest, model, own_weights(model), own, "the weights that belong to the model itself")
    return pairs


def _paired_layer(
    manifest: Manifest, owner: Any, variables: Sequence[Variable], tensors: Sequence[str], what: str
) -> list[_Pair]:
    if len(variables) != len(tensors):
        raise MismatchError(
            f"Cannot load {manifest.source} by order: {what} differ in their number, {len(tensors)} in the file and "
            f"{len(variables)} in the model. Build the model that was saved"
        )
    return [_Pair(owner, v, manifest.tensors[name]) for v, name in zip(variables, tensors, strict=True)]


def _some(names: Sequence[str], *, limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (" …" if len(names) > limit else "") or "none"
