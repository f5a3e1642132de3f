"""How much memory the slots of an optimizer take, found by building it."""

from __future__ import annotations

from typing import Any

import keras

from shardload.errors import LayoutError
from shardload.keras_bridge.abstraction import abstract
from shardload.parallel.roles import nbytes

_SIDE = 64


def slot_ratio(optimizer: Any) -> float:
    """Return the bytes of slots per byte of a trainable matrix.

    The optimizer's configuration is built for one matrix, without allocating it.

    Args:
        optimizer: A Keras optimizer, its name, or ``None`` for no slots.

    Raises:
        LayoutError: When Keras knows no optimizer of that name.
    """
    if optimizer is None:
        return 0.0
    try:
        made = keras.optimizers.get(optimizer)
    except (TypeError, ValueError) as error:
        raise LayoutError(
            f"Cannot plan for the optimizer {optimizer!r}: Keras has none of that name. Use a name such as adamw, or "
            "in Python pass an optimizer to shardload.parallel.search"
        ) from error
    with abstract():
        own = type(made).from_config(made.get_config())
        matrix = keras.Variable(shape=(_SIDE, _SIDE), initializer="zeros", dtype="float32")
        own.build([matrix])
    slots = [v for v in own.variables if len(v.shape) > 0]
    return sum(nbytes(v) for v in slots) / nbytes(matrix)
