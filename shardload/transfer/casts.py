"""Dtype casts that a load may make, decided before any byte is read.

Casts from float or integer to float are allowed: they round to nearest even, as in NumPy and JAX. A cast from integer
to integer is allowed if the new dtype has every value of the old one. Any other cast would change the meaning of the
weights, and raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from shardload.errors import MismatchError


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether ``dtype`` is a real floating-point type, ``ml_dtypes`` included."""
    try:
        ml_dtypes.finfo(dtype)
    except (ValueError, KeyError, TypeError):
        return False
    return dtype.kind != "c"  # finfo accepts complex types as well


def _range(dtype: np.dtype[Any]) -> tuple[int, int] | None:
    try:
        info = ml_dtypes.iinfo(dtype)
    except (ValueError, KeyError, TypeError):
        return None
    return int(info.min), int(info.max)


def check_cast(source: np.dtype[Any], target: np.dtype[Any], *, variable: str, tensor: str) -> None:
    """Raise `MismatchError` if a cast may change values by more than rounding to floats, for example int64 to int32."""
    if source == target:
        return
    # bool and complex have no range and are no floats here, so they load unchanged or not at all.
    stored, wanted = _range(source), _range(target)
    if is_float(target) and (is_float(source) or stored):
        return
    if stored and wanted and wanted[0] <= stored[0] and stored[1] <= wanted[1]:
        return
    why = "it would change what the values mean"
    if wanted and (stored or is_float(source)):
        why = f"integers of {source} may not fit into {target}" if stored else "fractions would be cut off"
    raise MismatchError(
        f"Cannot cast tensor {tensor!r} from {source} to {target} for {variable!r}: {why}. Give "
        f"it the dtype {source}{wide(source)}, or store {target} in the checkpoint"
    )


ENABLE_64_BITS = "Call jax.config.update('jax_enable_x64', True) before JAX is used"


def wide(dtype: np.dtype[Any]) -> str:
    """Return what messages append to a dtype's name: for a 64-bit dtype, the JAX setting that enables it; else ""."""
    return ", with jax.config.update('jax_enable_x64', True)" if dtype.itemsize == 8 and dtype.kind in "iuf" else ""


def needs_64_bits(variable: str, dtype: np.dtype[Any]) -> MismatchError:
    """Build the error for a variable of a 64-bit dtype, such as float64, while JAX has 64-bit dtypes disabled."""
    # Integers of 64 bits may not fit into fewer, whatever the model is built with.
    other = ", or build the model with a 32-bit dtype" if dtype.kind == "f" else ""
    return MismatchError(
        f"Cannot load variable {variable!r} as {dtype}: JAX has 64-bit dtypes disabled. {ENABLE_64_BITS}{other}"
    )


def overflow_notes(tensors: Sequence[str]) -> tuple[str, ...]:
    """Return a note for a load's report: a cast made finite values in ``tensors`` infinite. Empty if there are none."""
    if not tensors:
        return ()
    more = f" and {len(tensors) - 4} more" if len(tensors) > 4 else ""
    names = ", ".join(tensors[:4])
    return (f"values beyond the range of the new dtype became infinite: {names}{more}. Load them in a wider dtype",)
