"""Each layer's ``load_own_variables``: recorded with placeholders for the tensors, then run with sharded arrays.

A user's hook (``load_own_variables``) may decide by a tensor's value (a stored version, a check for zeros), which a
placeholder does not have. So a hook that computes with tensors is recorded again with their true values, until it
computes with no others. The last recording counts. For example, a hook that assigns to ``a`` and ``b`` in an order that
depends on tensor "2"::

    run 1, "2" reads as 0         a ← "1", b ← "0"      discarded
    run 2, "2" has its value 2    a ← "0", b ← "1"      counts

Keras' own hooks decide by shapes and keys only. Some hooks also set attributes of their layer: ``Normalization`` its
mean, ``Dense`` that it is calibrated. Attributes that change while recording are set back afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from shardload.errors import MismatchError
from shardload.keras_bridge import Variable
from shardload.keras_bridge.caller import warn_caller
from shardload.keras_bridge.recording import is_tracing_error
from shardload.keras_bridge.saving import assignments_to, load_state
from shardload.keras_bridge.variables import stored_dtype
from shardload.manifest import Tensor, View
from shardload.mapping.placeholders import Reservations
from shardload.mapping.variable_map import Mismatch, Runtime
from shardload.transfer.planning import Binding
from shardload.transfer.read_tensor import read_rows

_LEGACY = "_layer_checkpoint_dependencies"
"""The folder of a model's layers in files of Keras 2.13; later files call it ``layers``."""


def has_keras_hook(saveable: Any) -> bool:
    """Whether a layer or optimizer has Keras' own ``load_own_variables``, which no tensor's value can influence."""
    module = getattr(getattr(type(saveable), "load_own_variables", None), "__module__", "")
    return str(module).split(".")[0] == "keras"


class Entry:
    """What ``load_own_variables`` gets as its ``store`` instead of an HDF5 group: key → value, read when accessed."""

    def __init__(self, tensors: Mapping[str, Tensor], read: Callable[[str], Any]) -> None:
        self._tensors = tensors
        self._read = read

    def keys(self) -> list[str]:
        """Return each key up to its first slash, as an HDF5 group lists its members; hooks may loop over them."""
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
    """A part of a load: calls ``load_own_variables`` (the hook) of a layer or optimizer again, to assign the arrays."""

    saveable: Any
    path: str
    tensors: dict[str, Tensor]
    """Key in the hook's ``store`` → tensor, for all that is stored for this layer or optimizer."""
    computing: frozenset[str]
    """Names of the tensors whose values the hook gets, because it computes with them; others are placeholders."""
    bindings: tuple[Binding, ...]
    """Which elements of which tensor the hook assigns to each variable; of several assignments, the last one counts."""
    variables: tuple[Variable, ...]
    """Variables to which the hook assigns values that it computes."""
    kept: tuple[Variable, ...] = ()
    """Variables that keep their values, such as LoRA adapters: what the hook assigns to them is ignored."""

    @property
    def owner(self) -> str:
        """Class and path of the layer or optimizer, for messages."""
        return f"{type(self.saveable).__name__} at {self.path or 'the root'!r}"

    def keeping(self, kept: Mapping[int, Variable]) -> LayerStep:
        """Return a copy that ignores what the hook assigns to the variables in ``kept`` (``id`` → variable)."""
        own = [v for v in self.variables if id(v) in kept]
        return replace(self, variables=tuple(v for v in self.variables if id(v) not in kept), kept=tuple(own))

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the variables whose arrays must be read before `run`, as `run` assigns these arrays."""
        return tuple(b.name for b in self.bindings)

    @property
    def computes(self) -> bool:
        """Whether the hook does more than assign parts of tensors; it then runs last, and reads whole tensors."""
        return bool(self.computing or self.variables)

    def run(self, runtime: Runtime) -> None:
        """Call the hook. Where it assigns a part of a placeholder, assign the array that was read for it instead."""
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
                    raise self._deviates(f"computed a value for {variable.path!r}, but assigned a stored tensor to it")
                computed.add(id(variable))
                self._refuse_overflow(variable, value)
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
            raise self._deviates(f"assigned nothing to {left[0]!r}, but assigned a value to it")

    def _whole(self, tensor: Tensor) -> str | None:
        """Return the name of the variable whose loaded array the hook gets for ``tensor``; ``None`` for a placeholder.

        A placeholder takes a range of addresses, which is slow to reserve while other threads fill memory, so Keras'
        own hooks get the array itself. A user's hook gets a placeholder: it may reshape what it reads, or look at the
        dtype, and the loaded array may already be cast to the variable's dtype.
        """
        if self.computes or not has_keras_hook(self.saveable):
            return None
        found = [b for b in self.bindings if b.view.tensor == tensor.name]
        return found[0].name if len(found) == 1 and found[0].view.is_whole(tensor) else None

    @staticmethod
    def _refuse_overflow(variable: Variable, value: Any) -> None:
        """Raise an error if integers that a hook computed do not fit in their variable: an int64 count in an int32."""
        wanted, found = stored_dtype(variable), getattr(value, "dtype", None)
        if not isinstance(value, np.ndarray) or found == wanted or {value.dtype.kind, wanted.kind} - {"i", "u"}:
            return
        info = np.iinfo(wanted)
        if value.size and not (info.min <= int(value.min()) and int(value.max()) <= info.max):
            raise MismatchError(
                f"Cannot store the checkpoint's {found} values from {value.min()} to {value.max()} in variable "
                f"{variable.path!r}: they do not fit in {wanted}. Give the variable a wider dtype"
            )

    def _deviates(self, what: str) -> MismatchError:
        return MismatchError(
            f"Cannot load {self.owner}: its load_own_variables {what} in an earlier call, which recorded its "
            "assignments. It must do the same for the same checkpoint each time"
        )


@dataclass(frozen=True, slots=True)
class AttributeSnapshot:
    """A copy of an object's attributes, and of the lists, dicts and sets among them, to undo what loading code does."""

    target: Any
    attributes: dict[str, Any]
    contents: tuple[tuple[Any, Any], ...]

    @classmethod
    def of(cls, target: Any) -> AttributeSnapshot:
        """Record the attributes of ``target``, before code runs that may change them."""
        attributes = dict(getattr(target, "__dict__", {}))
        contents = [(value, kind(value)) for value in attributes.values() if (kind := _container_kind(value))]
        return cls(target, attributes, tuple(contents))

    def restore(self) -> None:
        """Set the recorded attributes again, but not by Keras' ``__setattr__``, which would track variables twice."""
        current = getattr(self.target, "__dict__", None)
        if current is None:
            return
        for name in current.keys() - self.attributes.keys():
            del current[name]
        for name, value in self.attributes.items():
            if current.get(name, self) is not value:
                current[name] = value
        # Without comparing first: equality of NumPy arrays is not one truth value.
        for container, content in self.contents:
            # By the plain type's methods: Keras' own would also untrack the layers and variables in its containers.
            kind: Any = type(content)
            kind.clear(container)
            (list.extend if kind is list else kind.update)(container, content)


def _container_kind(value: Any) -> Any:
    """Return list, dict or set if ``value`` is one, as it is or as Keras wraps the attributes of a layer."""
    if type(value) in (list, dict, set):
        return type(value)
    is_keras = type(value).__module__.split(".")[0] == "keras"
    return next((kind for kind in (list, dict, set) if is_keras and isinstance(value, kind)), None)


@dataclass(slots=True, eq=False)
class RecordedAssign:
    """One assignment that a hook made while it was recorded: a variable, and which part of a tensor it got."""

    variable: Variable
    view: View | None
    """Which elements of which tensor were assigned; ``None`` if the value was computed."""


@dataclass(slots=True, eq=False)
class Visit:
    """What one recorded call of ``load_own_variables`` (the hook of a layer or optimizer) read and assigned."""

    path: str
    tensors: Mapping[str, Tensor]
    """Key in the hook's ``store`` → tensor, for all that is stored for this layer or optimizer."""
    reservations: Reservations = field(default_factory=Reservations)
    saveable: Any = None
    real: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Name → true values of the tensors with which the hook computes; for other tensors, it gets placeholders."""
    read: set[str] = field(default_factory=set)
    assigned: list[RecordedAssign] = field(default_factory=list)
    mismatch: Mismatch | None = None
    error: Exception | None = None

    def reserve(self, key: str) -> Any:
        """Return what the hook gets at ``key``: a copy of the tensor's values if `real` has them, or a placeholder."""
        tensor = self.tensors[key]
        self.read.add(tensor.name)
        if tensor.name in self.real:
            return self.real[tensor.name].copy()
        return self.reservations.make(tensor)

    @property
    def computing(self) -> set[str]:
        """Names of the tensors whose values the hook needs in the load, as it does more than assign parts of them."""
        # A tensor read for no variable is kept elsewhere (the idf weights of a StringLookup), so it needs real bytes.
        used = self.reservations.used | (self.read - {e.view.tensor for e in self.assigned if e.view})
        dtypes = {t.name: t.dtype for t in self.tensors.values()}
        # Values must be checked where integers lose bits: TensorFlow counts steps in int64, JAX in int32.
        for view, variable in ((e.view, e.variable) for e in self.assigned if e.view):
            stored, wanted = dtypes[view.tensor], stored_dtype(variable)
            if {stored.kind, wanted.kind} <= {"i", "u"} and not np.can_cast(stored, wanted):
                used.add(view.tensor)
        # A variable both viewed and computed gets its last value only if the hook runs all of it on real bytes.
        for event in self.assigned:
            twice = [e for e in self.assigned if e.variable is event.variable]
            if len(twice) > 1 and any(e.view is None for e in twice):
                used.update(e.view.tensor for e in twice if e.view is not None)
        return used


class Walk:
    """Lets Keras load ``root`` from placeholders for tensors, and records what each ``load_own_variables`` (hook) does.

    With ``has_values=False`` (a plan for a checkpoint that does not exist), hooks get no true values of tensors.
    """

    def __init__(
        self, root: Any, tensors: Mapping[str, Tensor], *, skip: Iterable[Any] = (), has_values: bool = True
    ) -> None:
        self.root = root
        self.skip = tuple(skip)
        self.has_values = has_values
        self.visits: list[Visit] = []
        # Tensors by group path and key, in HDF5's order of keys, and every existing path.
        self._groups: dict[str, dict[str, Tensor]] = {}
        self._folders: set[str] = set()
        for name in sorted(tensors, key=str.encode):  # HDF5 sorts by bytes: "10" comes before "2"
            parts = name.split("/")
            self._folders.update("/".join(parts[:n]) for n in range(1, len(parts)))
            for n, part in enumerate(parts[:-1]):
                if part == "vars":
                    self._groups.setdefault("/".join(parts[:n]), {})["/".join(parts[n + 1 :])] = tensors[name]

    def record(self) -> None:
        """Let Keras walk over `root` once, and record in `visits` what each hook reads and assigns."""
        with assignments_to(self._assign):
            load_state(self.root, self, skip=self.skip)
        self._close_reservations()

    def entry(self, path: str) -> Entry:
        """Begin the `Visit` of the object at ``path``; return what Keras passes to its ``load_own_variables`` next."""
        self._close_reservations()
        # As in `H5IOStore.get`: files of Keras 2.13 name the folder of layers differently.
        group = self._groups.get(path, {})
        if not group and path and _LEGACY in self._folders:
            group = self._groups.get(path.replace("layers", _LEGACY), {})
        self.visits.append(Visit(path, group))
        return Entry(group, self.visits[-1].reserve)

    def has_path(self, path: str) -> bool:
        """Whether the file has anything below ``path``, as Keras' walk asks."""
        return path in self._folders

    @contextmanager
    def visit(self, saveable: Any, path: str) -> Iterator[Callable[[Exception | None], None]]:
        """Return a context in which Keras loads ``saveable`` (a layer or optimizer) and its children.

        It yields a function to call with the error of the hook, or ``None``. When the context ends, ``saveable``
        gets back the attributes that it had before, and a hook that needs values of tensors is called again.
        """
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
        """Call a hook again until it gets the values of all tensors that it computes with; keep the last `Visit`.

        At first, a hook runs in a JAX trace, which computes nothing and takes no memory. If it fails on a tracer, as
        NumPy code does, it is called again outside the trace, with real arrays.
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
        """Call a hook again, with the true values in ``real``, in a JAX trace if ``traced``; return the new `Visit`."""
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
