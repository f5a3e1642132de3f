"""Arrays as they are now, kept while training goes on, so that what is slow about starting a save need not hold it up.

    training thread    a NumPy view of every shard: no byte is copied
    saving thread      views ─► arrays of the same shardings, in the same memory ─► Orbax

`fit` donates its state to the next batch: the arrays are deleted and XLA writes into their memory, unless somebody
outside of JAX still looks at it, and then it takes fresh memory. That is how Orbax keeps the arrays of CPU devices as
well, only that it goes through all its own Python first. What cannot be kept so, Orbax is given as it is: arrays of
accelerators, whose bytes must be copied off before the next batch, and objects that only their handlers know.

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
"""JAX has these where ``jax_enable_x64`` is set, which may be so in one thread only; elsewhere it would narrow them."""

_PLAIN = bool, int, float, complex, str, bytes, np.generic
"""Immutable leaves."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """One array."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    shards: tuple[tuple[NDArray[Any], Any], ...]
    """What each device holds, with the device."""

    def array(self) -> jax.Array:
        """The same, for JAX."""
        values, devices = zip(*self.shards, strict=True)
        placed = jax.device_put(list(values), list(devices))
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, placed)


class ArraySnapshot:
    """What pytrees of arrays were at one moment; gives them back once, in any thread."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._kept = {name: jax.tree.map(_keep, item) for name, item in items.items()}

    def take(self) -> dict[str, Any]:
        """The pytrees. From then on their memory is held by nothing but them."""
        taken: dict[str, Any] = jax.tree.map(_give_back, self._kept, is_leaf=lambda leaf: isinstance(leaf, _Kept))
        self._kept = {}
        return taken


def snapshot(items: Mapping[str, Any]) -> ArraySnapshot | None:
    """Hold on to what ``items`` are now, without a copy of any array of JAX.

    Args:
        items: Pytrees by name.

    Returns:
        None when something in them is neither an array of CPU devices of this process, nor plain.
    """
    return ArraySnapshot(items) if all(map(_is_plain_tree, items.values())) else None


def _is_plain_tree(item: Any) -> bool:
    """No containers but Python's own: JAX takes others for leaves, and a copy of those shares what they hold."""
    if type(item) is dict:
        return all(map(_is_plain_tree, item.values()))
    if type(item) in {list, tuple}:
        return all(map(_is_plain_tree, item))
    return item is None or isinstance(item, (np.ndarray, *_PLAIN)) or (isinstance(item, jax.Array) and _is_host(item))


def _is_host(array: jax.Array) -> bool:
    """Whether NumPy sees the memory of its devices, and JAX takes it back as it is in any thread."""
    if not array.is_fully_addressable or jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return False
    if array.dtype in _WIDE:
        return False
    devices = array.sharding.device_set
    usual = {None, *(device.default_memory().kind for device in devices)}
    return all(device.platform == "cpu" for device in devices) and array.sharding.memory_kind in usual


def _keep(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        shards = tuple((np.asarray(shard.data), shard.device) for shard in leaf.addressable_shards)
        return _Kept(leaf.shape, leaf.sharding, shards)
    return copy.copy(leaf)


def _give_back(leaf: Any) -> Any:
    return leaf.array() if isinstance(leaf, _Kept) else leaf
