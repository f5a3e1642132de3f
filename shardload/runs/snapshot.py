"""Keep the values that arrays have now while training goes on, so that a worker thread can write them.

`fit` lets XLA overwrite its arrays in the next batch, while the worker still writes them.

* Arrays on CPU devices: NumPy views are kept. XLA then uses other memory, and nothing is copied. Orbax would do the
  same, but runs slow Python code of its own first.
* Arrays on GPUs: copied to pinned host memory, at the rate of the bus. Saves by Orbax, which copies to ordinary memory,
  blocked 16 times as long on one GPU: the kernel clears the pages, and the driver copies through a buffer of its own.
  JAX keeps the pinned memory for the next save; ``SHARDLOAD_PINNED_SAVES=0`` leaves the copies to Orbax.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

PINNED_PLATFORMS = {"gpu"}
"""JAX platforms whose arrays are copied to pinned memory."""
PINNED_SAVES = "SHARDLOAD_PINNED_SAVES"
"""Variable of the environment: ``0`` keeps saves from copying arrays to pinned memory."""
_DEFAULT_PINNED_GB = 64
"""What JAX pins at most, in GiB, unless this variable of the environment says otherwise."""
_PINNED_GB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_most_pinned = 0
"""Most bytes that this process has pinned for a snapshot. JAX keeps them for the next one."""

_WIDE = {np.dtype(name) for name in ("int64", "uint64", "float64", "complex128")}
"""Dtypes that `snapshot` does not keep: if ``jax_enable_x64`` is set for the training thread only, JAX narrows them
when the worker thread rebuilds the arrays."""

_PLAIN = bool, int, float, complex, str, bytes, np.generic
"""Types whose values cannot change, so that keeping a value takes only a reference, not a copy."""


class _KeptArray:
    """NumPy views of the shards of a JAX array: they preserve its values, and it can be rebuilt without a copy."""

    def __init__(self, array: jax.Array) -> None:
        self.shape, self.sharding = array.shape, array.sharding
        self.values = [np.asarray(shard.data) for shard in array.addressable_shards]
        self.devices = [shard.device for shard in array.addressable_shards]

    def array(self) -> jax.Array:
        """Rebuild the JAX array from its views, without a copy."""
        # On CPU, device_put uses the memory of a view as it is, without a copy; one call serves all shards.
        placed = jax.device_put(self.values, self.devices)
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, placed)


class ArraySnapshot:
    """Keeps the values that pytrees have now, until a worker thread takes them to write them: `take` works once."""

    def __init__(self, items: Mapping[str, Any], pinned: Mapping[int, jax.Array] | None = None) -> None:
        """Keep pytrees; ``pinned`` has the copies of those arrays that were copied, by the number `id` of the array."""
        copies = pinned or {}

        def kept(leaf: Any) -> Any:
            if id(leaf) in copies:
                return copies[id(leaf)]
            # NumPy arrays can change in place, so they are copied; a copy of an immutable leaf costs nothing.
            return _KeptArray(leaf) if isinstance(leaf, jax.Array) else copy.copy(leaf)

        self._kept = jax.tree.map(kept, dict(items))

    def take(self) -> dict[str, Any]:
        """Return the pytrees as they were when they were kept, and drop this object's references to their memory."""
        taken: dict[str, Any] = jax.tree.map(lambda x: x.array() if isinstance(x, _KeptArray) else x, self._kept)
        # While a view exists, XLA cannot reuse the memory, and a second copy of the state stays allocated.
        self._kept = {}
        return taken


def snapshot(items: Mapping[str, Any]) -> ArraySnapshot | None:
    """Keep the values of pytrees while training goes on; ``None`` if one of them cannot be kept.

    That is so for leaves and containers of other types than `_is_plain_tree` accepts, and if memory is short.
    """
    if not all(map(_is_plain_tree, items.values())):
        return None
    arrays = [leaf for leaf in jax.tree.leaves(dict(items)) if isinstance(leaf, jax.Array) and _is_pinnable(leaf)]
    copies = pinned_copies(arrays)
    return None if copies is None else ArraySnapshot(items, dict(zip(map(id, arrays), copies, strict=True)))


def pinned_copies(arrays: Sequence[jax.Array]) -> list[jax.Array] | None:
    """Copy arrays to pinned memory of this host and wait for it; return the copies, or None where memory is short."""
    global _most_pinned  # noqa: PLW0603
    n_bytes = sum(array.nbytes for array in arrays)
    if n_bytes > _room(already=_most_pinned):
        return None
    try:
        copies = jax.device_put(list(arrays), [array.sharding.with_memory_kind("pinned_host") for array in arrays])
        jax.block_until_ready(copies)
    except jax.errors.JaxRuntimeError:  # no memory left that can be pinned
        return None
    _most_pinned = max(_most_pinned, n_bytes)
    return list(copies)


def _room(*, already: int) -> int:
    """Return how many bytes may be pinned at a time: half of what JAX pins at most, and of the memory that is free."""
    limit = int(os.environ.get(_PINNED_GB) or _DEFAULT_PINNED_GB) << 30
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        free = limit
    return min(limit, free + already) // 2


def _is_plain_tree(item: Any) -> bool:
    """Whether `snapshot` can keep a pytree: dicts, lists and tuples of plain values, and arrays that it can keep."""
    if type(item) is dict:
        return all(map(_is_plain_tree, item.values()))
    if type(item) in {list, tuple}:
        return all(map(_is_plain_tree, item))
    return (
        item is None
        or isinstance(item, (np.ndarray, *_PLAIN))
        or (isinstance(item, jax.Array) and (_is_pinnable(item) or _is_host(item)))
    )


def _is_pinnable(array: jax.Array) -> bool:
    """Whether `snapshot` can keep an array in pinned memory: it is on GPUs of this process, each part on one only."""
    if os.environ.get(PINNED_SAVES) == "0" or not array.is_fully_addressable:
        return False
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return False
    devices = array.sharding.device_set
    # Orbax would cut replicas in pinned memory into parts, by a program on the device.
    is_single = math.prod(array.sharding.shard_shape(array.shape)) * len(devices) == array.size
    return (
        is_single
        and array.sharding.memory_kind in {None, *(device.default_memory().kind for device in devices)}
        and all(device.platform in PINNED_PLATFORMS for device in devices)
        and all("pinned_host" in {memory.kind for memory in device.addressable_memories()} for device in devices)
    )


def _is_host(array: jax.Array) -> bool:
    """Whether `snapshot` can keep an array: it is on CPU, and another thread can rebuild it from NumPy views."""
    # Extended types (PRNG keys) have no NumPy type. Shards of other processes are out of reach.
    if not array.is_fully_addressable or jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return False
    if array.dtype in _WIDE:
        return False
    devices = array.sharding.device_set
    # Another kind, such as pinned_host, is lost in a view: device_put would use the default kind.
    usual = {None, *(device.default_memory().kind for device in devices)}
    return all(device.platform == "cpu" for device in devices) and array.sharding.memory_kind in usual


def bytes_here(items: Any) -> int:
    """Return how many bytes of the arrays in nested dicts, lists and tuples this process writes."""
    if isinstance(items, Mapping):
        return sum(map(bytes_here, items.values()))
    if isinstance(items, list | tuple):
        return sum(map(bytes_here, items))
    if isinstance(items, jax.Array) and not jax.dtypes.issubdtype(items.dtype, jax.dtypes.extended):
        return sum(shard.data.nbytes for shard in items.addressable_shards if shard.replica_id == 0)
    return int(getattr(items, "nbytes", 0))
