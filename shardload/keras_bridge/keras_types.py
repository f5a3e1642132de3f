"""Names for types that Keras leaves untyped."""

from __future__ import annotations

from typing import Any

Variable = Any
"""A ``keras.Variable``; untyped upstream."""


Model = Any
"""A ``keras.Model`` or layer; untyped upstream."""
