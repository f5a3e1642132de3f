"""Values and layouts of one Keras variable, and what replaces its initialiser while it has no value.

A variable's private attribute ``_layout`` is a ``jax.sharding.NamedSharding`` or ``None``. Two more of its private
attributes give its state, which functions of this module change::

    _value        _initializer    state
    jax.Array     None            ordinary
    None          Pending         abstract: shape, dtype, path and layout known, no buffer
    jax.Array     Pending         assigned later; `direct_assign` and `forget_initializer` clear the initialiser
    None          None            inside ``fit``, where Keras keeps the values itself

In Keras' NNX mode, variables are ``flax.nnx.Variable`` too, and ``_value`` is a property of theirs: see `set_value`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import keras
import numpy as np
from jax._src.array import ArrayImpl
from keras.src.backend.common.name_scope import current_path
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.jax import core
from numpy.typing import NDArray

from shardload.errors import MismatchError, UninitialisedError
from shardload.keras_bridge import Variable
from shardload.processes.agreement import require_agreement
from shardload.sharding.layout import Layout
from shardload.transfer.placement import named_sharding

BUILD_YOURSELF = "Build the model outside it, then call shardload.load_weights(model, source, mesh=…)"
"""End of an error message: what to do if a model cannot be built without values."""


_orders = itertools.count()


def is_variable(found: Any) -> bool:
    """Whether an object is a variable: a leaf of a tree. In NNX mode, JAX takes variables for trees themselves."""
    return isinstance(found, keras.Variable)


def has_value(variable: Variable) -> bool:
    """Whether the variable has a value (an array) now."""
    return variable._value is not None


def is_abstract(variable: Variable) -> bool:
    """Whether the variable was built without a value and has none yet."""
    return variable._value is None and isinstance(variable._initializer, PendingValue)


def stored_dtype(variable: Variable) -> np.dtype[Any]:
    """Return the dtype in which a variable's value is stored, even inside an autocast scope of Keras."""
    # Unless jax_enable_x64 is set, JAX stores a variable that Keras calls int64 or float64 in 32 bits.
    dtype: np.dtype[Any] = jax.dtypes.canonicalize_dtype(np.dtype(getattr(jax.numpy, variable._dtype)))
    return dtype


def set_layout(variable: Variable, layout: Layout, devices: Sequence[jax.Device]) -> None:
    """Set the layout of values that a variable gets later; its present value is not moved."""
    layout.shard_shape(tuple(variable.shape))
    variable._layout = named_sharding(layout, devices)


def sharding_of(variable: Variable) -> Any:
    """Return the ``jax.sharding.Sharding`` for the variable's layout, ``None`` if it has no layout."""
    return getattr(variable._layout, "backend_layout", variable._layout)


def set_sharding(variable: Variable, sharding: Any) -> None:
    """Set the sharding of values that a variable gets later, ``None`` for no layout; its present value is not moved."""
    variable._layout = sharding


def copied(variable: Variable, sharding: Any) -> Variable:
    """Return a shallow copy of a variable, the same value with another layout: a reference for Keras to read."""
    kind: Any = type(variable)
    twin: Variable = kind.__new__(kind)
    if keras.config.is_nnx_enabled():  # `copy.copy` fails there
        object.__setattr__(twin, "_trace_state", variable._trace_state)
        object.__setattr__(twin, "_var_metadata", dict(variable._var_metadata))
        core._set_raw_value(twin, variable._value)
    twin.__dict__.update(vars(variable))
    twin._layout = sharding
    return twin


def direct_assign(variable: Variable, array: jax.Array) -> None:
    """Make ``array`` the variable's value: the same buffers, no copy, no transfer."""
    wanted, sharding = stored_dtype(variable), sharding_of(variable)
    if tuple(array.shape) != tuple(variable.shape) or array.dtype != wanted:
        raise MismatchError(
            f"Cannot assign {array.dtype} {array.shape} to variable {variable.path!r}: expected {wanted} "
            f"{tuple(variable.shape)}. Cast or reshape the array first"
        )
    if sharding is not None and not array.sharding.is_equivalent_to(sharding, array.ndim):
        raise MismatchError(
            f"Cannot assign an array on {array.sharding} to variable {variable.path!r}: expected {sharding}. Move the "
            "array there with jax.device_put first"
        )
    set_value(variable, array)
    forget_initializer(variable)


def forget_initializer(variable: Variable) -> None:
    """Make a variable that has got a value an ordinary one: remove its `PendingValue`, which stood for the value."""
    if variable._value is not None and isinstance(variable._initializer, PendingValue):
        variable._initializer = None


def set_value(variable: Variable, value: jax.Array | None) -> None:
    """Make ``value`` what a variable stores, unchecked; ``None`` releases its value.

    In NNX mode, Keras would copy an attribute that is set to the metadata of `flax.nnx`: a reference to an old array.
    """
    if keras.config.is_nnx_enabled():
        core._set_raw_value(variable, value)
    else:
        variable._value = value


def drop_value(variable: Variable) -> None:
    """Release a variable's value, to free its memory before a load assigns a new one."""
    if variable._value is not None:
        set_value(variable, None)
        # Without an initialiser: a loaded weight must not silently become a random one.
        variable._initializer = PendingValue(None, variable.path)


def value_of(variable: Variable) -> jax.Array:
    """Return the array that a variable stores, even inside an autocast scope; raise an error if it has none."""
    # Reading a variable without a value raises the error that says what to do.
    if variable._value is None:
        variable.value  # noqa: B018
    array: jax.Array = variable._value
    return array


def relocate(variable: Variable, sharding: Any) -> None:
    """Set the variable's layout and move its value there, if it has one."""
    variable._layout = sharding
    # Not is_equivalent_to: an equivalent sharding of another mesh would clash with that mesh in one program.
    value = variable._value
    if value is None or value.sharding == sharding:
        return
    if value.is_fully_addressable and not sharding.is_fully_addressable:
        # device_put cannot move to devices of other processes; each process provides its own shards.
        host = np.asarray(value)
        require_agreement([host], variable.path, sharding)
        set_value(variable, jax.make_array_from_callback(host.shape, sharding, lambda index: host[index]))
    else:
        set_value(variable, jax.device_put(value, sharding))


def release_from_mesh(variable: Variable, *, committed: bool) -> bool:
    """Turn a variable's value on a mesh of one device into an ordinary array on that device; copy nothing.

    Loads in Keras' place use such a mesh; Keras itself would create ordinary arrays. With ``committed``, JAX refuses to
    combine the array with arrays on other devices. Returns whether the value was changed.
    """
    value = variable._value
    if variable._layout is not None or not isinstance(getattr(value, "sharding", None), jax.sharding.NamedSharding):
        return False
    # JAX has no public function for this: `device_put` on a device commits the array to it.
    (shard,) = value.addressable_shards
    set_value(variable, ArrayImpl(shard.data.aval, shard.data.sharding, [shard.data], committed=committed))
    return True


def unique(found: Iterable[Variable]) -> list[Variable]:
    """Return each variable once, in order of first appearance; variables are compared by identity."""
    return list({id(v): v for v in found}.values())


def numbered(names: Iterable[str]) -> list[str]:
    """Make names (of variables, which may share one) unique: append ``#2``, ``#3`` and so on where they repeat."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found


def initialise_eagerly(variable: Variable, initializer: Callable[..., Any]) -> None:
    """Give a variable its initial value now, as Keras would: in its layout if the initialiser takes one, else whole."""
    set_value(variable, None)
    variable._initialize_with_initializer(initializer)
    variable._initializer = None


def current_value(variable: Variable) -> jax.Array | None:
    """Return the array that a variable stores now; ``None`` if it has no value."""
    value: jax.Array | None = variable._value
    return value


def restore_value(variable: Variable, value: jax.Array | None, initializer: Any) -> None:
    """Undo an assignment: give a variable back what `current_value` and `pending_of` returned before it."""
    set_value(variable, value)
    variable._initializer = initializer


class HostConstant:
    """Initialiser that returns a fixed array: the one from which a variable was created in `shardload.abstract`."""

    def __init__(self, value: NDArray[Any]) -> None:
        self.value = value

    def __call__(self, shape: Any = None, dtype: Any = None) -> jax.Array:
        """Return the value as a device array."""
        return keras.ops.convert_to_tensor(self.value, dtype=dtype)


class Unknown(keras.KerasTensor):  # type: ignore[misc]
    """Symbolic tensor without numbers: the result of reading a variable that has no value, while its layer builds.

    It, or a result computed from it, can be assigned to another variable without a value (`ComputedInBuild`). Any
    other use that needs numbers raises an error.
    """

    def __init__(self, pending: PendingValue, shape: Any, dtype: Any) -> None:
        super().__init__(shape, dtype)
        self.pending = pending

    def _refuse(self, *_: Any) -> Any:
        raise UninitialisedError(
            f"Variable {self.pending.path!r} has no value inside shardload.abstract(), but its model needs one to be "
            f"built. {BUILD_YOURSELF}",
            self.pending.path,
        )

    __array__ = __jax_array__ = __bool__ = __int__ = __float__ = _refuse


class ComputedInBuild:
    """Replaces the initialiser of a variable whose value its layer's ``build`` computes from other variables.

    Only a checkpoint can provide this value: ``build`` computes another one than the variable's own initialiser.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, shape: Any = None, dtype: Any = None) -> Any:
        """Raise an `UninitialisedError`, as no initialiser can compute the value."""
        raise UninitialisedError(
            f"Variable {self.path!r} has no value: its layer computes it in build() from variables without values, and "
            "no checkpoint provided it. Build the model outside shardload.abstract(), then call "
            "shardload.load_weights(model, source)",
            self.path,
        )


class PendingValue:
    """Takes the place of a variable's initialiser, which it keeps, until the variable gets a value.

    Keras calls it whenever the variable is read. It returns the exact value if that is known, and a placeholder during
    shape inference and while layers build; in other cases it raises an error.
    """

    __slots__ = ("initializer", "order", "path")

    def __init__(self, initializer: Callable[..., Any] | None, path: str) -> None:
        self.initializer = initializer
        self.path = path
        self.order = next(_orders)

    @property
    def exact(self) -> bool:
        """Whether the initial value is a known constant, as of learning rates and seeds, and needs no computation."""
        # Keras' initialiser of seeds is a local function, so only its name tells.
        name = getattr(self.initializer, "__qualname__", "")
        return isinstance(self.initializer, HostConstant) or name == "SeedGenerator.__init__.<locals>.seed_initializer"

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        """Return what reading the variable gives: its exact value, or a placeholder; raise if there is neither."""
        # Shape inference runs inside a JAX trace, where zeros take no memory.
        if in_symbolic_scope():
            return jax.numpy.zeros(shape, dtype)
        if self.exact and self.initializer is not None:
            return self.initializer(shape, dtype=dtype)
        if recording() and isinstance(self.initializer, (keras.initializers.Zeros, keras.initializers.Ones)):
            # Normalization.build computes with its statistics, so return the values they would have.
            fill = np.zeros if isinstance(self.initializer, keras.initializers.Zeros) else np.ones
            return jax.numpy.asarray(fill(shape, getattr(jax.numpy, dtype)))
        # Only inside a layer's name scope, so while it builds: elsewhere the reader is code that needs numbers.
        if recording() and current_path():
            return Unknown(self, shape, dtype)
        raise UninitialisedError(
            f"Variable {self.path!r} has no value: it was built without allocating, or a failed load released it. "
            "Call shardload.load_weights(model, source), Keras' load_weights, or shardload.initialise(model)",
            self.path,
        )


def pending_of(variable: Variable) -> Any:
    """Return what stands in for a missing value, for `restore_value` to put it back; ``None`` if there is a value."""
    return variable._initializer


def is_built_in(initializer: Any) -> bool:
    """Whether the initialiser is one of Keras' own, so that its configuration describes it completely."""
    return type(initializer).__module__.startswith("keras.src.initializers.")


recording_flag: ContextVar[bool] = ContextVar("shardload_recording", default=False)


def recording() -> bool:
    """Whether `record_variables` is active in this thread or task, so that variables created now get no value."""
    return recording_flag.get()
