"""Map tensors to variables by watching the code that would load them.

The loading code of layers and converters runs on *reservations*: arrays that take no memory (`placeholders.py`). The
address of an array that the code assigns to a variable tells which part of which tensor the variable gets.

    structural.py   Keras files: each layer's load_own_variables
    converters.py   Hugging Face and GGUF: KerasHub's converters
    stored_state.py training steps: what each stored variable is for
    state_tree.py   the tree that a step stores; pairs its leaves with a model's variables
    roles.py        names of variables and slots that are the same in every process
    optimizer_pairs.py    which optimizer state is restored, and what begins as new
    built_optimizers.py   the optimizer in a .keras archive, built again to learn what its numbered variables are
    adapters.py     LoRA adapters, which files of Keras do not store
    outside.py      unused tensors that the model does not need, and why
    by_name_or_order.py   files with nothing but tensors: by names, or by a caller's map; files of Keras 2: by order
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardload.loaders import spec_of
from shardload.manifest import Manifest
from shardload.mapping.accumulation import with_updates_kept
from shardload.mapping.adapters import with_adapter_advice, with_adapters_kept, with_zeros_noted
from shardload.mapping.built_optimizers import archived_pairs, needs_roles, with_archived_state
from shardload.mapping.by_name_or_order import map_by_name, map_by_order
from shardload.mapping.converters import map_hub
from shardload.mapping.outside import sort_unused, without_parts
from shardload.mapping.stored_state import map_state
from shardload.mapping.structural import map_keras
from shardload.mapping.variable_map import VariableMap

__all__ = ["map_state", "map_weights", "sort_unused", "without_parts"]


def map_weights(
    model: Any,
    manifest: Manifest,
    *,
    names: Mapping[str, str] | None = None,
    optimizer: bool = True,
    as_keras: bool = False,
) -> VariableMap:
    """Map a checkpoint's tensors to a model's variables, by the function of this package for the checkpoint's format.

    With ``names`` (tensor → path of its variable), tensors of every format are mapped by name. With ``as_keras``,
    they are mapped as Keras and KerasHub would do it: an archive's optimizer state by position alone, and tensors
    rounded where KerasHub's converter rounds them.
    """
    match spec_of(manifest).tensor_names:
        case "step":
            return map_state(model, manifest, items="all" if optimizer else "weights", names=names)
        case "keras" if names is None:
            if as_keras:
                return with_zeros_noted(map_keras(model, manifest, optimizer=optimizer), model)
            paired = archived_pairs(model, manifest) if optimizer else None
            if not optimizer:
                found = map_keras(model, manifest, optimizer=False)
            elif paired is None or not needs_roles(paired, manifest, model.optimizer):
                found = map_keras(model, manifest)
            else:
                found = with_archived_state(map_keras(model, manifest, optimizer=False), model, manifest, paired)
            found = with_adapters_kept(found, model, manifest)
            return with_updates_kept(found, model, manifest) if optimizer else found
        case "order" if names is None:
            return with_adapter_advice(map_by_order(model, manifest), model, manifest)
        case "hugging-face" if names is None:
            return map_hub(model, manifest, float_casts="computed" if as_keras else "viewed")
    return with_adapter_advice(map_by_name(model, manifest, names=names), model, manifest)
