"""Run one layer's ``load_own_variables`` for real, with sharded arrays in place of the recorded views."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.errors import MismatchError
from shardload.keras_bridge.caller import warn_caller
from shardload.keras_bridge.keras_types import Variable
from shardload.keras_bridge.saving import assignments_to
from shardload.keras_bridge.variables import stored_dtype
from shardload.manifest import Tensor
from shardload.mapping.placeholders import Reservations
from shardload.mapping.variable_map import Runtime
from shardload.transfer.planning import Binding


def has_keras_hook(saveable: Any) -> bool:
    """Whether Keras provides its ``load_own_variables``, for any kind of layer or optimizer."""
    module = getattr(getattr(type(saveable), "load_own_variables", None), "__module__", "")
    return str(module).split(".")[0] == "keras"


def _refuse_overflow(variable: Variable, value: Any) -> None:
    """Raise unless integers keep their values in the narrower dtype of the variable."""
    wanted, found = stored_dtype(variable), getattr(value, "dtype", None)
    if not isinstance(value, np.ndarray) or found == wanted or {value.dtype.kind, wanted.kind} - {"i", "u"}:
        return
    info = np.iinfo(wanted)
    if value.size and not (info.min <= int(value.min()) and int(value.max()) <= info.max):
        raise MismatchError(
            f"Cannot store the checkpoint's {found} values from {value.min()} to {value.max()} in variable "
            f"{variable.path!r}: they do not fit in {wanted}"
        )


class Entry:
    """The mapping Keras passes to ``load_own_variables``: the keys of one group, read one at a time."""

    def __init__(self, tensors: Mapping[str, Tensor], read: Callable[[str], Any]) -> None:
        self._tensors = tensors
        self._read = read

    def keys(self) -> list[str]:
        """Return the keys of the outermost level, as an HDF5 group does."""
        return list(dict.fromkeys(key.split("/")[0] for key in self._tensors))

    def __len__(self) -> int:
        return len(self.keys())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in self._tensors or key in self.keys()

    def __getitem__(self, key: str) -> Any:
        if key not in self._tensors:
            raise KeyError(key)
        return self._read(key)


@dataclass(frozen=True, slots=True, eq=False)
class LayerStep:
    """One call of a saveable's ``load_own_variables``."""

    saveable: Any
    path: str
    tensors: dict[str, Tensor]
    """The tensors stored for it, by key."""
    computing: frozenset[str]
    """Names of tensors the hook needs as real bytes."""
    bindings: tuple[Binding, ...]
    """Assigned views that no later assignment replaces."""
    variables: tuple[Variable, ...]
    """Variables whose values it computes."""
    kept: tuple[Variable, ...] = ()
    """Variables that it assigns, and that keep their values."""

    @property
    def owner(self) -> str:
        """The layer, for messages."""
        return f"{type(self.saveable).__name__} at {self.path or 'the root'!r}"

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the bindings it assigns."""
        return tuple(b.name for b in self.bindings)

    @property
    def computes(self) -> bool:
        """Whether it assigns anything but views."""
        return bool(self.computing or self.variables)

    def run(self, runtime: Runtime) -> None:
        """Call the hook.

        Raises:
            MismatchError: When it does not assign what it assigned when it was recorded.
        """
        # The hook gets the bytes of tensors that it computes with, and reservations of others, as when it was recorded.
        # A view that it assigns is then found by variable and view, and replaced by the binding's sharded array.
        reservations = Reservations()
        bound = {(id(b.variable), b.view): b.name for b in self.bindings}
        given: dict[int, tuple[str, Any]] = {}
        filled: set[str] = set()
        computed: set[int] = set()

        def read(key: str) -> Any:
            tensor = self.tensors[key]
            if tensor.name in self.computing:
                return runtime.read(tensor.name)
            if (name := self._whole(tensor)) is None:
                return reservations.make(tensor)
            # It also keeps the array alive, so that no other object gets its id.
            array = runtime.take(name)
            given[id(array)] = name, array
            return array

        def assign(variable: Variable, value: Any, original: Callable[[Variable, Any], Any]) -> Any:
            if id(variable) in kept:
                return value
            if id(value) in given:
                filled.add(given[id(value)][0])
                return runtime.assign(variable, value, original)
            view = reservations.locate(value)
            if view is None:
                if id(variable) not in computing:
                    raise self._deviates(f"computed a value for {variable.path!r}, but assigned a stored tensor")
                computed.add(id(variable))
                _refuse_overflow(variable, value)
                return runtime.compute(variable, value, original)
            name = bound.get((id(variable), view))
            if name is not None:
                filled.add(name)
                return runtime.assign(variable, runtime.take(name), original)
            # A later assignment replaces it, so no data was loaded for it.
            return value

        computing, kept = {id(v) for v in self.variables}, {id(v) for v in self.kept}
        # Keras' warnings would name the line in this block, so they are repeated below at the user's line.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with assignments_to(assign):
                self.saveable.load_own_variables(Entry(self.tensors, read))
        for warning in caught:
            warn_caller(str(warning.message), warning.category)
        left = [n for n in self.needs if n not in filled] + [v.path for v in self.variables if id(v) not in computed]
        if left:
            raise self._deviates(f"assigned nothing to {left[0]!r}, but assigned a value")

    def _whole(self, tensor: Tensor) -> str | None:
        """Return the binding that is a tensor's only use and all of it, if the hook can get the array itself.

        This covers every plain layer, and saves an address range per tensor, which the kernel allocates slowly while
        other threads fill memory. Only Keras' own hooks assign what they read, unchanged; other hooks may reshape
        it or read its dtype, which differs in an array that is already cast.
        """
        if self.computes or not has_keras_hook(self.saveable):
            return None
        found = [b for b in self.bindings if b.view.tensor == tensor.name]
        return found[0].name if len(found) == 1 and found[0].view.is_whole(tensor) else None

    def _deviates(self, what: str) -> MismatchError:
        return MismatchError(
            f"Cannot load {self.owner}: its load_own_variables {what} when it was recorded. It must do the same for "
            "the same checkpoint each time"
        )
