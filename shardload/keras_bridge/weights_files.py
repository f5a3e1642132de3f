"""List what Keras would write to a weights file, and what it finds in one; build models from files of Keras 2.

model ─ Keras' save_weights, into a store that writes no file ─► Listing     names, shapes and dtypes, no values
file  ─ Keras' own reader of files, headers only              ─► names, shapes and dtypes of what Keras finds there
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras.src.backend.common.symbolic_scope import SymbolicScope
from keras.src.backend.jax.core import JaxVariable
from keras.src.legacy.saving import legacy_h5_format, saving_options, saving_utils
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.saving import saving_lib, serialization_lib

from shardload.errors import UnsupportedError
from shardload.keras_bridge import Model, Variable
from shardload.keras_bridge.layer_settings import global_policy
from shardload.keras_bridge.patches import Patches, replacing
from shardload.keras_bridge.saving import WALK_PATCH, zeros_stored
from shardload.keras_bridge.variables import has_value, stored_dtype
from shardload.transfer.casts import is_float

_Form = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype of a dataset (a stored array) in an HDF5 file."""
_Groups = Mapping[str, Mapping[str, _Form]]
"""Path of an object (``layers/dense``) → key under which it stores an array (``0``) → shape and dtype."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The names, shapes and dtypes of all that Keras would write to a weights file of one model."""

    groups: _Groups
    optimizers: Mapping[str, Any]
    """Path in the file → optimizer whose variables Keras stores there."""


def dataset(path: str, key: str) -> str:
    """Return the name of a dataset in a weights file, such as ``layers/dense/vars/0``."""
    return f"{path}/vars/{key}" if path else f"vars/{key}"


def listed_by_keras(model: Model, *, skip: Iterable[Any] = ()) -> Listing:
    """Return what Keras' own ``save_weights`` would write for ``model``, without the objects in ``skip``.

    Skip objects that compute values when they are saved, such as a resized embedding: for these, the variables would
    need values. `SavedLayout` lists such objects under ``computing``.
    """
    store = _ListingStore()
    # Variables without a value read as zeros there, instead of raising.
    reading = nullcontext() if all(map(has_value, model.variables)) else SymbolicScope()
    with WALK_PATCH.applied(), _OPTIMIZER_PATCH.applied(), zeros_stored(), reading:
        saving_lib._save_state(model, store, None, "", set(map(id, skip)))
    # A quantised layer that was built from a map of policies gives Keras no scale to store, so its group tells nothing.
    known = {path: found for path, found in store.groups.items() if not any(v is None for v in found.values())}

    def form(value: Any) -> _Form:
        if isinstance(value, JaxVariable):
            return tuple(value.shape), stored_dtype(value)
        return np.shape(value), np.dtype(getattr(value, "dtype", None) or np.asarray(value).dtype)

    groups = {path: {key: form(value) for key, value in found.items()} for path, found in known.items()}
    return Listing(groups, store.optimizers)


def check_for_keras(file: Path, listing: Listing, *, omitted: Container[str] = (), is_index: bool = False) -> None:
    """Check a file that was just written: raise unless Keras finds in it all of ``listing`` but ``omitted`` paths.

    ``is_index`` tells that the file is the index of weights in several files, in ``.weights.json`` format.
    """
    wanted = {path: keys for path, keys in listing.groups.items() if path not in omitted}
    found = found_by_keras(file, wanted, is_index=is_index)
    for path, keys in wanted.items():
        for key in {**keys, **found[path]}:
            # Keras casts, and each value stays of its kind.
            want, has = keys.get(key), found[path].get(key)
            if want is None or has is None or want[0] != has[0] or is_float(want[1]) != is_float(has[1]):
                problem = f"it would find {_form(has)} at {dataset(path, key)!r}, expected {_form(want)}"
                if want is not None and has is not None and is_float(want[1]) > is_float(has[1]):
                    problem += ", because the model's own configuration leaves out that this layer is quantised"
                raise UnsupportedError(
                    f"Cannot write {file.name} for Keras: {problem}. Save a training step with shardload.save(model, "
                    "directory, step=0), or call Keras' model.save_weights(path)"
                )


def _form(form: _Form | None) -> str:
    return "nothing" if form is None else f"{form[1].name} {form[0]}"


def found_by_keras(path: Path, groups: _Groups, *, is_index: bool) -> _Groups:
    """Return shape and dtype of all arrays that Keras' own reader finds for the objects in ``groups``; read no values.

    ``groups`` has the path of each object in the file, and the keys under which the object would look for arrays.
    ``is_index`` tells that the file is the index of weights in several files, in ``.weights.json`` format.
    """

    def entry(store: Any, keys: Iterable[str]) -> dict[str, _Form]:
        # Layers count the keys of the outermost level, and their hooks may ask for keys below them.
        asked = dict.fromkeys([*list(store.keys()), *(key for key in keys if key in store)])
        return {key: form for key in asked if (form := store[key]) is not None}

    with closing((_ShardHeaders if is_index else _Headers)(path, mode="r")) as store:
        return {group: entry(store.get(group), keys) for group, keys in groups.items()}


class _ListingStore(saving_lib.H5IOStore):  # type: ignore[misc]
    """Passed to Keras' ``_save_state``, which requires this type of store: lists what Keras writes, writes no file."""

    def __init__(self) -> None:
        self.groups: dict[str, dict[str, Any]] = {}
        self.optimizers: dict[str, Any] = {}
        self._path = ""

    # Keras tests `if weights_store`; the inherited method would ask for the HDF5 file, which does not exist.
    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> _ListingStore:
        self._path, self._h5_entry_group = path, self.groups.setdefault(path, {})
        return self

    def __getitem__(self, key: str) -> Any:
        return self._h5_entry_group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._h5_entry_group[key] = value

    def take(self, optimizer: Any) -> None:
        """List the variables of an optimizer; Keras' own ``save_own_variables`` would convert them to NumPy arrays."""
        self.optimizers[self._path] = optimizer
        for i, variable in enumerate(optimizer.variables):
            self[str(i)] = variable


class _Headers(saving_lib.H5IOStore):  # type: ignore[misc]
    """Keras' reader, changed to return the shape and dtype of a dataset instead of its values; ``None`` for a group."""

    def __getitem__(self, key: str) -> _Form | None:
        if self._h5_entry_group.get(key, getclass=True) is not saving_lib.h5py.Dataset:
            return None
        found = saving_lib.safe_get_h5_dataset(self._h5_entry_group, key)
        return found.shape, np.dtype("bfloat16" if found.attrs.get("dtype") == "bfloat16" else found.dtype)


class _ShardHeaders(saving_lib.ShardedH5IOStore, _Headers):  # type: ignore[misc]
    """Keras' reader of sharded files (an index and its shards), changed to return shapes and dtypes, not values."""


@replacing
def _listed_state(original: Any, self: Any, store: Any) -> None:
    # Keras converts the variables to NumPy, which those without a value cannot be.
    store.take(self) if isinstance(store, _ListingStore) else original(self, store)


_OPTIMIZER_PATCH = Patches(lambda: [(BaseOptimizer, "save_own_variables", _listed_state)])


def build_legacy_model(
    config: Mapping[str, Any], *, dtype: Any, custom_objects: Mapping[str, Any] | None, safe_mode: bool
) -> Model:
    """Build the model that the ``model_config`` in a file of Keras 2 describes; do not compile it."""
    found = _decoded(config if dtype is None else _without_dtypes(config))
    with _legacy_scope(custom_objects, safe_mode), nullcontext() if dtype is None else global_policy(dtype):
        model = saving_utils.model_from_config(found, custom_objects=dict(custom_objects or {}))
    if not isinstance(model, keras.Model):
        raise UnsupportedError(
            f"Cannot build a model: the configuration describes a {type(model).__name__}, expected a Keras model. "
            "Build the model yourself, then call shardload.load_weights(model, source)"
        )
    return model


def compile_legacy_model(
    model: Model, config: Mapping[str, Any], *, custom_objects: Mapping[str, Any] | None, safe_mode: bool
) -> None:
    """Compile a model as the ``training_config`` in a file of Keras 2 describes."""
    with _legacy_scope(custom_objects, safe_mode):
        arguments = saving_utils.compile_args_from_training_config(_decoded(config), dict(custom_objects or {}))
        model.compile(**arguments)


@contextmanager
def _legacy_scope(custom_objects: Mapping[str, Any] | None, safe_mode: bool) -> Iterator[None]:
    with (
        keras.saving.custom_object_scope(dict(custom_objects or {})),
        serialization_lib.SafeModeScope(safe_mode),
        saving_options.keras_option_scope(use_legacy_config=True),
    ):
        yield


def _decoded(value: Any) -> Any:
    """Return a copy of a Keras 2 configuration with tuples, bytes and ellipses restored, without using TensorFlow."""
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, Mapping):
        return copy.copy(value)
    match value.get("class_name"):
        case "__tuple__" | "TensorShape" if isinstance(items := value.get("items"), list):
            return tuple(map(_decoded, items))
        case "__ellipsis__":
            return Ellipsis
        case "__bytes__" if isinstance(text := value.get("value"), str):
            return text.encode()
    return {key: _decoded(each) for key, each in value.items()}


def _without_dtypes(value: Any) -> Any:
    """Return a copy of a configuration without its layers' float dtypes: they then follow the global policy."""
    if isinstance(value, list):
        return [_without_dtypes(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    found = {key: _without_dtypes(each) for key, each in value.items()}
    inner = found.get("config")
    # Layers have names; initializers do not, and a dtype of theirs is that of their values.
    if not isinstance(inner, dict) or "name" not in inner or found.get("class_name") == "InputLayer":
        return found
    # A policy as Keras 3 describes it, or a dtype.
    dtype, policy = inner.get("dtype"), inner.get("dtype")
    if isinstance(policy, Mapping) and isinstance(policy.get("config"), Mapping):
        dtype = policy["config"].get("name")
    is_float_dtype = isinstance(dtype, str) and "float" in dtype
    return {**found, "config": {key: each for key, each in inner.items() if key != "dtype" or not is_float_dtype}}


def legacy_weights(layer: Any) -> list[Variable]:
    """Return the weights of a layer and of the layers in it, in the order of Keras 2: trainable ones first."""
    return list(legacy_h5_format._legacy_weights(layer))


def own_weights(model: Model) -> list[Variable]:
    """Return the weights that belong to the model itself and to none of its layers, in the order of Keras 2."""
    # As in `legacy_h5_format.load_weights_from_hdf5_group`, but by identity: `in` would compare values.
    known = {id(variable) for variable in model.weights}
    return [v for v in model._trainable_variables + model._non_trainable_variables if id(v) in known]
