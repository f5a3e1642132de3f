"""Make Keras load values from another source than a file, list what Keras would save, and intercept ``assign``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import keras
from keras.src.backend.common import global_state, variables
from keras.src.backend.jax.core import JaxVariable
from keras.src.saving import saving_lib, serialization_lib
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.utils import naming

from shardload.keras_bridge import Model, Variable
from shardload.keras_bridge.lora import hidden
from shardload.keras_bridge.patches import Patches, replacing
from shardload.keras_bridge.recording import without_computing

_AssignHandler = Callable[[Variable, Any, Callable[[Variable, Any], Any]], Any]
"""Function that gets a variable, a value and Keras' own ``assign``; returns what ``assign`` should return."""

_assign_handler: ContextVar[_AssignHandler | None] = ContextVar("shardload_assign_handler", default=None)


@contextmanager
def assignments_to(handler: _AssignHandler) -> Iterator[None]:
    """Inside the block, ``variable.assign(value)`` calls ``handler``, to learn what layers and converters assign."""
    token = _assign_handler.set(handler)
    try:
        with _ASSIGN_PATCH.applied():
            yield
    finally:
        _assign_handler.reset(token)


@replacing
def _handled_assign(original: Any, self: Variable, value: Any) -> Any:
    handler = _assign_handler.get()
    return original(self, value) if handler is None else handler(self, value, original)


class _InheritedPatch(Patches):
    """Patches ``assign`` of ``JaxVariable``, which has only an inherited one: adds a method, and later deletes it."""

    def __init__(self) -> None:
        super().__init__(tuple)

    def _replace(self) -> None:
        def inherited(variable: Variable, value: Any) -> Any:
            # What the base class has at the time of the call, patched or not.
            return variables.Variable.assign(variable, value)

        JaxVariable.assign = _handled_assign(inherited)

    def _restore(self) -> None:
        del JaxVariable.assign


class StateSource(Protocol):
    """A source of values for `load_state`, which calls it for each saveable (layer or optimizer) that Keras visits."""

    def entry(self, path: str) -> Any:
        """Return key → value, for ``load_own_variables`` of the saveable (layer or optimizer) at ``path``."""

    def has_path(self, path: str) -> bool:
        """Whether anything is below ``path``; else Keras skips nested lists of layers, as old versions saved none."""

    def visit(self, saveable: Any, path: str) -> AbstractContextManager[Callable[[Exception | None], None]]:
        """Return a context in which Keras loads a saveable; yields a function to call with the error, or ``None``."""


class _ServedStore(saving_lib.H5IOStore):  # type: ignore[misc]
    """Passes a `StateSource` to Keras' ``_load_state``, which requires this type of store; uses no HDF5."""

    def __init__(self, source: StateSource) -> None:
        self.source = source

    # Keras tests `if weights_store`; the inherited method would ask for the HDF5 file, which does not exist.
    def __bool__(self) -> bool:
        return True

    def get(self, path: str) -> Any:
        return self.source.entry(path)

    def has_path(self, path: str) -> bool:
        return self.source.has_path(path)


def load_state(model: Model, source: StateSource, *, skip: Iterable[Any] = ()) -> None:
    """Run Keras' own walk over all objects that have ``load_own_variables``; they get their values from ``source``.

    Errors of single saveables do not stop it (nor Keras): ``visit`` receives them. Saveables in ``skip`` are omitted.
    """
    # Keras raises the first error unless it is given a set of failed saveables.
    with WALK_PATCH.applied():
        saving_lib._load_state(
            model,
            weights_store=_ServedStore(source),
            assets_store=None,
            inner_path="",
            visited_saveables={id(saveable) for saveable in skip},
            failed_saveables=set(),
            error_msgs={},
        )


@replacing
def _visited_load_state(
    original: Any, saveable: Any, weights_store: Any, assets_store: Any, inner_path: str, **named: Any
) -> None:
    if not isinstance(weights_store, _ServedStore):
        original(saveable, weights_store, assets_store, inner_path, **named)
        return
    with weights_store.source.visit(saveable, inner_path) as failed:
        original(saveable, weights_store, assets_store, inner_path, **named)
        # Keras collects the errors of saveables instead of raising them.
        _, error = named["error_msgs"].get(id(saveable), (None, None))
        failed(error)


def stored_variables(saveable: Any) -> list[Variable]:
    """Return the variables of a layer or optimizer, without those of sub-layers, in the order in which Keras saves."""
    if isinstance(saveable, keras.Layer):
        return [*saveable._trainable_variables, *saveable._non_trainable_variables]
    return list(saveable.variables) if isinstance(saveable, keras.optimizers.Optimizer) else []


def saved_objects(model: Model, *, skip: Iterable[Any] = ()) -> list[tuple[str, Any]]:
    """Return (path, object) for all that Keras saves in ``.weights.h5``, except the compiled optimizer and ``skip``."""
    found: list[tuple[str, Any]] = []
    seen = {id(getattr(model, "optimizer", None)), *map(id, skip)}

    # The same walk and names as `_save_state` and `_save_container_state` of Keras, which also write what they find.
    def visit(saveable: Any, path: str) -> None:
        if id(saveable) in seen:
            return
        seen.add(id(saveable))
        found.append((path, saveable))
        for name, child in saving_lib._walk_saveable(saveable):
            enter(child, f"{path}/{name}" if path else name, set())

    def enter(value: Any, path: str, containers: set[int]) -> None:
        if isinstance(value, KerasSaveable):
            visit(value, path)
        # A list may contain itself.
        elif isinstance(value, (list, dict, tuple)) and id(value) not in containers:
            containers.add(id(value))
            used: dict[str, int] = {}
            for child in list(value.values()) if isinstance(value, dict) else value:
                kind = naming.to_snake_case(type(child).__name__) if isinstance(child, KerasSaveable) else "container"
                if isinstance(child, (KerasSaveable, list, dict, tuple)):
                    enter(child, f"{path}/{saving_lib._get_unique_name(kind, used)}", containers)

    with WALK_PATCH.applied():
        visit(model, "")
    return found


def stored_by_hook(saveable: Any) -> dict[str, Variable]:
    """Return the variables that an object's ``save_own_variables`` stores as they are, by the key it stores them under.

    Values that it computes are left out. If LoRA is on in a layer, the method runs as if it were off: otherwise it
    would compute the sum of the kernel and LoRA's product, and the kernel would be left out, too.
    """
    stored = _run_hook(saveable) or {}  # if it needs values, callers name its variables by attribute
    return {key: value for key, value in stored.items() if isinstance(value, JaxVariable)}


def _run_hook(saveable: Any) -> dict[str, Any] | None:
    """Trace ``save_own_variables``; return key → what it stores: a variable, a tracer for what it computes, or a value.

    The result is ``None`` if the method fails without real values.
    """
    hook = getattr(saveable, "save_own_variables", None)
    if hook is None:
        return {}
    store: dict[str, Any] = {}
    try:
        with hidden([saveable] if vars(saveable).get("lora_enabled", False) else []), zeros_stored():
            without_computing(lambda: hook(store))
    except Exception:
        return None
    return store


def zeros_stored() -> AbstractContextManager[None]:
    """Inside the block, layers in GPTQ's and AWQ's modes also save their zero points.

    Keras 3.15 leaves them out, although it expects them when it loads a layer, so it cannot load what it saved.
    """
    return _ZEROS_PATCH.applied()


@replacing
def _kernel_and_zeros(original: Any, layer: Any) -> tuple[Any, Any, Any]:
    # These modes save only the zero points from here.
    return (None, None, layer.kernel_zero) if layer.quantization_mode in ("gptq", "awq") else original(layer)


_ZEROS_PATCH = Patches(
    lambda: [
        (cls, "_get_kernel_with_merged_lora", _kernel_and_zeros)
        for cls in (keras.layers.Dense, keras.layers.EinsumDense)
    ]
)


@dataclass(frozen=True, slots=True)
class SavedLayout:
    """What a ``.weights.h5`` written by Keras would contain: the variable and object behind each name, no values."""

    variables: Mapping[str, Variable]
    """Dataset (``layers/dense/vars/0``) → variable, in Keras' order; a shared variable is listed for each layer."""
    names: Mapping[str, str]
    """Group (``layers/dense/vars``) → name of the layer, metric or other object that is saved there."""
    computing: tuple[tuple[str, Any], ...]
    """(path, object) of each object whose ``save_own_variables`` also stores values that it computes from variables, or
    fails without real values. None of what it stores is in ``variables``."""
    optimizers: Mapping[str, Any]
    """Path → optimizer, except the compiled one; ``variables`` does not have the state of any optimizer."""


def saved_layout(model: Model, *, skip: Iterable[Any] = ()) -> SavedLayout:
    """Return what Keras would write to a weights file of ``model``, without ``skip`` and the state of optimizers."""
    variables: dict[str, Variable] = {}
    names: dict[str, str] = {}
    computing: list[tuple[str, Any]] = []
    optimizers: dict[str, Any] = {}
    for path, saveable in saved_objects(model, skip=skip):
        group = f"{path}/vars" if path else "vars"
        if hasattr(saveable, "save_own_variables") and isinstance(getattr(saveable, "name", None), str):
            names[group] = saveable.name
        if isinstance(saveable, keras.optimizers.Optimizer):
            optimizers[path] = saveable
            continue
        stored = _run_hook(saveable)
        if stored is None or not all(isinstance(value, JaxVariable) for value in stored.values()):
            computing.append((path, saveable))
        else:
            variables |= {f"{group}/{key}": variable for key, variable in stored.items()}
    return SavedLayout(variables, names, tuple(computing), optimizers)


def optimizers_of(model: Model) -> dict[str, Any]:
    """Return path → optimizer for the compiled optimizer and those that it wraps; empty for an uncompiled model."""
    optimizer = getattr(model, "optimizer", None)
    found = [] if optimizer is None else saved_objects(optimizer)
    return {f"optimizer/{p}".rstrip("/"): o for p, o in found if isinstance(o, keras.optimizers.Optimizer)}


def model_of(config: Any, **scope: Any) -> Any:
    """Build the object that ``config`` describes, as Keras' ``load_model`` does: a layer used twice is built once."""
    with serialization_lib.ObjectSharingScope():
        # Without the half for saving: layers that copy others by their configuration (`Bidirectional`) would join what
        # they keep apart everywhere else, and the weights of some copies would be lost, as in Keras.
        global_state.set_global_attribute("shared_objects/id_to_config_map", None)
        return keras.saving.deserialize_keras_object(config, **scope)


def serialised_model(model: Model) -> str:
    """Return the model's configuration as JSON, as in ``config.json`` of a ``.keras`` archive."""
    config, _ = saving_lib._serialize_model_as_json(model)
    return str(config)


def objects_with_files(model: Model) -> list[tuple[str, Any]]:
    """Return (path below ``assets``, object) for each object that can save files, such as a layer with a vocabulary."""
    return [(path, found) for path, found in saved_objects(model) if hasattr(found, "load_assets")]


def load_layer_assets(model: Model, folder: Path) -> list[tuple[str, Any, Exception]]:
    """Let all objects in ``model`` load their files from ``folder``; return (path, object, error) of each failure."""
    failed: dict[int, tuple[Any, Exception]] = {}
    with WALK_PATCH.applied():
        saving_lib._load_state(
            model,
            weights_store=None,
            assets_store=saving_lib.DiskIOStore(str(folder), mode="r"),
            inner_path="",
            visited_saveables=set(),
            failed_saveables=set(),
            error_msgs=failed,
        )
    paths = {id(found): path for path, found in saved_objects(model)} if failed else {}
    return [(paths.get(id(found), ""), found, error) for found, error in failed.values()]


_ASSIGN_PATCH = _InheritedPatch()


@functools.cache
def _computed_attributes(kind: Any) -> frozenset[str]:
    """Return the attributes for which Keras' layers compute an array: they unpack int4, and add LoRA's product."""
    properties = {name: getattr(kind, name, None) for name in ("kernel", "embeddings")}
    getters = {name: one.fget for name, one in properties.items() if isinstance(one, property)}
    return frozenset(name for name, one in getters.items() if str(one.__module__).startswith("keras.src.layers."))


@replacing
def _walk_without_computing(original: Any, saveable: Any) -> Iterable[tuple[str, Any]]:
    computed = _computed_attributes(saveable.__class__)
    return _attributes(saveable, without=computed) if computed else original(saveable)


def _attributes(saveable: Any, *, without: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a layer's attributes, in the order of Keras' ``_walk_saveable``."""
    skipped = saving_lib.get_attr_skipset(saveable._obj_type()) | without
    for name in sorted(dir(saveable), key=saving_lib._name_key):
        if not name.startswith("__") and name not in skipped:
            try:
                value = getattr(saveable, name)
            except Exception:  # a property that cannot be computed now: as in Keras
                continue
            yield name, value


# Keras means to cache the attributes to skip, but looks them up under a different name than it stores them under, so
# it creates a layer for each layer it visits: most of the walk's time. And it asks for every attribute: those of a
# layer with int4 or LoRA would compute its whole kernel each time.
WALK_PATCH = Patches(
    lambda: [
        (saving_lib, "_load_state", _visited_load_state),
        (saving_lib, "_walk_saveable", _walk_without_computing),
        (saving_lib, "get_attr_skipset", functools.cache),
    ]
)
