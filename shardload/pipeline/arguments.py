"""Check the arguments of public calls before anything is opened; errors use the caller's terms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import keras

from shardload.errors import BackendError, UnsupportedError, UsageError
from shardload.transfer.casts import ENABLE_64_BITS
from shardload.typing import DTypeLike
from shardload.units import dtype_name, parse_bytes


def check_model(model: Any, *, built: bool = True) -> None:
    """Check that ``model`` is a Keras model that can be filled.

    Args:
        model: Any object.
        built: Require that all of it is built, not only some layers, as in a `Sequential` without an input shape.

    Raises:
        UsageError: When it is not a Keras model.
        BackendError: When Keras does not run on JAX.
        UnsupportedError: When it is not built, or has no weights.
    """
    if isinstance(model, type) or not hasattr(model, "weights"):
        raise UsageError(f"Cannot use {model!r:.60} as model: expected a Keras model, got {type(model).__name__}")
    check_backend()
    if built and not getattr(model, "built", True):
        raise UnsupportedError(
            f"The model {model.name!r} has not been built. Call it on a batch of inputs, or model.build(input_shape), "
            "first"
        )
    if not model.weights:
        raise UnsupportedError(
            f"The model {model.name!r} has no weights. If its layers create them when it is called, call it on a batch "
            "of inputs first"
        )


def check_backend() -> None:
    """Raise if Keras was imported with another backend, which cannot be changed afterwards."""
    if (found := keras.config.backend()) != "jax":
        raise BackendError(found)


def patterns(ignore: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns of tensor names to ignore as a tuple; raise `UsageError` for anything but a list of them."""
    # A string is a sequence of strings: ignore="head" would ignore tensors called "h", "e", "a" and "d".
    is_list = isinstance(ignore, Iterable) and not isinstance(ignore, str)
    found = tuple(ignore) if is_list else ()  # first, because a generator can be read only once
    if not is_list or not all(isinstance(pattern, str) for pattern in found):
        raise UsageError(f"Cannot use ignore={ignore!r:.60}: expected a list of tensor names, such as ['score.*']")
    return found


def float_dtype(wanted: DTypeLike | None) -> Any:
    """Return the name of the requested dtype; ``None`` and Keras' dtype policies pass through."""
    name = dtype_name(wanted)
    if name == "float64" and not jax.config.jax_enable_x64:
        raise UsageError(f"Cannot load as float64: JAX has 64-bit dtypes disabled. {ENABLE_64_BITS}, or choose float32")
    return name


def byte_count(argument: str, wanted: int | str | None, *, least: int = 0) -> int | None:
    """Parse the value of ``argument`` as a number of bytes; ``None`` stays ``None``, an int below ``least`` is refused.

    Raises:
        UsageError: When it is not a number of bytes.
    """
    try:
        return None if wanted is None else parse_bytes(wanted, least=least)
    except ValueError as error:
        raise UsageError(f"{argument}: {error}") from error
