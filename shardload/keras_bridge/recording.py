"""Build layers without allocating: while recording, new variables keep their initialiser and get no buffer.

Keras keeps names of layers, dtype policies and distributions per thread; `InThread` copies them to a new thread.
"""

from __future__ import annotations

import contextvars
import copy
import inspect
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import jax
import keras
import numpy as np
from keras.src.backend.common import global_state, variables
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.common.symbolic_scope import SymbolicScope
from keras.src.backend.jax import core
from numpy.typing import NDArray

from shardload.errors import UnsupportedError
from shardload.keras_bridge import Variable
from shardload.keras_bridge.patches import Patches, replacing
from shardload.keras_bridge.variables import (
    BUILD_YOURSELF,
    ComputedInBuild,
    HostConstant,
    PendingValue,
    Unknown,
    is_abstract,
    recording,
    recording_flag,
    set_value,
)

GLOBAL_SEED, GLOBAL_GENERATOR = "global_random_seed", "global_seed_generator"
"""Keys of Keras' global state: the seed from `keras.utils.set_random_seed`, and the generator with this seed."""
_created: ContextVar[list[weakref.ref[Variable]] | None] = ContextVar("shardload_created", default=None)

NAMES = "object_name_uids"
"""Key of Keras' global state: counters for automatic names, by which a second Dense layer is called dense_1."""
UNINITIALISED = "uninitialized_variables"
"""Key of Keras' global state: the thread's list of variables that were created without a value."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random generators of Keras, Python and NumPy inside the block; restore their states after it."""
    restore = random_states()
    try:
        random.seed(seed)
        # NumPy's is for user code. When Keras has no global generator, it creates one with a seed from Python's.
        np.random.seed(seed)
        global_state.set_global_attribute(GLOBAL_SEED, seed)
        global_state.set_global_attribute(GLOBAL_GENERATOR, None)
        yield
    finally:
        restore()


def random_states() -> Callable[[], None]:
    """Record the random states of Keras, Python and NumPy; return a function that restores them."""
    before = {name: global_state.get_global_attribute(name) for name in (GLOBAL_SEED, GLOBAL_GENERATOR)}
    python, numpy = random.getstate(), np.random.get_state()

    def restore() -> None:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)
        random.setstate(python)
        np.random.set_state(numpy)

    return restore


@contextmanager
def keeping_names() -> Iterator[None]:
    """Restore Keras' counters of automatic names after the block: models built in it change no names of later ones."""
    names = copy.copy(global_state.get_global_attribute(NAMES))
    try:
        yield
    finally:
        global_state.set_global_attribute(NAMES, names)


def unregistered(since: int = 0) -> list[Variable]:
    """Take variables off Keras' list of those to initialise later, from index ``since`` on; return them."""
    waiting = global_state.get_global_attribute(UNINITIALISED) or []
    taken = list(waiting[since:])
    del waiting[since:]
    return taken


def registered_variables() -> list[Variable]:
    """Return the variables on Keras' list of those to initialise later, which each thread has."""
    return list(global_state.get_global_attribute(UNINITIALISED) or [])


@contextmanager
def record_variables() -> Iterator[list[weakref.ref[Variable]]]:
    """Inside the block, new variables of this thread or task get no buffer; yield a list of weak references to them."""
    before = len(registered_variables())
    token = recording_flag.set(True)
    created: list[weakref.ref[Variable]] = []
    listed = _created.set(created)
    try:
        with _RECORDING_PATCHES.applied():
            yield created
    finally:
        _created.reset(listed)
        recording_flag.reset(token)
        # Layers that Keras built in a StatelessScope: left on its list, their variables would crash the next `fit`.
        for variable in unregistered(before):
            _record(variable, variable._initializer)


def _record(variable: Variable, initializer: Any) -> None:
    # The layout of the distribution that is set now; another may be when the variable gets its value.
    variable._initialize_layout()
    set_value(variable, None)
    if not isinstance(initializer, PendingValue):
        variable._initializer = PendingValue(initializer, variable.path)
    if (created := _created.get()) is not None:
        created.append(weakref.ref(variable))


def _host_array(value: Any, dtype: Any) -> NDArray[Any]:
    array = np.asarray(value)
    wanted = array.dtype if dtype is None else np.dtype(getattr(jax.numpy, keras.backend.standardize_dtype(dtype)))
    return np.array(array, dtype=jax.dtypes.canonicalize_dtype(wanted))


@replacing
def _init(
    original: Any, self: Variable, initializer: Any, shape: Any = None, dtype: Any = None, *rest: Any, **named: Any
) -> None:
    is_initializer = callable(initializer) or isinstance(initializer, str)
    # A value, such as a learning rate. Inside a StatelessScope, Keras refuses it with an error of its own.
    if recording() and not is_initializer and not in_stateless_scope():
        initializer = HostConstant(_host_array(initializer, dtype))
        shape, dtype = initializer.value.shape, initializer.value.dtype
    original(self, initializer, shape, dtype, *rest, **named)


@replacing
def _init_for_nnx(original: Any, self: Variable, *args: Any, **named: Any) -> None:
    if not recording():
        original(self, *args, **named)
        return
    from flax import nnx

    # As Keras does, but for its array of zeros, which would be whole on one device.
    given = inspect.signature(core.NnxVariable.__init__).bind(self, *args, **named).arguments
    given.pop("self")
    metadata = given.pop("nnx_metadata", {})
    mutable = given.pop("mutable", None)
    nnx.Variable.__init__(self, None, mutable=True if mutable is None else mutable, **metadata)
    core.JaxVariable.__init__(self, **given)
    core.stamp_with_enclosing_trace(self)


@replacing
def _initialize_with_initializer(original: Any, self: Variable, initializer: Any) -> None:
    _record(self, initializer) if recording() else original(self, initializer)


@replacing
def _deferred_initialize(original: Any, self: Variable) -> None:
    _record(self, self._initializer) if recording() else original(self)


@replacing
def _assign(original: Any, self: Variable, value: Any) -> Any:
    host = isinstance(value, (np.ndarray, np.generic, int, float, list, tuple))
    known = host or isinstance(value, keras.KerasTensor)
    if not (recording() and known and is_abstract(self) and not in_stateless_scope()):
        return original(self, value)
    # A known value becomes the initial value. A symbolic one was computed from placeholders while its layer was
    # built, so it cannot be computed later.
    value = _host_array(value, self._dtype) if host else value
    if tuple(value.shape) != tuple(self.shape):
        raise ValueError(f"Variable {self.path!r} has shape {self.shape}, but was given {value.shape}")
    self._initializer = PendingValue(HostConstant(value) if host else ComputedInBuild(self.path), self.path)
    return value


@replacing
def _post_build(original: Any, self: Any) -> None:
    # An attribute computed from a variable would keep a placeholder for ever; only variables are filled later.
    for name, value in list(vars(self).items()) if recording() else ():
        if isinstance(value, keras.KerasTensor) and (source := _unknown_behind(value)) is not None:
            raise UnsupportedError(
                f"Cannot build {type(self).__name__} {getattr(self, 'path', '')!r}: it computes .{name} from the "
                f"variable {source.pending.path!r}, which has no value inside shardload.abstract(). {BUILD_YOURSELF}"
            )
    original(self)


def _unknown_behind(tensor: Any) -> Unknown | None:
    """Return the placeholder of a variable without value that ``tensor`` was computed from; ``None`` if from none."""
    seen: dict[int, Any] = {}
    waiting = [tensor]
    while waiting:
        found = waiting.pop()
        if isinstance(found, Unknown):
            return found
        history = getattr(found, "_keras_history", None)
        if id(found) not in seen and history is not None and history.operation is not None:
            # From a symbolic result to the inputs of the operation that made it.
            waiting.extend(history.operation._inbound_nodes[history.node_index].input_tensors)
        seen[id(found)] = found
    return None


def without_computing(function: Callable[[], None]) -> None:
    """Run ``function`` with every JAX operation traced instead of executed: it takes no memory and computes nothing."""

    # The scope makes abstract variables read as zeros instead of raising (`PendingValue`).
    def traced() -> None:
        with SymbolicScope():
            function()

    jax.eval_shape(traced)


def is_tracing_error(error: Exception | None) -> bool:
    """Whether an error of traced code (see `without_computing`) only means that the code needs real values."""
    return isinstance(error, jax.errors.JAXTypeError)


# `core.Variable` is `JaxVariable`, or in NNX mode `NnxVariable`, which inherits from it.
_RECORDING_PATCHES = Patches(
    lambda: [
        (variables.Variable, "__init__", _init),
        *([(core.Variable, "__init__", _init_for_nnx)] if keras.config.is_nnx_enabled() else []),
        (core.Variable, "_initialize_with_initializer", _initialize_with_initializer),
        (variables.Variable, "_deferred_initialize", _deferred_initialize),
        (variables.Variable, "assign", _assign),
        (keras.Operation, "_post_build", _post_build),
    ]
)


_T = TypeVar("_T")


class InThread(Generic[_T]):
    """A call of a function in a new thread, with this thread's settings and name counters of Keras."""

    def __init__(self, function: Callable[[], _T], *, name: str) -> None:
        self._result: _T
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        # A threading.local has other attributes in each thread, so copy them here and set them there. Counters of
        # names are dicts, which are shared by reference: both threads count in the same one.
        state = dict(vars(global_state.GLOBAL_STATE_TRACKER))
        settings = dict(vars(global_state.GLOBAL_SETTINGS_TRACKER))

        def run() -> None:
            vars(global_state.GLOBAL_STATE_TRACKER).update(state)
            vars(global_state.GLOBAL_SETTINGS_TRACKER).update(settings)
            try:
                self._result = context.run(function)
            except BaseException as error:  # raised again in `result`
                self._error = error

        # A daemon: if the load fails meanwhile, Python can exit without waiting for the function.
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def result(self) -> _T:
        """Wait for the function; return its result, or raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result
