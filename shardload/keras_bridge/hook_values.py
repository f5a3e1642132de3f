"""What the ``save_own_variables`` of layers stores besides variables: counters, tables, the weights of ``tf_idf``.

A hook runs twice: traced, with placeholders for its variables, which tells what is computed from them, and then for
real, which gives the values of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import jax
import keras
import numpy as np
from jax.extend.core import Literal
from keras.src.backend.jax.core import JaxVariable

from shardload.keras_bridge.keras_types import Model, Variable
from shardload.keras_bridge.lora import hidden
from shardload.keras_bridge.saving import assignments_to, saved_objects
from shardload.keras_bridge.variables import has_value, stored_dtype, unique, value_of


def with_own_hooks(model: Model) -> list[tuple[str, Any]]:
    """Return the objects, with their paths, whose hooks may store other values than variables."""
    # Keras' own hooks save variables, except those of layers with a vocabulary (``tf_idf``).
    found = []
    for path, saveable in saved_objects(model):
        origin = str(getattr(getattr(type(saveable), "save_own_variables", None), "__module__", "keras."))
        if not origin.startswith("keras.") or "index_lookup" in origin:
            found.append((path, saveable))
    return found


def keys_besides_variables(saveable: Any) -> list[str] | None:
    """Return the keys of values that do not depend on variables; ``None`` if the hook needs the variables' values."""
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
    """Return the values that a hook stores besides variables and what it computes from them, by key."""
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
    return {key: value for key, value in rest.items() if not any(_same(value, copy) for copy in copies)}


def load_values(saveable: Any, values: Mapping[str, Any]) -> None:
    """Call ``load_own_variables`` with stored values, and with the layer's own variables, which keep their values.

    Raises:
        Exception: Of any kind, from the hook.
    """
    store: dict[str, Any] = {}
    with suppress(Exception), assignments_to(_keep):  # it may need the very values that are loaded here
        saveable.save_own_variables(store)
    own = {key: value_of(value) if isinstance(value, JaxVariable) else value for key, value in store.items()}
    with assignments_to(_keep):
        saveable.load_own_variables({**own, **values})


def _keep(variable: Variable, value: Any, assign: Any) -> Any:
    """Assign nothing."""
    del variable, assign
    return value


def _variables(saveable: Any) -> list[Variable]:
    return unique(v for v in getattr(saveable, "variables", ()) if isinstance(v, JaxVariable))


def _same(value: Any, copy: np.ndarray[Any, Any]) -> bool:
    return np.shape(value) == copy.shape and np.array_equal(np.asarray(value), copy)
