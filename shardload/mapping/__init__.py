"""Map tensors to variables by watching the code that would load them.

One mechanism for all sources: the layers' and converters' own loading code runs on *reservations*
(`placeholders.py`); the memory address of each assigned array identifies its part of a tensor.

    structural.py   Keras files: each layer's load_own_variables
    converters.py   Hugging Face and GGUF: KerasHub's converters
    stored_state.py training steps: the role of each leaf
    state_tree.py   the tree that a step stores; pairs its leaves with a model's variables
    roles.py        names of variables and slots that are the same in every process
    optimizer_pairs.py    which optimizer state is restored, and what begins as new
    built_optimizers.py   the saved optimizer of an archive, built again to learn what its numbered variables are
    adapters.py     LoRA adapters, which files of Keras do not store
    outside.py      unused tensors that the model does not need, and why
    by_name_or_order.py   bare files: variable paths, structural keys, or a map; files of Keras 2: order
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
    """Map tensors to variables by `map_keras`, `map_by_order`, `map_hub`, `map_state` or `map_by_name`, by the format.

    An explicit ``names`` map selects `map_by_name`, except that a training step uses it in `map_state`. With
    ``as_keras``, an archive's optimizer state is matched by position alone, and tensors are rounded where KerasHub's
    converter rounds them.
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
