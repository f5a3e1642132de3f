"""Where a caller wants an array: from JAX's shardings and specs to layouts and devices, and back.

PartitionSpec + mesh ─► NamedSharding ─► Layout on a MeshSpec ─► plan ─► array ─► the caller's own sharding object
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from shardload.errors import LayoutError, UnsupportedError, UsageError
from shardload.sharding.devices import MeshDevices, resolve_devices
from shardload.sharding.layout import Layout, Spec
from shardload.sharding.mesh import MeshSpec
from shardload.transfer.load_plan import ONE_DEVICE
from shardload.transfer.placement import jax_mesh
from shardload.typing import MeshLike

Placed: TypeAlias = NamedSharding | SingleDeviceSharding
"""Shardings that state their devices."""


def mesh_of_argument(mesh: MeshLike | None) -> jax.sharding.Mesh | None:
    """Return the mesh of a caller's argument.

    Raises:
        MeshError: When it cannot be read or has more positions than there are devices.
    """
    if mesh is None or isinstance(mesh, jax.sharding.Mesh):
        return mesh
    found = resolve_devices(mesh)
    return jax_mesh(found.mesh, found.devices)


def sharding_of(name: str, found: Any, mesh: jax.sharding.Mesh | None) -> Placed:
    """Return the sharding that a target states; that of the first device if it states none.

    Args:
        name: Of the array, for errors.
        found: The target, or the sharding that it has.
        mesh: That of a `PartitionSpec`, and of shardings on an abstract mesh.

    Raises:
        UsageError: When a `PartitionSpec`, or a sharding on an abstract mesh, comes without a mesh.
        LayoutError: When it does not fit the mesh.
        UnsupportedError: When the target is of another kind.
    """
    if found is None:
        return SingleDeviceSharding(jax.devices()[0])
    if isinstance(found, NamedSharding) and not isinstance(found.mesh, jax.sharding.Mesh):
        # As of `jax.eval_shape` under `jax.set_mesh`.
        if mesh is None:
            raise UsageError(
                f"Cannot place {name!r} by {found.spec}: its mesh is abstract, without devices. Pass mesh="
            )
        found = found.spec
    if isinstance(found, PartitionSpec):
        if mesh is None:
            raise UsageError(f"Cannot place {name!r} by {found}: a PartitionSpec needs a mesh. Pass mesh=")
        # JAX's own errors for an unknown axis, or one named twice, do not name the array.
        stated = [axis for entry in found for axis in _axes(name, entry)]
        if len(set(stated)) < len(stated):
            raise LayoutError(f"Cannot place {name!r} by {found}: expected each axis of the mesh at most once")
        if unknown := sorted(set(stated) - set(mesh.axis_names)):
            raise LayoutError(
                f"Cannot place {name!r} by {found}: the mesh has no axis {unknown[0]!r}, only "
                f"{', '.join(mesh.axis_names)}"
            )
        return NamedSharding(mesh, found)
    if isinstance(found, NamedSharding | SingleDeviceSharding):
        return found
    shown = f"the class {found.__name__}" if isinstance(found, type) else f"{found!r:.80}"
    raise UnsupportedError(
        f"Cannot place {name!r} by {shown}: expected a ShapeDtypeStruct, NamedSharding, "
        "SingleDeviceSharding, Device, Format, PartitionSpec, jax.Array or NumPy array, or for a scalar "
        "a number of the same kind (bool, int, float)"
    )


@functools.lru_cache(maxsize=256)
def devices_of(sharding: Placed) -> MeshDevices:
    """Return the mesh of a sharding with its devices; a single device is a mesh too."""
    if isinstance(sharding, SingleDeviceSharding):
        return MeshDevices(ONE_DEVICE, tuple(sharding.device_set))
    return resolve_devices(sharding.mesh)


def layout_of(name: str, shape: tuple[int, ...], sharding: Placed, mesh: MeshSpec) -> Layout:
    """Return the layout of an array.

    Raises:
        LayoutError: When the sharding does not divide the array, or has more dims.
    """
    rank, spec = len(shape), getattr(sharding, "spec", PartitionSpec())
    if len(spec) > rank:
        raise LayoutError(f"Cannot place {name!r} of shape {shape} by {spec}: it has more entries than dims")
    axes: Spec = tuple(_axes(name, entry) for entry in (*spec, *(None,) * (rank - len(spec))))
    layout = Layout(mesh, axes)
    if not layout.divides(shape):
        raise LayoutError(
            f"Cannot place {name!r} by {spec} on the mesh {mesh}: its shape {shape} does not divide into "
            f"{layout.parts} parts. Split another dim, or use None"
        )
    return layout


def _axes(name: str, entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    if entry is PartitionSpec.UNCONSTRAINED:
        raise LayoutError(f"Cannot place {name!r}: its PartitionSpec leaves a dim unconstrained. State an axis or None")
    return (entry,) if isinstance(entry, str) else tuple(entry)


def is_in_default_memory(sharding: Placed) -> bool:
    """Whether a sharding leaves arrays where a transfer puts them: not in ``pinned_host``, for example."""
    return sharding.memory_kind in (None, next(iter(sharding.device_set)).default_memory().kind)


def as_asked(array: Any, sharding: Placed) -> Any:
    """Return the array with the caller's own sharding object, without a copy if it is in the right memory."""
    if array.sharding is sharding:
        return array
    # Another kind of memory, such as ``pinned_host``: the transfer fills the device's default one.
    if sharding.memory_kind != array.sharding.memory_kind:
        return jax.device_put(array, sharding)
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)
