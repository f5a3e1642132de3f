"""Keras callbacks: `OrbaxCheckpoint` saves the training state of ``fit`` as steps, and continues from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardload.callbacks.orbax_checkpoint import OrbaxCheckpoint

__all__ = ["OrbaxCheckpoint"]


def __getattr__(name: str) -> Any:
    """Import the callback on first use, so that importing this package does not import Keras (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shardload.callbacks.orbax_checkpoint import OrbaxCheckpoint

    return OrbaxCheckpoint
