"""Slots for an optimizer that never trained, if the checkpoint contains their values.

``compile`` creates an optimizer without slots; Keras creates them in the first step of training, or when it restores a
whole model. A load into a compiled model restores them as well: the slots are built, without values, before
names are mapped, and removed again if nothing is loaded after all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shardload.keras_bridge.model_state import OptimizerState, other_optimizers, variables_of
from shardload.keras_bridge.optimizer_slots import innermost
from shardload.keras_bridge.recording import record_variables
from shardload.loaders import spec_of
from shardload.manifest import Manifest
from shardload.mapping.archived_optimizer import archived_pairs
from shardload.mapping.optimizer_pairs import is_untrained, takes_state
from shardload.mapping.state_keys import Role, roles_of
from shardload.mapping.state_tree import Stored
from shardload.mapping.stored_state import pair

_STORED = ("optimizer/vars/", "optimizer_variables/")
"""Where Keras stores the variables of a model's optimizer: in each of its own formats, and in a training step."""


@contextmanager
def slots_as_stored(
    model: Any, manifest: Manifest, *, rename: Mapping[str, str] | None = None, strict: bool = True
) -> Iterator[None]:
    """Create the optimizer slots that the checkpoint has; remove them again if the block raises.

    Does nothing if the optimizer already has slots, or cannot continue with the saved state: of a training step, by
    the roles of its slots; else by class if an archive gives it, or by number of variables, as in Keras.

    Args:
        model: A built model, compiled or not, abstract or not.
        manifest: Any format.
        rename: As for `map_state`.
        strict: Whether the block raises if the optimizer cannot continue with the state of a step, and so needs to
            know what it lacks.
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
                fits = len(optimizer.variables) == stored and not _other_kind(optimizer, manifest)
            if not fits:
                before.pop().restore()
        yield
    except BaseException:
        for state in before:
            state.restore()
        raise


def _unbuilt(model: Any, manifest: Manifest) -> Iterator[tuple[str | None, Any, list[Any], int]]:
    """Yield optimizers to build, with their path, the weights they train, and the number of variables stored."""
    optimizer, others = getattr(model, "optimizer", None), _of_others(manifest)
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


def _of_others(manifest: Manifest) -> list[Role]:
    """Return the stored roles of optimizers other than the compiled one in a training step."""
    return [role for role in _roles(manifest, "leaves") if role.optimizer is not None]


def _roles(manifest: Manifest, listed: str) -> list[Role]:
    """Return the roles of a training step's ``leaves``, or of what it has ``left_out``."""
    structure = manifest.metadata.get("structure")
    leaves = structure.get(listed) if isinstance(structure, Mapping) else None
    return [Stored.of_json(leaf).role for leaf in leaves] if isinstance(leaves, list) else []


def _other_kind(optimizer: Any, manifest: Manifest) -> bool:
    """Whether an archive's optimizer is of another class: SGD's momentum would fit RMSprop's velocity."""
    compiled = manifest.config.get("compile_config")
    saved = compiled.get("optimizer") if isinstance(compiled, Mapping) else None
    name = _class_name(saved)
    # `compile` wraps optimizers in a LossScaleOptimizer for half precision; the archive omits it.
    return name is not None and name != type(innermost(optimizer)).__name__


def _class_name(described: object) -> str | None:
    """Return the class of an optimizer's configuration, or of the one that it wraps."""
    if not isinstance(described, Mapping):
        return None
    config, name = described.get("config"), described.get("class_name")
    for wrapped in ("inner_optimizer", "base_optimizer"):
        if isinstance(config, Mapping) and wrapped in config:
            return _class_name(config[wrapped])
    return name if isinstance(name, str) else None
