"""Build optimizers without values, to learn what the variables in an archive are, and to have slots for a load.

A ``.keras`` archive stores the variables of an optimizer by number. It also has the optimizer's configuration: an
optimizer built from that, without values, tells which variable has which number.

    config.json ─► the optimizer that was saved ─► optimizer/vars/3 is the velocity of layers/dense/vars/0

``compile`` creates an optimizer without slots (such as Adam's momentums). Keras creates them in the first step of
training, or when it restores a whole model. For a load into a compiled model, shardload creates them, without values,
before it maps names, and removes them again if the load raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from shardload.keras_bridge.model_state import OptimizerState, other_optimizers, state_of, variables_of
from shardload.keras_bridge.optimizer_slots import as_described, innermost, kind_of
from shardload.keras_bridge.recording import record_variables
from shardload.keras_bridge.variables import stored_dtype
from shardload.loaders import spec_of
from shardload.manifest import Manifest, View
from shardload.mapping.accumulation import described_optimizer
from shardload.mapping.optimizer_pairs import (
    OPTIMIZER_KINDS,
    Left,
    Paired,
    begun_variables,
    is_untrained,
    resolve_optimizers,
    takes_state,
)
from shardload.mapping.roles import optimizer_roles, roles_of
from shardload.mapping.state_tree import Stored, find_stored
from shardload.mapping.stored_state import pair
from shardload.mapping.variable_map import AssignStep, VariableMap, unsharded_binding, variable_names

_GROUP, _INNER = "optimizer/vars/", "optimizer/inner_optimizer/"
_STORED = ("optimizer/vars/", "optimizer_variables/")
"""How names of stored optimizer variables begin: in all of Keras' own formats, and in a training step."""


def archived_pairs(model: Any, manifest: Manifest) -> Paired | None:
    """Pair an archive's optimizer variables with the compiled optimizer's, by what each is for; ``None`` if unknown."""
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
        place = {"path": tensor.name.split("/"), "kind": role.kind, "key": role.key, "slot": role.slot, "of": role.of}
        leaves.append({**place, "shape": list(tensor.shape), "dtype": tensor.dtype.name})
    found = find_stored(model, {"leaves": leaves, "optimizers": {"": kind_of(saved)}})
    missing = tuple(leaf for leaf in found.missing if leaf.kind in OPTIMIZER_KINDS and leaf.role.optimizer is None)
    pairs = tuple((manifest.tensors["/".join(stored.path)], leaf) for stored, leaf in found.pairs)
    left = tuple(Left.of(stored, "/".join(stored.path), found) for stored in found.unexpected)
    return Paired(pairs, missing, left, found.forms)


def with_archived_state(found: VariableMap, model: Any, manifest: Manifest, paired: Paired) -> VariableMap:
    """Return ``found``, extended so that it restores the compiled optimizer from the archive's state, ``paired``."""
    paired, notes = resolve_optimizers(model, paired, manifest, every=True)
    names = variable_names([*model.weights, *state_of(model)])
    fits = [(tensor, leaf) for tensor, leaf in paired.pairs if tensor.shape == leaf.shape]
    bindings = tuple(unsharded_binding(leaf.variable, View.whole(tensor), names) for tensor, leaf in fits)
    taken, filled = {b.view.tensor for b in bindings}, {id(b.variable) for b in bindings}
    wrong = [leaf for tensor, leaf in paired.pairs if tensor.shape != leaf.shape]
    return replace(
        found,
        bindings=(*found.bindings, *bindings),
        steps=(*found.steps, *(AssignStep((binding,)) for binding in bindings)),
        state=tuple(v for v in found.state if id(v) not in filled),
        skipped=tuple(name for name in found.skipped if name not in taken),
        notes=(*found.notes, *notes),
        begun=begun_variables(model, [*paired.begun, *wrong], paired.forms),
    )


def needs_roles(paired: Paired, manifest: Manifest, optimizer: Any) -> bool:
    """Whether to restore an archive's optimizer by what each variable is for: Keras' way, by position, would fail."""
    if not optimizer.built and not is_untrained(paired, manifest, None):
        return True
    # Keras would warn that the file has nothing for the optimizer inside.
    if innermost(optimizer) is not optimizer and not any(name.startswith(_INNER) for name in manifest.tensors):
        return True
    # Keras' hook compares the values: TensorFlow counts iterations in int64, JAX in int32.
    narrow = any(
        tensor.dtype.kind in "iu" and tensor.dtype != stored_dtype(leaf.variable) for tensor, leaf in paired.pairs
    )
    # Keras' own loading does the same if all is there, in the same order.
    numbers = {id(v): f"{_GROUP}{number}" for number, v in enumerate(optimizer.variables)}
    same = all(numbers.get(id(leaf.variable)) == tensor.name for tensor, leaf in paired.pairs)
    return not narrow and not (same and not paired.missing and not paired.left)


def _saved_optimizer(model: Any, manifest: Manifest) -> Any:
    """Build the optimizer that an archive describes, without values, to learn what its numbered variables are for."""
    described = described_optimizer(manifest)
    if getattr(model, "optimizer", None) is None or not isinstance(described, Mapping):
        return None
    with record_variables():
        found = as_described(described)
        if found is not None:
            found.build(model.trainable_variables)
    return found


@contextmanager
def slots_as_stored(
    model: Any, manifest: Manifest, *, rename: Mapping[str, str] | None = None, strict: bool = True
) -> Iterator[None]:
    """Create the slots (momentums) that a model's optimizers lack and the checkpoint has; remove them on an error.

    The load in the ``with`` block can then restore an optimizer that has never trained, if it fits the saved state.
    """
    before: list[OptimizerState] = []
    is_step = spec_of(manifest).tensor_names == "step"
    try:
        for path, optimizer, weights, stored in list(_unbuilt(model, manifest)):
            before.append(OptimizerState.of(optimizer))
            with record_variables():
                optimizer.build(weights)
            # Another kind of optimizer, whose state Keras skips with a warning; without slots, so does the mapping.
            paired = pair(model, manifest, rename=rename) if is_step else archived_pairs(model, manifest)
            if paired is not None:
                fits = not is_untrained(paired, manifest, path) and ((strict and is_step) or takes_state(paired, path))
            else:
                # By class too: SGD's momentum would fit RMSprop's velocity. `compile` wraps optimizers in a
                # LossScaleOptimizer for half precision; the archive omits it.
                kind = _class_name(described_optimizer(manifest))
                fits = len(optimizer.variables) == stored and kind in (None, type(innermost(optimizer)).__name__)
            if not fits:
                before.pop().restore()
        yield
    except BaseException:
        for state in before:
            state.restore()
        raise


def _unbuilt(model: Any, manifest: Manifest) -> Iterator[tuple[str | None, Any, list[Any], int]]:
    """Yield the optimizers without slots whose variables the checkpoint stores, with what is needed to build them.

    As (path, optimizer, weights that it trains, number of stored variables); the compiled one has the path ``None``.
    """
    optimizer, structure = getattr(model, "optimizer", None), manifest.metadata.get("structure")
    leaves = structure.get("leaves") if isinstance(structure, Mapping) else None
    stored_roles = [Stored.of_json(leaf).role for leaf in leaves] if isinstance(leaves, list) else []
    others = [role for role in stored_roles if role.optimizer is not None]
    stored = sum(name.startswith(_STORED) for name in manifest.tensors) - len(others)
    if stored and optimizer is not None and not optimizer.built:
        yield None, optimizer, model.trainable_variables, stored
    # Keras does not say which weights a GAN's optimizer trains, but the roles of its stored slots do.
    waiting = [(path, found) for path, found in other_optimizers(model) if not found.built] if others else []
    by_key = {role.key: i for i, role in roles_of(model).items()} if waiting else {}
    by_id = {id(v): v for v in variables_of(model)}
    for path, found in waiting:
        own_roles = [role for role in others if role.optimizer == path]
        trained = dict.fromkeys(role.of for role in own_roles if role.of is not None)
        weights = [by_id[i] for key in trained if (i := by_key.get(key)) in by_id]
        if weights and len(weights) == len(trained):
            yield path, found, weights, len(own_roles)


def _class_name(described: object) -> str | None:
    """Return the class of the optimizer that a configuration describes; of the one inside, if it is a wrapper."""
    if not isinstance(described, Mapping):
        return None
    config, name = described.get("config"), described.get("class_name")
    for wrapped in ("inner_optimizer", "base_optimizer"):
        if isinstance(config, Mapping) and wrapped in config:
            return _class_name(config[wrapped])
    return name if isinstance(name, str) else None
