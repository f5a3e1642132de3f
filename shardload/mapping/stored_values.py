"""Values that layers save besides variables, in the ``structure.json`` of a training step.

    "values": {"layers/counting": {"count": {"dtype": "<i8", "shape": [], "base64": "BwAAAAAAAAA="}}}

The values are restored by the layer's ``load_own_variables``, as from a ``.weights.h5``. Older steps lack these values.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Container, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.errors import SourceError, public_name
from shardload.keras_bridge.extra_state import (
    keys_besides_variables,
    load_values,
    values_besides_variables,
    with_own_hooks,
)
from shardload.keras_bridge.saving import saved_objects
from shardload.manifest import Manifest
from shardload.transfer.read_tensor import read_tensor

VALUES_ENTRY = "values"
LIMIT_BYTES = 8 << 20
"""Largest number of bytes of all values in a step: JSON is read as a whole, and files above 32 MiB are refused."""
_KINDS = "biufcSU"

_Values = Mapping[str, Mapping[str, NDArray[Any]]]
"""Path of a layer (or another object with such values) → key in its ``store`` → value."""


def values_to_json(hooked: Iterable[tuple[str, Any]]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what layers save besides variables, as ``structure.json`` entries; and notes on what cannot be stored."""
    return _to_entries((path, saveable, values_besides_variables(saveable)) for path, saveable in hooked)


def file_values_to_json(
    model: Any, manifest: Manifest, *, variables: Container[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what a Keras file has besides ``variables``, as ``structure.json`` entries; and notes on what is lost."""
    hooked = []
    for path, saveable in with_own_hooks(model):
        group = f"{path}/vars/" if path else "vars/"
        names = [name for name in manifest.tensors if name.startswith(group) and name not in variables]
        keys = keys_besides_variables(saveable)  # None: the hook needs values; then all that is no variable
        stored = {name.removeprefix(group): name for name in names}
        taken = {key: name for key, name in stored.items() if keys is None or key in keys}
        hooked.append((path, saveable, {key: read_tensor(manifest, name) for key, name in taken.items()}))
    entries, lost = _to_entries(hooked)
    return entries, (*lost, *lacking_values(model, {path: of for path, _, of in hooked}, where="the source"))


def _to_entries(
    hooked: Iterable[tuple[str, Any, Mapping[str, Any]]],
) -> tuple[dict[str, Any], tuple[str, ...]]:
    found: dict[str, Any] = {}
    lost: list[str] = []
    left = LIMIT_BYTES
    for path, saveable, values in hooked:
        entries: dict[str, Any] = {}
        refused = []
        for key, value in values.items():
            array = _array(value)
            if array is None or array.nbytes > left:
                refused.append(key)
                continue
            left -= array.nbytes
            if array.dtype.kind in _KINDS and sys.byteorder == "big":
                array = array.astype(array.dtype.newbyteorder("<"))
            dtype = array.dtype.str if array.dtype.kind in _KINDS else array.dtype.name
            data = base64.b64encode(array.tobytes()).decode()
            entries[key] = {"dtype": dtype, "shape": list(array.shape), "base64": data}
        if entries:
            found[path] = entries
        if refused:
            lost.append(
                f"A step cannot store {_listed(refused)}, which {_hook(saveable, path)} saves besides variables: "
                f"expected numbers, texts and arrays, of at most {LIMIT_BYTES >> 20} MiB together"
            )
    return ({VALUES_ENTRY: found} if found else {}), tuple(lost)


def stored_values(manifest: Manifest) -> _Values:
    """Return the values that layers saved in a step besides variables, by layer and key; empty if it has none."""
    structure = manifest.metadata.get("structure")
    found = structure.get(VALUES_ENTRY, {}) if isinstance(structure, Mapping) else {}
    try:
        return {path: {key: _of_json(entry) for key, entry in entries.items()} for path, entries in found.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SourceError(
            f"Cannot read {manifest.source}: the values of layers in its structure.json are not valid ({error}). "
            "Restore another step"
        ) from error


def lacking_values(model: Any, values: _Values, *, where: str = "the step") -> tuple[str, ...]:
    """Return a note for each layer that saves more than variables, if ``values`` (those of a checkpoint) lacks it."""
    found: list[str] = []
    for path, saveable in with_own_hooks(model):
        stored = values.get(path, {})
        if keys := [key for key in keys_besides_variables(saveable) or () if key not in stored]:
            found.append(f"{where} lacks {_listed(keys)}, which {_hook(saveable, path)} saves besides variables")
    return tuple(found)


def unstored_hook(model: Any, layer: Any, values: _Values) -> str | None:
    """Return a sentence if a step lacks what ``layer`` or a layer inside it saves besides variables; else ``None``."""
    own = next((path for path, saveable in saved_objects(model) if saveable is layer), "")
    for path, saveable in with_own_hooks(model):
        if path not in values and f"{path}/".startswith(f"{own}/"):
            return f"the step lacks what {_hook(saveable, path)} saves besides variables"
    return None


def load_stored_values(model: Any, manifest: Manifest, *, strict: bool) -> tuple[str, ...]:
    """Load what layers saved besides variables in a step, by their ``load_own_variables``; note what was not loaded."""
    values = stored_values(manifest)
    objects = dict(saved_objects(model)) if values else {}
    notes = []
    for path, found in values.items():
        what = f"{_listed(found)}, which a layer at {path or 'the root'!r} saved besides variables"
        if not hasattr(objects.get(path), "load_own_variables"):
            notes.append(f"the model has no layer for {what}")
            continue
        try:
            load_values(objects[path], found)
        except Exception as error:  # of any kind: this is a user's hook
            why = f"load_own_variables of {type(objects[path]).__name__} raised {public_name(error)}: {error}"
            if strict:
                raise SourceError(
                    f"Cannot load {what}, from {manifest.source}: {why}. Pass strict=False (--no-strict) to leave "
                    "these values as they are"
                ) from error
            notes.append(f"{what}, was not loaded: {why}")
    return tuple(notes)


def _array(value: Any) -> NDArray[Any] | None:
    """Return a layer's value as an array that ``structure.json`` can store, else ``None``."""
    try:
        array = np.asarray(value)
    except Exception:  # such as an array of other processes
        return None
    return array if array.dtype.kind in _KINDS or array.dtype.name == "bfloat16" else None


def _of_json(entry: Mapping[str, Any]) -> NDArray[Any]:
    dtype = np.dtype(entry["dtype"])
    if dtype.kind not in _KINDS and dtype.name != "bfloat16":
        raise ValueError(f"expected numbers or texts, but a value has the dtype {dtype}")
    data = base64.b64decode(entry["base64"], validate=True)
    shape = tuple(entry["shape"])
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"the shape of a value is {shape}, expected integers of at least 0")
    found = np.frombuffer(data, dtype) if data else np.empty(0, dtype)
    return found.reshape(shape).copy()


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(map(repr, keys))


def _hook(saveable: Any, path: str) -> str:
    return f"save_own_variables of {type(saveable).__name__} at {path or 'the root'!r}"
