"""Compare the shards of live arrays with the planned ones, device by device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from shardload.keras_bridge.variables import has_value, value_of
from shardload.layout_checks.compiled_step import devices_for
from shardload.layout_search.given_layouts import GivenLayouts, choice_for
from shardload.layouts.choice import LayoutChoice
from shardload.layouts.model_variables import all_variables
from shardload.sharding.bounds import Bounds
from shardload.sharding.layout import Layout
from shardload.units import plural


@dataclass(frozen=True, slots=True)
class Misplaced:
    """A variable whose shards are not the planned ones."""

    path: str
    planned: str
    """The planned layout, as text."""
    found: str
    """The actual sharding, as text."""
    planned_bytes: int
    """Bytes on each device."""
    found_bytes: int
    """Bytes on the device with most."""

    def __str__(self) -> str:
        return (
            f"{self.path}: planned {self.planned} with {plural(self.planned_bytes, 'byte')} per device, found "
            f"{self.found} with {self.found_bytes:,}"
        )


def check_placement(model: Any, choice: GivenLayouts, *, devices: Sequence[Any] | None = None) -> tuple[Misplaced, ...]:
    """Return the variables of a live model whose shards differ from the plan; an empty tuple if none does.

    Reads ``addressable_shards``: the part of the array on each device, and its bytes. Variables without a value are
    left out.

    Args:
        model: A model whose values are on the mesh, such as one that `shardload.load` returned.
        choice: Layouts of its variables, as `choose` returns them for this model, or a plan.
        devices: One per mesh position; by default the first of ``jax.devices()``.

    Raises:
        LayoutError: When the layouts are for another model object, or the plan is for another model.
        MeshError: When there are not as many devices as positions.
    """
    choice = choice_for(model, choice)
    devices = devices_for(choice.mesh, devices)
    return tuple(misplaced_by_id(model, choice, devices).values())


def misplaced_by_id(model: Any, choice: LayoutChoice, devices: Sequence[Any]) -> dict[int, Misplaced]:
    """Return the variables of a live model whose shards are not those of the choice, by ``id``."""
    found = {
        key: misplaced(v.path, value_of(v), choice.of(v), devices)
        for key, v in all_variables(model).items()
        if key in choice.by_id and has_value(v)
    }
    return {key: one for key, one in found.items() if one is not None}


def misplaced(path: str, array: Any, layout: Layout, devices: Sequence[Any]) -> Misplaced | None:
    """Return how an array differs from its layout, ``None`` if every device has the planned part of it."""
    shape, shards = tuple(array.shape), array.addressable_shards
    nbytes = layout.bounds(shape)[0].size * array.dtype.itemsize
    # Only this process's shards can be read; the other processes check theirs.
    here = {device for device in devices if device.process_index == jax.process_index()}
    planned = {d: (box, nbytes) for d, box in zip(devices, layout.bounds(shape), strict=True) if d in here}
    found = {}
    for shard in shards:
        ranges = [part.indices(size)[:2] for part, size in zip(shard.index, shape, strict=True)]
        box = Bounds(tuple(start for start, _ in ranges), tuple(stop for _, stop in ranges))
        found[shard.device] = (box, shard.data.nbytes)
    if planned == found:
        return None
    sharding = getattr(array.sharding, "spec", array.sharding)
    return Misplaced(path, str(layout), str(sharding), nbytes, max(shard.data.nbytes for shard in shards))


def bytes_by_device(arrays: Iterable[Any]) -> dict[Any, int]:
    """Return the bytes that arrays take on each device of this process, in the order of device ids."""
    total: Counter[Any] = Counter()
    for array in arrays:
        for shard in array.addressable_shards:
            total[shard.device] += shard.data.nbytes
    return dict(sorted(total.items(), key=lambda found: found[0].id))
