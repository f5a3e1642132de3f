"""Decide which devices update which matrices of REKLS, and turn shards into whole arrays for that.

`batched` says which matrices one device updates alone. Of all others, each device decomposes its share of the factors
(square matrices, two for each weight matrix), then all devices get all eigenpairs. For example, four devices share six
factors of 64 x 64 and three of 32 x 32::

    device 0   64 64          device 2   64    32
    device 1   64 64          device 3   64    32 32     ◄─ equal numbers first, the rest to whoever has least to do

Inside `jax.shard_map`, four functions turn shards into whole arrays and back::

    shards of one array on all devices        ─ gather ─►  the whole array on all devices        ─ shard ─►  the shards
    shards of k arrays on each of k devices   ─ collect ─► one whole array on each device        ─ spread ─► the shards

They contain optimization barriers: without these, XLA would merge them with the arithmetic, which then rounds
differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardload.optimizers.rekls_math import Array, Eigenpairs

EVERYWHERE_TIMES = 2
"""How many times the bytes of their state a device needs as memory to update matrices that are whole on all devices.
Measured with XLA on CPU: 1.5 to 2.1."""
ALONE_TIMES = 3
"""How many times the bytes of their state a device needs as memory to update matrices alone. Measured: 2.6 to 2.8."""
_Decompose = Callable[[Array, Eigenpairs], Eigenpairs]
"""Function that computes new eigenpairs, from a stack of factors (b, n, n) and their old eigenpairs."""


@dataclass(frozen=True, slots=True)
class Sized:
    """The properties of a weight matrix. Matrices that are equal in all of them can be dealt out, see `batched`."""

    sides: tuple[int, int]
    """Numbers of rows and columns of the matrix, which are the sizes of its factors."""
    nbytes: int
    """Bytes of the optimizer's state of this matrix, if it is whole on a device."""
    is_split: bool
    """Whether the matrix and its state are split over all devices. Only such a matrix is updated by one device, which
    then sends a shard to each of the others. If several devices had copies, each would have to be sent a whole one."""
    kind: Hashable
    """Everything else on which the compiled update depends, such as shape and dtype. Where it is equal, one program
    updates all the matrices."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Matrices that are updated together. Batches follow one another, so that few matrices are whole at a time."""

    places: tuple[int, ...]
    """Positions of the batch's matrices in the list of all. If dealt out to k devices, each device gets every k-th."""
    is_dealt: bool
    """Whether each matrix is whole on one device only, which updates it; otherwise all are whole on all devices."""


@dataclass(frozen=True, slots=True)
class Deal:
    """Which device decomposes which factors, among the factors of one size (number of rows)."""

    size: int
    factors: tuple[int, ...]
    """Positions of the factors of this size in the list of all factors."""
    hands: tuple[tuple[int, ...], ...]
    """For each device, the indices in ``factors`` of those that it decomposes. Their numbers differ by at most one."""


def batched(matrices: Sequence[Sized], limit: int, devices: int) -> tuple[Batch, ...]:
    """Put matrices into batches of at most ``limit`` bytes of state on each device, or one matrix if it is larger.

    Matrices that are equal and split over all devices are dealt out. Each device gets the same number of them whole,
    and updates them alone. All other matrices, and those left after equal numbers, are whole on every device. They are
    sorted by shape: a batch then has many factors of one size, so that each device can decompose equally many.
    """
    found, rest = [], []
    for kind in dict.fromkeys(matrices):
        places = [place for place, each in enumerate(matrices) if each == kind]
        # A device needs memory only for the matrices it gets, so a batch holds `devices` times as many.
        share = max(limit * EVERYWHERE_TIMES // (kind.nbytes * ALONE_TIMES), 1) * devices
        dealt = len(places) - len(places) % devices if devices > 1 and kind.is_split else 0
        found += [Batch(tuple(places[at : min(at + share, dealt)]), is_dealt=True) for at in range(0, dealt, share)]
        rest += places[dealt:]
    everywhere: list[tuple[int, ...]] = []
    room = 0
    # A matrix and its transpose have factors of the same two sizes: sorted sides bring them together.
    for place in sorted(rest, key=lambda place: sorted(matrices[place].sides)):
        if not everywhere or matrices[place].nbytes > room:
            everywhere.append(())
            room = limit
        everywhere[-1] += (place,)
        room -= matrices[place].nbytes
    return (*found, *(Batch(batch, is_dealt=False) for batch in everywhere))


def deal(sizes: Sequence[int], devices: int) -> tuple[Deal, ...]:
    """Decide which device decomposes which factors: equally many of each size, the rest to the least busy devices."""
    load = [0] * devices
    found = []
    # Largest first, so that smaller factors even out what is left over of larger ones.
    for size in sorted(set(sizes), reverse=True):
        factors = tuple(i for i, each in enumerate(sizes) if each == size)
        share, rest = divmod(len(factors), devices)
        lucky = sorted(sorted(range(devices), key=lambda d: load[d])[:rest])
        hands, at = [], 0
        for device in range(devices):
            count = share + (device in lucky)
            hands.append(tuple(range(at, at + count)))
            at += count
            # A decomposition takes O(n³) operations.
            load[device] += count * size**3
        found.append(Deal(size, factors, tuple(hands)))
    return tuple(found)


def decompose_dealt(
    factors: Sequence[Array], old: Sequence[Eigenpairs], decompose: _Decompose, *, axes: tuple[str, ...], devices: int
) -> list[Eigenpairs]:
    """Inside `jax.shard_map`, find the eigenpairs of each factor on one device only; return all on every device."""
    found: dict[int, Eigenpairs] = {}
    for group in deal([factor.shape[0] for factor in factors], devices):
        stack = jnp.stack([factors[i] for i in group.factors])
        stacked_old = stacked([old[i] for i in group.factors])
        share = min(map(len, group.hands))
        rest = [hand[share] for hand in group.hands if len(hand) > share]
        # What every device has goes through an all-gather, (devices, share, n, n), which needs equal numbers.
        if share:
            mine = _picked(group, slice(share), axes)
            hands = decompose(*_at(mine, stack, stacked_old))
            everyone = jax.tree.map(lambda x: jax.lax.all_gather(x, axes), hands)
            for device, hand in enumerate(group.hands):
                for slot, place in enumerate(hand[:share]):
                    found[group.factors[place]] = jax.tree.map(lambda x, d=device, s=slot: x[d, s], everyone)
        if rest:
            pairs = _rest(group, share, stack, stacked_old, decompose, axes=axes)
            found |= {group.factors[p]: jax.tree.map(lambda x, s=slot: x[s], pairs) for slot, p in enumerate(rest)}
    return [found[i] for i in range(len(factors))]


def decompose_repeated(factors: Sequence[Array], old: Sequence[Eigenpairs], decompose: _Decompose) -> list[Eigenpairs]:
    """Decompose all factors on every device; factors of one size are decomposed as one stack."""
    found: dict[int, Eigenpairs] = {}
    for group in deal([factor.shape[0] for factor in factors], 1):
        pairs = decompose(jnp.stack([factors[i] for i in group.factors]), stacked([old[i] for i in group.factors]))
        found |= {i: jax.tree.map(lambda x, p=place: x[p], pairs) for place, i in enumerate(group.factors)}
    return [found[i] for i in range(len(factors))]


def stacked(trees: Sequence[Any]) -> Any:
    """Join pytrees of the same structure into one. Each of its arrays stacks, along a new dim 0, one array per tree."""
    return jax.tree.map(lambda *each: jnp.stack(each), *trees)


def _picked(group: Deal, cards: slice, axes: tuple[str, ...]) -> Array:
    """Return which of ``group.factors`` this device decomposes now, by position; shorter lists end in -1s."""
    # All devices run one program: each looks up its own row in a constant.
    hands = [hand[cards] for hand in group.hands]
    longest = max(map(len, hands))
    table = np.array([(*hand, *(-1,) * (longest - len(hand))) for hand in hands], np.int32)
    return jnp.asarray(table)[jax.lax.axis_index(axes)]


def _at(places: Array, stack: Array, old: Eigenpairs) -> tuple[Array, Eigenpairs]:
    found: tuple[Array, Eigenpairs] = jax.tree.map(lambda x: jnp.take(x, places, axis=0), (stack, old))
    return found


def _rest(
    group: Deal, share: int, stack: Array, old: Eigenpairs, decompose: _Decompose, *, axes: tuple[str, ...]
) -> Eigenpairs:
    """Decompose the factors left after equal shares, at most one per device; return their eigenpairs on all devices.

    An all-gather would also send padding for devices without a factor. Instead, each device puts its result into an
    array of zeros, and the arrays of all devices are summed.
    """
    mine = _picked(group, slice(share, share + 1), axes)
    has = mine[0] >= 0
    # Devices without a factor take the first one, and skip its decomposition.
    one, one_old = _at(jnp.maximum(mine, 0), stack, old)
    pair = jax.lax.cond(has, decompose, lambda _, unchanged: unchanged, one, one_old)
    order = np.cumsum([len(hand) > share for hand in group.hands]) - 1
    slot = jnp.asarray(order.astype(np.int32))[jax.lax.axis_index(axes)]

    def everywhere(own: Array) -> Array:
        # As integers, 0 + x has exactly the bits of x, also for -0.0 and NaN.
        bits = jax.lax.bitcast_convert_type(own, jnp.uint32)
        room = jnp.zeros((int(order[-1]) + 1, *own.shape[1:]), jnp.uint32)
        placed = jax.lax.dynamic_update_slice_in_dim(room, jnp.where(has, bits, 0), jnp.maximum(slot, 0), 0)
        placed = jnp.where(has, placed, room)
        return jax.lax.bitcast_convert_type(jax.lax.psum(placed, axes), own.dtype)

    found: Eigenpairs = jax.tree.map(everywhere, pair)
    return found


def gather_shards(shards: Any, specs: Any) -> Any:
    """Inside `jax.shard_map`, join the shards of all devices to whole arrays; ``specs`` says how they are split."""

    def one(own: Any, spec: PartitionSpec) -> Any:
        for dim, axes in _split_dims(spec):
            own = jax.lax.all_gather(own, axes, axis=dim, tiled=True)
        return jax.lax.optimization_barrier(own)

    return jax.tree.map(one, shards, specs)


def shard(arrays: Any, specs: Any) -> Any:
    """Inside `jax.shard_map`, cut this device's shards out of whole arrays; ``specs`` says how they are split."""

    def one(array: Any, spec: PartitionSpec) -> Any:
        array = jax.lax.optimization_barrier(array)
        for dim, axes in _split_dims(spec):
            # The index along several axes counts like the shards: the first axis is the major one.
            size = array.shape[dim] // math.prod(jax.lax.axis_size(axis) for axis in axes)
            array = jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index(axes) * size, size, dim)
        return array

    return jax.tree.map(one, arrays, specs)


def collect_dealt(stacks: Any, specs: Any, mesh: Mesh) -> Any:
    """Inside `jax.shard_map`, join shards of arrays so that each device has some of the arrays whole, to update them.

    Each stack has this device's shards of c · k arrays along dim 0, for k devices. The result has c whole arrays each:
    device i gets the arrays i, i + k, and so on. ``specs`` says how those of each stack are split over ``mesh``.
    """

    def one(stack: Any, spec: PartitionSpec) -> Any:
        # (c, a, b, …) on a mesh a x b: dims 1 to ndim say which device gets an array, the others are the shard's own.
        stack = stack.reshape(-1, *mesh.devices.shape, *stack.shape[1:])
        dims = _dims_of_axes(spec)
        for place, axis in _minor_first(spec, mesh):
            # Each device along this axis is sent the arrays it gets; their shards are joined along the dim it splits.
            if axis in dims:
                stack = jax.lax.all_to_all(stack, axis, place, mesh.devices.ndim + 1 + dims[axis], tiled=True)
            # Whole on all devices along this axis: each takes its own arrays, and nothing is sent.
            else:
                stack = jax.lax.dynamic_index_in_dim(stack, jax.lax.axis_index(axis), place, keepdims=True)
        return stack.reshape(stack.shape[0], *stack.shape[mesh.devices.ndim + 1 :])

    return jax.tree.map(one, stacks, specs)


def spread_dealt(arrays: Any, specs: Any, mesh: Mesh) -> Any:
    """Inside `jax.shard_map`, split whole arrays over all devices again, after each device updated its own.

    Each stack has the c whole arrays of this device along dim 0. The result has this device's shards of the arrays of
    all k devices, c · k along dim 0. ``specs`` says how an array of each stack is split over ``mesh``.
    """

    def one(array: Any, spec: PartitionSpec) -> Any:
        array = array.reshape(array.shape[0], *(1 for _ in mesh.axis_names), *array.shape[1:])
        dims = _dims_of_axes(spec)
        for place, axis in reversed(_minor_first(spec, mesh)):
            if axis in dims:
                array = jax.lax.all_to_all(array, axis, mesh.devices.ndim + 1 + dims[axis], place, tiled=True)
            else:
                array = jax.lax.all_gather(array, axis, axis=place, tiled=True)
        return array.reshape(-1, *array.shape[mesh.devices.ndim + 1 :])

    return jax.tree.map(one, arrays, specs)


def split_axes(spec: PartitionSpec) -> set[str]:
    """Return the names of the mesh axes that split an array with this `PartitionSpec`, in any dim."""
    return set(_dims_of_axes(spec))


def _dims_of_axes(spec: PartitionSpec) -> dict[str, int]:
    return {axis: dim for dim, axes in _split_dims(spec) for axis in axes}


def _minor_first(spec: PartitionSpec, mesh: Mesh) -> list[tuple[int, str]]:
    """Return the mesh axes in the order in which shards are joined along them, without axes of one device.

    Each comes with its dim in a stack of arrays (c, *mesh shape, …), where dim 1 belongs to the first axis of the mesh.
    If several axes split one dim of an array, the last is joined first: along it, devices have adjacent shards.
    """
    # Minor axes split neighbours: joined first, they give the contiguous blocks that the major axis then joins.
    order = [axis for _, axes in _split_dims(spec) for axis in reversed(axes)]
    rest = [axis for axis in mesh.axis_names if axis not in order]
    return [(1 + mesh.axis_names.index(axis), axis) for axis in (*rest, *order) if mesh.shape[axis] > 1]


def _split_dims(spec: PartitionSpec) -> list[tuple[int, tuple[str, ...]]]:
    axes = [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec]
    return [(dim, names) for dim, names in enumerate(axes) if names]
