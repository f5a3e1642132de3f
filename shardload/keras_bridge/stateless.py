"""Run a Keras model as a pure function of its variables' values, on any mesh.

Inside its block, `stateless` removes what Keras would mix in: the distribution that is set for the thread, the one that
the model is bound to, and the variables on Keras' list of uninitialised ones. The first ``stateless_call`` would run
the initialisers of those as a part of the traced program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.backend.common import global_state

from shardload.keras_bridge.binding import BindingSnapshot, MeshParallel, unbind
from shardload.keras_bridge.gathered_use import Use, gathering
from shardload.keras_bridge.keras_types import Model
from shardload.keras_bridge.recording import UNINITIALISED, unregistered


@contextmanager
def stateless(model: Model, distribution: MeshParallel | None = None) -> Iterator[None]:
    """Inside the block, ``stateless_call`` of the model can be traced under ``distribution`` alone.

    Its variables keep their values and layouts. A bound model is unbound inside the block and bound again afterwards.
    """
    before, bound = keras.distribution.distribution(), BindingSnapshot.of(model)
    waiting = unregistered()
    try:
        # The methods of a bound model would open its own distribution inside this one.
        if bound.binding is not None:
            unbind(model)
        keras.distribution.set_distribution(distribution)
        yield
    finally:
        keras.distribution.set_distribution(before)
        if bound.binding is not None:
            bound.restore()
        # Drop what the block put on the list, then put back what was there before.
        unregistered()
        global_state.get_global_attribute(UNINITIALISED, [], set_to_default=True).extend(waiting)


def run_forward(
    model: Model, state: Any, inputs: Any, *, training: bool, uses: Mapping[int, Use] | None = None, **kwargs: Any
) -> tuple[Any, list[Any], Any]:
    """Run ``model`` on the values in ``state``.

    Args:
        model: A built model.
        state: Arrays under ``trainable`` and ``non_trainable``, in Keras' order.
        inputs: The first argument of its ``call``.
        training: Passed on if ``call`` takes it.
        uses: Variables that are gathered for use.
        kwargs: Further arguments of ``call``.

    Returns:
        The outputs, the non-trainable values afterwards, and the losses that layers added.
    """
    if model._call_has_training_arg:
        kwargs["training"] = training
    call = gathering(model, uses, model.stateless_call) if uses else model.stateless_call
    found: tuple[Any, list[Any], Any] = call(
        state["trainable"], state["non_trainable"], inputs, return_losses=True, **kwargs
    )
    return found


def scaled_loss(optimizer: Any, values: Sequence[Any], loss: Any) -> Any:
    """Return the loss that the optimizer needs the gradients of: ``LossScaleOptimizer`` multiplies it by its scale."""
    with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, values, strict=True))):
        return optimizer.scale_loss(loss)
