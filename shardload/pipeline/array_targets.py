"""One target of `load_arrays`: where an array goes, its shape and dtype, and what is made of it then.

PartitionSpec + mesh ─► NamedSharding ─► Layout on a MeshSpec ─► plan ─► array ─► the caller's own sharding object
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from numpy.typing import NDArray

from shardload.errors import LayoutError, MismatchError, UnsupportedError, UsageError
from shardload.keras_bridge.caller import warn_caller
from shardload.manifest import Tensor, View
from shardload.resolve.opening import OpenedSource
from shardload.sharding.devices import MeshDevices, resolve_devices
from shardload.sharding.layout import Layout, Spec
from shardload.sharding.mesh import MeshSpec
from shardload.transfer.byte_source import check_tensor
from shardload.transfer.casts import overflow_notes, wide
from shardload.transfer.load_plan import ONE_DEVICE
from shardload.transfer.placement import jax_mesh
from shardload.transfer.read_tensor import read_tensor
from shardload.transfer.scratch import copy
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


KINDS = (jax.ShapeDtypeStruct, Sharding, PartitionSpec, jax.Array, jax.Device, Format, np.ndarray, np.generic)
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
    on_host: bool = False
    """Whether the result is an array of NumPy."""


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
    on_host: bool = False
    """Whether the result is an array of NumPy; its ``sharding`` is not used."""


def is_tree(targets: Any) -> bool:
    """Whether JAX takes an object for a tree, though it may be callable (modules of Equinox and Flax NNX)."""
    return not isinstance(targets, KINDS) and not jax.tree_util.all_leaves([targets])


def stated(target: Any) -> Stated:
    """Return what a target states; ``target`` itself, for its sharding, if it is of no known kind."""
    if isinstance(target, Format):
        return Stated(target.sharding, finish=_laid_out(target))
    if isinstance(target, jax.Device):
        return Stated(SingleDeviceSharding(target))
    if isinstance(target, np.ndarray | np.generic):
        finish = (lambda array: array[()]) if isinstance(target, np.generic) else None
        return Stated(None, tuple(target.shape), target.dtype, finish, on_host=True)
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


def specs_of_boxes(targets: Any) -> list[tuple[Sequence[Any], PartitionSpec]]:
    """Return what boxes of Linen (`nn.Partitioned`) say of the layout of their array, by the path of the box."""

    def spec(found: Any) -> Any:
        return None if isinstance(found, type) else getattr(found, "get_partition_spec", None)

    if not is_tree(targets):
        return []
    leaves, _ = jax.tree_util.tree_flatten_with_path(targets, is_leaf=lambda found: callable(spec(found)))
    found = [(path, get()) for path, leaf in leaves if callable(get := spec(leaf))]
    return [(path, said) for path, said in found if isinstance(said, PartitionSpec)]


def is_checked(opened: OpenedSource, one: WantedArray) -> bool:
    """Whether a tensor is read whole: integers of a wider dtype (a step in int64), Python's numbers, host arrays."""
    return narrows(opened.manifest.tensors[one.view.tensor].dtype, one.dtype) or one.finish in SCALARS or one.on_host


def narrows(stored: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Whether the values of integers decide if they fit into another dtype."""
    return stored.kind in "iu" and wanted.kind in "iu" and not np.can_cast(stored, wanted)


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
    if narrows(tensor.dtype, one.dtype):
        _check_range(value, one, tensor)
    ordered = value.transpose(one.order or range(value.ndim))
    if one.on_host:
        return _on_host(ordered, one)
    host = ordered.astype(one.dtype)
    mesh = devices_of(one.sharding).mesh
    layout_of(one.name, host.shape, one.sharding, mesh)  # raises where the sharding does not divide
    return jax.make_array_from_callback(host.shape, one.sharding, lambda index: np.array(host[index]))


def _on_host(value: NDArray[Any], one: WantedArray) -> NDArray[Any]:
    host, overflowed = np.empty(value.shape, one.dtype), set[str]()
    with np.errstate(all="ignore", over="call", call=lambda *_: overflowed.add(one.view.tensor)):
        copy(host, value)
    for note in overflow_notes(tuple(overflowed)):
        warn_caller(note)
    return host


def _check_range(value: NDArray[Any], one: WantedArray, tensor: Tensor) -> None:
    info = np.iinfo(one.dtype)
    if value.size and not (info.min <= int(value.min()) and int(value.max()) <= info.max):
        raise MismatchError(
            f"Cannot load {one.name!r} as {one.dtype}: tensor {tensor.name!r} has {tensor.dtype} values from "
            f"{value.min()} to {value.max()}, expected {info.min} to {info.max}. "
            f"Choose {tensor.dtype}{wide(tensor.dtype)}, or another dtype in which they fit"
        )
