"""From host buffers to sharded `jax.Array`s, never through device 0.

`assemble` passes one buffer per distinct shard to all its devices in one call (27 µs for eight shards;
`device_put` per shard takes 200 µs). On CPU the devices adopt the buffers: no copy. `IncrementalArray` is
for variables larger than the budget: the shards are allocated on their devices, and each piece is uploaded and written
into place by a donated update, so that a device stores only its final shards and one piece.

Imports JAX: import this module only when a transfer is about to start.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from numpy.typing import NDArray

from shardload.errors import MeshError
from shardload.sharding.layout import Bounds, Layout
from shardload.sharding.mesh import MeshSpec
from shardload.transfer.host_memory import arena
from shardload.units import plural


@functools.lru_cache(maxsize=64)
def jax_mesh(spec: MeshSpec, devices: tuple[Any, ...]) -> Mesh:
    """Return the mesh of these devices, given in mesh-position order."""
    return Mesh(np.array(devices, dtype=object).reshape(spec.sizes), spec.axes)


def check_devices(mesh: MeshSpec, devices: Sequence[Any]) -> None:
    """Raise `MeshError` unless there is one device per mesh position."""
    if len(devices) != mesh.size:
        raise MeshError(f"Cannot use mesh {mesh} with {plural(len(devices), 'device')}: expected {mesh.size}")


def named_sharding(layout: Layout, devices: Sequence[Any]) -> NamedSharding:
    """Return the sharding of a layout over real devices, given in mesh-position order."""
    check_devices(layout.mesh, devices)
    spec = (None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in layout.spec)
    return NamedSharding(jax_mesh(layout.mesh, tuple(devices)), PartitionSpec(*spec))


def assemble(shape: tuple[int, ...], sharding: NamedSharding, buffers: Mapping[Bounds, NDArray[Any]]) -> Any:
    """Build a sharded array from one host buffer per distinct shard; on CPU it adopts aligned buffers."""
    only = next(iter(buffers.values())) if len(buffers) == 1 else None

    def shard(index: tuple[slice, ...] | None) -> NDArray[Any]:
        if only is not None:
            return only
        return buffers[_bounds(_ranges(index), shape)]

    # JAX calls back once per device; replicas get the same buffer, and adopt it together.
    return jax.make_array_from_callback(shape, sharding, shard)


def _ranges(index: tuple[slice, ...] | None) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((s.start, s.stop) for s in index or ())


@functools.lru_cache(maxsize=4096)
def _bounds(index: tuple[tuple[int | None, int | None], ...], shape: tuple[int, ...]) -> Bounds:
    ranges = [slice(*s).indices(n) for s, n in zip(index, shape, strict=True)]
    return Bounds(tuple(r[0] for r in ranges), tuple(r[1] for r in ranges))


def place(value: NDArray[Any], layout: Layout, devices: Sequence[Any]) -> Any:
    """Copy a host array, which may change afterwards, into a sharded `jax.Array`."""
    value = np.asarray(value)
    layout.shard_shape(value.shape)  # clearer error than JAX's for an indivisible dim
    sharding = named_sharding(layout, devices)
    indices = sharding.addressable_devices_indices_map(value.shape).values()
    distinct = tuple(dict.fromkeys(_bounds(_ranges(index), value.shape) for index in indices))
    # A copy in buffers of our own: a CPU device adopts aligned memory, also if the caller writes to it afterwards.
    buffers = dict(zip(distinct, arena([b.shape for b in distinct], value.dtype), strict=True))
    for bounds, buffer in buffers.items():
        buffer[...] = value[bounds.slices]
    return assemble(value.shape, sharding, buffers)


def widens_on_device(stored: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Whether to cast on the device: the cast widens, and gives the same bits as on the host.

    Not float16 and float8: XLA quiets signalling NaNs, and accelerators may flush denormals.
    """
    exact = stored.kind in "iu" or (stored == jnp.bfloat16 and wanted == np.float32)
    return exact and stored.itemsize < wanted.itemsize


@functools.partial(jax.jit, static_argnames="dtype")
def _widened(array: Any, *, dtype: Any) -> Any:
    return array.astype(dtype)


def widen(array: Any, *, dtype: Any) -> Any:
    """Cast an array on its own devices, shard by shard if other processes have some of the shards."""
    # Every process would have to start a program over all devices in the same order, and they finish variables in any.
    if array.is_fully_addressable:
        return _widened(array, dtype=dtype)
    shards = [_widened(shard.data, dtype=dtype) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


@functools.partial(jax.jit, donate_argnums=0)
def _update(whole: Any, piece: Any, start: Any) -> Any:
    floats = jnp.issubdtype(whole.dtype, jnp.floating) and jnp.finfo(whole.dtype).bits == 8 * whole.dtype.itemsize
    if piece.dtype != whole.dtype or not floats:
        return jax.lax.dynamic_update_slice(whole, piece.astype(whole.dtype), start)
    # As integers: XLA on CPU computes with short floats in float32, which quiets NaNs.
    bits = jnp.dtype(f"uint{8 * whole.dtype.itemsize}")
    as_bits = (jax.lax.bitcast_convert_type(x, bits) for x in (whole, piece))
    return jax.lax.bitcast_convert_type(jax.lax.dynamic_update_slice(*as_bits, start), whole.dtype)


@functools.lru_cache(maxsize=256)
def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any], device: Any) -> Any:
    """Return a function that makes zeros on one device, compiled once per kind of shard."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=SingleDeviceSharding(device))


class IncrementalArray:
    """A variable allocated on its devices and filled piece by piece."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], sharding: NamedSharding) -> None:
        self.shape = shape
        self.sharding = sharding
        # One by one: processes may come here in different orders, so a program for all devices would have to wait.
        self.shards: dict[Any, tuple[Bounds, Any]] = {
            device: (bounds, _zeros(bounds.shape, dtype, device)())
            for device, index in sharding.addressable_devices_indices_map(shape).items()
            for bounds in [_bounds(_ranges(index), shape)]
        }

    def put(self, pieces: Mapping[Bounds, tuple[Bounds, NDArray[Any]]]) -> list[Any]:
        """Upload the box and content for each shard; return the pieces. When they are ready, buffers may be reused."""
        uploaded = []
        for device, (bounds, shard) in self.shards.items():
            if bounds in pieces:
                box, content = pieces[bounds]
                piece = jax.device_put(content, device)
                start = tuple(np.int32(a) for a in box.relative_to(bounds.start).start)
                self.shards[device] = (bounds, _update(shard, piece, start))
                uploaded.append(piece)
        return uploaded

    def finish(self) -> Any:
        """Return the complete variable."""
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, [s for _, s in self.shards.values()])
