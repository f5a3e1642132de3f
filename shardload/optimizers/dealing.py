"""Put matrices into batches, and deal matrices or decompositions out over devices.

If there are as many matrices of one kind as devices, each device updates one alone. In a batch of others, each device
decomposes its share of the factors; then all devices get all eigenpairs.

six factors of 64, three of 32, four devices
device 0   64 64          device 2   64    32
device 1   64 64          device 3   64    32 32     ◄─ equal numbers first, the rest to whoever has least to do
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardload.optimizers.rekls_math import Array, Eigenpairs

EVERYWHERE_TIMES = 2
"""Memory of an update on each device, as a multiple of the state that is whole on all of them; measured with XLA on
CPU (1.5 to 2.1)."""
ALONE_TIMES = 3
"""The same for matrices that are dealt out, as a multiple of the state that is whole on this device (2.6 to 2.8)."""
Decompose = Callable[[Array, Eigenpairs], Eigenpairs]
"""From a stack of factors (b, n, n) and the old eigenpairs to the new ones."""


@dataclass(frozen=True, slots=True)
class Sized:
    """What batches depend on; equal matrices can be dealt out."""

    sides: tuple[int, int]
    """Rows and columns."""
    nbytes: int
    """Of the whole matrix and its state."""
    is_split: bool
    """Whether it and its state are split over all devices. Others would have to be gathered again afterwards."""
    kind: Hashable
    """Everything else that the update of a matrix depends on."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Matrices that are updated at the same time."""

    places: tuple[int, ...]
    """Their positions among all matrices; of those dealt out, the first k go to one each of k devices, and so on."""
    is_dealt: bool
    """Whether each is whole on one device only, which computes it alone. Otherwise all are whole on all devices."""


@dataclass(frozen=True, slots=True)
class Deal:
    """Which device decomposes which factors of one size."""

    size: int
    """Length of the factors."""
    factors: tuple[int, ...]
    """Their positions among all factors."""
    hands: tuple[tuple[int, ...], ...]
    """For each device, positions in ``factors``. Numbers of them differ by one at most."""


def batched(matrices: Sequence[Sized], limit: int, devices: int) -> tuple[Batch, ...]:
    """Put matrices into batches of at most ``limit`` bytes, or of one matrix.

    Matrices of one kind that are split over all devices are dealt out, the same number to each device. Those left over
    are whole everywhere; matrices of one shape, or its transpose, share a batch there, so that their decompositions
    divide evenly.

    Args:
        matrices: In the order to which the batches refer.
        limit: Most bytes of a batch that is whole everywhere. A batch that is dealt out needs no more memory than one.
        devices: Number of devices to deal matrices to; 1 deals none.
    """
    found, rest = [], []
    for kind in dict.fromkeys(matrices):
        places = [place for place, each in enumerate(matrices) if each == kind]
        # A device needs memory only for the matrices it gets, so a batch holds `devices` times as many.
        share = max(limit * EVERYWHERE_TIMES // (kind.nbytes * ALONE_TIMES), 1) * devices
        dealt = len(places) - len(places) % devices if devices > 1 and kind.is_split else 0
        found += [Batch(tuple(places[at : min(at + share, dealt)]), is_dealt=True) for at in range(0, dealt, share)]
        rest += places[dealt:]
    return (*found, *_whole_batches(matrices, rest, limit))


def _whole_batches(matrices: Sequence[Sized], places: Sequence[int], limit: int) -> list[Batch]:
    found: list[tuple[int, ...]] = []
    room = 0
    # A matrix and its transpose have factors of the same two sizes: sorted sides bring them together.
    for place in sorted(places, key=lambda place: sorted(matrices[place].sides)):
        if not found or matrices[place].nbytes > room:
            found.append(())
            room = limit
        found[-1] += (place,)
        room -= matrices[place].nbytes
    return [Batch(batch, is_dealt=False) for batch in found]


def deal(sizes: Sequence[int], devices: int) -> tuple[Deal, ...]:
    """Deal out factors of these lengths: equal numbers of every size, the rest to the devices with least to do."""
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
    factors: Sequence[Array], old: Sequence[Eigenpairs], decompose: Decompose, *, axes: tuple[str, ...], devices: int
) -> list[Eigenpairs]:
    """Inside `jax.shard_map`, decompose whole factors that every device has; every device gets all eigenpairs.

    Args:
        factors: (n, n) each, of any lengths n, the same on every device.
        old: The eigenpairs of each factor before the step.
        decompose: Decomposes a stack of factors of one size.
        axes: All axes of the mesh, in its order.
        devices: Number of devices of the mesh.
    """
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


def decompose_repeated(factors: Sequence[Array], old: Sequence[Eigenpairs], decompose: Decompose) -> list[Eigenpairs]:
    """Decompose all factors on every device, those of one size together."""
    found: dict[int, Eigenpairs] = {}
    for group in deal([factor.shape[0] for factor in factors], 1):
        pairs = decompose(jnp.stack([factors[i] for i in group.factors]), stacked([old[i] for i in group.factors]))
        found |= {i: jax.tree.map(lambda x, p=place: x[p], pairs) for place, i in enumerate(group.factors)}
    return [found[i] for i in range(len(factors))]


def stacked(trees: Sequence[Any]) -> Any:
    """Stack the arrays of trees of one structure: eigenpairs of one size, or states of one kind."""
    return jax.tree.map(lambda *each: jnp.stack(each), *trees)


def _picked(group: Deal, cards: slice, axes: tuple[str, ...]) -> Array:
    """Return which of these cards this device has: positions in the group, -1 for none."""
    # All devices run one program: each looks up its own row in a constant.
    hands = [hand[cards] for hand in group.hands]
    longest = max(map(len, hands))
    table = np.array([(*hand, *(-1,) * (longest - len(hand))) for hand in hands], np.int32)
    return jnp.asarray(table)[jax.lax.axis_index(axes)]


def _at(places: Array, stack: Array, old: Eigenpairs) -> tuple[Array, Eigenpairs]:
    found: tuple[Array, Eigenpairs] = jax.tree.map(lambda x: jnp.take(x, places, axis=0), (stack, old))
    return found


def _rest(
    group: Deal, share: int, stack: Array, old: Eigenpairs, decompose: Decompose, *, axes: tuple[str, ...]
) -> Eigenpairs:
    """Decompose what some devices have beyond their share, one each; return the pairs in the order of devices.

    An all-gather would also send padding from devices that have nothing. Instead, results are summed over devices that
    have zeros in all other places.
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
