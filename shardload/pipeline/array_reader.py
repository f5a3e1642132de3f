"""From the targets of `load_arrays` to the arrays to load: a tree or a function becomes a list of `WantedArray`.

targets ─► `leaves_of`: target by name ─► `ArrayReader.wanted`: the tensor, its elements, dtype and sharding of each
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from shardload.errors import MismatchError, UsageError
from shardload.manifest import Manifest, Tensor
from shardload.pipeline.array_parts import StoredArray, array_to_load, whole_array
from shardload.pipeline.array_targets import (
    KINDS,
    SCALARS,
    Stated,
    TensorNames,
    WantedArray,
    is_tree,
    narrows,
    stated,
    target_sharding,
)
from shardload.pipeline.stored_as import StoredAs
from shardload.transfer.casts import ENABLE_64_BITS, check_cast
from shardload.units import is_function


def is_rule(targets: Any) -> bool:
    """Whether ``targets`` is no tree, but one target for every tensor, or a function that returns the target of one."""
    return isinstance(targets, KINDS) or (callable(targets) and not is_tree(targets))


def leaves_of(targets: Any, reader: ArrayReader) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]:
    """Return the targets by name, and a function that puts the loaded arrays into the same structure as ``targets``."""
    if is_rule(targets):
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


def _by_rule(targets: Any, reader: ArrayReader) -> dict[str, Any]:
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
    takes_dtype = takes(targets, "name", (), np.dtype(np.float32))
    if not takes_dtype and not takes(targets, "name", ()):
        raise UsageError(
            "Cannot call the function of targets: expected one that takes the name and shape of an array, and its "
            "dtype as well if it has three arguments"
        )
    dtypes = {t.name: (t.dtype,) if takes_dtype else () for t in every}
    found = {t.name: targets(t.name, reader.shape_of(t), *dtypes[t.name]) for t in every}
    return {name: target for name, target in found.items() if target is not None}


def takes(function: Callable[..., Any], *given: Any) -> bool:
    """Whether a caller's function accepts the arguments ``given``; ``True`` for a builtin without a signature."""
    try:
        inspect.signature(function).bind(*given)
    except TypeError:
        return False
    except ValueError:
        pass
    return True


@dataclass(frozen=True, slots=True)
class ArrayReader:
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
            return self.names.stored(name) not in self.manifest.tensors
        return callable(target) and not isinstance(target, KINDS)

    def wanted(self, leaves: Mapping[str, Any]) -> list[WantedArray]:
        """Return the array to load for each target, by the names of `leaves_of`; raise if one cannot be loaded so."""
        if words := [name for name, target in leaves.items() if isinstance(target, str)]:
            raise UsageError(
                f"Cannot place {words[0]!r} by {leaves[words[0]]!r}: it is text, expected a target "
                "(a tuple is a tree of targets). Write PartitionSpec(…)"
            )
        named = {name: self.names.stored(name) for name in leaves}
        tensors = {name: tensor for name, tensor in named.items() if isinstance(tensor, str)}
        self.names.check(tensors, {name: stated(leaves[name]).shape for name in tensors})
        return [self._one(name, target, self._stored(name, named[name], target)) for name, target in leaves.items()]

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of the array made from a tensor: its dims have the order of the argument ``transpose``."""
        return whole_array(tensor, self._order(tensor.name, tensor)).shape

    def _stored(self, name: str, stored: str | StoredAs, target: Any) -> StoredArray:
        if isinstance(stored, str):
            tensor = self.manifest.tensors[stored]
            return whole_array(tensor, self._order(name, tensor))
        if isinstance(self.transpose, Mapping) and name in self.transpose:
            raise UsageError(f"Cannot transpose {name!r}: it has a rule, expected the order of dims there")
        return array_to_load(stored, name, self.manifest.tensors, stated(target).shape)

    def _one(self, name: str, target: Any, stored: StoredArray) -> WantedArray:
        tensors = [self.manifest.tensors[tensor.name] for tensor in stored.tensors]
        tensor = tensors[0]
        dtypes = {each.dtype for each in tensors}
        if self.dtype is not None:
            wanted = jax.numpy.dtype(self.dtype)
            dtypes = {wanted if jax.numpy.issubdtype(each, jax.numpy.floating) else each for each in dtypes}
        if type(target) in SCALARS and not stored.shape and tensor.dtype.kind in _KIND_OF[type(target)]:
            here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            return WantedArray(name, stored, tensor.dtype, here, finish=type(target))
        found = stated(target)
        if found.shape is not None and found.shape != stored.shape:
            if len(tensors) > 1:
                raise MismatchError(
                    f"Cannot load {name!r}: its target has shape {found.shape}, but by its rule, the tensors make up "
                    f"{stored.shape}. Change one of them"
                )
            raise MismatchError(
                f"Cannot load {name!r}: its target has shape {found.shape}, but tensor {tensor.name!r} has "
                f"{stored.shape}. Pass transpose= if only the order of its dims differs"
            )
        if len(dtypes) > 1 and found.dtype is None:
            other = next(each for each in tensors if each.dtype != tensor.dtype)
            raise MismatchError(
                f"Cannot load {name!r}: {tensor.name!r} is stored in {tensor.dtype}, and {other.name!r} in "
                f"{other.dtype}, expected one dtype. State one by dtype=, or in the target"
            )
        dtype = dtypes.pop() if found.dtype is None else found.dtype
        if found.on_host:
            here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            for each in tensors:
                if not narrows(each.dtype, dtype):
                    check_cast(each.dtype, dtype, variable=name, tensor=each.name)
            return WantedArray(name, stored, dtype, here, found.finish, on_host=True)
        placed = target_sharding(name, self._sharding(name, found), self.mesh)
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise UsageError(
                f"Cannot load {name!r} as {dtype}: JAX has 64-bit dtypes disabled. {ENABLE_64_BITS}, or leave the "
                "tensor out"
            )
        return WantedArray(name, stored, dtype, placed, found.finish)

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


_KIND_OF = {bool: "b", int: "iu", float: "f"}
