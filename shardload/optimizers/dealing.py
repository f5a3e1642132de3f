"""Deal decompositions out over devices: each decomposes its share of the factors, then all get all eigenpairs.

six factors of 64, three of 32, four devices
device 0   64 64          device 2   64    32
device 1   64 64          device 3   64    32 32     ◄─ equal numbers first, the rest to who has least to do
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardload.optimizers.rekls_math import Array, Pair

Decompose = Callable[[Array, Pair], Pair]
"""From a stack of factors (b, n, n) and the old eigenpairs to the new ones."""


@dataclass(frozen=True, slots=True)
class Deal:
    """Who decomposes which factors of one size."""

    size: int
    """Length of the factors."""
    factors: tuple[int, ...]
    """Their positions among all factors."""
    hands: tuple[tuple[int, ...], ...]
    """For each device, positions in ``factors``. Numbers of them differ by one at most."""


def deal(sizes: Sequence[int], devices: int) -> tuple[Deal, ...]:
    """Deal factors of these lengths out: equal numbers of every size, the rest to devices with least to do."""
    load = [0] * devices
    found = []
    for size in sorted(set(sizes), reverse=True):
        factors = tuple(i for i, each in enumerate(sizes) if each == size)
        share, rest = divmod(len(factors), devices)
        lucky = sorted(sorted(range(devices), key=lambda d: load[d])[:rest])
        hands, at = [], 0
        for device in range(devices):
            count = share + (device in lucky)
            hands.append(tuple(range(at, at + count)))
            at += count
            load[device] += count * size**3
        found.append(Deal(size, factors, tuple(hands)))
    return tuple(found)


def decompose_dealt(
    factors: Sequence[Array], old: Sequence[Pair], decompose: Decompose, *, axes: tuple[str, ...], devices: int
) -> list[Pair]:
    """Inside `jax.shard_map`, decompose whole factors that every device has; every device gets all eigenpairs."""
    found: dict[int, Pair] = {}
    for group in deal([factor.shape[0] for factor in factors], devices):
        stack = jnp.stack([factors[i] for i in group.factors])
        stacked_old = stacked([old[i] for i in group.factors])
        hands = _own_share(group, stack, stacked_old, decompose, axes)
        everyone = jax.tree.map(lambda x: jax.lax.all_gather(x, axes), hands)
        for device, hand in enumerate(group.hands):
            for slot, place in enumerate(hand):
                found[group.factors[place]] = jax.tree.map(lambda x, d=device, s=slot: x[d, s], everyone)
    return [found[i] for i in range(len(factors))]


def decompose_repeated(factors: Sequence[Array], old: Sequence[Pair], decompose: Decompose) -> list[Pair]:
    """Decompose all factors on every device, those of one size together."""
    found: dict[int, Pair] = {}
    for group in deal([factor.shape[0] for factor in factors], 1):
        pairs = decompose(jnp.stack([factors[i] for i in group.factors]), stacked([old[i] for i in group.factors]))
        found |= {i: jax.tree.map(lambda x, p=place: x[p], pairs) for place, i in enumerate(group.factors)}
    return [found[i] for i in range(len(factors))]


def stacked(pairs: Sequence[Pair]) -> Pair:
    """Stack eigenpairs of one size."""
    found: Pair = jax.tree.map(lambda *each: jnp.stack(each), *pairs)
    return found


def _own_share(group: Deal, stack: Array, old: Pair, decompose: Decompose, axes: tuple[str, ...]) -> Pair:
    """Decompose this device's hand. The last card of a longer hand is the only one that some do not have."""
    share = min(map(len, group.hands))
    longest = max(map(len, group.hands))
    table = np.array([(*hand, *(-1,) * (longest - len(hand))) for hand in group.hands], np.int32)
    mine = jnp.asarray(table)[jax.lax.axis_index(axes)]

    def picked(places: Array) -> tuple[Array, Pair]:
        pick: Any = lambda x: jnp.take(x, places, axis=0)  # noqa: E731
        return pick(stack), jax.tree.map(pick, old)

    parts = [decompose(*picked(mine[:share]))] if share else []
    if longest > share:
        last = mine[share:]
        one, one_old = picked(jnp.maximum(last, 0))
        parts.append(jax.lax.cond(last[0] >= 0, decompose, lambda _, unchanged: unchanged, one, one_old))
    found: Pair = jax.tree.map(lambda *each: jnp.concatenate(each), *parts)
    return found
