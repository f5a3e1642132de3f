"""Optimizers for sharded models, and where their state lies."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardload.optimizers.sharding import shard_optimizer
    from shardload.optimizers.slot_report import SlotLayout, SlotReport
    from shardload.optimizers.tensor_parallel import TensorParallelOptimizer

__all__ = [
    "SlotLayout",
    "SlotReport",
    "TensorParallelOptimizer",
    "shard_optimizer",
]

_HOMES = {
    "SlotLayout": "slot_report",
    "SlotReport": "slot_report",
    "TensorParallelOptimizer": "tensor_parallel",
    "shard_optimizer": "sharding",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use: ``import shardload`` loads neither JAX nor Keras."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
