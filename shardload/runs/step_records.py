"""Build the JSON records of a step, and check the values that users add to it."""

from __future__ import annotations

import base64
import functools
import json
import operator
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib import metadata as distributions
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

from shardload import processes
from shardload.errors import UsageError, require_callable_with
from shardload.keras_bridge.optimizer_slots import accumulations_in, innermost
from shardload.keras_bridge.variables import current_value
from shardload.mapping.state_tree import StateTree
from shardload.runs.best import plain_logs
from shardload.stores.local import local_target
from shardload.units import check_choice, is_function, is_integer, is_real

VERSION = 1
MAX_SHOWN = 200
"""The number of characters of a user's value shown in a message."""
_PACKAGES = ("shardload", "keras", "jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy")
_TAKEN = frozenset({"pytree", "model_config", "assets", "shardload"})


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that take part in saving."""
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            found[name] = distributions.version(name)
        except distributions.PackageNotFoundError:
            continue
    return found


def prepare_serialising() -> None:
    """Import early the modules that Keras imports to write its first configuration: all of TensorFlow, if installed."""
    # Any layer does: the first call imports what all need.
    keras.saving.serialize_keras_object(keras.layers.Identity())


def placement(state: StateTree) -> dict[str, Any]:
    """Return the mesh of the state (axis names and sizes; ``None`` without a mesh), device count and process count."""
    mesh = None
    for leaf in state.leaves:
        value = current_value(leaf.variable)
        sharding = getattr(value, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding):
            axes, sizes = zip(*sharding.mesh.shape.items(), strict=True)
            mesh = {"axes": list(axes), "sizes": list(sizes)}
            break
    return {"mesh": mesh, "devices": jax.device_count(), "processes": jax.process_count()}


def for_all_processes(tree: Any) -> Any:
    """Return a state tree that several processes can save together.

    An array that is not distributed over all processes (seeds, counters of a model without a distribution) belongs to
    one process, and Orbax refuses it. Process 0 stores its value, which is the same on all: they train the same model.
    """
    if processes.count() == 1:
        return tree

    def plain(value: Any) -> Any:
        return np.asarray(value) if isinstance(value, jax.Array) and value.is_fully_addressable else value

    return jax.tree.map(plain, tree)


def check_flags(**flags: Any) -> None:
    """Refuse what is neither true nor false: the text ``"no"`` would count as true.

    Raises:
        UsageError: If one is not.
    """
    for name, given in flags.items():
        if not isinstance(given, bool | np.bool_ | int) or given not in (True, False):
            raise UsageError(f"Cannot use {name}={given!r:.60}: expected True or False")


def check_functions(**functions: Any) -> None:
    """Refuse functions that cannot be called with a step and what else they get, before training begins.

    Raises:
        UsageError: If one cannot be.
    """
    for name, given in functions.items():
        if callable(given):
            require_callable_with(given, 0, {}, name=name)


def checked_metadata(found: Any) -> Any:
    """Return a user's metadata after a round trip through JSON.

    Raises:
        UsageError: If the metadata is not JSON.
    """
    try:
        return json.loads(json.dumps(found, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"Cannot save metadata: {error}. Expected JSON: dicts, lists, strings and numbers") from error


def checked_items(checkpointables: Any) -> dict[str, Any]:
    """Return the user's further items by name; a callable is called to get them.

    Raises:
        UsageError: If a name or a value is not supported.
    """
    found = checkpointables() if is_function(checkpointables) else checkpointables
    if not isinstance(found, Mapping):
        raise UsageError(
            f"Cannot save checkpointables={found!r:.60}: expected a dict of named items, or a function that returns one"
        )
    for name in found:
        if not isinstance(name, str) or name in _TAKEN or not name.replace("_", "a").replace("-", "a").isalnum():
            raise UsageError(
                f"Cannot name a checkpointable {name!r}: use letters, digits, _ and -, and none of the names "
                f"{', '.join(sorted(_TAKEN))}"
            )
        if isinstance(found[name], (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            raise UsageError(
                f"The checkpointable {name!r} is a single value, expected a tree in which every value has a name. "
                f'Put it into a dict: {{"{name}": {{"value": …}}}}'
            )
        _refuse_empty(name, found[name])
    return dict(found)


def _refuse_empty(name: str, item: Any) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(item)[0]:
        if isinstance(leaf, (jax.Array, np.ndarray)) and not leaf.size:
            raise UsageError(
                f"Cannot save the checkpointable {name!r}: its array {jax.tree_util.keystr(path)} of shape "
                f"{leaf.shape} has no elements, and Orbax stores no such arrays. Leave it out"
            )


def iterator_record(source: Any) -> dict[str, Any]:
    """Return the position of a data iterator as JSON: from its ``get_state()``, a callable, or the value itself.

    Raises:
        UsageError: If the position is neither bytes nor preserved by a round trip through JSON.
    """
    state = source.get_state() if hasattr(source, "get_state") else source() if is_function(source) else source
    if isinstance(state, bytes):
        return {"version": VERSION, "state_base64": base64.b64encode(state).decode()}
    try:
        held = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"Cannot save the state of data_iterator: {error}. Expected bytes or JSON") from error
    # Tuples become lists and number keys become strings, which set_state might accept and misread.
    if held != state:
        raise UsageError(
            "Cannot save the state of data_iterator: a round trip through JSON turns "
            f"{_shown(state)} into {_shown(held)}. Use lists instead of tuples and strings as keys, or bytes"
        )
    return {"version": VERSION, "state": held}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " …"


Metadata = Mapping[str, Any] | Callable[[int, Mapping[str, float]], Mapping[str, Any]] | None


def count(argument: str, value: Any) -> int:
    """Return a non-negative integer, also one of NumPy or JAX, as a Python int.

    Raises:
        UsageError: If it is something else.
    """
    try:
        # operator.index accepts integers of NumPy and JAX, and refuses floats.
        found = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = -1
    if found < 0:
        raise UsageError(f"Cannot use {argument}={value!r:.60}: expected a non-negative integer")
    return found


def scalars(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as Python floats.

    Raises:
        UsageError: If they are not a mapping from names to numbers.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError(f"Cannot use metrics={metrics!r:.60}: expected a mapping from names to numbers")
    found = plain_logs(metrics)
    if left := [name for name in metrics or () if str(name) not in found]:
        raise UsageError(f"Cannot use the metric {left[0]!r}: expected a number")
    return found


def check_timeout(seconds: float | None) -> None:
    """Raise a `UsageError` unless a time limit is ``None`` or positive."""
    if seconds is not None and not (is_real(seconds) and seconds > 0):
        raise UsageError(f"Cannot use async_timeout_s={seconds!r:.60}: expected a positive number of seconds, or None")


def check_directory(directory: str | os.PathLike[str]) -> None:
    """Raise a `UsageError` unless ``directory`` can be a local folder."""
    if not isinstance(directory, str | os.PathLike):
        raise UsageError(f"Cannot save steps to {directory!r:.60}: expected the path of a folder")
    if not os.fspath(directory):
        raise UsageError('Cannot save steps to "": expected the path of a folder. The current folder is "."')
    path = local_target(directory)
    # File names and patterns such as those of Keras' ModelCheckpoint, which this callback may replace.
    if re.search(r"\{[^}]*\}", path.name) or path.name.endswith((".keras", ".h5")):
        raise UsageError(
            f"Cannot save steps to {str(path)!r}: steps are folders named by their numbers, not files. Pass the folder "
            f"for them, such as {str(path.parent if path.parent.name else Path('checkpoints'))!r}"
        )


def check_choices(*, compression: str, best_of: str) -> None:
    """Raise a `UsageError` for an unknown option."""
    check_choice("compression", compression, ("none", "zstd"))
    check_choice("best_of", best_of, ("folder", "run"))


def check_initial_epoch(found: Any) -> None:
    """Raise a `UsageError` for an invalid epoch number."""
    if found is not None and not (is_integer(found) and found >= 0):
        raise UsageError(f"Cannot use initial_epoch={found!r:.60}: expected a non-negative integer or None")


def check_frequency(save_freq: Any) -> None:
    """Raise a `UsageError` for an invalid ``save_freq``, with Keras' message."""
    if not (isinstance(save_freq, str) and save_freq == "epoch") and not (is_integer(save_freq) and save_freq >= 1):
        raise UsageError(
            f"Unrecognized save_freq: {save_freq}. Expected save_freq are 'epoch' or integer values from 1"
        )


def iterations(model: Any) -> int:
    """Return the number of updates that the model's optimizer has made; 0 without an optimizer."""
    optimizer = getattr(model, "optimizer", None)
    return 0 if optimizer is None else int(optimizer.iterations)


def trained_batches(model: Any) -> int:
    """Return the number of batches that the model's optimizer has processed: several for each accumulated update."""
    optimizer = innermost(getattr(model, "optimizer", None))
    counts = [one.count for one in accumulations_in(optimizer)][:1]
    return int(counts[0]) if counts else iterations(model)
