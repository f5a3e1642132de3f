"""The one room where private Keras attributes and ``keras.src`` are touched.

A Keras variable on JAX has three private attributes that matter here, and every function below moves
between their states::

    _value        _initializer    state
    jax.Array     None            ordinary
    None          Pending         abstract: shape, dtype, path and layout known, no buffer
    jax.Array     Pending         assigned since; `direct_assign` and `settle` put it in order
    None          None            inside ``fit``, where Keras holds the values itself

``_layout`` is a ``jax.sharding.NamedSharding`` or ``None``. What each function relies on is pinned by
tests/test_keras_contract.py against the Keras version named there.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, Protocol

import jax
import keras
import numpy as np
from keras.src.backend.common import global_state, variables
from keras.src.backend.common.name_scope import current_path
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.common.symbolic_scope import SymbolicScope, in_symbolic_scope
from keras.src.backend.jax.core import JaxVariable
from keras.src.backend.jax.trainer import JAXEpochIterator, JAXTrainer, _distribute_data
from keras.src.saving import saving_lib, serialization_lib
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.utils import naming
from numpy.typing import NDArray

from shardload._agreement import require_agreement
from shardload._patches import Patches
from shardload._placement import named_sharding
from shardload.errors import MismatchError, UninitialisedError, UnsupportedError
from shardload.layout import Layout

Variable = Any
"""A ``keras.Variable``; untyped upstream."""
Model = Any
"""A ``keras.Model`` or layer; untyped upstream."""

BUILD_YOURSELF = "Build the model yourself, outside it, and fill it: shardload.load_weights(model, source, mesh=…)"
"""The way out where a model cannot be built without values."""
GLOBAL_SEED, GLOBAL_GENERATOR = "global_random_seed", "global_seed_generator"
"""Where Keras keeps what `keras.utils.set_random_seed` was given, and the generator that it seeds."""
UNINITIALISED = "uninitialized_variables"
"""Keras' thread-local list of variables created in a ``StatelessScope``."""


# ---- values and layouts of one variable ---------------------------------------------------------


def has_value(variable: Variable) -> bool:
    """Whether the variable holds an array now."""
    return variable._value is not None


def is_abstract(variable: Variable) -> bool:
    """Whether the variable was built without a value and has none yet."""
    return variable._value is None and isinstance(variable._initializer, Pending)


def stored_dtype(variable: Variable) -> np.dtype[Any]:
    """The dtype of what the variable stores, whatever autocast scope is open."""
    dtype: np.dtype[Any] = jax.dtypes.canonicalize_dtype(np.dtype(getattr(jax.numpy, variable._dtype)))
    return dtype


def set_layout(variable: Variable, layout: Layout, devices: Sequence[jax.Device]) -> None:
    """Say where the variable is to live; a value it already holds stays where it is.

    Raises:
        LayoutError: When the layout does not divide the variable's shape.
        MeshError: When there are not as many devices as mesh positions.
    """
    layout.shard_shape(tuple(variable.shape))
    variable._layout = named_sharding(layout, devices)


def sharding_of(variable: Variable) -> Any:
    """The ``jax.sharding.Sharding`` the variable's layout asks for, ``None`` where it has no layout."""
    return getattr(variable._layout, "backend_layout", variable._layout)


def set_sharding(variable: Variable, sharding: Any) -> None:
    """As `set_layout`, for a sharding that is already made."""
    variable._layout = sharding


def direct_assign(variable: Variable, array: jax.Array) -> None:
    """Make ``array`` the variable's value: the same buffers, no copy, no transfer.

    Raises:
        MismatchError: When shape, dtype or sharding are not the variable's own.
    """
    wanted, sharding = stored_dtype(variable), sharding_of(variable)
    if tuple(array.shape) != tuple(variable.shape) or array.dtype != wanted:
        raise MismatchError(
            f"Variable {variable.path!r} is {wanted} {tuple(variable.shape)}, but was given {array.dtype} {array.shape}"
        )
    if sharding is not None and not array.sharding.is_equivalent_to(sharding, array.ndim):
        raise MismatchError(
            f"Variable {variable.path!r} lives on {sharding}, but was given an array on {array.sharding}"
        )
    variable._value = array
    settle(variable)


def settle(variable: Variable) -> None:
    """Forget the recorded initialiser of a variable that has a value."""
    if variable._value is not None and isinstance(variable._initializer, Pending):
        variable._initializer = None


def drop_value(variable: Variable) -> None:
    """Let go of the variable's value, so that its memory is free before a load replaces it."""
    if variable._value is not None:
        variable._value = None
        variable._initializer = Pending(None, variable.path)


def value_of(variable: Variable) -> jax.Array:
    """The array the variable stores, past any autocast scope."""
    if variable._value is None:
        variable.value  # noqa: B018  # raises what a reader of the variable would see
    array: jax.Array = variable._value
    return array


def relocate(variable: Variable, sharding: Any) -> None:
    """Give the variable a layout and move its value there, if it has one."""
    variable._layout = sharding
    # Not is_equivalent_to: an equivalent sharding of another mesh would clash with that mesh in one program.
    value = variable._value
    if value is None or value.sharding == sharding:
        return
    if value.is_fully_addressable and not sharding.is_fully_addressable:
        host = np.asarray(value)
        require_agreement([host], variable.path, sharding)
        variable._value = jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
    else:
        variable._value = jax.device_put(value, sharding)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Have Keras, Python and NumPy draw from ``seed`` inside, and go on afterwards as if nothing had been drawn."""
    names = (GLOBAL_SEED, GLOBAL_GENERATOR)
    before = [global_state.get_global_attribute(name) for name in names]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        random.seed(seed)
        np.random.seed(seed)  # Keras' own generators, and user code, may draw from it
        for name, value in zip(names, (seed, None), strict=True):
            global_state.set_global_attribute(name, value)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            global_state.set_global_attribute(name, value)
        random.setstate(python)
        np.random.set_state(numpy)


# ---- variables of a model -----------------------------------------------------------------------


def variables_of(model: Model) -> list[Variable]:
    """The model's own variables once each, in Keras' order: weights and seed generators' states."""
    return unique(model.variables)


def optimizer_variables_of(model: Model) -> list[Variable]:
    """Variables of the compiled optimizer: slots, iterations, learning rate."""
    optimizer = getattr(model, "optimizer", None)
    return unique(getattr(optimizer, "variables", ()))


def weights_of(model: Model) -> list[Variable]:
    """All a checkpoint of the model can hold: its own variables, then its optimizer's."""
    return unique([*variables_of(model), *optimizer_variables_of(model)])


_PLAIN = frozenset(map(id, (bool, int, float, str, list, tuple, set, dict, FunctionType, type(None))))
"""Types of most attributes, which hold no variables; by identity, as a metaclass may define equality and hashes."""


def state_of(model: Model) -> list[Variable]:
    """Every variable reachable: `weights_of`, metrics, and what attributes hold (a sampler's seeds)."""
    found = weights_of(model)
    if isinstance(model, keras.Layer):
        for layer in model._flatten_layers():
            found.extend(getattr(layer, "metrics_variables", ()))
            # Metrics that were handed to compile as objects have variables before the model counts them as its own.
            given = getattr(layer, "_compile_metrics", None)
            for metric in keras.tree.flatten(
                [getattr(given, n, None) for n in ("_user_metrics", "_user_weighted_metrics")]
            ):
                found.extend(metric.variables if isinstance(metric, keras.Metric) else ())
            for attribute in list(vars(layer).values()):
                if id(type(attribute)) not in _PLAIN:
                    found.extend(_held_by(attribute))
        for optimizer in _attribute_optimizers(model):
            found.extend(optimizer.variables)
    return unique(found)


def other_optimizers(model: Model) -> list[tuple[str, Any]]:
    """Optimizers that Keras saves with the model besides the compiled one (a GAN's), by path in ``.weights.h5``."""
    held = set(map(id, _attribute_optimizers(model)))
    return [(path, found) for path, found in saved_objects(model) if id(found) in held] if held else []


def _attribute_optimizers(model: Model) -> list[Any]:
    """What `other_optimizers` may find, without Keras' walk over everything, which takes long for large models."""
    found: dict[int, Any] = {}
    for layer in model._flatten_layers() if isinstance(model, keras.Layer) else ():
        for attribute in list(vars(layer).values()):
            found |= {id(optimizer): optimizer for optimizer in _optimizers_in(attribute)}
    for wrapper in (model, *found.values()):  # what another one wraps, for loss scaling, is saved with that
        inner = getattr(wrapper, "optimizer" if wrapper is model else "inner_optimizer", None)
        while inner is not None:
            found = {i: optimizer for i, optimizer in found.items() if optimizer is not inner}
            inner = getattr(inner, "inner_optimizer", None)
    return list(found.values())


def _optimizers_in(held: Any) -> Iterator[Any]:
    """The optimizers that an attribute is, or that its containers hold, as far down as Keras looks."""
    waiting, seen = [held], set[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, keras.optimizers.Optimizer):
            yield one
        elif isinstance(one, (dict, list, tuple)) and id(one) not in seen:  # a list may hold itself
            seen.add(id(one))
            waiting.extend(one.values() if isinstance(one, dict) else one)


def slots_of(model: Model) -> list[tuple[Variable, Variable]]:
    """Optimizer variables that mirror a weight in shape, each with that weight."""
    found: list[tuple[Variable, Variable]] = []
    waiting = [getattr(model, "optimizer", None), *_attribute_optimizers(model)]
    while waiting:
        if (optimizer := waiting.pop()) is not None:
            found.extend(_slots_in(optimizer))
            waiting.append(getattr(optimizer, "inner_optimizer", None))
    return found


def _slots_in(optimizer: Any) -> Iterator[tuple[Variable, Variable]]:
    weights = getattr(optimizer, "_trainable_variables", [])
    for held in vars(optimizer).values():
        if isinstance(held, list) and held is not weights and len(held) == len(weights):
            pairs = zip(held, weights, strict=True)
            yield from ((s, w) for s, w in pairs if isinstance(s, JaxVariable) and s.shape == w.shape)


def models_in(model: Model) -> list[Model]:
    """The model and the models among its layers (a task's backbone), itself first."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.Model)]


def refresh_derived(model: Model) -> None:
    """Have layers recompute the constants they hold beside their variables: ``Normalization``'s mean and variance."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Normalization) and layer.built and all(map(has_value, layer.variables)):
            layer.finalize_state()


def _held_by(attribute: Any) -> Iterable[Variable]:
    if isinstance(attribute, JaxVariable):
        return (attribute,)
    if isinstance(attribute, keras.random.SeedGenerator):
        return (attribute.state,)
    if isinstance(attribute, (keras.Layer, list, tuple, dict, set)):
        return ()
    held = getattr(attribute, "variables", ()) if hasattr(type(attribute), "variables") else ()
    return [v for v in held if isinstance(v, JaxVariable)] if isinstance(held, (list, tuple)) else ()


def unique(found: Iterable[Variable]) -> list[Variable]:
    """Each variable once, by identity, in order of first appearance."""
    return list({id(v): v for v in found}.values())


# ---- building without allocating ----------------------------------------------------------------

_orders = itertools.count()


class HostConstant:
    """An initialiser that is a value: small arrays given to ``Variable`` while building abstractly."""

    def __init__(self, value: NDArray[Any]) -> None:
        self.value = value

    def __call__(self, shape: Any = None, dtype: Any = None) -> jax.Array:
        """The value as a device array."""
        return keras.ops.convert_to_tensor(self.value, dtype=dtype)


class Unknown(keras.KerasTensor):  # type: ignore[misc]
    """What reading a variable without a value yields while a layer builds: its shape and dtype, for ``keras.ops``.

    No number can come from it, nor from what is computed with it: it can be assigned to another abstract variable
    (`ComputedInBuild`), and whatever else needs its value is refused.
    """

    def __init__(self, pending: Pending, shape: Any, dtype: Any) -> None:
        super().__init__(shape, dtype)
        self.pending = pending

    def _refuse(self, *_: Any) -> Any:
        raise UninitialisedError(
            f"Variable {self.pending.path!r} has no value inside shardload.abstract(), and what is built there needs "
            f"it. {BUILD_YOURSELF}"
        )

    __array__ = __jax_array__ = __bool__ = __int__ = __float__ = _refuse


class ComputedInBuild:
    """Stands in for the initialiser of a variable that its layer computes from others in ``build``.

    Only a checkpoint can give it a value: its initialiser would be another one than the layer means.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, shape: Any = None, dtype: Any = None) -> Any:
        """Refuse."""
        raise UninitialisedError(
            f"Variable {self.path!r} has no value: its layer computes it from other variables when it is built, which "
            "had none then, and nothing was loaded for it. Build the model outside shardload.abstract(), then "
            "shardload.load_weights(model, source)"
        )


class Pending:
    """Stands in for a variable's initialiser until the variable gets a value.

    Called by Keras whenever someone reads the variable: yields a placeholder during shape inference and while
    layers build, the exact value where that is known, and otherwise refuses.
    """

    __slots__ = ("initializer", "order", "path")

    def __init__(self, initializer: Callable[..., Any] | None, path: str) -> None:
        self.initializer = initializer
        self.path = path
        self.order = next(_orders)

    @property
    def exact(self) -> bool:
        """Whether the initial value is a constant known on the host: learning rates, seeds."""
        name = getattr(self.initializer, "__qualname__", "")
        return isinstance(self.initializer, HostConstant) or name == "SeedGenerator.__init__.<locals>.seed_initializer"

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        """What reading the variable yields.

        Raises:
            UninitialisedError: When a value was asked for and there is none.
        """
        if in_symbolic_scope():
            return jax.numpy.zeros(shape, dtype)
        if self.exact and self.initializer is not None:
            return self.initializer(shape, dtype=dtype)
        if recording() and isinstance(self.initializer, (keras.initializers.Zeros, keras.initializers.Ones)):
            # Normalization.build computes with its statistics; they are what they would be.
            fill = np.zeros if isinstance(self.initializer, keras.initializers.Zeros) else np.ones
            return jax.numpy.asarray(fill(shape, getattr(jax.numpy, dtype)))
        if recording() and current_path():
            return Unknown(self, shape, dtype)
        raise UninitialisedError(
            f"Variable {self.path!r} has no value: it was built without allocating, or a load let go of it. Load the "
            "model (shardload.load_weights, or Keras' own load_weights), or initialise it with "
            "shardload.abstraction.initialise(model)"
        )


def pending_of(variable: Variable) -> Pending:
    """What an abstract variable recorded in place of its value."""
    pending: Pending = variable._initializer
    return pending


def initialise_eagerly(variable: Variable, initializer: Callable[..., Any]) -> None:
    """Initialise as Keras would have done, single-device or by the initialiser's own ``layout`` argument."""
    variable._value = None
    variable._initialize_with_initializer(initializer)
    variable._initializer = None


def is_built_in(initializer: Any) -> bool:
    """Whether the initialiser is one of Keras' own, so that its configuration says everything about it."""
    return type(initializer).__module__.startswith("keras.src.initializers.")


def unregistered(since: int = 0) -> list[Variable]:
    """Take the variables off Keras' global list of uninitialised ones, from index ``since`` on."""
    waiting = global_state.get_global_attribute(UNINITIALISED) or []
    taken = list(waiting[since:])
    del waiting[since:]
    return taken


def registered() -> list[Variable]:
    """Variables on Keras' global list of uninitialised ones, in this thread."""
    return list(global_state.get_global_attribute(UNINITIALISED) or [])


_recording: ContextVar[bool] = ContextVar("shardload_recording", default=False)


def recording() -> bool:
    """Whether variables created now, in this thread or task, stay without a value."""
    return _recording.get()


@contextmanager
def record_variables() -> Iterator[None]:
    """While open, variables created by this thread or task record their initialiser and get no buffer."""
    before = len(registered())
    token = _recording.set(True)
    try:
        with _RECORDING_PATCHES.applied():
            yield
    finally:
        _recording.reset(token)
        for variable in unregistered(before):
            _record(variable, variable._initializer)


def _record(variable: Variable, initializer: Any) -> None:
    variable._initialize_layout()
    variable._value = None
    if not isinstance(initializer, Pending):
        variable._initializer = Pending(initializer, variable.path)


def _host_array(value: Any, dtype: Any) -> NDArray[Any]:
    array = np.asarray(value)
    wanted = array.dtype if dtype is None else np.dtype(getattr(jax.numpy, keras.backend.standardize_dtype(dtype)))
    return np.array(array, dtype=jax.dtypes.canonicalize_dtype(wanted))


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Variable, initializer: Any, shape: Any = None, dtype: Any = None, *rest: Any, **named: Any) -> None:
        given = callable(initializer) or isinstance(initializer, str)
        if recording() and not given and not in_stateless_scope():
            initializer = HostConstant(_host_array(initializer, dtype))
            shape, dtype = initializer.value.shape, initializer.value.dtype
        original(self, initializer, shape, dtype, *rest, **named)

    return init


def _initialize_with_initializer(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def initialize(self: Variable, initializer: Any) -> None:
        _record(self, initializer) if recording() else original(self, initializer)

    return initialize


def _deferred_initialize(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def initialize(self: Variable) -> None:
        _record(self, self._initializer) if recording() else original(self)

    return initialize


def _assign(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def assign(self: Variable, value: Any) -> Any:
        host = isinstance(value, (np.ndarray, np.generic, int, float, list, tuple))
        known = host or isinstance(value, keras.KerasTensor)
        if not (recording() and known and is_abstract(self) and not in_stateless_scope()):
            return original(self, value)
        value = _host_array(value, self._dtype) if host else value
        if tuple(value.shape) != tuple(self.shape):
            raise ValueError(f"Variable {self.path!r} has shape {self.shape}, but was given {value.shape}")
        self._initializer = Pending(HostConstant(value) if host else ComputedInBuild(self.path), self.path)
        return value

    return assign


def _post_build(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def post_build(self: Any) -> None:
        for name, held in list(vars(self).items()) if recording() else ():
            if isinstance(held, keras.KerasTensor) and (source := _unknown_behind(held)) is not None:
                raise UnsupportedError(
                    f"{type(self).__name__} {getattr(self, 'path', '')!r} keeps in .{name} what it computed from the "
                    f"variable {source.pending.path!r}, which has no value inside shardload.abstract(). "
                    f"{BUILD_YOURSELF}"
                )
        original(self)

    return post_build


def _unknown_behind(tensor: Any) -> Unknown | None:
    """A variable's placeholder that ``tensor`` was computed from."""
    seen: dict[int, Any] = {}
    waiting = [tensor]
    while waiting:
        found = waiting.pop()
        if isinstance(found, Unknown):
            return found
        history = getattr(found, "_keras_history", None)
        if id(found) not in seen and history is not None and history.operation is not None:
            waiting.extend(history.operation._inbound_nodes[history.node_index].input_tensors)
        seen[id(found)] = found
    return None


# ---- running a model under its own distribution -------------------------------------------------


def _distributed_iterator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras lays out every batch like the first; a last, smaller one may not divide."""

    @functools.wraps(original)
    def iterate(self: Any, distribution: Any) -> Iterator[Any]:
        if not getattr(distribution, "lays_out_each_batch", False):
            yield from original(self, distribution)
            return
        for data in self.data_adapter.get_jax_iterator():
            yield _distribute_data(data)

    return iterate


def _check_sharding_consistency(original: Callable[..., None]) -> Callable[..., None]:
    """On one device all shardings agree; Keras warns there, as its own variables come without a mesh."""

    @functools.wraps(original)
    def check(self: Model, *shardings: Sequence[Any]) -> None:
        devices = {device for found in shardings for sharding in found for device in sharding.device_set}
        if len(devices) > 1:
            original(self, *shardings)

    return check


@contextmanager
def batches_laid_out_singly() -> Iterator[None]:
    """While open, distributions with ``lays_out_each_batch`` are asked about every batch of a dataset."""
    with _TRAINER_PATCHES.applied():
        yield


# ---- saving and recording -----------------------------------------------------------------------

AssignHandler = Callable[[Variable, Any, Callable[[Variable, Any], Any]], Any]
"""Called with the variable, the value and Keras' own ``assign``; returns what ``assign`` is to return."""

_assign_handler: ContextVar[AssignHandler | None] = ContextVar("shardload_assign_handler", default=None)


@contextmanager
def assignments_to(handler: AssignHandler) -> Iterator[None]:
    """While open, every ``variable.assign(value)`` of this thread goes to ``handler`` instead."""
    token = _assign_handler.set(handler)
    try:
        with _ASSIGN_PATCH.applied():
            yield
    finally:
        _assign_handler.reset(token)


def _handled_assign(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def assign(self: Variable, value: Any) -> Any:
        handler = _assign_handler.get()
        return original(self, value) if handler is None else handler(self, value, original)

    return assign


def _inherited_assign(variable: Variable, value: Any) -> Any:
    """Whatever ``assign`` the base class has when it is called, patched or not."""
    return variables.Variable.assign(variable, value)


class _InheritedPatch(Patches):
    """``JaxVariable.assign`` is inherited: this one is set on the subclass and deleted after."""

    def __init__(self) -> None:
        super().__init__(tuple)

    def _replace(self) -> None:
        JaxVariable.assign = _handled_assign(_inherited_assign)

    def _put_back(self) -> None:
        del JaxVariable.assign


class StateSource(Protocol):
    """What `load_state` reads from, and what it tells about where Keras is."""

    def entry(self, path: str) -> Any:
        """The mapping handed to ``load_own_variables`` of the saveable at ``path``."""
        ...

    def has_path(self, path: str) -> bool:
        """Whether anything is stored below ``path``."""
        ...

    def visit(self, saveable: Any, path: str) -> AbstractContextManager[Callable[[Exception | None], None]]:
        """Open around each saveable and its children; told at the end how its ``load_own_variables`` failed."""
        ...


class _ServedStore(saving_lib.H5IOStore):  # type: ignore[misc]
    """``_load_state`` insists on the type; nothing of the HDF5 in it is used."""

    def __init__(self, source: StateSource) -> None:
        self.source = source

    def __bool__(self) -> bool:
        return True

    def get(self, path: str) -> Any:
        return self.source.entry(path)

    def has_path(self, path: str) -> bool:
        return self.source.has_path(path)


def load_state(model: Model, source: StateSource, *, skip: Iterable[Any] = ()) -> None:
    """Keras' own walk over everything that has ``load_own_variables``, served by ``source``.

    Errors of single saveables do not stop it (nor Keras): ``visit`` is told. Those in ``skip`` are left out.
    """
    with _LOAD_STATE_PATCH.applied():
        saving_lib._load_state(
            model,
            weights_store=_ServedStore(source),
            assets_store=None,
            inner_path="",
            visited_saveables={id(saveable) for saveable in skip},
            failed_saveables=set(),
            error_msgs={},
        )


def _visited_load_state(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def load(saveable: Any, weights_store: Any, assets_store: Any, inner_path: str, **named: Any) -> None:
        if not isinstance(weights_store, _ServedStore):
            original(saveable, weights_store, assets_store, inner_path, **named)
            return
        with weights_store.source.visit(saveable, inner_path) as failed:
            original(saveable, weights_store, assets_store, inner_path, **named)
            _, error = named["error_msgs"].get(id(saveable), (None, None))
            failed(error)

    return load


def without_computing(function: Callable[[], None]) -> None:
    """Run ``function`` with every JAX operation in it traced instead of executed: no memory, no initialiser."""

    def traced() -> None:
        with SymbolicScope():
            function()

    jax.eval_shape(traced)


def computing() -> AbstractContextManager[Any]:
    """Inside `without_computing`: execute for real after all."""
    evaluate: AbstractContextManager[Any] = jax.ensure_compile_time_eval()
    return evaluate


def stored_variables(saveable: Any) -> list[Variable]:
    """Variables a layer or optimizer stores itself, in the order Keras' own hook stores them."""
    if isinstance(saveable, keras.Layer):
        return [*saveable._trainable_variables, *saveable._non_trainable_variables]
    return list(saveable.variables) if isinstance(saveable, keras.optimizers.Optimizer) else []


def is_tracing_error(error: Exception | None) -> bool:
    """Whether code failed only because it ran in `without_computing`."""
    return isinstance(error, jax.errors.JAXTypeError)


def saved_objects(model: Model, *, skip: Iterable[Any] = ()) -> list[tuple[str, Any]]:
    """All Keras would write into ``.weights.h5``, each once with its path there; without the optimizer and ``skip``."""
    found: list[tuple[str, Any]] = []
    seen = {id(getattr(model, "optimizer", None)), *map(id, skip)}

    def visit(saveable: Any, path: str) -> None:
        if id(saveable) in seen:
            return
        seen.add(id(saveable))
        found.append((path, saveable))
        for name, child in saving_lib._walk_saveable(saveable):
            enter(child, f"{path}/{name}" if path else name, set())

    def enter(held: Any, path: str, containers: set[int]) -> None:
        if isinstance(held, KerasSaveable):
            visit(held, path)
        elif isinstance(held, (list, dict, tuple)) and id(held) not in containers:
            containers.add(id(held))
            used: dict[str, int] = {}
            for child in list(held.values()) if isinstance(held, dict) else held:
                kind = naming.to_snake_case(type(child).__name__) if isinstance(child, KerasSaveable) else "container"
                if isinstance(child, (KerasSaveable, list, dict, tuple)):
                    enter(child, f"{path}/{saving_lib._get_unique_name(kind, used)}", containers)

    with _LOAD_STATE_PATCH.applied():
        visit(model, "")
    return found


def policy_name(layer: Any) -> str | None:
    """Name of a layer's dtype policy, the usual one of a map; None for what is no layer."""
    policy = layer._dtype_policy if isinstance(layer, keras.Layer) else None
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        policy = policy[layer.path] if layer.path and not isinstance(layer, keras.Model) else policy.default_policy
    if isinstance(policy, keras.dtype_policies.QuantizedDTypePolicy):  # some are named "int8_from_None"
        computes, holds = policy.compute_dtype, policy.variable_dtype
        return f"{policy.quantization_mode}_from_{holds if computes == holds else f'mixed_{computes}'}"
    return None if policy is None else str(policy.name)


def named_weights(layer: Any) -> list[tuple[str, Variable]]:
    """The weights of a layer itself that can be frozen, by name; ``#2`` and so on where names repeat."""
    found: list[tuple[str, Variable]] = []
    seen: dict[str, int] = {}
    for variable in layer._trainable_variables if isinstance(layer, keras.Layer) else ():
        count = seen[variable.name] = seen.get(variable.name, 0) + 1
        found.append((variable.name if count == 1 else f"{variable.name}#{count}", variable))
    return found


def quantize_without_values(layer: Any) -> None:
    """``layer.quantize("int8")`` where its kernel has no value: everything but the numbers, which a load brings.

    A layer built from a map of policies has the map itself as its policy, so that Keras' own hooks store no scale; it
    gets the one that is meant.
    """
    policy = getattr(layer, "_dtype_policy", None)
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        layer._dtype_policy = policy[layer.path]
    if layer.quantization_mode is None:
        with _INT8_PATCH.applied():
            layer.quantize("int8")


def compile_as_described(
    model: Model, config: Mapping[str, Any], *, custom_objects: Mapping[str, Any] | None, safe_mode: bool
) -> bool:
    """What ``deserialize_keras_object`` does with a ``compile_config``, once the model has the layers it trained.

    Tasks of KerasHub have a ``compile`` of their own, which keeps Keras from calling it; they get what theirs takes.

    Returns:
        Whether the model is compiled so now. Keras warns and does not call a ``compile`` that the user has overridden.
    """
    cls = type(model)
    with keras.saving.custom_object_scope(dict(custom_objects or {})), serialization_lib.SafeModeScope(safe_mode):
        if cls.compile.__module__.startswith("keras_hub."):
            model.compile(**keras.saving.deserialize_keras_object(dict(config)))
            return True
        model.compile_from_config(dict(config))
    return cls.compile is keras.Model.compile or cls.compile_from_config is not keras.Model.compile_from_config


def has_own_compile(model: Model) -> bool:
    """Whether the user has overridden the model's ``compile``."""
    own = getattr(type(model), "compile", keras.Model.compile)
    return own is not keras.Model.compile and not own.__module__.startswith("keras_hub.")


def _stand_ins(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, x: Any, axis: Any = None, to_numpy: bool = False, **named: Any) -> Any:
        if not (isinstance(x, JaxVariable) and is_abstract(x)):
            return original(self, x, axis, to_numpy=to_numpy, **named)
        axis = self.axis if axis is None else axis
        axes = {a % len(x.shape) for a in ((axis,) if isinstance(axis, int) else axis)}
        scales = tuple(1 if d in axes else n for d, n in enumerate(x.shape))
        return np.broadcast_to(np.int8(0), tuple(x.shape)), np.broadcast_to(np.float32(1), scales)

    return call


def stored_by_hook(saveable: Any) -> dict[str, Variable]:
    """What ``save_own_variables`` stores as it is, by key; nothing is computed. LoRA is left out, not merged."""
    hook = getattr(saveable, "save_own_variables", None)
    if hook is None:
        return {}
    store: dict[str, Any] = {}
    lora = vars(saveable).get("lora_enabled", False)
    try:
        if lora:
            vars(saveable)["lora_enabled"] = False
        without_computing(lambda: hook(store))
    except Exception:
        return {}  # a hook that needs values: its variables are named by attribute
    finally:
        if lora:
            vars(saveable)["lora_enabled"] = lora
    return {key: held for key, held in store.items() if isinstance(held, JaxVariable)}


def seeds_of(saveable: Any) -> list[Variable]:
    """States of the seed generators a layer tracks, in order of creation."""
    return [generator.state for generator in getattr(saveable, "_seed_generators", ())]


def weights_optimized(optimizer: Any) -> list[Variable]:
    """Weights an optimizer was built for, in the order its slots have; empty before it was built."""
    return list(getattr(optimizer, "_trainable_variables", ()))


def metric_direction(model: Model, name: str) -> Literal["min", "max"] | None:
    """Whether a metric is better low or high, as the model's metric of that name has it; ``None`` if it has none."""
    metrics: list[Any] = []
    for metric in getattr(model, "metrics", ()):
        metrics.extend(getattr(metric, "metrics", ()) or [metric])
    exact = [m for m in metrics if m.name == name]
    for metric in exact or [m for m in metrics if name.endswith(f"_{m.name}")]:  # of one output: ``head_accuracy``
        if hasattr(metric, "_direction"):
            return "max" if metric._direction == "up" else "min"
    return None


def serialised_model(model: Model) -> str:
    """The model's configuration as JSON, as in ``config.json`` of a ``.keras`` archive."""
    config, _ = saving_lib._serialize_model_as_json(model)
    return str(config)


def assets_of(model: Model) -> dict[str, Any] | None:
    """Files that layers save beside their variables (vocabularies), as nested uint8 arrays; ``None`` without any."""
    with _LOAD_STATE_PATCH.applied():
        found: dict[str, Any] | None = saving_lib._save_assets_to_dict(model)
    return found


def load_assets(model: Model, folder: Path) -> list[tuple[Any, Exception]]:
    """Let everything in ``model`` that saved files read them again; what failed, and how.

    Args:
        model: A built model.
        folder: Laid out like the ``assets`` of a ``.keras`` archive.
    """
    failed: dict[int, tuple[Any, Exception]] = {}
    with _LOAD_STATE_PATCH.applied():
        saving_lib._load_state(
            model,
            weights_store=None,
            assets_store=saving_lib.DiskIOStore(str(folder), mode="r"),
            inner_path="",
            visited_saveables=set(),
            failed_saveables=set(),
            error_msgs=failed,
        )
    return list(failed.values())


def own_layers(model: Model) -> list[Any]:
    """The model and every layer in it."""
    return list(model._flatten_layers())


def current_value(variable: Variable) -> jax.Array | None:
    """The array the variable stores now, or ``None``."""
    value: jax.Array | None = variable._value
    return value


def put_back(variable: Variable, value: jax.Array | None, initializer: Any) -> None:
    """Undo an assignment: the value and recorded initialiser from before."""
    variable._value = value
    variable._initializer = initializer


def recorded_initializer(variable: Variable) -> Any:
    """What `put_back` needs to make a variable abstract again; ``None`` for ordinary ones."""
    return variable._initializer


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """What an optimizer is made of before it is built, to take its slots away again."""

    parts: tuple[tuple[Any, dict[str, Any], tuple[tuple[Any, Any], ...]], ...]
    """For the optimizer, its tracker, and those it wraps: the object, its attributes, its containers' content."""

    @classmethod
    def of(cls, optimizer: Any) -> OptimizerState:
        """Remember an optimizer as it is."""
        parts = []
        while optimizer is not None:
            tracker = optimizer._tracker
            for target, held in ((optimizer, vars(optimizer)), (tracker, tracker.stored_ids)):
                containers = (v for v in held.values() if isinstance(v, (list, dict, set)))
                parts.append((target, dict(vars(target)), tuple((c, _plain(c)) for c in containers)))
            optimizer = getattr(optimizer, "inner_optimizer", None)
        return cls(tuple(parts))

    def restore(self) -> None:
        """Make it so again, past Keras' tracking of attributes and lists."""
        for target, attributes, containers in self.parts:
            vars(target).clear()
            vars(target).update(attributes)
            for container, content in containers:
                kind = type(content)
                kind.clear(container)
                kind.extend(container, content) if kind is list else kind.update(container, content)


def _plain(container: Any) -> Any:
    """A copy of a (tracked) list, dict or set as the plain kind."""
    return next(kind for kind in (list, dict, set) if isinstance(container, kind))(container)


# ---- how the seams are opened and closed --------------------------------------------------------


_RECORDING_PATCHES = Patches(
    lambda: [
        (variables.Variable, "__init__", _init),
        (JaxVariable, "_initialize_with_initializer", _initialize_with_initializer),
        (variables.Variable, "_deferred_initialize", _deferred_initialize),
        (variables.Variable, "assign", _assign),
        (keras.Operation, "_post_build", _post_build),
    ]
)
_TRAINER_PATCHES = Patches(
    lambda: [
        (JAXEpochIterator, "_get_distributed_iterator", _distributed_iterator),
        (JAXTrainer, "_check_sharding_consistency", _check_sharding_consistency),
    ]
)
_ASSIGN_PATCH = _InheritedPatch()
# Keras means to cache the attributes to skip, but looks them up under another name than it stores them under, and so
# makes a layer per layer it visits: most of the walk's time.
_LOAD_STATE_PATCH = Patches(
    lambda: [
        (saving_lib, "_load_state", _visited_load_state),
        (saving_lib, "get_attr_skipset", functools.cache),
    ]
)
_INT8_PATCH = Patches(lambda: [(keras.quantizers.AbsMaxQuantizer, "__call__", _stand_ins)])


def epoch_iterator_of_caller() -> Any:
    """The ``EpochIterator`` on whose behalf the calling code runs, or None; Keras hands it to nobody."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), EpochIterator):
            return owner
        frame = frame.f_back
    return None


def epoch_iterator_of_fit() -> Any:
    """The ``EpochIterator`` of the ``fit`` that calls; None outside of one."""
    return _locals_of_fit().get("epoch_iterator")


def initial_epoch_of_fit() -> int:
    """What the ``fit`` that calls was given as ``initial_epoch``, which Keras tells no callback; its default is 0."""
    return int(_locals_of_fit().get("initial_epoch", 0))


def _locals_of_fit() -> dict[str, Any]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "fit" and isinstance(frame.f_locals.get("epoch_iterator"), EpochIterator):
            return dict(frame.f_locals)
        frame = frame.f_back
    return {}


def grain_dataset(epochs: Any) -> Any:
    """The Grain dataset an ``EpochIterator`` reads; None where it reads something else."""
    return getattr(epochs.data_adapter, "_dataset", None)


def forget_epoch_length(epochs: Any) -> None:
    """Let an ``EpochIterator`` find out anew how many batches its data has."""
    epochs._num_batches = epochs.data_adapter.num_batches


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Where the next ``fit`` begins; read right after ``on_train_begin``."""
    model._initial_epoch = epoch
