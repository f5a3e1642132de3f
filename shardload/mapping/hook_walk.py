"""Keras' walk over a model with placeholders for the tensors, and what each layer's ``load_own_variables`` did.

A hook that computes with a tensor may also decide by its value (a stored version, a check for zeros). Placeholders have
no values, so such a hook runs again with the true values of the tensors that it computed with, until it computes with
no others. What it assigns in that run is what counts::

    "2" is int32 (), "0" and "1" are float32      run 1: int(store["2"]) is 0 ─► a ← "1", b ← "0"      discarded
                                                  run 2: int(store["2"]) is 2 ─► a ← "0", b ← "1"

Keras' own hooks decide by shapes and keys only. Changes to attributes are undone after each run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from shardload.keras_bridge.keras_types import Variable
from shardload.keras_bridge.recording import is_tracing_error
from shardload.keras_bridge.saving import assignments_to, load_state
from shardload.keras_bridge.variables import stored_dtype
from shardload.manifest import Tensor, View
from shardload.mapping.attributes import AttributeSnapshot
from shardload.mapping.layer_step import Entry, has_keras_hook
from shardload.mapping.placeholders import Reservations
from shardload.mapping.variable_map import Mismatch
from shardload.transfer.read_tensor import read_rows

_LEGACY = "_layer_checkpoint_dependencies"
"""The folder of a model's layers in files of Keras 2.13."""


@dataclass(slots=True, eq=False)
class RecordedAssign:
    """One ``assign`` recorded."""

    variable: Variable
    view: View | None
    """``None`` if the value was computed."""


@dataclass(slots=True, eq=False)
class Visit:
    """One call of one saveable's ``load_own_variables``."""

    path: str
    tensors: Mapping[str, Tensor]
    """The tensors stored for it, by key."""
    reservations: Reservations = field(default_factory=Reservations)
    saveable: Any = None
    real: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """The tensors that it gets with their values instead of a placeholder, by name."""
    read: set[str] = field(default_factory=set)
    assigned: list[RecordedAssign] = field(default_factory=list)
    mismatch: Mismatch | None = None
    error: Exception | None = None

    def reserve(self, key: str) -> Any:
        """Return the placeholder for one of its tensors, or a copy of its values."""
        tensor = self.tensors[key]
        self.read.add(tensor.name)
        if tensor.name in self.real:
            return self.real[tensor.name].copy()
        return self.reservations.make(tensor)

    @property
    def computing(self) -> set[str]:
        """Return the tensors whose bytes the hook needs, beyond viewing them."""
        # A tensor read for no variable is kept elsewhere (the idf weights of a StringLookup), so it needs real bytes.
        used = self.reservations.used | (self.read - {e.view.tensor for e in self.assigned if e.view})
        dtypes = {t.name: t.dtype for t in self.tensors.values()}
        used.update(e.view.tensor for e in self.assigned if e.view and _narrows(dtypes[e.view.tensor], e.variable))
        # A variable both viewed and computed gets its last value only if the hook runs all of it on real bytes.
        for event in self.assigned:
            twice = [e for e in self.assigned if e.variable is event.variable]
            if len(twice) > 1 and any(e.view is None for e in twice):
                used.update(e.view.tensor for e in twice if e.view is not None)
        return used


class Walk:
    """One recorded walk of Keras over ``root``; where tensors have no values, hooks see zeros."""

    def __init__(
        self, root: Any, tensors: Mapping[str, Tensor], *, skip: Iterable[Any] = (), has_values: bool = True
    ) -> None:
        self.root = root
        self.skip = tuple(skip)
        self.has_values = has_values
        self.visits: list[Visit] = []
        self._groups, self._folders = _index(tensors)

    def record(self) -> None:
        """Visit everything; `visits` contains the result."""
        with assignments_to(self._assign):
            load_state(self.root, self, skip=self.skip)
        self._close_reservations()

    def entry(self, path: str) -> Entry:
        """Begin the next visit; Keras calls this right before ``load_own_variables``."""
        self._close_reservations()
        # As in `H5IOStore.get`: files of Keras 2.13 name the folder of layers differently.
        group = self._groups.get(path, {})
        if not group and path and _LEGACY in self._folders:
            group = self._groups.get(path.replace("layers", _LEGACY), {})
        self.visits.append(Visit(path, group))
        return Entry(group, self.visits[-1].reserve)

    def has_path(self, path: str) -> bool:
        """Whether the file has anything below ``path``."""
        return path in self._folders

    @contextmanager
    def visit(self, saveable: Any, path: str) -> Iterator[Callable[[Exception | None], None]]:
        """Attach ``saveable`` to the visit that begins inside; afterwards undo its hook's changes to attributes."""
        before, snapshot = len(self.visits), AttributeSnapshot.of(saveable)

        # The block contains the visits of children, too, so this one's is the first that it opens, if it opens any.
        def failed(error: Exception | None) -> None:
            if len(self.visits) > before and self.visits[before].path == path:
                self.visits[before].saveable = saveable
                self.visits[before].error = error

        try:
            yield failed
        finally:
            snapshot.restore()
        if len(self.visits) > before and self.visits[before].saveable is saveable:
            self._settle(before, snapshot)

    def _settle(self, index: int, snapshot: AttributeSnapshot) -> None:
        """Run a hook again until it has the values that it computes with, and outside the trace if it leaves JAX.

        Raises:
            TransferError: When a tensor that it computes with cannot be read.
        """
        visit, real, traced = self.visits[index], dict[str, NDArray[Any]](), True
        tensors = {t.name: t for t in visit.tensors.values()}
        while True:
            visit.reservations.close()
            fixed = has_keras_hook(visit.saveable) or not self.has_values
            unknown = set() if fixed else visit.reservations.computed - real.keys()
            leaves = traced and is_tracing_error(visit.error)
            if not unknown and not leaves:
                return
            real |= {name: read_rows(tensors[name], 0, tensors[name].rows) for name in unknown}
            traced = traced and not leaves
            visit = self.visits[index] = self._again(visit, real, snapshot, traced=traced)

    def _again(
        self, visit: Visit, real: Mapping[str, NDArray[Any]], snapshot: AttributeSnapshot, *, traced: bool
    ) -> Visit:
        """Run a hook again, with the values of ``real``."""
        again = Visit(visit.path, visit.tensors, saveable=visit.saveable, real=real)
        self.visits.append(again)  # which receives what is assigned
        try:
            # Outside the trace of the recording, NumPy code gets arrays instead of tracers.
            with nullcontext() if traced else jax.ensure_compile_time_eval():
                visit.saveable.load_own_variables(Entry(visit.tensors, again.reserve))
        except Exception as error:
            again.error = error
        finally:
            snapshot.restore()
        return self.visits.pop()

    def _close_reservations(self) -> None:
        if self.visits:
            self.visits[-1].reservations.close()

    def _assign(self, variable: Variable, value: Any, assign: Callable[[Variable, Any], Any]) -> Any:
        del assign  # nothing is assigned while recording
        visit = self.visits[-1]
        view = visit.reservations.locate(value)
        shape = tuple(getattr(value, "shape", ()))
        if shape != tuple(variable.shape):
            # The error that Keras' `assign` raises, so the hook ends here as it would in Keras.
            visit.mismatch = Mismatch.of_shapes(variable, view.tensor if view else "", shape)
            raise ValueError(visit.mismatch.message)
        visit.assigned.append(RecordedAssign(variable, view))
        return value


def _index(tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], set[str]]:
    """Return tensors by group path and key, in HDF5's order of keys, and every existing path."""
    groups: dict[str, dict[str, Tensor]] = {}
    folders: set[str] = set()
    for name in sorted(tensors, key=str.encode):  # HDF5 sorts by bytes: "10" comes before "2"
        parts = name.split("/")
        folders.update("/".join(parts[:n]) for n in range(1, len(parts)))
        for n, part in enumerate(parts[:-1]):
            if part == "vars":
                groups.setdefault("/".join(parts[:n]), {})["/".join(parts[n + 1 :])] = tensors[name]
    return groups, folders


def _narrows(stored: np.dtype[Any], variable: Variable) -> bool:
    """Whether integers lose bits, so that values must be checked: TensorFlow counts steps in int64, JAX in int32."""
    wanted = stored_dtype(variable)
    return stored.kind in "iu" and wanted.kind in "iu" and not np.can_cast(stored, wanted)
