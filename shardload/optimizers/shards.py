"""Whole arrays and a device's shards of them, inside `jax.shard_map`.

A barrier lies between both and the arithmetic: the compiler would move slices into matrix products, and these round
differently then.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec


def gather(shards: Any, specs: Any) -> Any:
    """Return whole arrays of this device's shards; ``specs`` has the same structure."""
    return jax.tree.map(_gather, shards, specs)


def shard(arrays: Any, specs: Any) -> Any:
    """Return this device's shards of whole arrays; ``specs`` has the same structure."""
    return jax.tree.map(_shard, arrays, specs)


def _gather(own: Any, spec: PartitionSpec) -> Any:
    for dim, axes in _split_dims(spec):
        own = jax.lax.all_gather(own, axes, axis=dim, tiled=True)
    return jax.lax.optimization_barrier(own)


def _shard(array: Any, spec: PartitionSpec) -> Any:
    array = jax.lax.optimization_barrier(array)
    for dim, axes in _split_dims(spec):
        size = array.shape[dim] // math.prod(jax.lax.axis_size(axis) for axis in axes)
        array = jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index(axes) * size, size, dim)
    return array


def _split_dims(spec: PartitionSpec) -> list[tuple[int, tuple[str, ...]]]:
    axes = [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec]
    return [(dim, names) for dim, names in enumerate(axes) if names]
