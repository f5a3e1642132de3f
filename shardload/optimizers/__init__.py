"""Optimizers for sharded models, and layouts for optimizer state.

`REKLS` is second-order: for each matrix of weights, it finds eigenvectors of two factors, which are moving averages of
products of gradients, and runs Adam in their coordinates. `rekls_math` is the arithmetic for one matrix, `joint_update`
is one training step of all variables, `matrices` says how variables of any shape are viewed as matrices, and
`dealing` decides which device decomposes what, and runs the decompositions.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardload.errors import BackendError

if TYPE_CHECKING:
    from shardload.optimizers.joint_update import Counts
    from shardload.optimizers.matrices import state_bytes
    from shardload.optimizers.rekls import REKLS, TpRekls
    from shardload.optimizers.sharding import SlotLayout, SlotReport, shard_optimizer
    from shardload.optimizers.tensor_parallel import TensorParallelOptimizer

__all__ = [
    "REKLS",
    "Counts",
    "SlotLayout",
    "SlotReport",
    "TensorParallelOptimizer",
    "TpRekls",
    "shard_optimizer",
    "state_bytes",
]

_HOMES = {
    "REKLS": "rekls",
    "Counts": "joint_update",
    "SlotLayout": "sharding",
    "SlotReport": "sharding",
    "TensorParallelOptimizer": "tensor_parallel",
    "TpRekls": "rekls",
    "shard_optimizer": "sharding",
    "state_bytes": "matrices",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use: ``import shardload`` loads neither JAX nor Keras."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ImportError as error:
        if (better := BackendError.explaining(error)) is error:
            raise
        raise better from error
    # Python asks this function only for names that the module lacks: the next access is a plain attribute.
    globals()[name] = value
    return value
