"""The state of an optimizer in Keras' own files, by role where it does not fit by position.

Keras stores the variables of an optimizer by number, and loads them only into an optimizer with as many. An archive has
the optimizer's configuration too: built again, without values, it says what each number is.

    config.json ─► the optimizer that was saved ─► optimizer/vars/3 is the velocity of layers/dense/vars/0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardload.keras_bridge.model_state import state_of
from shardload.keras_bridge.optimizer_slots import as_described, innermost, kind_of
from shardload.keras_bridge.recording import record_variables
from shardload.keras_bridge.variables import stored_dtype
from shardload.manifest import Manifest, View
from shardload.mapping.optimizer_pairs import (
    OPTIMIZER_KINDS,
    Left,
    Paired,
    begun_variables,
    is_untrained,
    resolve_optimizers,
)
from shardload.mapping.state_keys import Role, optimizer_roles, roles_of
from shardload.mapping.state_tree import Pairing, find
from shardload.mapping.variable_map import DirectStep, VariableMap, bind, variable_names

_GROUP, _INNER = "optimizer/vars/", "optimizer/inner_optimizer/"


def archived_pairs(model: Any, manifest: Manifest) -> Paired | None:
    """Pair the optimizer's state in an archive with the compiled optimizer; ``None`` if the archive does not say it."""
    stored = {name: tensor for name, tensor in manifest.tensors.items() if name.startswith(_GROUP)}
    saved = _saved_optimizer(model, manifest)
    if saved is None or len(saved.variables) != len(stored):
        return None
    weights = {i: role.key for i, role in roles_of(model).items() if role.kind == "weight"}
    roles = optimizer_roles(saved, weights)
    leaves = []
    for number, variable in enumerate(saved.variables):
        tensor, role = stored.get(f"{_GROUP}{number}"), roles[id(variable)]
        if tensor is None or tensor.shape != tuple(variable.shape):
            return None
        leaves.append(_leaf(tensor.name, role, tensor.shape, tensor.dtype.name))
    found = find(model, {"leaves": leaves, "optimizers": {"": kind_of(saved)}})
    return _paired(found, manifest)


def fits_by_position(paired: Paired, optimizer: Any) -> bool:
    """Whether Keras' own loading does the same: all is there, in the same order."""
    numbers = {id(v): f"{_GROUP}{number}" for number, v in enumerate(optimizer.variables)}
    same = all(numbers.get(id(leaf.variable)) == tensor.name for tensor, leaf in paired.pairs)
    return same and not paired.missing and not paired.left


def with_archived_state(found: VariableMap, model: Any, manifest: Manifest, paired: Paired) -> VariableMap:
    """Add the state of the compiled optimizer to a mapping without it."""
    paired, notes = resolve_optimizers(model, paired, manifest, every=True)
    names = variable_names([*model.weights, *state_of(model)])
    fits = [(tensor, leaf) for tensor, leaf in paired.pairs if tensor.shape == leaf.shape]
    bindings = tuple(bind(leaf.variable, View.whole(tensor), names) for tensor, leaf in fits)
    taken, filled = {b.view.tensor for b in bindings}, {id(b.variable) for b in bindings}
    wrong = [leaf for tensor, leaf in paired.pairs if tensor.shape != leaf.shape]
    return replace(
        found,
        bindings=(*found.bindings, *bindings),
        steps=(*found.steps, *map(DirectStep, bindings)),
        state=tuple(v for v in found.state if id(v) not in filled),
        skipped=tuple(name for name in found.skipped if name not in taken),
        notes=(*found.notes, *notes),
        begun=begun_variables(model, [*paired.begun, *wrong], paired.forms),
    )


def needs_roles(paired: Paired, manifest: Manifest, optimizer: Any) -> bool:
    """Whether the state of an archive is to be taken by role, because Keras would load other things, or nothing."""
    if not optimizer.built and not is_untrained(paired, manifest, None):
        return True
    # Keras would warn that the file has nothing for the optimizer inside.
    if innermost(optimizer) is not optimizer and not any(name.startswith(_INNER) for name in manifest.tensors):
        return True
    # Keras' hook compares the values: TensorFlow counts iterations in int64, JAX in int32.
    narrow = any(
        tensor.dtype.kind in "iu" and tensor.dtype != stored_dtype(leaf.variable) for tensor, leaf in paired.pairs
    )
    return not narrow and not fits_by_position(paired, optimizer)


def _saved_optimizer(model: Any, manifest: Manifest) -> Any:
    """Return the optimizer that an archive describes, built for the weights of ``model``, without values."""
    compiled = manifest.config.get("compile_config")
    described = compiled.get("optimizer") if isinstance(compiled, Mapping) else None
    if getattr(model, "optimizer", None) is None or not isinstance(described, Mapping):
        return None
    with record_variables():
        found = as_described(described)
        if found is not None:
            found.build(model.trainable_variables)
    return found


def _leaf(name: str, role: Role, shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    place = {"path": name.split("/"), "kind": role.kind, "key": role.key, "slot": role.slot, "of": role.of}
    return {**place, "shape": list(shape), "dtype": dtype}


def _paired(found: Pairing, manifest: Manifest) -> Paired:
    def tensors() -> Iterator[Left]:
        for stored in found.unexpected:
            yield Left.of(stored, "/".join(stored.path), found)

    missing = tuple(leaf for leaf in found.missing if leaf.kind in OPTIMIZER_KINDS and leaf.role.optimizer is None)
    pairs = tuple((manifest.tensors["/".join(stored.path)], leaf) for stored, leaf in found.pairs)
    return Paired(pairs, missing, tuple(tensors()), found.forms)
