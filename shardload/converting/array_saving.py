"""Save a tree of sharded arrays as safetensors or Orbax, without Keras and without a model: `save_arrays`.

tree ─► arrays by name ─► tensors of each, by its rule (`array_parts`) ─► every tensor is there, once
     ─► files without values ─► each process writes its own shards ─► flush ─► one rename         (`saving`)
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardload import processes
from shardload.converting.computing import StoredValue
from shardload.converting.live_source import LocalBox, local_boxes_of, reader_of_box
from shardload.converting.plans import ConversionPlan, ConvertReport, Copy
from shardload.converting.saving import write_live
from shardload.converting.targets import CONVERT_HOST_MEMORY, block_bytes_of
from shardload.converting.uploading import remote_target
from shardload.errors import (
    MismatchError,
    UninitialisedError,
    UnsupportedError,
    UsageError,
    suggests_arguments,
)
from shardload.loaders.file_pieces import TensorPlace, Wanted
from shardload.loaders.hf_folder import BARE as SAFETENSORS
from shardload.loaders.orbax.loader import SPEC as ORBAX
from shardload.loaders.safetensors import SAFETENSORS_DTYPES, SHARD_BYTES, write_file_skeleton, write_skeleton
from shardload.pipeline.array_parts import StoredArray, StoredTensor, array_to_save
from shardload.pipeline.array_reader import takes
from shardload.pipeline.array_targets import (
    TensorNamesArgument,
    array_layout,
    check_keys,
    mesh_devices_of,
    reshaped,
    stored_name,
)
from shardload.pipeline.stored_as import StoredAs
from shardload.processes.agreement import Topic
from shardload.processes.joint_call import Alone, Call, joint
from shardload.progress import ProgressLike, as_progress
from shardload.sharding.layout import Bounds
from shardload.stores.clients import is_bucket
from shardload.stores.local import local_target
from shardload.transfer.placement import named_sharding
from shardload.typing import PathLike
from shardload.units import byte_count, check_kind, check_no_iterator, is_function, plural

ArrayTargetFormat = Literal["safetensors", "orbax"]
_RENAME = "Rename it with names="
_ENDING = ".safetensors"


@suggests_arguments
def save_arrays(
    tree: Any,
    path: PathLike,
    *,
    to: ArrayTargetFormat | None = None,
    names: TensorNamesArgument = None,
    host_memory_bytes: int | str = CONVERT_HOST_MEMORY,
    max_shard_bytes: int | str | None = None,
    overwrite: bool = False,
    progress: ProgressLike = None,
) -> ConvertReport:
    """Save a tree of arrays, in a form that `load_arrays` and other programs read.

    Shards go from the devices to the files block by block: the host never has a copy of the tree or of a large array.
    The target appears under its name only when it is complete and flushed to disk; an error, Ctrl-C, a full disk or a
    killed process leaves nothing under it.

    If arrays are sharded over several processes of a `jax.distributed` run, every process must make the call, with the
    same path in a folder that all share. Each writes its own shards, and one of them each replica.

    Examples:
        ```python
        params = {"dense": {"kernel": jax.numpy.ones((8, 16))}}
        shardload.save_arrays(params, "params.safetensors")
        ```

    Args:
        tree: A pytree of `jax.Array`s, arrays of NumPy and numbers: dicts, a module of Equinox or Flax NNX, a state.
            The name of a leaf is its path joined by dots, or by slashes for Orbax. Functions in a module are left out.
        path: A file that ends in ``.safetensors``, or a folder; or its address in a bucket (``s3://``, ``gs://``).
        to: ``"safetensors"`` or ``"orbax"``, required for a folder. The folder of the first has ``model.safetensors``,
            or several files with an index. That of the second is a pytree for Orbax: nested dicts, by the names.
        names: As for `load_arrays`, with the same rules: a `StoredAs` says in which tensors an array is stored. Lengths
            that do not follow from the array's shape must be in its ``sizes``. Padding must be zero.
        host_memory_bytes: Most bytes of arrays in host memory at once, 512 MiB by default.
        max_shard_bytes: Most bytes of tensors in one file of a safetensors folder, by default 5 GB.
        overwrite: Replace an existing checkpoint at ``path``.
        progress: As for `shardload.load`.

    Returns:
        The report: how many tensors and bytes were written.

    Raises:
        UsageError: When an argument is invalid, or a leaf is not an array.
        MismatchError: When an array does not fit its rule, padding is not zero, or a tensor would have gaps.
        UnsupportedError: When the format has no such dtype.
        UninitialisedError: When an array was deleted or donated.
        WriteError: When ``path`` exists already, or cannot be written.
        DisagreementError: When the processes of a `jax.distributed` run save different arrays.
        ProcessLostError: When another process ended, or does not respond.
    """
    check_no_iterator("tree", tree)
    if is_bucket(path):
        check_kind("overwrite", overwrite, bool, "True or False")
        if processes.are_several() and _is_spread(tree):
            raise UnsupportedError(
                f"Cannot save to {path}: several processes each have a part of the arrays, expected a path that all of "
                "them share. Save to such a folder, and upload it"
            )
        with remote_target(str(path), overwrite=overwrite, progress=as_progress(progress)) as remote:
            report = save_arrays(
                tree,
                remote.path,
                to=to,
                names=names,
                host_memory_bytes=host_memory_bytes,
                max_shard_bytes=max_shard_bytes,
                overwrite=overwrite,
                progress=progress,
            )
        return replace(report, target=remote.url)
    # Of the path only the name must be equal on all processes, as hosts may mount the folder elsewhere.
    name = Path(path).name if isinstance(path, str | os.PathLike) else None
    compared = {"path": name, "to": to, "max_shard_bytes": max_shard_bytes, "overwrite": overwrite}
    together: AbstractContextManager[Call] = nullcontext(Alone())
    if processes.are_several() and _is_spread(tree):
        together = joint("save_arrays", path, compared, doing="saving")
    with together as call:
        began, shown = time.monotonic(), as_progress(progress)
        block_bytes = block_bytes_of(host_memory_bytes)
        check_kind("overwrite", overwrite, bool, "True or False")
        target, kind = _target(path, to)
        plan = _plan(tree, target, kind, names, max_shard_bytes)
        facts = {copy.wanted.name: f"{copy.wanted.dtype} {copy.wanted.shape}" for copy in plan.copies}
        call.require([Topic("the arrays", lambda: facts, "Save the same arrays on every process")])
        preparing_s = time.monotonic() - began
        write_live(plan, target, call, shown, source=None, overwrite=overwrite, block_bytes=block_bytes)
        counts, seconds = (len(plan.tensors), plan.nbytes, 0), time.monotonic() - began
        return ConvertReport("arrays", str(target), plan.format, *counts, seconds, plan.notes, preparing_s)


def _is_spread(tree: Any) -> bool:
    """Whether other processes have parts of an array."""
    return any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in jax.tree.leaves(tree))


def _target(path: PathLike, to: Any) -> tuple[Path, str]:
    check_kind("path", path, str | os.PathLike, "a path")
    check_kind("to", to, str | None, f"one of {', '.join(get_args(ArrayTargetFormat))}")
    if not os.fspath(path):
        raise UsageError("Cannot save to an empty path. Give a folder, or NAME.safetensors")
    target = Path(os.path.abspath(local_target(path)))  # noqa: PTH100  a link is replaced, not followed
    if to is not None and to not in get_args(ArrayTargetFormat):
        raise UsageError(f"Cannot save arrays with to={to!r}: expected safetensors or orbax")
    if target.name.endswith(_ENDING):
        if to == "orbax":
            raise UsageError(f"Cannot write {target.name} with to='orbax': its name is that of a safetensors file")
        return target, "file"
    if to is None:
        raise UsageError(
            f"Cannot tell the format of {target.name}. Pass to='safetensors' or to='orbax' for a folder, or name it "
            f"{target.name}{_ENDING}"
        )
    return target, to


@dataclass(frozen=True, slots=True, eq=False)
class _Leaf:
    """One array of the tree: its name, and its value."""

    name: str
    value: Any

    @property
    def stored(self) -> StoredValue:
        """The value as what is written."""
        if isinstance(self.value, jax.Array):
            array = self.value
            return StoredValue(None, np.dtype(array.dtype), live=lambda: array)
        return StoredValue(None, self.value.dtype, array=self.value)


def _leaves(tree: Any, joined_by: str) -> Iterator[_Leaf]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in paths:
        keys = [_key(entry) for entry in path]
        if len(keys) > 1 and keys[-1] == "value" and not isinstance(path[-1], jax.tree_util.DictKey):
            keys.pop()  # the attribute with the array in a box of Flax
        name = joined_by.join(keys)
        if isinstance(leaf, jax.Array):
            if leaf.is_deleted():
                raise UninitialisedError(
                    f"Cannot save {name!r}: its array was deleted, or donated to a computation. Save the current arrays"
                )
            is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            yield _Leaf(name, jax.random.key_data(leaf) if is_key else leaf)
        elif isinstance(leaf, np.ndarray | np.generic | bool | int | float) and np.asarray(leaf).dtype != object:
            yield _Leaf(name, np.asarray(leaf))
        elif not callable(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            raise UsageError(
                f"Cannot save {name or 'the tree'!r}: found {type(leaf).__name__}, expected an array or a number"
            )


def _key(entry: Any) -> str:
    # Entries of a path have different fields: `DictKey.key`, `SequenceKey.idx`, `GetAttrKey.name`.
    return str(next(getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name)))


def _plan(
    tree: Any, target: Path, kind: str, names: TensorNamesArgument, max_shard_bytes: int | str | None
) -> ConversionPlan:
    if not (names is None or is_function(names) or isinstance(names, Mapping)):
        raise UsageError(f"Cannot use names={names!r:.60}: expected a mapping or a function")
    if callable(names) and not takes(names, "name"):
        raise UsageError("Cannot call the function names: expected one that takes the name of an array")
    shard_bytes = SHARD_BYTES if max_shard_bytes is None else byte_count("max_shard_bytes", max_shard_bytes)
    if max_shard_bytes is not None and kind != "safetensors":
        why = "it is one file" if kind == "file" else "Orbax has separate files for each tensor"
        raise UsageError(f"Cannot use max_shard_bytes for {target.name}: {why}")
    leaves = list(_leaves(tree, "/" if kind == "orbax" else "."))
    check_keys("names", names, (leaf.name for leaf in leaves), of="array")
    rules = {leaf.name: stored_name(names, leaf.name) for leaf in leaves}
    arrays = _stored(leaves, rules)
    wanted = _wanted(leaves, arrays)
    for leaf, stored in zip(leaves, arrays, strict=True):
        _check_padding(leaf, stored)
    copies = []
    for leaf, stored in zip(leaves, arrays, strict=True):
        value, made = _with_few_parts(leaf, stored)
        whole = Bounds.whole(made.shape)
        for tensor in made.tensors:
            for part in tensor.parts:
                box = None if part.box == whole else part.box
                copies.append(Copy(wanted[tensor.name], value, part.view, box))
    _check_written(kind, list(wanted.values()))
    format, make = _maker(kind, list(wanted.values()), shard_bytes)
    return ConversionPlan(format, tuple(copies), make, {}, is_file=kind == "file")


def _with_few_parts(leaf: _Leaf, stored: StoredArray) -> tuple[StoredValue, StoredArray]:
    """Return what to write of an array: with more dims if it then has fewer parts, and its shards allow it."""
    value, finer = leaf.value, stored.finer
    if finer is None:
        return leaf.stored, stored
    if not isinstance(value, jax.Array):
        return StoredValue(None, value.dtype, array=value.reshape(finer.stored.shape)), finer.stored
    if not isinstance(value.sharding, NamedSharding):
        return leaf.stored, stored
    on = mesh_devices_of(value.sharding)
    layout = finer.layout(array_layout(leaf.name, value.shape, value.sharding, on.mesh))
    if layout is None:
        return leaf.stored, stored
    sharding, shape = named_sharding(layout, on.devices), finer.stored.shape
    live = partial(reshaped, value, sharding, shape, donate=False)
    return StoredValue(None, np.dtype(value.dtype), live=live), finer.stored


def _check_written(kind: str, tensors: Sequence[Wanted]) -> None:
    """Raise unless the format can have all tensors: their dtypes, and their names."""
    from shardload.loaders.orbax.saving import ORBAX_DTYPES

    own, other = (ORBAX_DTYPES, SAFETENSORS_DTYPES) if kind == "orbax" else (SAFETENSORS_DTYPES, ORBAX_DTYPES)
    format, instead = ("Orbax", "safetensors") if kind == "orbax" else ("safetensors", "orbax")
    for tensor in tensors:
        if tensor.dtype.name not in own:
            way_out = f"Pass to={instead!r}, or cast it" if tensor.dtype.name in other else "Cast it to another dtype"
            raise UnsupportedError(
                f"Cannot write tensor {tensor.name!r} to {format}, which has no {tensor.dtype}. {way_out}"
            )
        if kind != "orbax" and tensor.name == "__metadata__":
            raise UnsupportedError(
                f"Cannot write tensor {tensor.name!r} to safetensors, which reserves the name. {_RENAME}"
            )


def _maker(kind: str, tensors: Sequence[Wanted], shard_bytes: int) -> tuple[str, Any]:
    """Return the name of a format, and the function that makes its files without values."""
    if kind == "file":
        return SAFETENSORS.name, partial(write_file_skeleton, tensors=tensors)
    if kind == "safetensors":

        def make(folder: Path) -> tuple[TensorPlace, ...]:
            folder.mkdir()
            return write_skeleton(folder, tensors, shard_bytes=shard_bytes)

        return SAFETENSORS.name, make
    from shardload.loaders.orbax.saving import write_array_skeleton

    return ORBAX.name, partial(write_array_skeleton, tensors=tensors)


def _stored(leaves: Sequence[_Leaf], rules: Mapping[str, str | StoredAs]) -> list[StoredArray]:
    """Return the tensors in which each array is stored."""
    full: dict[tuple[str, str], int] = {}
    for rule in rules.values():
        if isinstance(rule, StoredAs):
            for pattern, (name, part) in itertools.product(rule.patterns, rule.take.items()):
                stop = part.stop if isinstance(part, slice) else part + 1
                stated = rule.sizes.get(name, 0)
                full[pattern, name] = max(full.get((pattern, name), 0), stop, stated if isinstance(stated, int) else 0)
    found = []
    for leaf in leaves:
        named = rules[leaf.name]
        rule = named if isinstance(named, StoredAs) else _as_it_is(named, leaf.name)
        lengths = {name: full[rule.patterns[0], name] for name in rule.take}
        found.append(array_to_save(rule, leaf.name, tuple(leaf.value.shape), lengths))
    return found


def _as_it_is(tensor: str, array: str) -> StoredAs:
    """Return the rule of an array that is stored as a tensor of this name."""
    if not tensor:
        raise UsageError("Cannot save an array without a name. Save a tree, such as {'weight': array}")
    if "{" in tensor or "\0" in tensor or any(part in (".", "..") for part in tensor.split("/")):
        why = "braces, a null character, or a part of dots alone"
        raise UsageError(f"Cannot save {array!r} under the name {tensor!r}, which has {why}. {_RENAME}")
    return StoredAs(tensor)


def _wanted(leaves: Sequence[_Leaf], arrays: Sequence[StoredArray]) -> dict[str, Wanted]:
    """Return the tensors to write; raise unless every element of each comes from one array."""
    found: dict[str, list[tuple[_Leaf, StoredTensor]]] = {}
    for leaf, stored in zip(leaves, arrays, strict=True):
        for tensor in stored.tensors:
            found.setdefault(tensor.name, []).append((leaf, tensor))
    wanted = {}
    for name, parts in found.items():
        leaf, first = parts[0]
        dtype = leaf.stored.dtype
        for other, tensor in parts[1:]:
            if (tensor.shape, tensor.lengths, other.stored.dtype) != (first.shape, first.lengths, dtype):
                raise MismatchError(
                    f"Cannot save tensor {name!r}: {leaf.name!r} and {other.name!r} are parts of it, but differ in "
                    f"dtype or dims: {dtype} {first.shape}, {other.stored.dtype} {tensor.shape}"
                )
        _check_complete(name, parts)
        wanted[name] = Wanted(name, first.shape, dtype)
    return wanted


def _check_complete(name: str, parts: Sequence[tuple[_Leaf, StoredTensor]]) -> None:
    for (leaf, one), (other, two) in itertools.combinations(parts, 2):
        if one.taken.intersect(two.taken) is not None:
            both = f"{leaf.name!r} and {other.name!r} would both be"
            if leaf.name == other.name:
                both = f"two arrays called {leaf.name!r} would be"
            raise MismatchError(f"Cannot save tensor {name!r}: {both} in it. Rename one")
    size = math.prod(parts[0][1].shape)
    if (there := sum(tensor.taken.size for _, tensor in parts)) != size:
        raise MismatchError(
            f"Cannot save tensor {name!r}: {plural(len(parts), 'array')} ({parts[0][0].name!r}) would fill {there} of "
            f"its {plural(size, 'element')}. Save arrays with the other parts too"
        )


def _check_padding(leaf: _Leaf, stored: StoredArray) -> None:
    """Raise unless all elements of an array that no tensor gets are zero: loading it back gives zeros."""
    if not stored.is_padded:
        return
    boxes = [part.box for part in stored.parts]
    hull = Bounds(
        tuple(map(min, zip(*(box.start for box in boxes), strict=True))),
        tuple(map(max, zip(*(box.stop for box in boxes), strict=True))),
    )
    if hull.size != sum(box.size for box in boxes):
        raise UnsupportedError(
            f"Cannot save {leaf.name!r}: its padding lies between the elements of its tensors, expected it behind "
            "them. Save the array without it"
        )
    for box in _around(hull, stored.shape):
        for start, bits in _bits_of(leaf, box):
            if bits.any():
                raise MismatchError(
                    f"Cannot save {leaf.name!r} of shape {stored.shape}: it is padded from {hull.stop} on, and the "
                    f"padding at {start} is not zero. Set it to zero, or save the array without pad="
                )


def _around(hull: Bounds, shape: tuple[int, ...]) -> Iterator[Bounds]:
    """Yield boxes that together are all of an array but the box ``hull``, which begins at 0."""
    for d, (stop, n) in enumerate(zip(hull.stop, shape, strict=True)):
        if stop < n:
            start = tuple(stop if i == d else 0 for i in range(len(shape)))
            yield Bounds(start, (*hull.stop[:d], *shape[d:]))


_CHECKED_ELEMENTS = 4 << 20
"""How many elements of padding are read at a time."""


def _bits_of(leaf: _Leaf, box: Bounds) -> Iterator[tuple[tuple[int, ...], np.ndarray[Any, Any]]]:
    """Yield the elements of a box of an array that are in this process, as bytes, with the index of the first."""
    if not isinstance(leaf.value, jax.Array):
        yield box.start, np.ascontiguousarray(leaf.value[box.slices]).reshape(-1).view(np.uint8)
        return
    for region in local_boxes_of(leaf.value):
        if (both := region.box.intersect(box)) is not None:
            read = reader_of_box(LocalBox(both, region.shards), np.dtype(leaf.value.dtype))
            for start in range(0, both.size, _CHECKED_ELEMENTS):
                yield both.start, read(start, min(both.size, start + _CHECKED_ELEMENTS)).view(np.uint8)
