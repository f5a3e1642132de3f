"""Map a bare file of tensors to an existing model: by exact names, never by similarity.

A tensor goes to the variable with its path, to the variable an explicit map names, or, if its name is
Keras' structural key (``layers/dense/vars/0``), to the variable that the layer's own hook assigns it to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from shardload.errors import MismatchError
from shardload.keras_bridge.keras_types import Variable
from shardload.keras_bridge.model_state import state_of
from shardload.keras_bridge.variables import unique
from shardload.manifest import Manifest, Tensor, View
from shardload.mapping.structural import map_keras
from shardload.mapping.suggestions import suggestion, unknown_tensor
from shardload.mapping.variable_map import (
    DirectStep,
    Mismatch,
    VariableMap,
    bind,
    refused_among,
    split_missing,
    variable_names,
)
from shardload.units import plural


def map_by_name(model: Any, manifest: Manifest, *, names: Mapping[str, str] | None = None) -> VariableMap:
    """Map tensors to variables by name.

    Args:
        model: A built Keras model, abstract or not; it is not changed.
        manifest: Any format; only names, shapes and dtypes are used.
        names: Tensor name → variable path, where they differ.

    Raises:
        MismatchError: When a name in ``names`` does not exist, a path belongs to several variables, or a
            variable is named twice.
    """
    variables = _by_path(model)
    chosen = _chosen(variables, manifest, dict(names or {}))
    # Keras' keys have a part "vars" ("layers/dense/vars/0"), and only a layer's own hook knows which variable is 0.
    structural = {n: t for n, t in manifest.tensors.items() if n not in chosen and "vars" in n.split("/")[:-1]}
    base = map_keras(model, dataclasses.replace(manifest, tensors=structural)) if structural else None
    _refuse_twice(chosen, base)
    return _summarise(model, manifest, chosen, base)


def _by_path(model: Any) -> dict[str, list[Variable]]:
    found: dict[str, list[Variable]] = {}
    for variable in state_of(model):
        found.setdefault(variable.path, []).append(variable)
    return found


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


def _refuse_twice(chosen: Mapping[str, tuple[Tensor, Variable]], base: VariableMap | None) -> None:
    taken: dict[int, str] = {id(v): "the tensor of its structural key" for v in base.provided} if base else {}
    for name, (_, variable) in chosen.items():
        if id(variable) in taken:
            raise MismatchError(
                f"Cannot map two tensors to variable {variable.path!r}: tensor {name!r}, and {taken[id(variable)]}"
            )
        taken[id(variable)] = f"tensor {name!r}"


def _summarise(
    model: Any, manifest: Manifest, chosen: Mapping[str, tuple[Tensor, Variable]], base: VariableMap | None
) -> VariableMap:
    weights = list(model.weights)
    everything = unique([*weights, *state_of(model)])
    names = variable_names(everything)
    fits = {n: pair for n, pair in chosen.items() if pair[0].shape == tuple(pair[1].shape)}
    bindings = tuple(bind(v, View.whole(t), names) for t, v in fits.values())
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
        steps=(*(DirectStep(b) for b in bindings), *(base.steps if base else ())),
        refused=(
            *refused_among(weights, [v for n, (_, v) in chosen.items() if n not in fits], [], names),
            *((names[id(v)], v) for _, v in (base.refused if base else ())),
        ),
    )
