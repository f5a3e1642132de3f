"""Values that are on devices now, read a block at a time.

    shards of this process ─► boxes ─► read(start, stop): elements of one box, in row-major order
     ┌──┬──┐                  ┌─────┐
     │a │b │  a, b are here   │a  b │  shards that make up one box are read as one, so that runs are long
     └──┴──┘                  └─────┘

A `jax.Array` keeps the host copy that NumPy makes of it. So the bytes are taken through another array over the same
buffers, which goes at once: a model that was saved has no copy on the host, and training may reuse its memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from shardload.converting.strided_copy import Read, bits
from shardload.manifest import View
from shardload.sharding.bounds import Bounds
from shardload.transfer.strides import address


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A part of an array on one device."""

    box: Bounds
    """Its place in the array."""
    data: jax.Array
    """On its device."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalBox:
    """A box of an array, and the shards that make it up."""

    box: Bounds
    shards: tuple[Shard, ...]


def local_boxes_of(array: jax.Array) -> tuple[LocalBox, ...]:
    """Return the part of an array that this process writes: of each replicated shard, one process writes its first."""
    shards = tuple(
        Shard(_box(shard.index, array.shape), shard.data) for shard in array.addressable_shards if not shard.replica_id
    )
    if not shards:
        return ()
    start = tuple(map(min, zip(*(s.box.start for s in shards), strict=True)))
    stop = tuple(map(max, zip(*(s.box.stop for s in shards), strict=True)))
    # Shards never overlap, so they fill the box around them exactly if the sizes agree.
    whole = Bounds(start, stop)
    if whole.size == sum(s.box.size for s in shards):
        return (LocalBox(whole, shards),)
    return tuple(LocalBox(s.box, (s,)) for s in shards)


def host_value(array: jax.Array) -> NDArray[Any]:
    """Return a small array that is whole on this process, as NumPy's own copy."""
    # A replicated array may have devices of other processes too, and then only its local copies can be read.
    if array.is_fully_replicated:
        return np.array(_uncached(array.addressable_data(0)))
    return np.array(_uncached(array))


def part_of(view: View, box: Bounds) -> View:
    """Return the part of a view in ``box``."""
    return View(view.tensor, address(view, box.start), box.shape, view.strides)


def reader_of_box(region: LocalBox, dtype: np.dtype[Any]) -> Read:
    """Return a reader of a region's elements, cast to ``dtype``; it returns bits as unsigned integers."""
    stored = np.dtype(region.shards[0].data.dtype)
    raw = np.dtype(f"u{stored.itemsize}") if stored.itemsize in (1, 2, 4, 8) else stored

    def read(start: int, stop: int) -> NDArray[Any]:
        out = np.empty(stop - start, raw)
        at = 0
        for box in boxes_of_run(region.box.shape, start, stop):
            _fill(out[at : at + box.size].reshape(box.shape), box, region)
            at += box.size
        return out if dtype == stored else bits(out.view(stored).astype(dtype))

    return read


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Bounds]:
    """Yield the boxes that elements ``[start, stop)`` in row-major order consist of, in that order."""
    if start == stop:
        return
    if not shape:
        yield Bounds((), ())
        return
    # A run is the end of a row, whole rows, and the start of a row; the two partial rows are split in turn.
    #     · · · ■ ■   before
    #     ■ ■ ■ ■ ■
    #     ■ ■ · · ·   after
    length, rest = shape[0], tuple(shape[1:])
    inner = math.prod(rest)
    (first, before), (last, after) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from _inside(first, rest, before, after)
        return
    if before:
        yield from _inside(first, rest, before, inner)
        first += 1
    if first < last:
        yield Bounds((first, *(0 for _ in rest)), (min(last, length), *rest))
    if after:
        yield from _inside(last, rest, 0, after)


def _inside(row: int, rest: tuple[int, ...], start: int, stop: int) -> Iterator[Bounds]:
    for box in boxes_of_run(rest, start, stop):
        yield Bounds((row, *box.start), (row + 1, *box.stop))


def _box(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    found = [part.indices(n) for part, n in zip(index, shape, strict=True)]
    return Bounds(tuple(a for a, _, _ in found), tuple(b for _, b, _ in found))


def _fill(out: NDArray[Any], box: Bounds, region: LocalBox) -> None:
    """Copy a box, relative to the region, from the shards that it overlaps."""
    wanted = box.relative_to(tuple(-start for start in region.box.start))  # relative to the array
    for shard in region.shards:
        if (overlap := wanted.intersect(shard.box)) is not None:
            part = _host_part(shard.data, overlap.relative_to(shard.box.start))
            out[overlap.relative_to(wanted.start).slices] = part.view(out.dtype)


def is_on_host(data: jax.Array) -> bool:
    """Whether NumPy can view an array's memory, so that no part of it must be copied off its device first."""
    return all(device.platform == "cpu" for device in data.devices())


def _host_part(data: jax.Array, box: Bounds) -> NDArray[Any]:
    """Return a box of one device's array: a view of it on a CPU, else a copy of the box alone."""
    if box.shape == data.shape:
        return _uncached(data)
    if is_on_host(data):
        return _uncached(data)[box.slices]
    # Compiled once per shape: an ordinary slice has its position in the program, and would compile for each block.
    return np.asarray(jax.lax.dynamic_slice(data, box.start, box.shape))


def _uncached(data: jax.Array) -> NDArray[Any]:
    """Return an array as NumPy's, without leaving a copy in it."""
    alias = jax.make_array_from_single_device_arrays(
        data.shape, data.sharding, [s.data for s in data.addressable_shards]
    )
    return np.asarray(alias)
