"""The dtype policies in a Keras configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_dtype(config: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """Replace every floating-point dtype policy in a Keras configuration; quantised ones keep their scheme.

    Args:
        config: The result of ``serialize_keras_object``.
        dtype: Name of a floating-point dtype or policy, or an object with a ``name``; ``None`` changes nothing.
    """
    if dtype is None:
        return dict(config)
    name = str(getattr(dtype, "name", dtype))

    def rewrite(value: Any) -> Any:
        if isinstance(value, list):
            return [rewrite(v) for v in value]
        if not isinstance(value, Mapping):
            return value
        kind, inner = value.get("class_name"), value.get("config")
        if kind == "DTypePolicy" and isinstance(inner, Mapping):
            return {**value, "config": {**inner, "name": name}}
        # A quantised policy: int8 of float32 becomes int8 of the new dtype.
        if str(kind).endswith("DTypePolicy") and isinstance(inner, Mapping) and "source_name" in inner:
            return {**value, "config": {**inner, "source_name": name}}
        return {k: rewrite(v) for k, v in value.items()}

    changed: dict[str, Any] = rewrite(config)
    return changed
