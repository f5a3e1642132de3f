"""Whole arrays and a device's shards of them, inside `jax.shard_map`.

    shards of one array on all devices        ─ gather ─►  the whole array on all devices        ─ shard ─►  the shards
    shards of k arrays on each of k devices   ─ collect ─► one whole array on each device        ─ spread ─► the shards

An optimization barrier separates them from the arithmetic: XLA would move slices into matrix products, which then round
differently (seen at 96 x 200).
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec


def gather(shards: Any, specs: Any) -> Any:
    """Return the whole arrays that this device has shards of; ``specs`` has the same structure."""
    return jax.tree.map(_gather, shards, specs)


def shard(arrays: Any, specs: Any) -> Any:
    """Return this device's shards of whole arrays; ``specs`` has the same structure."""
    return jax.tree.map(_shard, arrays, specs)


def collect(stacks: Any, specs: Any, mesh: Mesh) -> Any:
    """Turn stacks of shards into the whole arrays that this device gets; ``specs`` has the same structure.

    Args:
        stacks: (c · k, …) each, with k devices: shards of arrays of one shape. A device gets c of the arrays, every
            k-th one.
        specs: How each array is split.
        mesh: The mesh of all k devices.

    Returns:
        (c, …) each.
    """
    return jax.tree.map(lambda stack, spec: _collect(stack, spec, mesh), stacks, specs)


def spread(arrays: Any, specs: Any, mesh: Mesh) -> Any:
    """Return this device's shards of the arrays on all devices, as stacks: the inverse of `collect`."""
    return jax.tree.map(lambda array, spec: _spread(array, spec, mesh), arrays, specs)


def split_axes(spec: PartitionSpec) -> set[str]:
    """Return the mesh axes over which an array is split."""
    return set(_dims_of_axes(spec))


def _collect(stack: Any, spec: PartitionSpec, mesh: Mesh) -> Any:
    # (c, a, b, …) on a mesh a x b: dims 1 to ndim say which device gets an array, the others are the shard's own.
    stack = stack.reshape(-1, *mesh.devices.shape, *stack.shape[1:])
    dims = _dims_of_axes(spec)
    for place, axis in _minor_first(spec, mesh):
        # Each device along this axis is sent the arrays it gets; their shards are joined along the dim that it splits.
        if axis in dims:
            stack = jax.lax.all_to_all(stack, axis, place, mesh.devices.ndim + 1 + dims[axis], tiled=True)
        # Whole on all devices along this axis: each takes its own arrays, and nothing is sent.
        else:
            stack = jax.lax.dynamic_index_in_dim(stack, jax.lax.axis_index(axis), place, keepdims=True)
    return stack.reshape(stack.shape[0], *stack.shape[mesh.devices.ndim + 1 :])


def _spread(array: Any, spec: PartitionSpec, mesh: Mesh) -> Any:
    array = array.reshape(array.shape[0], *(1 for _ in mesh.axis_names), *array.shape[1:])
    dims = _dims_of_axes(spec)
    for place, axis in reversed(_minor_first(spec, mesh)):
        if axis in dims:
            array = jax.lax.all_to_all(array, axis, mesh.devices.ndim + 1 + dims[axis], place, tiled=True)
        else:
            array = jax.lax.all_gather(array, axis, axis=place, tiled=True)
    return array.reshape(-1, *array.shape[mesh.devices.ndim + 1 :])


def _dims_of_axes(spec: PartitionSpec) -> dict[str, int]:
    return {axis: dim for dim, axes in _split_dims(spec) for axis in axes}


def _minor_first(spec: PartitionSpec, mesh: Mesh) -> list[tuple[int, str]]:
    """Return mesh axes of several devices, with their dims in a stack; of those that split one dim, the minor first."""
    # Minor axes split neighbours: joined first, they give the contiguous blocks that the major axis then joins.
    order = [axis for _, axes in _split_dims(spec) for axis in reversed(axes)]
    rest = [axis for axis in mesh.axis_names if axis not in order]
    return [(1 + mesh.axis_names.index(axis), axis) for axis in (*rest, *order) if mesh.shape[axis] > 1]


def _gather(own: Any, spec: PartitionSpec) -> Any:
    for dim, axes in _split_dims(spec):
        own = jax.lax.all_gather(own, axes, axis=dim, tiled=True)
    return jax.lax.optimization_barrier(own)


def _shard(array: Any, spec: PartitionSpec) -> Any:
    array = jax.lax.optimization_barrier(array)
    for dim, axes in _split_dims(spec):
        # The index along several axes counts like the shards: the first axis is the major one.
        size = array.shape[dim] // math.prod(jax.lax.axis_size(axis) for axis in axes)
        array = jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index(axes) * size, size, dim)
    return array


def _split_dims(spec: PartitionSpec) -> list[tuple[int, tuple[str, ...]]]:
    axes = [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec]
    return [(dim, names) for dim, names in enumerate(axes) if names]
