"""Keep the current values of arrays while training continues, so that the slow start of a save does not delay it.

    training thread    a NumPy view of every shard: no bytes are copied
    saving thread      views ─► arrays with the same shardings and memory ─► Orbax

`fit` donates its state to the next batch: XLA deletes the arrays and reuses their memory, unless something
outside JAX still refers to it; then XLA allocates new memory. Orbax keeps arrays of CPU devices in the same
way, but runs its own slow Python code first. Other items go to Orbax directly: arrays of
accelerators, which must be copied off before the next batch, and objects that only their handlers understand.

Imports JAX: only import this module when arrays are about to be saved.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

_WIDE = {np.dtype(name) for name in ("int64", "uint64", "float64", "complex128")}
"""JAX has these types with ``jax_enable_x64`` only, which can be set per thread; other threads narrow them."""

_PLAIN = bool, int, float, complex, str, bytes, np.generic
"""Types of immutable leaves."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """The kept shards of one array."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    shards: tuple[tuple[NDArray[Any], Any], ...]
    """The value on each device, with the device."""

    def array(self) -> jax.Array:
        """Return the kept array as a `jax.Array`."""
        values, devices = zip(*self.shards, strict=True)
        # On CPU, device_put uses the memory of a view as it is, without a copy; one call serves all shards.
        placed = jax.device_put(list(values), list(devices))
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, placed)


class ArraySnapshot:
    """The values of pytrees of arrays at one moment; `take` returns them once, from any thread."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._kept = {name: jax.tree.map(_keep, item) for name, item in items.items()}

    def take(self) -> dict[str, Any]:
        """Return the pytrees and drop the references to their memory."""
        taken: dict[str, Any] = jax.tree.map(_give_back, self._kept, is_leaf=lambda leaf: isinstance(leaf, _Kept))
        # While a view exists, XLA cannot reuse the memory, and a second copy of the state stays allocated.
        self._kept = {}
        return taken


def snapshot(items: Mapping[str, Any]) -> ArraySnapshot | None:
    """Keep the current values of ``items`` without copying any JAX array.

    Args:
        items: The pytrees, by name.

    Returns:
        ``None`` if an item contains anything but CPU arrays of this process and plain values.
    """
    return ArraySnapshot(items) if all(map(_is_plain_tree, items.values())) else None


def _is_plain_tree(item: Any) -> bool:
    """Accept Python's own containers only: JAX treats others as leaves, and a copy of a leaf shares its content."""
    if type(item) is dict:
        return all(map(_is_plain_tree, item.values()))
    if type(item) in {list, tuple}:
        return all(map(_is_plain_tree, item))
    return item is None or isinstance(item, (np.ndarray, *_PLAIN)) or (isinstance(item, jax.Array) and _is_host(item))


def _is_host(array: jax.Array) -> bool:
    """Whether NumPy can view an array's memory, and any thread can rebuild the array from that view."""
    # Extended types (PRNG keys) have no NumPy type. Shards of other processes are out of reach.
    if not array.is_fully_addressable or jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return False
    if array.dtype in _WIDE:
        return False
    devices = array.sharding.device_set
    # Another kind, such as pinned_host, is lost in a view: device_put would use the default kind.
    usual = {None, *(device.default_memory().kind for device in devices)}
    return all(device.platform == "cpu" for device in devices) and array.sharding.memory_kind in usual


def _keep(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        shards = tuple((np.asarray(shard.data), shard.device) for shard in leaf.addressable_shards)
        return _Kept(leaf.shape, leaf.sharding, shards)
    # NumPy arrays can change in place, so they are copied; a copy of an immutable leaf costs nothing.
    return copy.copy(leaf)


def _give_back(leaf: Any) -> Any:
    return leaf.array() if isinstance(leaf, _Kept) else leaf
