"""What Keras itself would write to a weights file, and what it finds in one; names, shapes and dtypes, no values.

model ─ Keras' save_weights, into a store that keeps no file ─► Listing
file  ─ Keras' own reader of files, headers only             ─► the same groups as they are there
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from keras.src.backend.common.symbolic_scope import SymbolicScope
from keras.src.backend.jax.core import JaxVariable
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.saving import saving_lib

from shardload.errors import UnsupportedError
from shardload.keras_bridge.keras_types import Model
from shardload.keras_bridge.patches import Patches
from shardload.keras_bridge.saving import WALK_PATCH
from shardload.keras_bridge.variables import has_value, stored_dtype
from shardload.transfer.casts import is_float

Form = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype of a dataset."""
Groups = Mapping[str, Mapping[str, Form]]
"""Path of an object (``layers/dense``) → its keys (``0``) → their datasets."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What Keras would write for one model."""

    groups: Groups
    optimizers: Mapping[str, Any]
    """Path → optimizer."""


def dataset(path: str, key: str) -> str:
    """Return the name of a dataset in the file, ``layers/dense/vars/0``."""
    return f"{path}/vars/{key}" if path else f"vars/{key}"


def listed_by_keras(model: Model, *, skip: Iterable[Any] = ()) -> Listing:
    """Return what Keras' own ``save_weights`` would write for ``model``, without the objects in ``skip``.

    Its hooks run, so they must only store variables, as `SavedLayout.computing` tells.
    """
    store = _ListingStore()
    # Variables without a value read as zeros there, instead of raising.
    reading = nullcontext() if all(map(has_value, model.variables)) else SymbolicScope()
    with WALK_PATCH.applied(), _OPTIMIZER_PATCH.applied(), reading:
        saving_lib._save_state(model, store, None, "", set(map(id, skip)))
    # A quantised layer that was built from a map of policies gives Keras no scale to store, so its group tells nothing.
    known = {path: found for path, found in store.groups.items() if not any(v is None for v in found.values())}
    groups = {path: {key: _form(value) for key, value in found.items()} for path, found in known.items()}
    return Listing(groups, store.optimizers)


def check_for_keras(file: Path, listing: Listing, *, omitted: Container[str] = (), is_index: bool = False) -> None:
    """Compare a file with what Keras would write, through Keras' own reader.

    Args:
        file: A weights file, or an index of several.
        listing: What Keras would write.
        omitted: Paths of optimizers that the file may lack.
        is_index: Whether it is an index.

    Raises:
        UnsupportedError: When a dataset is missing, surplus, or of another shape or kind.
    """
    wanted = {path: keys for path, keys in listing.groups.items() if path not in omitted}
    found = found_by_keras(file, wanted, is_index=is_index)
    for path, keys in wanted.items():
        for key in {**keys, **found[path]}:
            if not _reads(keys.get(key), found[path].get(key)):
                raise UnsupportedError(
                    f"Cannot write {file.name} for Keras: it would find {_shown(found[path].get(key))} at "
                    f"{dataset(path, key)!r}, expected {_shown(keys.get(key))}. Call Keras' save_weights of the model, "
                    "or choose the format orbax; please report this model"
                )


def _reads(wanted: Form | None, found: Form | None) -> bool:
    """Whether Keras assigns the one to a variable of the other: it casts, and each value stays of its kind."""
    if wanted is None or found is None:
        return wanted is found
    return wanted[0] == found[0] and is_float(wanted[1]) == is_float(found[1])


def _shown(form: Form | None) -> str:
    return "nothing" if form is None else f"{form[1].name} {form[0]}"


def found_by_keras(path: Path, groups: Groups, *, is_index: bool) -> Groups:
    """Return what Keras finds in a file when it asks for these groups and keys; reads headers only.

    Args:
        path: A weights file, or an index of several.
        groups: What it asks for.
        is_index: Whether it is an index.
    """
    store = (_ShardHeaders if is_index else _Headers)(path, mode="r")
    try:
        return {group: _entry(store.get(group), keys) for group, keys in groups.items()}
    finally:
        store.close()


def _entry(store: Any, keys: Iterable[str]) -> dict[str, Form]:
    # Layers count the keys of the outermost level, and their hooks may ask for keys below them.
    found = {key: store[key] for key in dict.fromkeys([*list(store.keys()), *(key for key in keys if key in store)])}
    return {key: form for key, form in found.items() if form is not None}


class _ListingStore(saving_lib.H5IOStore):  # type: ignore[misc]
    """A store of the type that ``_save_state`` requires; its HDF5 parts are unused."""

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
        """Store the variables of an optimizer."""
        self.optimizers[self._path] = optimizer
        for i, variable in enumerate(optimizer.variables):
            self[str(i)] = variable


def _form(value: Any) -> Form:
    if isinstance(value, JaxVariable):
        return tuple(value.shape), stored_dtype(value)
    return np.shape(value), np.dtype(getattr(value, "dtype", None) or np.asarray(value).dtype)


class _Headers(saving_lib.H5IOStore):  # type: ignore[misc]
    """Keras' reader, which gives the form of a dataset instead of its values, and ``None`` for a group."""

    def __getitem__(self, key: str) -> Form | None:
        if self._h5_entry_group.get(key, getclass=True) is not saving_lib.h5py.Dataset:
            return None
        found = saving_lib.safe_get_h5_dataset(self._h5_entry_group, key)
        return found.shape, np.dtype("bfloat16" if found.attrs.get("dtype") == "bfloat16" else found.dtype)


class _ShardHeaders(saving_lib.ShardedH5IOStore, _Headers):  # type: ignore[misc]
    """The same for an index and its shards: Keras' class takes datasets from the next one, which is `_Headers`."""


def _listed_state(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def save_own_variables(self: Any, store: Any) -> None:
        # Keras converts the variables to NumPy, which those without a value cannot be.
        store.take(self) if isinstance(store, _ListingStore) else original(self, store)

    return save_own_variables


_OPTIMIZER_PATCH = Patches(lambda: [(BaseOptimizer, "save_own_variables", _listed_state)])
