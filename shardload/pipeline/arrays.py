"""Load tensors as sharded `jax.Array`s, without Keras and without a model.

targets (name → sharding) ─► layouts, grouped by mesh ─► plan ─► transfer ─► arrays with just these shardings
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import PartitionSpec, Sharding

from shardload.errors import MismatchError, UsageError, suggests_arguments
from shardload.keras_bridge.caller import warn_caller
from shardload.manifest import Manifest, Tensor, View
from shardload.pipeline.array_targets import (
    KINDS,
    SCALARS,
    Placed,
    Stated,
    TensorNames,
    WantedArray,
    array_layout,
    as_asked,
    checked_value,
    first_names,
    is_in_default_memory,
    is_tree,
    mesh_devices_of,
    narrows,
    specs_of_boxes,
    stated,
    target_sharding,
)
from shardload.progress import ProgressLike, as_progress
from shardload.resolve.opening import OpenedSource, open_source
from shardload.sharding.devices import MeshDevices, local_positions, resolve_devices
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec
from shardload.stores.location import Fingerprint
from shardload.transfer import execution
from shardload.transfer.casts import ENABLE_64_BITS, check_cast, overflow_notes
from shardload.transfer.load_plan import Binding
from shardload.transfer.placement import jax_mesh
from shardload.transfer.planning import plan_transfers
from shardload.transfer.read_tensor import require_decoders
from shardload.typing import MeshLike, PathLike
from shardload.units import byte_count, check_kind, check_no_iterator, is_function, plain_dtype_name

ArrayTarget: TypeAlias = (
    "jax.ShapeDtypeStruct | Sharding | PartitionSpec | jax.Array | jax.Device | Format | np.ndarray[Any, Any]"
)
"""Types of objects that say where an array goes; a `jax.ShapeDtypeStruct` or `jax.Array` states shape and dtype too."""


@suggests_arguments
def load_arrays(
    source: PathLike,
    targets: Any,
    *,
    mesh: MeshLike | None = None,
    names: Mapping[str, str] | Callable[[str], str] | None = None,
    transpose: Mapping[str, Sequence[int]] | Callable[[str, tuple[int, ...]], Sequence[int] | None] | None = None,
    dtype: Any = None,
    strict: bool = True,
    format: str | None = None,
    host_memory_bytes: int | str | None = None,
    progress: ProgressLike = None,
) -> Any:
    """Load a checkpoint of any format straight into sharded `jax.Array`s.

    A target is a `jax.ShapeDtypeStruct` with a sharding, a `NamedSharding`, a `SingleDeviceSharding`, a
    `PartitionSpec` on ``mesh``, a `jax.Device`, a `jax.experimental.layout.Format`, or a `jax.Array` to replace: its
    shape, dtype and sharding. Typed PRNG keys, Python's numbers and arrays of NumPy are targets too, as in Orbax: what
    loads is of the same type. Each process reads what its own devices need. Unlike `shardload.load`, this is no joint
    call: processes do not compare what they were given, and if one of them fails, the others return.

    Args:
        source: As for `shardload.load`; its tensors have the names that `shardload.inspect` lists.
        targets: One target for every tensor; or a function of an array's name and shape (and dtype, if it takes three)
            that returns a target, or ``None`` to leave the tensor out; or a dict or another pytree of targets (a module
            of Equinox, the state of Flax NNX or Linen). A leaf's name is its path joined by dots, or by slashes if
            the file's names have them (Orbax, Keras). The ``value`` of a box of Flax may be in the path, the
            tensor's name, both or neither. Functions and numbers in a module stay if there is no tensor for them.
        mesh: The mesh of each `PartitionSpec`, in any form that `shardload.load` accepts. The axes of ``"2x4"`` are
            ``batch`` and ``model``. A `jax.ShapeDtypeStruct` without a sharding is whole on each of its devices, or
            split as its box (`nn.Partitioned`) says.
        names: Tensor names by target names, as a mapping of those that differ or a function.
        transpose: The order of the tensor's dims in an array, by target name; or a function of the target's name and
            the tensor's shape that returns it, or ``None``. Transposed tensors are read like others.
        dtype: Dtype of floating-point arrays whose target states none, also one of float8; the tensor's own by default.
        strict: Refuse a checkpoint with tensors that no target names.
        format: Name of a format, to require it.
        host_memory_bytes: Most bytes staged in host memory, as for `shardload.load`.
        progress: As for `shardload.load`.

    Returns:
        The arrays in the structure of ``targets``; for a function or a single target, a dict by tensor name.

    Raises:
        UsageError: When an argument is of the wrong kind.
        SourceNotFoundError: When the name resolves to nothing.
        SourceError: When the checkpoint contradicts itself.
        MismatchError: When a target has no tensor, or one of another shape; under ``strict``, when a tensor is unused.
        MeshError: When ``mesh`` cannot be read or has more positions than there are devices.
        LayoutError: When a sharding does not divide its array.
        TransferError: When reading fails half-way.
        DamagedError: When the bytes of a training step differ from the saved ones.
    """
    # Arguments first: none of them should fail after a download.
    shown = as_progress(progress)
    budget = None if host_memory_bytes is None else byte_count("host_memory_bytes", host_memory_bytes)
    check_no_iterator("targets", targets)
    _check_kinds(names=names, transpose=transpose, strict=strict)
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh):
        on = resolve_devices(mesh)
        mesh = jax_mesh(on.mesh, on.devices)
    opened = open_source(source, format)
    for note in opened.manifest.notes:  # of tensors that an index leaves out
        warn_caller(note)
    files = Fingerprint.of(opened.manifest.files)
    known = TensorNames(opened.manifest, names)
    specs = {known.of_box(path): spec for path, spec in specs_of_boxes(targets)}
    also = tuple(sorted(name for name in dir(jax.numpy) if name.startswith("float8")))
    float_name = None if dtype is None else plain_dtype_name(dtype, doing="load", also=also)
    reader = _Reader(opened.manifest, mesh, specs, known, transpose, float_name)
    leaves, rebuild = _leaves(targets, reader)
    # A misspelt key would load another tensor, or dims in the wrong order.
    for argument, value in (("names", names), ("transpose", transpose)):
        if unknown := sorted(set(value) - set(leaves)) if isinstance(value, Mapping) else []:
            raise UsageError(f"Cannot use {argument}: no target is called {unknown[0]!r}. Use names of targets as keys")
    wanted = reader.wanted(leaves)
    # A rule sees every tensor, so what it leaves out is left out on purpose; but not all of them.
    used = {one.view.tensor for one in wanted}
    if strict and not _is_rule(targets) and (unused := [name for name in opened.manifest.tensors if name not in used]):
        raise MismatchError(
            f"Cannot load from {opened.manifest.source}: no target names {len(unused)} of its tensors:\n  "
            + "\n  ".join(first_names(unused))
            + "\nPass strict=False to leave them out."
        )
    if strict and not wanted and opened.manifest.tensors:
        raise MismatchError(
            f"Cannot load from {opened.manifest.source}: the function returned None for each of its tensors. Return a "
            "target, such as a PartitionSpec, for those to load, or pass strict=False"
        )
    # Twice: a writer must not have changed the files since their headers were read, before and after the reads.
    files.check()
    found = _transfer(opened, wanted, budget=budget, shown=shown)
    files.check()
    return rebuild(found)


def _check_kinds(*, names: Any, transpose: Any, strict: Any) -> None:
    for argument, value, given, told in (
        ("names", names, ("name",), "the name of a target"),
        ("transpose", transpose, ("name", ()), "the name of a target and the shape of its tensor"),
    ):
        if not (value is None or is_function(value) or isinstance(value, Mapping)):
            raise UsageError(f"Cannot use {argument}={value!r:.60}: expected a mapping or a function")
        if callable(value) and not _takes(value, *given):
            raise UsageError(f"Cannot call the function {argument}: expected one that takes {told}")
    check_kind("strict", strict, bool, "True or False")


def _is_rule(targets: Any) -> bool:
    return isinstance(targets, KINDS) or (callable(targets) and not is_tree(targets))


def _leaves(targets: Any, reader: _Reader) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]:
    """Return the targets by name, and a function that puts the loaded arrays into the same structure as ``targets``."""
    if _is_rule(targets):
        return _by_rule(targets, reader), dict
    paths, structure = jax.tree_util.tree_flatten_with_path(targets, is_leaf=lambda leaf: isinstance(leaf, KINDS))
    names = [reader.names.of_leaf(path) for path, _ in paths]
    if len(set(names)) != len(names):
        raise UsageError("Cannot name the targets by their paths: two leaves have the same path. Rename a key")
    leaves = dict(zip(names, (target for _, target in paths), strict=True))
    kept = {} if isinstance(targets, (dict, list, tuple)) else {n: t for n, t in leaves.items() if reader.stays(n, t)}
    wanted = {name: target for name, target in leaves.items() if name not in kept}

    def rebuild(arrays: dict[str, Any]) -> Any:
        return jax.tree_util.tree_unflatten(structure, [kept[n] if n in kept else arrays[n] for n in names])

    return wanted, rebuild


def _by_rule(targets: Any, reader: _Reader) -> dict[str, Any]:
    every = reader.manifest.tensors.values()
    if isinstance(targets, KINDS):
        return {tensor.name: targets for tensor in every}
    if isinstance(targets, type):
        raise UsageError(f"Cannot use the class {targets.__name__} for targets: expected a tree or a function")
    if not is_function(targets):
        raise UsageError(
            f"Cannot use targets={targets!r:.60}: expected a tree or a function. For a Keras model, call load_weights"
        )
    # Asked of the signature, not tried: a TypeError raised inside of the function must reach the caller.
    takes_dtype = _takes(targets, "name", (), np.dtype(np.float32))
    if not takes_dtype and not _takes(targets, "name", ()):
        raise UsageError(
            "Cannot call the function of targets: expected one that takes the name and shape of an array, and its "
            "dtype as well if it has three arguments"
        )
    dtypes = {t.name: (t.dtype,) if takes_dtype else () for t in every}
    found = {t.name: targets(t.name, reader.shape_of(t), *dtypes[t.name]) for t in every}
    return {name: target for name, target in found.items() if target is not None}


def _takes(function: Callable[..., Any], *given: Any) -> bool:
    """Whether a caller's function accepts the arguments ``given``; ``True`` for a builtin without a signature."""
    try:
        inspect.signature(function).bind(*given)
    except TypeError:
        return False
    except ValueError:
        pass
    return True


@dataclass(frozen=True, slots=True)
class _Reader:
    """Turns each target into the array to load, by the caller's arguments ``names``, ``transpose`` and ``dtype``."""

    manifest: Manifest
    mesh: jax.sharding.Mesh | None
    specs: Mapping[str, PartitionSpec]
    names: TensorNames
    transpose: Any
    dtype: str | None

    def stays(self, name: str, target: Any) -> bool:
        """Whether a leaf is returned unchanged, with nothing to load: a function, or a number without a tensor."""
        if isinstance(target, SCALARS):
            return self.names.tensor(name) not in self.manifest.tensors
        return callable(target) and not isinstance(target, KINDS)

    def wanted(self, leaves: Mapping[str, Any]) -> list[WantedArray]:
        if words := [name for name, target in leaves.items() if isinstance(target, str)]:
            raise UsageError(
                f"Cannot place {words[0]!r} by {leaves[words[0]]!r}: it is text, expected a target "
                "(a tuple is a tree of targets). Write PartitionSpec(…)"
            )
        tensors = {name: self.names.tensor(name) for name in leaves}
        self.names.check(tensors, {name: stated(target).shape for name, target in leaves.items()})
        return [self._one(name, target, self.manifest.tensors[tensors[name]]) for name, target in leaves.items()]

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of the array made from a tensor: its dims have the order of the argument ``transpose``."""
        return self._view(tensor.name, tensor).shape

    def _one(self, name: str, target: Any, tensor: Tensor) -> WantedArray:
        view, dtype = self._view(name, tensor), tensor.dtype
        if self.dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.floating):
            dtype = jax.numpy.dtype(self.dtype)
        if type(target) in SCALARS and not view.shape and tensor.dtype.kind in _KIND_OF[type(target)]:
            here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            return WantedArray(name, view, tensor.dtype, here, finish=type(target))
        found = stated(target)
        if found.shape is not None and found.shape != view.shape:
            raise MismatchError(
                f"Cannot load {name!r}: its target has shape {found.shape}, but tensor {tensor.name!r} has "
                f"{view.shape}. Pass transpose= if only the order of its dims differs"
            )
        dtype = dtype if found.dtype is None else found.dtype
        if found.on_host:
            here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            if not narrows(tensor.dtype, dtype):
                check_cast(tensor.dtype, dtype, variable=name, tensor=tensor.name)
            return WantedArray(name, view, dtype, here, self._order(name, tensor), found.finish, on_host=True)
        placed = target_sharding(name, self._sharding(name, found), self.mesh)
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise UsageError(
                f"Cannot load {name!r} as {dtype}: JAX has 64-bit dtypes disabled. {ENABLE_64_BITS}, or leave the "
                "tensor out"
            )
        return WantedArray(name, view, dtype, placed, self._order(name, tensor), found.finish)

    def _sharding(self, name: str, found: Stated) -> Any:
        if found.sharding is not None:
            return found.sharding
        if self.mesh is not None:
            return self.specs.get(name, PartitionSpec())
        if jax.device_count() > 1:  # else the whole array would go to device 0
            raise UsageError(
                f"Cannot place {name!r}: its ShapeDtypeStruct has no sharding. Pass sharding= to it, or mesh= for a "
                "copy on each device; for one device, jax.sharding.SingleDeviceSharding(device)"
            )
        return None

    def _order(self, name: str, tensor: Tensor) -> tuple[int, ...] | None:
        given = self.transpose
        order = given(name, tensor.shape) if callable(given) else (given or {}).get(name)
        if order is None:
            return None
        # Not a set, whose order is not the caller's.
        if not isinstance(order, Sequence | np.ndarray) or sorted(order) != list(range(len(tensor.shape))):
            raise UsageError(f"Cannot transpose {name!r} of shape {tensor.shape} to {order}: expected each dim once")
        return tuple(order)

    def _view(self, name: str, tensor: Tensor) -> View:
        view, order = View.whole(tensor), self._order(name, tensor)
        if order is None:
            return view
        return replace(view, shape=tuple(view.shape[d] for d in order), strides=tuple(view.strides[d] for d in order))


_KIND_OF = {bool: "b", int: "iu", float: "f"}


def _bindings(group: Iterable[WantedArray], mesh: MeshSpec) -> Iterator[Binding]:
    # Layers repeat, so thousands of small arrays have a few layouts.
    layouts: dict[tuple[Placed, tuple[int, ...]], Layout] = {}
    for one in group:
        key = one.sharding, one.view.shape
        if key not in layouts:
            layouts[key] = array_layout(one.name, one.view.shape, one.sharding, mesh)
        yield Binding(one.name, one.view, one.dtype, layouts[key])


def _transfer(opened: OpenedSource, wanted: Sequence[WantedArray], *, budget: int | None, shown: Any) -> dict[str, Any]:
    require_decoders(opened.manifest.tensors[one.view.tensor] for one in wanted)
    tensors = opened.manifest.tensors
    arrays: dict[str, Any] = {
        # Read whole: integers of a wider dtype (a step in int64), Python's numbers, host arrays.
        one.name: checked_value(opened, one)
        for one in wanted
        if narrows(tensors[one.view.tensor].dtype, one.dtype) or one.finish in SCALARS or one.on_host
    }
    overflowed: tuple[str, ...] = ()
    # A plan has one mesh, so each mesh gets a plan and a transfer; a single device is a mesh too.
    by_mesh: dict[MeshDevices, list[WantedArray]] = {}
    for one in wanted:
        if one.name not in arrays:
            by_mesh.setdefault(mesh_devices_of(one.sharding), []).append(one)
    plans = {  # all of them before the first read: what does not fit is refused at once
        devices: plan_transfers(
            opened.manifest,
            [*_bindings(group, devices.mesh)],
            host_memory_bytes=budget,
            positions=local_positions(devices),
            scatter=opened.checker is None,
            uploads=any(device.platform != "cpu" for device in devices.devices),
        )
        for devices, group in by_mesh.items()
    }
    shardings = {one.name: one.sharding for one in wanted}
    usual = {sharding: is_in_default_memory(sharding) for sharding in dict.fromkeys(shardings.values())}

    def ready(name: str, array: Any) -> None:
        arrays[name] = as_asked(array, shardings[name])

    try:
        for devices, plan in plans.items():
            shown.start(plan.read_bytes, "Loading")
            stats = execution.execute(
                plan,
                opened.manifest,
                devices=devices.devices,
                on_ready=ready,
                progress=shown.advance,
                check=opened.checker,
                shardings={name: sharding for name, sharding in shardings.items() if usual[sharding]},
            )
            overflowed += stats.overflowed
    finally:
        shown.stop()
    for text in overflow_notes(overflowed):
        warn_caller(text)
    finish = {one.name: one.finish for one in wanted if one.finish is not None}
    return {name: finish[name](array) if name in finish else array for name, array in arrays.items()}
