"""Objects that replace a variable's initialiser while the variable has no value.

A Keras variable on JAX has two relevant private attributes, and the functions of `variables` move between
their states::

    _value        _initializer    state
    jax.Array     None            ordinary
    None          Pending         abstract: shape, dtype, path and layout known, no buffer
    jax.Array     Pending         assigned later; `direct_assign` and `forget_initializer` clear the initialiser
    None          None            inside ``fit``, where Keras keeps the values itself
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import keras
import numpy as np
from keras.src.backend.common.name_scope import current_path
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from numpy.typing import NDArray

from shardload.errors import UninitialisedError
from shardload.keras_bridge.keras_types import Variable

BUILD_YOURSELF = "Build the model outside it, then call shardload.load_weights(model, source, mesh=…)"
"""Advice for a model that cannot be built without values."""


_orders = itertools.count()


class HostConstant:
    """An initialiser for a fixed value: small arrays passed to ``Variable`` while building abstractly."""

    def __init__(self, value: NDArray[Any]) -> None:
        self.value = value

    def __call__(self, shape: Any = None, dtype: Any = None) -> jax.Array:
        """Return the value as a device array."""
        return keras.ops.convert_to_tensor(self.value, dtype=dtype)


class Unknown(keras.KerasTensor):  # type: ignore[misc]
    """The result of reading a variable without a value while a layer builds: shape and dtype, for ``keras.ops``.

    Neither it nor a result computed from it has numbers: it can be assigned to another abstract variable
    (`ComputedInBuild`); any other use that needs a value raises.
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
    """Replaces the initialiser of a variable that its layer computes from other variables in ``build``.

    Only a checkpoint can provide its value: its initialiser gives a different one than the layer would compute.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, shape: Any = None, dtype: Any = None) -> Any:
        """Raise."""
        raise UninitialisedError(
            f"Variable {self.path!r} has no value: its layer computes it in build() from variables without values, and "
            "no checkpoint provided it. Build the model outside shardload.abstract(), then call "
            "shardload.load_weights(model, source)",
            self.path,
        )


class PendingValue:
    """Replaces a variable's initialiser until the variable gets a value.

    Keras calls it whenever the variable is read: returns a placeholder during shape inference and while
    layers build, the exact value if it is known, and raises otherwise.
    """

    __slots__ = ("initializer", "order", "path")

    def __init__(self, initializer: Callable[..., Any] | None, path: str) -> None:
        self.initializer = initializer
        self.path = path
        self.order = next(_orders)

    @property
    def exact(self) -> bool:
        """Whether the initial value is a constant known on the host: learning rates, seeds."""
        # Keras' initialiser of seeds is a local function, so only its name tells.
        name = getattr(self.initializer, "__qualname__", "")
        return isinstance(self.initializer, HostConstant) or name == "SeedGenerator.__init__.<locals>.seed_initializer"

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        """Return the result of reading the variable.

        Raises:
            UninitialisedError: When a value is needed and there is none.
        """
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
    """Return the `PendingValue` with which `restore_value` makes a variable abstract again; ``None`` if ordinary."""
    return variable._initializer


def is_built_in(initializer: Any) -> bool:
    """Whether the initialiser is one of Keras' own, so that its configuration describes it completely."""
    return type(initializer).__module__.startswith("keras.src.initializers.")


recording_flag: ContextVar[bool] = ContextVar("shardload_recording", default=False)


def recording() -> bool:
    """Whether variables created now, in this thread or task, get no value."""
    return recording_flag.get()
