"""What layers save besides variables: counters, tables, the weights of ``tf_idf``, and files such as vocabularies.

The hook ``save_own_variables`` runs twice. The first run is traced, with placeholders for the layer's variables: it
tells which stored values depend on variables. The second run gives the stored values that depend on none.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
from jax.extend.core import Literal
from keras.src.backend.jax.core import JaxVariable
from keras.src.layers import TextVectorization
from keras.src.layers.preprocessing.index_lookup import IndexLookup
from keras.src.saving import saving_lib

from shardload.keras_bridge import Model, Variable
from shardload.keras_bridge.lora import hidden
from shardload.keras_bridge.saving import WALK_PATCH, assignments_to, saved_objects
from shardload.keras_bridge.variables import has_value, stored_dtype, unique, value_of

_FILE = "vocabulary.txt"


def with_own_hooks(model: Model) -> list[tuple[str, Any]]:
    """Return (path, layer) for each saved object whose ``save_own_variables`` may store more than its variables."""
    # Keras' own hooks save variables, except those of layers with a vocabulary (``tf_idf``).
    found = []
    for path, saveable in saved_objects(model):
        origin = str(getattr(getattr(type(saveable), "save_own_variables", None), "__module__", "keras."))
        if not origin.startswith("keras.") or "index_lookup" in origin:
            found.append((path, saveable))
    return found


def keys_besides_variables(saveable: Any) -> list[str] | None:
    """Return the keys of what ``save_own_variables`` stores and no variable affects; ``None`` if it can't be traced."""
    store: dict[str, Any] = {}
    computed: list[str] = []
    variables = _variables(saveable)

    def run(values: list[Any]) -> list[Any]:
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            saveable.save_own_variables(store)
        computed.extend(key for key, value in store.items() if isinstance(value, jax.core.Tracer))
        return [store[key] for key in computed]

    try:
        with hidden([saveable] if vars(saveable).get("lora_enabled", False) else []):
            program = jax.make_jaxpr(run)([jax.ShapeDtypeStruct(v.shape, stored_dtype(v)) for v in variables])
    except Exception:  # of any kind: this is a user's hook
        return None
    # JAX traces every operation, also on a counter that is a `jax.Array`, so look where each result comes from.
    known = set(program.jaxpr.invars)
    for equation in program.jaxpr.eqns:
        if any(not isinstance(v, Literal) and v in known for v in equation.invars):
            known.update(equation.outvars)
    derived = {
        key for key, v in zip(computed, program.jaxpr.outvars, strict=True) if not isinstance(v, Literal) and v in known
    }
    return [key for key, value in store.items() if key not in derived and not isinstance(value, JaxVariable)]


def values_besides_variables(saveable: Any) -> dict[str, Any]:
    """Return key → value of what ``save_own_variables`` stores besides variables and values computed from them."""
    keys = keys_besides_variables(saveable)
    if keys is not None and not keys:
        return {}
    store: dict[str, Any] = {}
    try:
        # A hook may assign variables (KerasHub's DINOv2), but saving a step must not change the model.
        with assignments_to(_keep):
            saveable.save_own_variables(store)
    except Exception:  # of any kind: this is a user's hook
        return dict.fromkeys(keys or ())
    if keys is not None:
        return {key: store[key] for key in keys if key in store}
    copies = [
        np.asarray(value_of(v)) for v in _variables(saveable) if has_value(v) and value_of(v).is_fully_addressable
    ]
    rest = {key: value for key, value in store.items() if not isinstance(value, JaxVariable)}
    return {
        key: value
        for key, value in rest.items()
        if not any(np.shape(value) == copy.shape and np.array_equal(np.asarray(value), copy) for copy in copies)
    }


def load_values(saveable: Any, values: Mapping[str, Any]) -> None:
    """Restore values that are not variables (counters) by calling ``load_own_variables``; variables do not change."""
    store: dict[str, Any] = {}
    with suppress(Exception), assignments_to(_keep):  # it may need the very values that are loaded here
        saveable.save_own_variables(store)
    own = {key: value_of(value) if isinstance(value, JaxVariable) else value for key, value in store.items()}
    with assignments_to(_keep):
        saveable.load_own_variables({**own, **values})


def _keep(variable: Variable, value: Any, assign: Any) -> Any:
    """Handle ``variable.assign(value)`` by doing nothing, so that the variable keeps its value."""
    del variable, assign
    return value


def _variables(saveable: Any) -> list[Variable]:
    return unique(v for v in getattr(saveable, "variables", ()) if isinstance(v, JaxVariable))


def assets_of(model: Model) -> dict[str, Any] | None:
    """Return the files (assets) that layers save, as nested dicts of uint8 arrays; ``None`` if there are none.

    Vocabularies of lookup layers that were never adapted are left out: these layers would refuse to read them again.
    """
    with WALK_PATCH.applied():
        found: dict[str, Any] | None = saving_lib._save_assets_to_dict(model)
    for path, _ in unadapted_layers(model) if found else ():
        _remove(found or {}, path.split("/"))
    return found or None


def _remove(tree: dict[str, Any], path: list[str]) -> None:
    """Remove what is at ``path`` in nested dicts, and each dict on the way there that is then empty."""
    first, *rest = path
    if rest and isinstance(tree.get(first), dict):
        _remove(tree[first], rest)
    if not rest or not tree.get(first):
        tree.pop(first, None)


def unadapted_layers(model: Model) -> list[tuple[str, Any]]:
    """Return (path, layer) for each lookup layer, such as ``StringLookup``, that has no vocabulary."""
    found: list[tuple[str, Any]] = []
    inner: set[int] = set()
    for path, saveable in saved_objects(model):
        if isinstance(saveable, TextVectorization):
            inner.add(id(saveable._lookup_layer))  # its outer layer comes first and stands for both
        if id(saveable) not in inner and has_empty_vocabulary(saveable):
            found.append((path, saveable))
    return found


def has_empty_vocabulary(layer: Any) -> bool:
    """Whether ``layer`` is a lookup layer without a vocabulary."""
    lookup = _lookup_of(layer)
    return lookup is not None and lookup.vocabulary_size() <= lookup._token_start_index()


def is_empty_vocabulary(layer: Any, folder: Path) -> bool:
    """Whether the vocabulary file of ``layer`` in ``folder`` has special tokens only, which Keras refuses to load."""
    lookup, file = _lookup_of(layer), folder / _FILE
    if lookup is None or not file.is_file():
        return False
    lines = file.read_text().splitlines()
    while lines and not lines[-1]:
        lines.pop()
    tokens = [str(lookup.mask_token)] * lookup._oov_start_index() + [str(lookup.oov_token)] * lookup.num_oov_indices
    return lines == tokens[: len(lines)]


def _lookup_of(layer: Any) -> Any:
    found = layer._lookup_layer if isinstance(layer, TextVectorization) else layer
    return found if isinstance(found, IndexLookup) else None
