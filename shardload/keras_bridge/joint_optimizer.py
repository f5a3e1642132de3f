"""A base class for optimizers that update all variables in one call, and what that class needs from Keras' optimizers.

Keras calls `update_step` once per variable. An optimizer that works on several variables together (batched
decompositions, or one per device) needs all gradients at once. It also needs to know whether a step counts: with
gradient accumulation, Keras on JAX computes an update for every batch and discards most of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding

from shardload.errors import BackendError, MismatchError
from shardload.keras_bridge import Variable
from shardload.keras_bridge.variables import current_value, sharding_of
from shardload.sharding.layout import Layout
from shardload.units import plural

FLOAT32_UPDATE = "float32_update"
"""JAX name scope in which a `JointOptimizer` updates the weights, in float32 even if the model is 16-bit.

Memory estimates for a 16-bit model halve the float32 arrays of a step that was compiled in float32. Arrays that the
compiled step exchanges between devices under this name keep their size.
"""


class JointOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """An optimizer that updates all variables in one call of `update_all`; subclasses create its state in `build`."""

    def __init__(self, learning_rate: Any, **options: Any) -> None:
        """Create an optimizer without state; raise a `BackendError` if Keras does not run on JAX."""
        if (found := keras.config.backend()) != "jax":
            raise BackendError(found)
        super().__init__(learning_rate, **options)

    @abstractmethod
    def update_all(self, gradients: Sequence[Any], variables: Sequence[Variable], learning_rate: Any) -> None:
        """Assign new values to variables and state. The gradients are already unscaled, accumulated and clipped."""

    @property
    def needs_even_state(self) -> bool:
        """Whether a search for layouts must refuse those in which a weight's state cannot be split evenly."""
        return False

    @property
    def update_bytes(self) -> int:
        """Bytes of an update's temporary arrays on each device, in every layout; gradients and state do not count."""
        return 0

    @property
    def fixed_dtype_state(self) -> list[Variable]:
        """State variables that keep their dtype even in a 16-bit model, for estimates of a step's memory."""
        return []

    def state_layouts(self, layout_of: Callable[[Variable], Layout | None]) -> dict[int, Layout]:
        """Return ``id(variable)`` → layout for state shaped unlike its weight; the weight has ``layout_of(weight)``."""
        return {}

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Variable] | None = None) -> None:
        """Check the number and shapes of the gradients, then update the variables."""
        variables = self.trained if trainable_variables is None else list(trainable_variables)
        if len(grads) != len(variables) and self.built:
            raise MismatchError(
                f"Cannot update {plural(len(variables), 'variable')} with {self.name!r} and "
                f"{plural(len(grads), 'gradient')}: expected one for each, None where a variable has none"
            )
        # Lengths may differ before it is built: Keras then raises its own error, which asks for the variables.
        for gradient, variable in zip(grads, variables, strict=False):
            if gradient is not None and np.shape(gradient) != tuple(variable.shape):
                raise MismatchError(
                    f"Cannot update {variable.path!r} of shape {tuple(variable.shape)} with {self.name!r}: its "
                    f"gradient has shape {np.shape(gradient)}, expected the same. Pass gradients in the order of the "
                    "variables, not transposed"
                )
        super().apply(grads, None if trainable_variables is None else variables)

    def is_due(self) -> Any:
        """Whether this call updates the variables instead of only accumulating gradients: `True`, or a traced bool."""
        # As in Keras, which adds 1 to the iterations after the update.
        steps = self.gradient_accumulation_steps
        return (self._iterations.value + 1) % steps == 0 if steps else True

    @property
    def trained(self) -> list[Variable]:
        """The variables that the optimizer was built with, in order; empty before it is built."""
        return list(self._trainable_variables)

    def position(self, variable: Variable) -> int:
        """Return the position of a variable among those that the optimizer was built with."""
        return int(self._get_variable_index(variable))

    def is_decayed(self, variable: Variable) -> bool:
        """Whether weight decay is on and applies to ``variable``: `exclude_from_weight_decay` does not exclude it."""
        return bool(self.weight_decay) and bool(self._use_weight_decay(variable))

    def add_state(
        self,
        variable: Variable,
        name: str,
        *,
        shape: Sequence[int],
        dtype: str,
        initializer: Any = "zeros",
        sharding: NamedSharding | None,
    ) -> Variable:
        """Create a state variable that belongs to ``variable``; without a ``sharding``, Keras chooses its layout."""
        return self.add_variable(
            tuple(shape),
            initializer=initializer,
            dtype=dtype,
            layout=sharding,
            name=f"{variable.path.replace('/', '_')}_{name}",
        )

    # Keras calls this once per step, after accumulation and clipping; its own version loops over the variables.
    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        with jax.named_scope(FLOAT32_UPDATE):
            self.update_all(grads, trainable_variables, learning_rate)

    def _apply_weight_decay(self, variables: Sequence[Variable]) -> None:
        """Do nothing: `update_all` applies weight decay itself.

        Keras calls this before each update, and would shrink the weights in proportion to the learning rate. But
        `update_all` may use another rate for some weights, or skip their update; the decay must then follow.
        """


def sharding_on_mesh(variable: Variable) -> NamedSharding | None:
    """Return a variable's sharding over a mesh, from its layout or else its value; `None` if it is on no mesh."""
    found = sharding_of(variable)
    if found is None:
        found = getattr(current_value(variable), "sharding", None)
    return found if isinstance(found, NamedSharding) else None


def in_place_of(gradient: Any, variable: Variable) -> Any:
    """Move a gradient to the devices and shards of its variable; return it. A traced gradient stays unchanged."""
    sharding = sharding_on_mesh(variable)
    if sharding is None or isinstance(gradient, jax.core.Tracer):
        return gradient
    return jax.device_put(gradient, sharding)
