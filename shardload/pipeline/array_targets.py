"""What one target of `load_arrays` states: where an array goes, its shape and dtype, and what is made of it then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import PartitionSpec, Sharding, SingleDeviceSharding

from shardload.errors import MismatchError
from shardload.manifest import View
from shardload.pipeline.array_shardings import Placed, devices_of, layout_of
from shardload.resolve.opening import OpenedSource
from shardload.transfer.casts import wide
from shardload.transfer.read_tensor import read_tensor
from shardload.transfer.verification import check_tensor

KINDS = (jax.ShapeDtypeStruct, Sharding, PartitionSpec, jax.Array, jax.Device, Format)
"""Types of targets, all of them leaves: JAX takes none for a tree."""
SCALARS = (bool, int, float)
"""Python's numbers, which become the tensor's value (the ``step`` of a Flax ``TrainState``)."""


@dataclass(frozen=True, slots=True)
class Stated:
    """What a target states; ``None`` for what it leaves open."""

    sharding: Any = None
    """A sharding or `PartitionSpec`."""
    shape: tuple[int, ...] | None = None
    """Of the stored array."""
    dtype: np.dtype[Any] | None = None
    """Of the stored array."""
    finish: Callable[[Any], Any] | None = None
    """Makes the result of the array."""


@dataclass(frozen=True, slots=True)
class WantedArray:
    """One array to load."""

    name: str
    """Name of the target."""
    view: View
    dtype: np.dtype[Any]
    sharding: Placed
    order: tuple[int, ...] | None = None
    """The order of the tensor's dims in the array."""
    finish: Callable[[Any], Any] | None = None
    """Makes the result of the array."""


def is_tree(targets: Any) -> bool:
    """Whether JAX takes an object for a tree, though it may be callable (modules of Equinox and Flax NNX)."""
    return not isinstance(targets, KINDS) and not jax.tree_util.all_leaves([targets])


def stated(target: Any) -> Stated:
    """Return what a target states; ``target`` itself, for its sharding, if it is of no known kind."""
    if isinstance(target, Format):
        return Stated(target.sharding, finish=_laid_out(target))
    if isinstance(target, jax.Device):
        return Stated(SingleDeviceSharding(target))
    if not isinstance(target, jax.Array | jax.ShapeDtypeStruct):
        return Stated(target)
    if jax.dtypes.issubdtype(target.dtype, jax.dtypes.prng_key):
        return _of_keys(target)
    finish = _laid_out(target.format) if isinstance(target, jax.ShapeDtypeStruct) else None
    return Stated(target.sharding, tuple(target.shape), np.dtype(target.dtype), finish)


def _laid_out(wanted: Any) -> Callable[[Any], Any] | None:
    if getattr(wanted, "layout", None) is None:
        return None
    return lambda array: jax.device_put(array, wanted)


def _of_keys(target: Any) -> Stated:
    """Typed keys are stored as the integers in them: one more dim, which is not split."""
    key = jax.numpy.empty((), dtype=target.dtype)
    data, kind = jax.random.key_data(key), jax.random.key_impl(key)
    shape = (*target.shape, *data.shape)
    return Stated(
        target.sharding, shape, np.dtype(data.dtype), finish=lambda array: jax.random.wrap_key_data(array, impl=kind)
    )


def is_checked(opened: OpenedSource, one: WantedArray) -> bool:
    """Whether values decide if a tensor fits: integers of a wider dtype (a step in int64), and Python's numbers."""
    stored = opened.manifest.tensors[one.view.tensor].dtype
    narrows = stored.kind in "iu" and one.dtype.kind in "iu" and not np.can_cast(stored, one.dtype)
    return narrows or one.finish in SCALARS


def checked_value(opened: OpenedSource, one: WantedArray) -> Any:
    """Read a tensor whole and return its array, or Python's number.

    Raises:
        MismatchError: When a value does not fit.
        DamagedError: When a digest does not match.
    """
    tensor = opened.manifest.tensors[one.view.tensor]
    if opened.checker is not None:
        check_tensor(opened.checker, tensor)
    value = read_tensor(opened.manifest, tensor.name)
    if one.finish in SCALARS:
        return value.item()
    info = np.iinfo(one.dtype)
    if value.size and not (info.min <= int(value.min()) and int(value.max()) <= info.max):
        raise MismatchError(
            f"Cannot load {one.name!r} as {one.dtype}: tensor {tensor.name!r} has {tensor.dtype} values from "
            f"{value.min()} to {value.max()}, expected {info.min} to {info.max}. "
            f"Choose {tensor.dtype}{wide(tensor.dtype)}, or another dtype in which they fit"
        )
    host = value.astype(one.dtype).transpose(one.order or range(value.ndim))
    mesh = devices_of(one.sharding).mesh
    layout_of(one.name, host.shape, one.sharding, mesh)  # raises where the sharding does not divide
    return jax.make_array_from_callback(host.shape, one.sharding, lambda index: np.array(host[index]))
