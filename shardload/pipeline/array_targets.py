"""One target of `load_arrays`: which tensor it names, where the loaded array goes, and what the caller gets from it.

path of a leaf in the tree          name of its tensor
params, dense, kernel               params.dense.kernel or, in files of Orbax and Keras, params/dense/kernel
params, dense, kernel, value        the same: ``value`` is the array in a box of Flax (`nn.Partitioned`)
params, dense, kernel               params/dense/kernel/value, if no other name begins with params/dense/kernel/

A sharding, or a PartitionSpec with its mesh, is converted to a Layout to plan the load; the array gets the sharding.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shardload.errors import LayoutError, MismatchError, UnsupportedError, UsageError
from shardload.keras_bridge.caller import warn_caller
from shardload.manifest import Manifest, Tensor
from shardload.pipeline.array_parts import ArrayPart, StoredArray
from shardload.pipeline.stored_as import StoredAs
from shardload.resolve.opening import OpenedSource
from shardload.sharding.devices import MeshDevices, resolve_devices
from shardload.sharding.layout import Layout, Spec
from shardload.sharding.mesh import MeshSpec
from shardload.transfer.byte_source import check_tensor
from shardload.transfer.casts import overflow_notes, wide
from shardload.transfer.geometry import address
from shardload.transfer.load_plan import ONE_DEVICE
from shardload.transfer.read_tensor import read_tensor
from shardload.transfer.scratch import copy
from shardload.units import plural

Placed: TypeAlias = NamedSharding | SingleDeviceSharding
"""Kinds of JAX shardings that a load can use, because they state the devices of an array."""


def target_sharding(name: str, found: Any, mesh: jax.sharding.Mesh | None) -> Placed:
    """Return a sharding with devices for ``found``, the sharding or `PartitionSpec` that a target states.

    ``None`` stands for the first device. ``name``: the target's, for errors. ``mesh``: the mesh for a `PartitionSpec`,
    and for shardings on an abstract mesh.
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
def mesh_devices_of(sharding: Placed) -> MeshDevices:
    """Return the mesh and devices of a sharding; the mesh of a single device has one position."""
    if isinstance(sharding, SingleDeviceSharding):
        return MeshDevices(ONE_DEVICE, tuple(sharding.device_set))
    return resolve_devices(sharding.mesh)


def array_layout(name: str, shape: tuple[int, ...], sharding: Placed, mesh: MeshSpec) -> Layout:
    """Convert an array's sharding to a `Layout`, which a load is planned with; raise if it does not fit the shape."""
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
    """Whether a sharding is in its devices' default memory, which loads fill, and not in ``pinned_host``, say."""
    return sharding.memory_kind in (None, next(iter(sharding.device_set)).default_memory().kind)


def as_asked(array: Any, sharding: Placed, shape: tuple[int, ...]) -> Any:
    """Return a loaded array under the caller's sharding object; copy it only to another memory (``pinned_host``).

    Its shape may have more dims than ``shape`` (`FinerArray`), and the same elements in the same shards.
    """
    if array.shape != shape:
        usual = sharding
        if not is_in_default_memory(sharding):
            usual = sharding.with_memory_kind(next(iter(sharding.device_set)).default_memory().kind)
        array = reshaped(array, usual, shape, donate=True)
    if array.sharding is sharding:
        return array
    # Another kind of memory, such as ``pinned_host``: the transfer fills the device's default one.
    if sharding.memory_kind != array.sharding.memory_kind:
        return jax.device_put(array, sharding)
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def reshaped(array: Any, sharding: Placed, shape: tuple[int, ...], *, donate: bool) -> Any:
    """Return an array with other dims, whose shards have the same elements in the same order: no device sends any.

    CPU devices share the memory of both; others copy each shard, unless ``donate`` says that ``array`` is used no more.
    """
    local = sharding.shard_shape(shape)
    if all(device.platform == "cpu" for device in sharding.device_set):
        # CPU devices use the memory of the shards as it is, and JAX asks for one shard after the other.
        held = {shard.device: np.asarray(shard.data).reshape(local) for shard in array.addressable_shards}
        by_index = {
            tuple((part.start, part.stop) for part in index): held[device]
            for device, index in sharding.addressable_devices_indices_map(shape).items()
            if index is not None
        }
        return jax.make_array_from_callback(
            shape, sharding, lambda index: by_index[tuple((part.start, part.stop) for part in index)]
        )
    change = _reshaped_in_place if donate else _reshaped
    shards = [change(shard.data, shape=local) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _reshaped(shard: Any, *, shape: tuple[int, ...]) -> Any:
    return shard.reshape(shape)


_reshaped_in_place = jax.jit(_reshaped, static_argnames="shape", donate_argnums=0)


KINDS = (jax.ShapeDtypeStruct, Sharding, PartitionSpec, jax.Array, jax.Device, Format, np.ndarray, np.generic)
"""Types of objects that may be a target, and so a leaf in a tree of targets. (JAX treats none of them as a tree.)"""
SCALARS = (bool, int, float)
"""Types of Python numbers. One may be a target (``step`` of a Flax ``TrainState``) if a number is to be loaded."""


@dataclass(frozen=True, slots=True)
class Stated:
    """What a target says about the array to load; ``None`` for what it does not say."""

    sharding: Any = None
    """A JAX sharding, or a `PartitionSpec`, which needs a mesh."""
    shape: tuple[int, ...] | None = None
    dtype: np.dtype[Any] | None = None
    """Dtype to load. It and ``shape`` are not always those of the target: a PRNG key is loaded as an integer array."""
    finish: Callable[[Any], Any] | None = None
    """Converts the loaded array to what the caller gets (a PRNG key, a number); ``None``: the array itself."""
    on_host: bool = False
    """Whether the caller gets an array of NumPy, because the target is one."""


@dataclass(frozen=True, slots=True)
class WantedArray:
    """One array for a load to make: from which elements of a tensor, in which dtype and sharding, for which target."""

    name: str
    """Name of the target: its path in the tree of targets, or the name of a tensor."""
    stored: StoredArray
    """The array's shape, and the elements of tensors that it consists of."""
    dtype: np.dtype[Any]
    sharding: Placed
    finish: Callable[[Any], Any] | None = None
    """Converts the loaded array to what the caller gets (a PRNG key, a number); ``None``: the array itself."""
    on_host: bool = False
    """Whether the caller gets an array of NumPy; ``sharding`` is not used then."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.stored.shape

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that the array consists of."""
        return tuple(tensor.name for tensor in self.stored.tensors)


def is_tree(targets: Any) -> bool:
    """Whether ``targets`` is a tree for JAX, as modules of Equinox and Flax NNX are, although they are callable too."""
    return not isinstance(targets, KINDS) and not jax.tree_util.all_leaves([targets])


def stated(target: Any) -> Stated:
    """Return what a target says about its array; one of unknown type counts as a sharding (to be refused later)."""
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
        # Typed keys are stored as the integers in them: one more dim, which is not split.
        key = jax.numpy.empty((), dtype=target.dtype)
        data, kind = jax.random.key_data(key), jax.random.key_impl(key)
        shape = (*target.shape, *data.shape)
        return Stated(target.sharding, shape, np.dtype(data.dtype), lambda a: jax.random.wrap_key_data(a, impl=kind))
    finish = _laid_out(target.format) if isinstance(target, jax.ShapeDtypeStruct) else None
    return Stated(target.sharding, tuple(target.shape), np.dtype(target.dtype), finish)


def _laid_out(wanted: Any) -> Callable[[Any], Any] | None:
    if getattr(wanted, "layout", None) is None:
        return None
    return lambda array: jax.device_put(array, wanted)


def specs_of_boxes(targets: Any) -> list[tuple[Sequence[Any], PartitionSpec]]:
    """Return each box of Flax Linen (`nn.Partitioned`) in a tree of targets: its path, and how it splits its array."""

    def spec(found: Any) -> Any:
        return None if isinstance(found, type) else getattr(found, "get_partition_spec", None)

    if not is_tree(targets):
        return []
    leaves, _ = jax.tree_util.tree_flatten_with_path(targets, is_leaf=lambda found: callable(spec(found)))
    found = [(path, get()) for path, leaf in leaves if callable(get := spec(leaf))]
    return [(path, said) for path, said in found if isinstance(said, PartitionSpec)]


def narrows(stored: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Whether a cast between integer dtypes may change values (int64 to int32), so that each must be checked."""
    return stored.kind in "iu" and wanted.kind in "iu" and not np.can_cast(stored, wanted)


def checked_value(opened: OpenedSource, one: WantedArray) -> Any:
    """Read whole tensors on the host, for NumPy, numbers or checked casts; raise if a value exceeds the dtype."""
    result, overflowed = np.zeros(one.shape, one.dtype), set[str]()
    for stored in one.stored.tensors:
        tensor = opened.manifest.tensors[stored.name]
        if opened.checker is not None:
            check_tensor(opened.checker, tensor)
        value = np.ascontiguousarray(read_tensor(opened.manifest, tensor.name))
        if one.finish in SCALARS:
            return value.item()
        _check_range(one, tensor, value)
        report = functools.partial(_note, overflowed, tensor.name)
        for part in stored.parts:
            with np.errstate(all="ignore", over="call", call=report):
                copy(result[part.box.slices] if result.ndim else result, _elements(value, part))
    for note in overflow_notes(tuple(sorted(overflowed))):
        warn_caller(note)
    if one.on_host:
        return result
    mesh = mesh_devices_of(one.sharding).mesh
    array_layout(one.name, result.shape, one.sharding, mesh)  # raises where the sharding does not divide
    return jax.make_array_from_callback(result.shape, one.sharding, lambda index: np.array(result[index]))


def _note(found: set[str], name: str, *_: object) -> None:
    found.add(name)


def _elements(value: np.ndarray[Any, Any], part: ArrayPart) -> np.ndarray[Any, Any]:
    """Return the elements of a whole tensor that are in a box of an array, in the order of the array."""
    offset = address(part.view, part.box.start) * value.itemsize
    strides = tuple(t * value.itemsize for t in part.view.strides)
    return np.ndarray(part.box.shape, value.dtype, value.reshape(-1).view(np.uint8).data, offset, strides)


def _check_range(one: WantedArray, tensor: Tensor, value: np.ndarray[Any, Any]) -> None:
    if narrows(tensor.dtype, one.dtype) and value.size:
        info = np.iinfo(one.dtype)
        if not (info.min <= int(value.min()) and int(value.max()) <= info.max):
            raise MismatchError(
                f"Cannot load {one.name!r} as {one.dtype}: tensor {tensor.name!r} has {tensor.dtype} values from "
                f"{value.min()} to {value.max()}, expected {info.min} to {info.max}. "
                f"Choose {tensor.dtype}{wide(tensor.dtype)}, or another dtype in which they fit"
            )


_BOXED = "value"
"""Name of the attribute with the array in a box of Flax (`nn.Partitioned`)."""
_SHOWN = 8
"""Most names that an error lists; it states how many more there are."""


TensorNamesArgument: TypeAlias = Mapping[str, str | StoredAs] | Callable[[str], str | StoredAs] | None
"""The caller's argument ``names``: for each target, the name of its tensor, or a rule for several tensors."""


def stored_name(names: TensorNamesArgument, target: str) -> str | StoredAs:
    """Return what the caller's argument ``names`` says for a target: by default, the tensor has the same name."""
    found = names(target) if callable(names) else (names or {}).get(target, target)
    if not isinstance(found, str | StoredAs):
        raise UsageError(
            f"Cannot use names: for target {target!r}, it gives {found!r:.60}, expected a tensor's name or a StoredAs"
        )
    return found


def check_keys(argument: str, given: Any, names: Iterable[str], *, of: str) -> None:
    """Raise if a key of a caller's mapping may be a misspelt name; other keys are of arrays that are not asked for.

    So one table serves for a whole model and for each part of it. But a misspelt key would load another tensor, or dims
    in the wrong order: a key is refused if it is like a name that has no entry, or if no key is a name.

    Args:
        argument: Name of the argument, for the error.
        given: What the caller passed as the argument; anything but a mapping is accepted.
        names: Names of the caller's targets or arrays.
        of: What has these names: ``target`` or ``array``.
    """
    own = set(names)
    unknown = [key for key in given if key not in own] if isinstance(given, Mapping) else []
    if unknown and len(unknown) == len(given):
        raise UsageError(f"Cannot use {argument}: no {of} is called {unknown[0]!r}. Use names of {of}s as keys")
    # Names with other numbers are of other layers.
    without: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(own - set(given)) if unknown else ():
        without.setdefault(_numbers(name), []).append(name)
    for key in unknown:
        parts = _parts(str(key))
        if like := next((n for n in without.get(_numbers(str(key)), ()) if _is_like(parts, _parts(n))), None):
            raise UsageError(
                f"Cannot use {argument}: no {of} is called {key!r}, but one {like!r}, which has no entry. Correct the "
                "key, or leave it out"
            )


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Finds the tensor to load for a target: by the target's own name, or by the caller's argument ``names``."""

    manifest: Manifest
    names: TensorNamesArgument
    _boxes: dict[str, str] = field(init=False, compare=False)
    """For each box of Flax in the checkpoint, by name, the name of the tensor that is its ``value``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_boxes", _boxes(self.manifest.tensors))

    def of_leaf(self, path: Sequence[Any]) -> str:
        """Return the name of a leaf of a tree: its path joined by dots, or by slashes if only that names a tensor."""
        # Entries of a path have different fields: `DictKey.key`, `SequenceKey.idx`, `GetAttrKey.name`.
        fields = ("key", "idx", "name")
        keys = [str(next(getattr(entry, name) for name in fields if hasattr(entry, name))) for entry in path]
        named = self.names if isinstance(self.names, Mapping) else {}
        boxed = len(path) > 1 and keys[-1] == _BOXED
        texts = [join.join(part) for part in ((keys[:-1], keys) if boxed else (keys,)) for join in (".", "/")]
        known = (named, self.manifest.tensors, self._boxes)
        return next((text for names in known for text in texts if text in names), texts[0])

    def of_box(self, path: Sequence[Any]) -> str:
        """Return the name of the target that is in the box of Flax (`nn.Partitioned`) at ``path`` of the tree."""
        return self.of_leaf((*path, jax.tree_util.GetAttrKey(_BOXED)))

    def stored(self, target: str) -> str | StoredAs:
        """Return the name of the tensor for a target, whether or not the checkpoint has such a tensor; or its rule."""
        found = stored_name(self.names, target)
        return self._boxes.get(found, found) if isinstance(found, str) and found not in self.manifest.tensors else found

    def check(self, tensors: Mapping[str, str], shapes: Mapping[str, tuple[int, ...] | None]) -> None:
        """Raise if the checkpoint lacks a target's tensor, and suggest names; ``tensors``: tensor names by target."""
        missing = [target for target, tensor in tensors.items() if tensor not in self.manifest.tensors]
        if not missing:
            return
        taken = set(tensors.values())
        free = [name for name in self.manifest.tensors if name not in taken]

        def line(target: str) -> str:
            tensor, shape = tensors[target], shapes[target]
            fits = [n for n in free if shape is None or sorted(self.manifest.tensors[n].shape) == sorted(shape)]
            # Never a tensor of another layer, which has the same parameters.
            parts = _parts(tensor)
            likely = [n for n in fits if _is_like(parts, _parts(n))]
            close = next(iter(difflib.get_close_matches(tensor, likely, n=1)), None)
            own = target or "the target itself"
            return own + (f" ({tensor})" if tensor != target else "") + (f", did you mean {close!r}?" if close else "")

        raise MismatchError(
            f"Cannot load from {self.manifest.source}: it has no tensor for {plural(len(missing), 'target')}:\n  "
            + "\n  ".join([*map(line, missing[:_SHOWN]), *first_names(missing)[_SHOWN:]])
            + "\nPass names= to map targets to tensors; shardload.inspect lists the tensors."
            + (f" They have the names of the file: {why}" if (why := self.manifest.undescribed) else "")
        )


def _boxes(names: Iterable[str]) -> dict[str, str]:
    """Return ``NAME`` → ``NAME.value`` for each tensor so named, if it is alone below ``NAME``, as in a box of Flax."""
    every = set(names)
    inside = {name[: -len(_BOXED) - 1]: name for name in every if name.endswith((f"/{_BOXED}", f".{_BOXED}"))}
    if not inside:
        return {}
    # A layer may have a parameter of that name among others.
    below = Counter(name[: at.start()] for name in every for at in re.finditer(r"[./]", name))
    return {place: name for place, name in inside.items() if below[place] == 1 and place not in every}


def _parts(name: str) -> list[str]:
    return re.split(r"[./]", name)


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\d+", name))


def _is_like(wanted: list[str], found: list[str]) -> bool:
    """Whether a name (a list of parts) may be suggested for another: parts are added, or one is spelt differently."""
    if len(wanted) != len(found):
        short, long = sorted((wanted, found), key=len)
        return long[: len(short)] == short or long[-len(short) :] == short
    differing = [(a, b) for a, b in zip(wanted, found, strict=True) if a != b]
    return len(differing) <= 1 and all(
        _numbers(a) == _numbers(b) and difflib.get_close_matches(a, [b]) for a, b in differing
    )


def first_names(names: Iterable[str]) -> list[str]:
    """Return the names to list in an error: the first of ``names``, and an entry that tells how many more there are."""
    found = list(names)
    return found[:_SHOWN] + ([f"… and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])
