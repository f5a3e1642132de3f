"""Compile the first step of a model ahead of time, from the shapes and shardings of its variables.

Keras makes a step once and keeps it on the model; JAX keeps what it compiles with the jitted function inside. So a step
that was lowered and compiled for the arrays that the first call will pass is not traced or compiled again::

    model.make_predict_function() ─► jitted function ─► lower(specs, batch) ─► compile      no variable needs a value
    model.predict(batch)          ─► jitted function ─► found

A variable that has no value yet is described by its shape, dtype and sharding. What a layer reads besides variables is
fixed in the program: `has_derived_values` tells the models of which a load may change that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import jax
import keras
import numpy as np
from keras.src.backend.jax.trainer import JAXEpochIterator, _distribute_data

from shardload.errors import UnsupportedError
from shardload.keras_bridge import Model, Variable
from shardload.keras_bridge.binding import binding_of, forget_compiled
from shardload.keras_bridge.model_state import state_of
from shardload.keras_bridge.variables import current_value, sharding_of, stored_dtype
from shardload.keras_bridge.xla_faults import avoiding_xla_faults

StepName = Literal["predict", "train"]

_STEPS = ("compiled_generate_function", "_step_function", "step_function", "predict_step", "train_step")
"""Names under which the functions that Keras and KerasHub make refer to the next one inside, down to the jitted one."""


@dataclass(frozen=True, slots=True)
class LoweredStep:
    """A step of a model that was traced and lowered; compiling it needs neither Python's lock nor the model."""

    lowered: Any

    def compile(self) -> None:
        """Compile the step, and let JAX keep the result for the first call with the same shapes and shardings."""
        self.lowered.compile()


def value_spec(variable: Variable) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and sharding of the value that a variable has, or gets in a load."""
    sharding, value = sharding_of(variable), current_value(variable)
    if sharding is None and value is not None and value.committed:
        sharding = value.sharding
    return jax.ShapeDtypeStruct(tuple(variable.shape), stored_dtype(variable), sharding=sharding)


def has_derived_values(model: Model) -> bool:
    """Whether a layer computes with attributes made from its variables or vocabulary, such as ``Normalization``."""
    return any(hasattr(layer, "finalize_state") for layer in model._flatten_layers())


def lower_step(model: Model, kind: StepName, batch: Any) -> LoweredStep:
    """Trace and lower the step that the first ``predict`` or ``fit`` of a model runs, for a batch like ``batch``.

    ``batch``: what ``predict`` takes as ``x``, or for ``"train"`` a tuple like ``(x, y)``; arrays, or shapes and dtypes
    (`jax.ShapeDtypeStruct`), of the whole batch. For ``"train"``, `build_for_training` comes first.

    Raises:
        UnsupportedError: When the model does not compile this step, or needs values while it is traced.
    """
    with _on_mesh_of(model), forgotten_on_error(model):
        data = _first_batch(batch if kind == "train" else (batch,))
        with values_as_specs(model):
            if kind == "train":
                model.make_train_function()
                *state, metrics = model._get_jax_state(True, True, True, True)
                # `fit` begins with new zeros, which Keras does not move to a mesh of a single device.
                if (binding := binding_of(model)) is not None and binding.mesh.size == 1:
                    metrics = [spec.update(sharding=None) for spec in metrics]
                return lower(model.train_function, (*state, metrics), data)
            model.make_predict_function()
            return lower(model.predict_function, model._get_jax_state(True, True), data)


def build_for_training(model: Model, batch: Any) -> None:
    """Build the metrics and the optimizer of a model, as its first ``fit`` on ``batch`` would, without values.

    Not while another thread assigns values: Keras reads a variable's initialiser if it has none, in two steps.
    """
    with _on_mesh_of(model):
        model._symbolic_build(data_batch=_first_batch(batch))


def lower_generation(
    model: Model, function: Callable[..., Any], inputs: Any, stop_ids: Any, sampler: Any
) -> LoweredStep:
    """Trace and lower a function that ``make_generate_function`` of KerasHub's ``CausalLM`` has made.

    ``inputs`` and ``stop_ids`` are those of the first call, the arrays placed as they will be then.
    """
    with values_as_specs(model):
        variables = sampler.variables, model.trainable_variables, model.non_trainable_variables
        state = tuple([v.value for v in found] for found in variables)
        return lower(function, inputs, stop_ids, state)


@contextmanager
def values_as_specs(model: Model) -> Iterator[None]:
    """Inside the block, the ``value`` of a model's variable is its shape, dtype and sharding, in this thread only."""
    # Not initialised at its end: Keras' list of variables to initialise has those that a load is about to fill.
    scope = keras.StatelessScope(initialize_variables=False)
    scope.state_mapping.update({id(v): value_spec(v) for v in state_of(model)})
    with scope:
        yield


def lower(function: Callable[..., Any], *args: Any) -> LoweredStep:
    """Trace and lower the jitted function inside ``function`` for arguments that are arrays, or their specs."""
    if (jitted := jitted_in(function)) is None:
        raise UnsupportedError("the model does not compile this step (run_eagerly, or jit_compile=False)")
    traced = jitted.trace(*args)
    return LoweredStep(traced.lower())


def jitted_in(function: Callable[..., Any]) -> Any:
    """Return the jitted function that a function made by Keras or KerasHub calls; ``None`` if it calls none."""
    while not hasattr(function, "lower"):
        inner = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
        found = next((inner[name] for name in _STEPS if name in inner), None)
        if found is None:
            return None
        function = found
    return function


@contextmanager
def forgotten_on_error(model: Model) -> Iterator[None]:
    """If the block fails, drop the model's steps: the next call makes and traces them again, with all values."""
    try:
        yield
    except BaseException:
        forget_compiled(model)
        raise


def _first_batch(batch: Sequence[Any]) -> Any:
    """Return a batch as the step gets it: what Keras makes of arrays of zeros with the same shapes and dtypes."""
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tuple(batch))
    x, y, weight = (*zeros, None, None)[:3]
    rows = jax.tree.leaves(zeros)[0].shape[0]
    distribution = keras.distribution.distribution()
    # Without a distribution: with several processes, Keras would refuse arrays, as each might pass the same ones.
    keras.distribution.set_distribution(None)
    try:
        epochs = JAXEpochIterator(x=x, y=y, sample_weight=weight, batch_size=rows, shuffle=False)
        data = next(next(iterator for _, _, iterator in epochs))
    finally:
        keras.distribution.set_distribution(distribution)
    return data if distribution is None else _distribute_data(data)


@contextmanager
def _on_mesh_of(model: Model) -> Iterator[None]:
    with ExitStack() as stack:
        if (binding := binding_of(model)) is not None:
            stack.enter_context(binding.scope())
            # As the step is called: this context is part of the key of compiled steps.
            stack.enter_context(avoiding_xla_faults(binding.distribution))
        yield
