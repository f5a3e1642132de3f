"""The content of a step: a model's state, the configuration to rebuild it from, and the position in the training data.

Positions of data iterators are in ``shardload/iterator.json``: one record per process, or one if all are equal.
"""

from __future__ import annotations

import base64
import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from importlib import metadata as distributions
from typing import Any

import jax
import keras
import numpy as np

from shardload import processes
from shardload.errors import (
    DamagedError,
    SourceError,
    SourceNotFoundError,
    UsageError,
    public_name,
    require_callable_with,
)
from shardload.keras_bridge.caller import warn_caller
from shardload.keras_bridge.extra_state import assets_of, unadapted_layers, with_own_hooks
from shardload.keras_bridge.layer_settings import serialised_with_attributes
from shardload.keras_bridge.model_state import trained_variables, variables_of
from shardload.keras_bridge.optimizer_slots import accumulations_in, innermost
from shardload.keras_bridge.variables import current_value
from shardload.loaders.orbax.loader import OWN_FOLDER
from shardload.mapping.state_tree import StateTree, state_tree_of
from shardload.mapping.stored_values import values_to_json
from shardload.runs.step import StepInfo, StepRecord
from shardload.runs.writer import SaveJob
from shardload.stores.json_files import read_object
from shardload.units import check_kind, is_function, plural

_PACKAGES = ("shardload", "keras", "jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy")
_TAKEN = frozenset({"pytree", "model_config", "assets", "shardload"})
Variables = Sequence[str] | Callable[[Any], bool] | None
"""Weights to store: patterns of paths (``"*lora*"``), a function that says so of a variable, or ``None`` for all."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The weights that a callback stores in its steps: all, only the trainable ones, or those that the user selects."""

    trainable_only: bool = False
    variables: Variables = None

    def __post_init__(self) -> None:
        chosen: Any = self.variables
        check_kind("save_trainable_only", self.trainable_only, bool, "True or False")
        if self.trainable_only and chosen is not None:
            raise UsageError("Cannot use save_trainable_only and variables together: pass one of them")
        if chosen is None or is_function(chosen):
            return
        is_list = isinstance(chosen, Iterable) and not isinstance(chosen, str | np.ndarray | type | Iterator)
        if not is_list or not chosen or not all(isinstance(pattern, str) for pattern in chosen):
            raise UsageError(
                f"Cannot use variables={chosen!r:.60}: expected patterns of variable paths such as ['*lora*'], or a "
                "function of a variable"
            )

    @property
    def is_partial(self) -> bool:
        """Whether steps may lack some of the model's weights, so that a restore must find these in the model."""
        return self.trainable_only or self.variables is not None

    @property
    def patterns(self) -> tuple[str, ...] | None:
        """The user's patterns of variable paths, for ``step.json``; ``None`` if the user gave a function or nothing."""
        return None if self.variables is None or callable(self.variables) else tuple(self.variables)

    def of(self, state: StateTree, model: Any) -> StateTree:
        """Return the part of a model's state that a step stores: selected weights, with their optimizer state."""
        if not self.is_partial:
            return state
        # By identity: == of Keras variables compares their values.
        chosen = {id(v) for v in self._chosen(model)}
        found = state.only(lambda variable: id(variable) in chosen)
        if not any(leaf.kind == "weight" for leaf in found.leaves):
            why = "it has no trainable variable" if self.trainable_only else "variables selects none of its weights"
            raise UsageError(f"Cannot save the model {model.name!r}: {why}, so the step would be empty")
        return found

    def _chosen(self, model: Any) -> list[Any]:
        if self.trainable_only:
            return trained_variables(model)
        weights = variables_of(model)
        if callable(self.variables):
            require_callable_with(self.variables, None, name="variables")
            return list(filter(self.variables, weights))
        patterns = self.patterns or ()
        for pattern in patterns:
            if not any(fnmatchcase(v.path, pattern) for v in weights):
                known = ", ".join(repr(v.path) for v in weights[:3])
                raise UsageError(
                    f"Cannot select variables by {pattern!r}: it matches no path in the model {model.name!r}. Paths "
                    f"are like {known}"
                )
        return [v for v in weights if any(fnmatchcase(v.path, pattern) for pattern in patterns)]


ALL = Selection()


class Contents:
    """Collects what one callback saves in each step: state, configuration, data position, the user's items.

    ``warn`` is called with a message about each part that cannot be saved. If the user selects weights, steps have no
    assets (files that layers save), because assets belong to the weights that are left out.
    """

    def __init__(self, *, weights_only: bool, warn: Callable[[str], None], selection: Selection = ALL) -> None:
        self.weights_only, self._warn, self._selection = weights_only, warn, selection
        self._whole: StateTree | None = None
        self._state = StateTree(())
        self._items: dict[str, Any] | None = None
        self._hooked: list[tuple[str, Any]] = []
        self._told: set[str] = set()

    def forget(self) -> None:
        """Let the next save examine the model again, because ``compile()``, for example, may have changed it."""
        self._whole = None

    def described_state(self, model: Any) -> StateTree:
        """Return the variables that a step stores, as a tree. The tree is kept until the model has other variables."""
        if self._whole is None or not self._whole.still_describes(model):
            # In this order: which items describe the model depends on the weights that the selection leaves out.
            self._whole = state_tree_of(model)
            self._hooked = with_own_hooks(model)
            self._state = self._selection.of(self._whole, model)
            self._items = None
        return self._state.weights_only() if self.weights_only else self._state

    def job(
        self,
        model: Any,
        record: StepRecord,
        *,
        position: Mapping[str, Any],
        checkpointables: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None,
        **how: Any,
    ) -> SaveJob:
        """Collect all that a step will contain; ``how`` are further fields of `SaveJob`, such as the compression."""
        state = self.described_state(model)
        shardings = (getattr(current_value(leaf.variable), "sharding", None) for leaf in state.leaves)
        meshes = (one.mesh.shape for one in shardings if isinstance(one, jax.sharding.NamedSharding))
        mesh = next(({"axes": list(shape), "sizes": list(shape.values())} for shape in meshes), None)
        record = replace(
            record,
            save_weights_only=self.weights_only,
            save_trainable_only=self._selection.trainable_only,
            variables=self._selection.patterns,
            left_out=sum(leaf.kind == "weight" for leaf in state.left_out),
            versions=versions(),
            saved_unix_s=time.time(),
            mesh=mesh,
            devices=jax.device_count(),
            processes=jax.process_count(),
        )
        records = {"step.json": asdict(record), "structure.json": state.to_json() | self._values()}
        if position:
            records["iterator.json"] = dict(position)
        if self._items is None:
            self._items = {} if self.weights_only else dict(self._descriptions(model))
        items = {"pytree": _for_all_processes(state.tree), **self._items}
        if checkpointables is not None:
            items |= checked_items(checkpointables)
        assert record.step is not None
        return SaveJob(step=record.step, items=items, records=records, **how)

    def _values(self) -> dict[str, Any]:
        """Return values that layers save beside their variables (``save_own_variables``); warn of those left out."""
        found, lost = values_to_json(self._hooked)
        for sentence in lost:
            if sentence not in self._told:
                self._told.add(sentence)
                self._warn(f"{sentence}. Keras' model.save_weights(path) saves it")
        return found

    def _descriptions(self, model: Any) -> Iterator[tuple[str, Any]]:
        """Yield pairs (folder in the step, content) that describe the model: its configuration, and files of layers."""
        try:
            yield "model_config", {"config": serialised_with_attributes(model)}
        except Exception as error:  # Keras runs the get_config of every layer
            self._warn(
                f"The model's configuration cannot be saved ({public_name(error)}: {error}), so "
                "keras.saving.load_model cannot rebuild it; its state is saved."
            )
        if not self._state.left_out and (assets := assets_of(model)) is not None:
            yield "assets", assets
        for path, layer in () if self._state.left_out else unadapted_layers(model):
            self._warn(
                f"{type(layer).__name__} at {path or 'the root'!r} has no vocabulary yet, so the step contains none. "
                "To store it, call its adapt() or set_vocabulary() before you save"
            )


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that take part in saving, for ``step.json``."""
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            found[name] = distributions.version(name)
        except distributions.PackageNotFoundError:
            continue
    return found


def prepare_serialising() -> None:
    """Make Keras import now what it needs to write configurations (TensorFlow, if installed), not in the first save."""
    # Any layer does: the first call imports what all need.
    keras.saving.serialize_keras_object(keras.layers.Identity())


def _for_all_processes(tree: Any) -> Any:
    """Return a state tree that several processes can save together.

    Orbax refuses arrays that only one process can access, such as seeds of a model without a distribution. They become
    NumPy arrays, and process 0 stores its own: all processes train the same model, so the values are equal.
    """

    def plain(value: Any) -> Any:
        return np.asarray(value) if isinstance(value, jax.Array) and value.is_fully_addressable else value

    return tree if processes.count() == 1 else jax.tree.map(plain, tree)


def checked_metadata(found: Any) -> Any:
    """Return a user's metadata as it will be read back from JSON; raise if JSON cannot store it."""
    try:
        return json.loads(json.dumps(found, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"Cannot save metadata: {error}. Expected JSON: dicts, lists, strings and numbers") from error


def checked_items(checkpointables: Any) -> dict[str, Any]:
    """Check the user's own items for a step (a dict, or a function that returns one), and return them by name."""
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
        for path, leaf in jax.tree_util.tree_flatten_with_path(found[name])[0]:
            if isinstance(leaf, (jax.Array, np.ndarray)) and not leaf.size:
                raise UsageError(
                    f"Cannot save the checkpointable {name!r}: its array {jax.tree_util.keystr(path)} of shape "
                    f"{leaf.shape} has no elements, and Orbax stores no such arrays. Leave it out"
                )
    return dict(found)


def iterations(model: Any) -> int:
    """Return the number of updates that the model's optimizer has made; 0 without an optimizer."""
    optimizer = getattr(model, "optimizer", None)
    return 0 if optimizer is None else int(optimizer.iterations)


def trained_batches(model: Any) -> int:
    """Return how many batches the optimizer has processed: more than its updates if it accumulates gradients."""
    optimizer = innermost(getattr(model, "optimizer", None))
    counts = [one.count for one in accumulations_in(optimizer)][:1]
    return int(counts[0]) if counts else iterations(model)


def iterator_record(source: Any) -> dict[str, Any]:
    """Return a data position as JSON: ``get_state()`` of an iterator, a function's result, or a given value."""
    state = source.get_state() if hasattr(source, "get_state") else source() if is_function(source) else source
    if isinstance(state, bytes):
        return {"version": 1, "state_base64": base64.b64encode(state).decode()}
    try:
        held = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"Cannot save the state of data_iterator: {error}. Expected bytes or JSON") from error
    # Tuples become lists and number keys become strings, which set_state might accept and misread.
    if held != state:
        raise UsageError(
            f"Cannot save the state of data_iterator: a round trip through JSON turns {_shortened(state)} into "
            f"{_shortened(held)}. Use lists instead of tuples and strings as keys, or bytes"
        )
    return {"version": 1, "state": held}


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]} …"


def joined_positions(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the data positions of all processes into the record that a step stores; equal ones are stored once."""
    return records[0] if all(record == records[0] for record in records) else {"processes": records}


def stored_positions(info: StepInfo) -> list[dict[str, Any]]:
    """Return the data positions that a step stores: one for each process, a single one if all were equal, or none."""
    path = info.location / OWN_FOLDER / "iterator.json"
    try:
        found = read_object(path)
    except SourceNotFoundError:
        return []
    except SourceError as error:
        raise DamagedError(f"Step {info.step}: {error}") from error
    records = found.get("processes", [found])
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise DamagedError(f"Step {info.step}: {path} should contain one object, or a list of them for its processes")
    for record in records:
        if "state_base64" in record:
            try:
                record["state"] = base64.b64decode(record["state_base64"], validate=True)
            except (TypeError, ValueError) as error:
                raise DamagedError(
                    f"Step {info.step}: {path} should contain the iterator's state in base64, but has "
                    f"{record['state_base64']!r:.80}"
                ) from error
    return records


def position_of_this_process(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the stored position that belongs to this process; ``None`` if another number of processes saved them."""
    if len(records) == 1:
        return records[0]
    return records[processes.index()] if len(records) == processes.count() else None


def set_position(source: Any, records: list[dict[str, Any]], info: StepInfo) -> bool:
    """Set the user's data iterator to the position stored for this process; return whether the step stores one."""
    record = position_of_this_process(records)
    if record is None and any("state" in one for one in records):
        warn_caller(
            f"Cannot restore the position of data_iterator: step {info.step} stores one for each of "
            f"{plural(len(records), 'process')}, but this run has {processes.count()}. The data starts where "
            "data_iterator is now"
        )
    if record is None or "state" not in record:
        return False
    # A function or a JSON value as ``data_iterator`` only gives positions.
    if hasattr(source, "set_state") or hasattr(source, "get_state"):
        check_settable(source, "data_iterator")
        source.set_state(record["state"])
    return True


def restore_iterator(source: Any, info: StepInfo) -> None:
    """Set a data source to the position that a step stores; warn if the step stores none for this process."""
    records = stored_positions(info)
    if not set_position(source, records, info) and not any("state" in one for one in records):
        warn_caller(f"Step {info.step} stores no position of a data iterator, so this one stays where it is.")


def check_settable(source: Any, argument: str) -> None:
    """Raise a `UsageError` unless a data source has ``set_state``, which sets its position."""
    if not hasattr(source, "set_state"):
        raise UsageError(
            f"Cannot restore the position of {argument}: {type(source).__name__} has no set_state(state). Pass an "
            "object that has one"
        )
