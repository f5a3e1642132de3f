"""Load tensors as sharded `jax.Array`s, without Keras and without a model.

targets (name → sharding) ─► layouts, grouped by mesh ─► plan ─► transfer ─► arrays with just these shardings
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import PartitionSpec, Sharding

from shardload.errors import MismatchError, UsageError, suggests_arguments
from shardload.keras_bridge.caller import warn_caller
from shardload.manifest import Manifest, Tensor, View
from shardload.pipeline.array_shardings import Placed, as_asked, devices_of, layout_of, mesh_of_argument, sharding_of
from shardload.progress import ProgressLike, as_progress
from shardload.resolve.opening import OpenedSource, open_source
from shardload.sharding.devices import MeshDevices, local_positions
from shardload.stores.fingerprint import Fingerprint
from shardload.transfer import execution
from shardload.transfer.binding import Binding
from shardload.transfer.casts import overflow_notes
from shardload.transfer.planning import make_plan
from shardload.typing import MeshLike, PathLike
from shardload.units import dtype_name, parse_bytes, plural

Target: TypeAlias = "jax.ShapeDtypeStruct | Sharding | PartitionSpec | jax.Array"
"""Where an array goes; a `jax.ShapeDtypeStruct` and a `jax.Array` also state its shape and dtype."""
_KINDS = (jax.ShapeDtypeStruct, Sharding, PartitionSpec, jax.Array)
SHOWN = 8
"""Names that an error lists before it counts the rest."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One array to load."""

    name: str
    """Name of the target."""
    view: View
    dtype: np.dtype[Any]
    sharding: Placed


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
    `PartitionSpec` on ``mesh``, or a `jax.Array` to replace: its shape, dtype and sharding. Each process reads what its
    own devices need. Unlike `shardload.load`, this is no joint call: processes do not compare what they were given, and
    if one of them fails, the others return.

    Args:
        source: As for `shardload.load`; its tensors have the names that `shardload.inspect` lists.
        targets: A dict, or another pytree (the state of Flax NNX or Linen), of targets, where the name of a leaf is its
            path joined by dots; a function of an array's name and shape (and dtype, if it takes three) that returns a
            target, or ``None`` to leave the tensor out; or one target for every tensor. Where names of tensors have
            slashes, as in Orbax' and Keras' files, paths joined by slashes are found too.
        mesh: The mesh of each `PartitionSpec`, in any form that `shardload.load` accepts. The axes of ``"2x4"`` are
            ``batch`` and ``model``.
        names: Tensor names by target names, as a mapping of those that differ or a function.
        transpose: The order of the tensor's dims in an array, by target name; or a function of the target's name and
            the tensor's shape that returns it, or ``None``. Transposed tensors are read like others.
        dtype: Dtype of floating-point arrays whose target states none; the tensor's own by default.
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
    budget = _budget(host_memory_bytes)
    _check_kinds(names=names, transpose=transpose, strict=strict)
    placed = mesh_of_argument(mesh)
    opened = open_source(source, format)
    for note in opened.manifest.notes:  # of tensors that an index leaves out
        warn_caller(note)
    files = Fingerprint.of(opened.manifest.files)
    reader = _Reader(opened.manifest, mesh=placed, names=names, transpose=transpose, dtype=dtype_name(dtype))
    leaves, rebuild = _leaves(targets, reader)
    _check_keys(leaves, names=names, transpose=transpose)
    wanted = reader.wanted(leaves)
    # A rule sees every tensor, so what it leaves out is left out on purpose; but not all of them.
    if strict and not _is_rule(targets):
        _check_unused(opened.manifest, wanted)
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


# Not `arguments.byte_count`, as that module imports Keras.
def _budget(wanted: int | str | None) -> int | None:
    try:
        return None if wanted is None else parse_bytes(wanted)
    except ValueError as error:
        raise UsageError(f"host_memory_bytes: {error}") from error


def _check_kinds(*, names: Any, transpose: Any, strict: Any) -> None:
    for argument, value in (("names", names), ("transpose", transpose)):
        if not (value is None or callable(value) or isinstance(value, Mapping)):
            raise UsageError(f"Cannot use {argument}={value!r:.60}: expected a mapping or a function")
    if not isinstance(strict, bool):
        raise UsageError(f"Cannot use strict={strict!r:.60}: expected True or False")


def _check_keys(leaves: Iterable[str], **stated: Any) -> None:
    """Refuse keys that name no target: a misspelt one would load another tensor, or dims in the wrong order."""
    known = set(leaves)
    for argument, value in stated.items():
        if unknown := sorted(set(value) - known) if isinstance(value, Mapping) else []:
            raise UsageError(f"Cannot use {argument}: no target is called {unknown[0]!r}. Use names of targets as keys")


def _is_rule(targets: Any) -> bool:
    return callable(targets) or isinstance(targets, _KINDS)


def _leaves(targets: Any, reader: _Reader) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]:
    """Return the targets by name, and a function that puts arrays by name into the same structure."""
    if _is_rule(targets):
        every = reader.manifest.tensors.values()
        rule = _rule(targets, reader.shape_of) if callable(targets) else lambda tensor: targets
        found = {tensor.name: rule(tensor) for tensor in every}
        return {name: target for name, target in found.items() if target is not None}, dict
    paths, structure = jax.tree_util.tree_flatten_with_path(targets, is_leaf=lambda leaf: isinstance(leaf, _KINDS))
    leaves = {_leaf_name([_key(entry) for entry in path], reader.manifest): target for path, target in paths}
    if len(leaves) != len(paths):
        raise UsageError("Cannot name the targets by their paths: two leaves have the same. Rename a key")
    return leaves, lambda arrays: jax.tree_util.tree_unflatten(structure, [arrays[name] for name in leaves])


def _leaf_name(path: Sequence[str], manifest: Manifest) -> str:
    """Return a leaf's name: its path joined by dots or, where the tensors are called so (Orbax, Keras), by slashes."""
    dotted, slashed = ".".join(path), "/".join(path)
    return slashed if slashed in manifest.tensors and dotted not in manifest.tensors else dotted


def _rule(targets: Callable[..., Any], shape_of: Callable[[Tensor], tuple[int, ...]]) -> Callable[[Tensor], Any]:
    """Return a function of a tensor that calls ``targets`` with name, the array's shape, and the dtype if accepted."""
    # Asked of the signature, not tried: a TypeError raised inside of the function must reach the caller.
    try:
        inspect.signature(targets).bind("name", (), np.dtype(np.float32))
    except TypeError:
        return lambda tensor: targets(tensor.name, shape_of(tensor))
    except ValueError:  # a builtin without a signature
        pass
    return lambda tensor: targets(tensor.name, shape_of(tensor), tensor.dtype)


# Entries of a path have different fields: `DictKey.key`, `SequenceKey.idx`, `GetAttrKey.name`.
def _key(entry: Any) -> str:
    return str(next(getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name)))


@dataclass(frozen=True, slots=True)
class _Reader:
    """The caller's names, transpositions and dtype, applied to one target after another."""

    manifest: Manifest
    mesh: jax.sharding.Mesh | None
    names: Mapping[str, str] | Callable[[str], str] | None
    transpose: Any
    dtype: str | None

    def wanted(self, leaves: Mapping[str, Any]) -> list[_Wanted]:
        if words := [name for name, target in leaves.items() if isinstance(target, str)]:
            raise UsageError(
                f"Cannot place {words[0]!r} by {leaves[words[0]]!r}: a tuple is a tree of targets. "
                "Write PartitionSpec(…)"
            )
        tensors = {name: self._tensor_name(name) for name in leaves}
        if missing := [name for name, tensor in tensors.items() if tensor not in self.manifest.tensors]:
            raise MismatchError(
                f"Cannot load from {self.manifest.source}: it has no tensor for {plural(len(missing), 'target')}:\n  "
                + "\n  ".join(_shown(self._missing(name, tensors[name]) for name in missing))
                + "\nPass names= to map targets to tensors; shardload.inspect lists the tensors."
            )
        return [self._one(name, target, self.manifest.tensors[tensors[name]]) for name, target in leaves.items()]

    def _missing(self, name: str, tensor: str) -> str:
        close = difflib.get_close_matches(tensor, self.manifest.tensors, n=1)
        return name + (f" ({tensor})" if tensor != name else "") + (f", did you mean {close[0]!r}?" if close else "")

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of the array of a tensor that is its own target."""
        return self._view(tensor.name, tensor).shape

    def _tensor_name(self, name: str) -> str:
        if self.names is None:
            return name
        found = self.names(name) if callable(self.names) else self.names.get(name, name)
        if not isinstance(found, str):
            raise UsageError(f"Cannot use names: for target {name!r}, it gives {found!r:.60}, expected a tensor's name")
        return found

    def _one(self, name: str, target: Any, tensor: Tensor) -> _Wanted:
        view, dtype = self._view(name, tensor), tensor.dtype
        if self.dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.floating):
            dtype = jax.numpy.dtype(self.dtype)
        sharding = target
        if isinstance(target, jax.Array):
            target = jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=target.sharding)
        if isinstance(target, jax.ShapeDtypeStruct):
            if tuple(target.shape) != view.shape:
                raise MismatchError(
                    f"Cannot load {name!r}: its target has shape {tuple(target.shape)}, but tensor {tensor.name!r} has "
                    f"{view.shape}. Pass transpose= if only the order of its dims differs"
                )
            dtype, sharding = np.dtype(target.dtype), target.sharding
            if sharding is None and jax.device_count() > 1:  # else the whole array would go to device 0
                raise UsageError(
                    f"Cannot place {name!r}: its ShapeDtypeStruct has no sharding. Pass sharding= to it; for one "
                    "device, jax.sharding.SingleDeviceSharding(device)"
                )
        _check_width(name, dtype)
        return _Wanted(name, view, dtype, sharding_of(name, sharding, self.mesh))

    def _view(self, name: str, tensor: Tensor) -> View:
        view = View.whole(tensor)
        if callable(self.transpose):
            order = self.transpose(name, tensor.shape)
        else:
            order = None if self.transpose is None else self.transpose.get(name)
        if order is None:
            return view
        # Not a set, whose order is not the caller's.
        if not isinstance(order, Sequence | np.ndarray) or sorted(order) != list(range(len(view.shape))):
            raise UsageError(f"Cannot transpose {name!r} of shape {view.shape} to {order}: expected each dim once")
        return replace(view, shape=tuple(view.shape[d] for d in order), strides=tuple(view.strides[d] for d in order))


def _check_width(name: str, dtype: np.dtype[Any]) -> None:
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise UsageError(
            f"Cannot load {name!r} as {dtype}: JAX has 64-bit dtypes disabled. Call "
            "jax.config.update('jax_enable_x64', True) first, or leave the tensor out"
        )


def _check_unused(manifest: Manifest, wanted: Iterable[_Wanted]) -> None:
    used = {one.view.tensor for one in wanted}
    if unused := [name for name in manifest.tensors if name not in used]:
        raise MismatchError(
            f"Cannot load from {manifest.source}: no target names {len(unused)} of its tensors:\n  "
            + "\n  ".join(_shown(unused))
            + "\nPass strict=False to leave them out."
        )


def _shown(names: Iterable[str]) -> list[str]:
    found = list(names)
    return found[:SHOWN] + ([f"… and {len(found) - SHOWN} more"] if len(found) > SHOWN else [])


def _transfer(opened: OpenedSource, wanted: Sequence[_Wanted], *, budget: int | None, shown: Any) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    overflowed: tuple[str, ...] = ()
    # A plan has one mesh, so each mesh gets a plan and a transfer; a single device is a mesh too.
    by_mesh: dict[MeshDevices, list[_Wanted]] = {}
    for one in wanted:
        by_mesh.setdefault(devices_of(one.sharding), []).append(one)
    plans = {  # all of them before the first read: what does not fit is refused at once
        devices: make_plan(
            opened.manifest,
            [
                Binding(one.name, one.view, one.dtype, layout_of(one.name, one.view.shape, one.sharding, devices.mesh))
                for one in group
            ],
            host_memory_bytes=budget,
            positions=local_positions(devices),
            scatter=opened.checker is None,
            uploads=any(device.platform != "cpu" for device in devices.devices),
        )
        for devices, group in by_mesh.items()
    }
    shardings = {one.name: one.sharding for one in wanted}

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
            )
            overflowed += stats.overflowed
    finally:
        shown.stop()
    for text in overflow_notes(overflowed):
        warn_caller(text)
    return arrays


__all__ = ["Target", "load_arrays"]
