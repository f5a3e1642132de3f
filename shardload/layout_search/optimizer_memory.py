"""The state of an optimizer for each weight, found by building the optimizer without values.

The size of a weight does not say how much state it has. Adafactor, for example, keeps sums over the rows and columns of
a weight. Adafactor, Muon and `shardload.optimizers.REKLS` treat weights of some names or shapes in another way.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import keras

from shardload.errors import LayoutError
from shardload.keras_bridge.abstraction import abstract
from shardload.keras_bridge.joint_optimizer import JointOptimizer
from shardload.keras_bridge.model_state import OptimizerState, weights_optimized
from shardload.keras_bridge.optimizer_slots import SlotSpread, optimizers_in, spread_of, state_in
from shardload.keras_bridge.variables import set_sharding, sharding_of
from shardload.layouts.model_variables import nbytes
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec

_SplitBy = Literal["weight", "rows", "nothing"]


@dataclass(frozen=True, slots=True)
class Slot:
    """One array that an optimizer keeps for a weight, such as a moment of Adam, and how it is split over devices."""

    shape: tuple[int, ...]
    nbytes: int
    """Bytes of the whole array, over all devices."""
    follows: _SplitBy
    """``weight``: the slot is split like its weight. ``rows``: its dim 0 is split into as many parts as the weight has,
    or not at all if this number does not divide it. ``nothing``: the slot is whole on every device."""
    spread: SlotSpread | None = None
    """Further mesh axes that split the slot, but not its weight, as with `shard_optimizer`; else ``None``."""
    even: bool = False
    """Whether the slot must be split if its weight is split. Counts only if ``follows`` is ``rows``.

    A weight may have a layout whose number of parts does not divide the length of the slot's dim 0. If ``even`` is
    true, this layout is not allowed. If it is false, the layout is allowed, and every device has the whole slot."""

    def allows(self, layout: Layout) -> bool:
        """Whether the weight of this slot may have a layout, which must not split an ``even`` slot unevenly."""
        return not self.even or self.shape[0] % math.prod(layout.parts) == 0

    def device_bytes(self, layout: Layout) -> float:
        """Return the bytes of the slot on each device if its weight has this layout."""
        parts = math.prod(layout.parts)
        match self.follows:
            case "weight" if self.spread is not None:
                return self.nbytes / math.prod(self.spread.applied(layout, self.shape).parts)
            case "weight":
                return self.nbytes / parts
            case "rows" if self.shape[0] % parts == 0:
                return self.nbytes / parts
            case _:
                return self.nbytes


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """The arrays that an optimizer keeps for each weight, and the memory that an update needs in addition."""

    slots: Mapping[int, tuple[Slot, ...]] = field(default_factory=dict)
    """The arrays that the optimizer keeps for each weight, by ``id(weight)``."""
    update_bytes: int = 0
    """Bytes that an update needs on every device besides ``slots``, under any layout: state that it gathers there."""


def memory_of_optimizer(optimizer: Any, weights: Sequence[Any]) -> OptimizerMemory:
    """Return the memory that an optimizer needs for the given weights; one that is not built yet stays unbuilt."""
    if optimizer is None or not weights:
        return OptimizerMemory()
    found: dict[int, list[Slot]] = defaultdict(list)
    with abstract():
        made = checked_optimizer(optimizer)
    is_own = made.built and {id(v) for v in weights_optimized(made)} == {id(v) for v in weights}
    with built_on(made, weights, [None] * len(weights), is_own=is_own) as own:
        spread, joint = spread_of(own), [part for part in optimizers_in(own) if isinstance(part, JointOptimizer)]
        # State that an optimizer splits in its own way, by `id`, with whether it must divide. Only which state it is
        # matters here, so a mesh of one device is enough.
        one = MeshSpec(("x",), (1,))
        factors = {
            key: part.needs_even_state
            for part in joint
            for key in part.state_layouts(lambda v: Layout.replicated(one, len(v.shape)))
        }
        for slot, weight in state_in(own):
            # State of no weight in particular is whole on every device, so any weight can count it.
            part = Slot(tuple(slot.shape), nbytes(slot), "nothing")
            if weight is not None and id(slot) in factors:
                part = replace(part, follows="rows", even=factors[id(slot)])
            elif weight is not None and slot.shape == weight.shape:
                part = replace(part, follows="weight", spread=spread)
            found[id(weights[0] if weight is None else weight)].append(part)
        update = sum(part.update_bytes for part in joint)
    return OptimizerMemory({key: tuple(slots) for key, slots in found.items()}, update)


def checked_optimizer(optimizer: Any) -> Any:
    """Return an optimizer, given as an object or by Keras' name (``"adamw"``); raise for classes and unknown names."""
    if isinstance(optimizer, type):
        raise LayoutError(
            f"Cannot plan for the class {optimizer.__name__}: expected an optimizer. Create one: {optimizer.__name__}()"
        )
    try:
        return keras.optimizers.get(optimizer)
    except (KeyError, TypeError, ValueError) as error:
        raise LayoutError(
            f"Cannot plan for the optimizer {optimizer!r}: Keras has none of that name. Use a name such as adamw, "
            "or rekls on the command line; in Python pass an optimizer to shardload.parallel.search"
        ) from error


@contextmanager
def built_on(optimizer: Any, weights: Sequence[Any], shardings: Sequence[Any], *, is_own: bool) -> Iterator[Any]:
    """Yield an optimizer that is built for the block, without values, as if ``weights`` had these shardings.

    An optimizer that is built already is yielded as it is if it was built for these weights (``is_own``). If not, a
    copy of it is built.
    """
    with abstract():  # also its counters: the devices may be those of another machine, which store nothing
        if optimizer.built and not is_own:
            optimizer = type(optimizer).from_config(optimizer.get_config())
    if optimizer.built:
        yield optimizer
        return
    unbuilt, before = OptimizerState.of(optimizer), [sharding_of(v) for v in weights]
    try:
        for variable, sharding in zip(weights, shardings, strict=True):
            set_sharding(variable, sharding)
        with abstract():
            optimizer.build(list(weights))
        yield optimizer
    finally:
        unbuilt.restore()
        for variable, sharding in zip(weights, before, strict=True):
            set_sharding(variable, sharding)
