"""Names of the floating-point dtypes a model can be loaded in, as people write them.

"bf16" ─ dtype_name ─► "bfloat16"        jnp.float32 ─► "float32"        "float99" ─► UsageError
"""

from __future__ import annotations

import re
from typing import Any

from shardload.errors import UsageError

FLOATS = ("bfloat16", "float16", "float32")
"""What a checkpoint's weights are loaded in."""
_ALSO = ("float64", "mixed_bfloat16", "mixed_float16")
"""Accepted in Python only: JAX's 64-bit mode, and Keras' policies."""
_SPELLINGS = {
    **dict.fromkeys(("bf16", "bfloat"), "bfloat16"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("fp32", "f32", "float"), "float32"),
}
_QUANTISED = r"(int8|int4|float8)\w*_from_\w+"


def dtype_name(wanted: Any) -> Any:
    """The canonical name of a dtype to load in; ``None`` and Keras' policy objects pass through.

    Args:
        wanted: A name in any spelling, a NumPy or JAX dtype, a Keras dtype policy or its name, or ``None``.

    Raises:
        UsageError: When it is not a floating-point dtype.
    """
    if wanted is None or hasattr(wanted, "variable_dtype"):
        return wanted
    text = wanted if isinstance(wanted, str) else _name_of(wanted)
    name = _SPELLINGS.get(text.lower(), text.lower())
    if name in FLOATS or name in _ALSO or re.fullmatch(_QUANTISED, name):
        return name
    raise UsageError(f"Cannot load in the dtype {wanted!r}. Choose {', '.join(FLOATS)} (or bf16, fp16, fp32)")


def _name_of(wanted: Any) -> str:
    """The name of a dtype object: ``np.dtype("float32")``, ``np.float32``, ``jnp.float32``."""
    return str(getattr(getattr(wanted, "dtype", wanted), "name", getattr(wanted, "__name__", wanted)))
