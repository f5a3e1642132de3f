"""Assign finished arrays to variables, through each layer's own loading code.

The methods of `Assigner`, in the order of their use:

    ready(name, array)    receives one sharded array. Once a layer has all of its arrays, its load_own_variables runs,
                          and assigns them without a copy.
    finish()              runs the layers and converters that compute values: they read whole tensors, one layer at a
                          time, and each result is placed in the layout of its variable.
    abort()               ends a failed load, and tells which variables have new values, old ones, or none. With
                          ``atomic=True``, old values are kept until the end of finish(), and abort() restores them.

With ``at_once``, no layer's code runs before finish(), which calls it first: until then, the model is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.errors import LoadInterruptedError, MismatchError
from shardload.keras_bridge import Variable
from shardload.keras_bridge.variables import (
    current_value,
    drop_value,
    forget_initializer,
    pending_of,
    restore_value,
    stored_dtype,
)
from shardload.mapping.layer_hooks import AttributeSnapshot
from shardload.mapping.variable_map import MappingStep, VariableMap
from shardload.units import plural

_ReadTensor = Callable[[str], NDArray[Any]]
"""Function that takes the name of a stored tensor and reads the whole tensor, for code that computes with it."""
_Place = Callable[[Variable, NDArray[Any]], Any]
"""Function that copies a host array of a variable's shape and dtype to the devices, in the variable's layout."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Names of the variables that have new values, old values or no value after a failed load, for its error."""

    new: tuple[str, ...]
    old: tuple[str, ...]
    none: tuple[str, ...]
    """Variables without a value: never loaded into a model built without values, or released before the failure."""

    def __str__(self) -> str:
        new = f"{plural(len(self.new), 'variable')} {'has' if len(self.new) == 1 else 'have'} new values"
        without = f" (first without: {self.none[0]!r})" if self.none else ""
        return f"{new}, {len(self.old)} their old ones, {len(self.none)} none{without}"


@dataclass(slots=True)
class _Before:
    """What a variable gets back if the load fails: its former value (kept only if ``atomic``) and initialiser."""

    variable: Variable
    value: Any
    initializer: Any


@dataclass(slots=True)
class Assigner:
    """Receives arrays that were read, and assigns them once all of a layer are there; assigns computed values last."""

    variables: VariableMap
    read_tensor: _ReadTensor
    place: _Place
    atomic: bool = False
    at_once: Callable[[], object] | None = None
    """Called right before the first variable is assigned, with all arrays received; ``None`` once it was called."""
    _names: dict[int, str] = field(default_factory=dict)
    _before: dict[str, _Before] = field(default_factory=dict)
    _untouched: set[str] = field(default_factory=set)
    _arrays: dict[str, Any] = field(default_factory=dict)
    _waiting: dict[str, MappingStep] = field(default_factory=dict)
    _missing: dict[int, set[str]] = field(default_factory=dict)
    _late: list[MappingStep] = field(default_factory=list)
    _late_needs: set[str] = field(default_factory=set)
    _snapshots: list[AttributeSnapshot] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.variables.mismatched:
            raise MismatchError("; ".join(str(m) for m in self.variables.mismatched[:3]))
        named = [(o.name, o.variable) for b in self.variables.bindings for o in b.outputs]
        named += [pair for c in self.variables.computed for pair in zip(c.names, c.variables, strict=True)]
        for name, variable in named:
            self._names[id(variable)] = name
            # Without ``atomic`` the old value must be free to leave the device before the new one arrives.
            value = current_value(variable) if self.atomic else None
            self._before[name] = _Before(variable, value, pending_of(variable))
        self._untouched = set(self._before)
        # Plain layers are assigned while others are still read; what computes, or needs no array, waits for `finish`.
        for step in self.variables.steps:
            if step.computes or not step.needs or self.at_once is not None:
                self._late.append(step)
                self._late_needs.update(step.needs)
            else:
                self._missing[id(step)] = set(step.needs)
                self._waiting |= dict.fromkeys(step.needs, step)

    def starting(self, name: str) -> None:
        """Release a variable's old value, unless ``atomic``. Call it right before the new value takes device memory."""
        before = self._before[name]
        if not self.atomic and name in self._untouched:
            self._untouched.discard(name)
            drop_value(before.variable)

    def ready(self, name: str, array: Any) -> None:
        """Receive the sharded array for a variable; if it is the last one that its layer waits for, assign them all."""
        step = self._waiting.pop(name, None)
        if step is None and (name in self._arrays or name not in self._late_needs):
            raise KeyError(f"no binding expects an array named {name!r}")
        self._arrays[name] = array
        if step is not None:
            missing = self._missing[id(step)]
            missing.discard(name)
            if not missing:
                self._run(step)

    def finish(self, agreed: Callable[[], None] = lambda: None) -> None:
        """Assign the computed values, call ``agreed``, then release the old values.

        ``agreed`` may raise an error, for instance if another process failed: the load can still be undone then.
        """
        absent = [n for n in self._waiting if n not in self._arrays]
        absent += [n for step in self._late for n in step.needs if n not in self._arrays]
        if absent:
            raise LoadInterruptedError(
                f"Cannot finish the load: no value for {plural(len(absent), 'variable')}, the first {absent[0]!r}. "
                "Load the model again"
            )
        if self.at_once is not None:
            self.at_once()
            self.at_once = None
        # Converters compute from variables, so these steps run after all bindings are assigned.
        for step in self._late:
            self._run(step)
        agreed()
        # From here on nothing can be rolled back: release the old values.
        self._late.clear()
        self._late_needs.clear()
        self._snapshots.clear()
        self._before.clear()

    def abort(self) -> Interrupted:
        """End a failed load: release received arrays, restore old values if ``atomic``; return what is new or old."""
        self._arrays.clear()
        self._waiting.clear()
        if self.atomic and self.at_once is None:
            for before in self._before.values():
                restore_value(before.variable, before.value, before.initializer)
            # Backwards: where an object has several snapshots, the first one has its old state.
            for snapshot in reversed(self._snapshots):
                snapshot.restore()
            self._untouched = set(self._before)
        new: list[str] = []
        old: list[str] = []
        none: list[str] = []
        for name, before in self._before.items():
            value = current_value(before.variable)
            (none if value is None else old if name in self._untouched else new).append(name)
        return Interrupted(tuple(new), tuple(old), tuple(none))

    # ---- called by steps: mapping.variable_map.Runtime ------------------------------------------

    def read(self, tensor: str) -> NDArray[Any]:
        """Read a whole tensor; return a writable array that nothing else uses, as loading code expects."""
        value = self.read_tensor(tensor)
        return value if value.flags.writeable else value.copy()

    def take(self, name: str) -> Any:
        """Return the received, sharded array for the variable called ``name``."""
        return self._arrays[name]

    def assign(self, variable: Variable, value: Any, assign: Callable[[Variable, Any], Any]) -> Any:
        """Give a variable its sharded array by ``assign``, Keras' own method (loading code calls a patched one)."""
        self._untouched.discard(self._names[id(variable)])
        result = assign(variable, value)
        forget_initializer(variable)
        return result

    def compute(self, variable: Variable, value: Any, assign: Callable[[Variable, Any], Any]) -> Any:
        """Cast a value that loading code computed to the variable's dtype, place it in its layout, and assign it."""
        if tuple(getattr(value, "shape", ())) != tuple(variable.shape):
            return assign(variable, value)  # raises Keras' own error
        # Cast on the host and placed shard by shard: Keras' `assign` would first put the whole value on device 0.
        host = as_keras_casts(np.asarray(value), stored_dtype(variable))
        self.starting(self._names[id(variable)])
        return self.assign(variable, self.place(variable, host), assign)

    # ---- inside ---------------------------------------------------------------------------------

    def _run(self, step: MappingStep) -> None:
        if self.atomic and step.saveable is not None:
            self._snapshots.append(AttributeSnapshot.of(step.saveable))
        step.run(self)
        # The variable owns the array now; a second reference would keep its memory.
        for name in step.needs:
            del self._arrays[name]


def as_keras_casts(value: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Cast a host array as ``Variable.assign`` would: JAX rounds float64 to float32 first if it casts to bfloat16."""
    if dtype.name == "bfloat16" and value.dtype.name == "float64":
        value = value.astype("float32")
    return value.astype(dtype, copy=False)
