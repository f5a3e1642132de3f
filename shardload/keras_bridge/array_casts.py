"""Functions that cast arrays, led to a method of the array: a placeholder has no values to cast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from keras.src.backend.jax import core
from numpy.typing import NDArray

from shardload.keras_bridge.patches import Patches


def casts_by_astype(kind: type[NDArray[Any]]) -> Patches:
    """Return patches under which functions that cast arrays of this class call ``array.astype(dtype)``.

    The functions are ``numpy.asarray(array, dtype)``, ``numpy.array(array, dtype)`` and ``keras.ops.cast``. NumPy
    itself would read the array's memory, and JAX would copy it.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def cast(*args: Any, **named: Any) -> Any:
            dtype = args[1] if len(args) > 1 else named.get("dtype")
            if dtype is not None and args and isinstance(args[0], kind):
                return args[0].astype(dtype)
            return original(*args, **named)

        return cast

    return Patches(lambda: [(np, "asarray", wrap), (np, "array", wrap), (core, "cast", wrap)])
