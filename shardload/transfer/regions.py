"""Where the elements of a tensor lie: in one run of a file, or in several chunks.

A chunk of shape ``chunk_shape`` stores its elements in C order (after decoding, if it is packed), including those past
the tensor's edge. For one chunk, a variable is a view with the chunk's own strides, of which only a box exists::

    tensor (4, 6), chunks (4, 3)      variable = tensor, seen from chunk (0, 1)
        0  1  2 │ 3  4  5                 strides (3, 1), offset -3: index (0, 3) is element 0 of the chunk
        6  7  8 │ 9 10 11                 box [0:4, 3:6]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.errors import LayoutError
from shardload.manifest import Chunked, Decoded, Extent, Packed, Tensor, View, c_strides
from shardload.sharding.bounds import Bounds
from shardload.stores.location import Location

SCRATCH_BYTES = 64 << 20
"""Most scratch per transfer, with fewer threads if necessary: 8 MiB for each of eight."""
CHECKING_BYTES = SCRATCH_BYTES + (64 << 20)
"""Most scratch per transfer if verified units are kept or prefetched as well."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a tensor stored in one place."""

    path: Location
    """The file (for a decoded tensor, the first one)."""
    offset: int
    """Byte offset of its first element; meaningless for a decoded tensor."""
    size: int
    """Elements."""
    origin: tuple[int, ...] | None = None
    """For a chunk, the tensor index of its first element; None where the region is the whole tensor."""
    shape: tuple[int, ...] = ()
    """The chunk's shape."""
    packed: Packed | None = None
    """The encoding, if the chunk decodes as a whole."""

    def stored_bytes(self, dtype: np.dtype[Any]) -> int:
        """Return its size in the file; for a decoded tensor the size is unknown."""
        return self.size * dtype.itemsize if self.packed is None else self.packed.n_bytes

    def unpacking_bytes(self, dtype: np.dtype[Any]) -> int:
        """Return the memory needed to decode it: the input, and the output in TensorStore and here."""
        if self.packed is None:
            return 0
        return 2 * self.size * dtype.itemsize + self.packed.n_bytes + len(self.packed.kept)


@dataclass(frozen=True, slots=True)
class RegionView:
    """The part of a variable in one region."""

    view: View
    """Elements counted from the region's first one; only those of ``box`` exist."""
    box: Bounds
    """In the variable's index space."""


def regions(tensor: Tensor) -> Iterator[Region]:
    """Yield the regions of a tensor, in declaration order."""
    match tensor.storage:
        case Extent(path, offset):
            yield Region(path, offset, tensor.size)
        case Packed() as whole:
            yield Region(whole.path, whole.offset, tensor.size, packed=whole)
        case Decoded(reader):
            yield Region(reader.paths[0], 0, tensor.size)
        case Chunked(shape, extents):
            for index, extent in extents.items():
                origin = tuple(i * n for i, n in zip(index, shape, strict=True))
                packed = extent if isinstance(extent, Packed) else None
                yield Region(extent.path, extent.offset, math.prod(shape), origin, shape, packed)


def view_in_region(view: View, tensor: Tensor, region: Region) -> RegionView | None:
    """Return the part of a view in a region; None if they do not overlap.

    Raises:
        LayoutError: When a view of a chunked tensor does more than select, reorder and slice dims.
    """
    if 0 in view.shape:
        return None
    if region.origin is None:
        return RegionView(view, Bounds.whole(view.shape))
    if not math.prod(tensor.shape):
        return None
    # Where the view starts in the tensor, and which dim of the tensor each of its dims walks along.
    dims = _dims(view, tensor)
    first = tuple(view.offset // t % n for t, n in zip(c_strides(tensor.shape), tensor.shape, strict=True))
    inner = c_strides(region.shape)
    # A dim that the view fixes to one index (or drops) selects the chunk by that index.
    for j, (i, a, n) in enumerate(zip(first, region.origin, region.shape, strict=True)):
        if j not in dims and not a <= i < a + n:
            return None
    start, stop = [0] * len(view.shape), list(view.shape)
    for d, dim in enumerate(dims):
        if dim is not None:
            start[d] = max(0, region.origin[dim] - first[dim])
            stop[d] = min(view.shape[d], region.origin[dim] + region.shape[dim] - first[dim])
            if start[d] >= stop[d]:
                return None
    strides = tuple(0 if j is None else inner[j] for j in dims)
    # Negative where the view starts before the chunk; only elements of the box are ever addressed.
    offset = sum((i - a) * t for i, a, t in zip(first, region.origin, inner, strict=True))
    return RegionView(View(view.tensor, offset, view.shape, strides), Bounds(tuple(start), tuple(stop)))


def _dims(view: View, tensor: Tensor) -> list[int | None]:
    """Return the tensor dim that each dim of a view follows; None for a dim of length 1."""
    strides = c_strides(tensor.shape)
    # Dims longer than 1 have different strides in C order, so a stride tells the dim.
    along = {t: j for j, (t, n) in enumerate(zip(strides, tensor.shape, strict=True)) if n > 1}
    found = [along.get(t) if n > 1 else None for n, t in zip(view.shape, view.strides, strict=True)]
    walked = [(n, j) for n, j in zip(view.shape, found, strict=True) if n > 1]
    known = [j for _, j in walked if j is not None]
    first = [view.offset // t % n for t, n in zip(strides, tensor.shape, strict=True)]
    fits = all(j is not None and first[j] + n <= tensor.shape[j] for n, j in walked)
    if not fits or len(set(known)) < len(known):
        raise LayoutError(
            f"Cannot load a view of tensor {tensor.name!r} of shape {tensor.shape}, which is stored in chunks: found "
            f"shape {view.shape} and strides {view.strides}, expected dims that are only selected, reordered or sliced"
        )
    return found


def paths_of(tensor: Tensor) -> tuple[Location, ...]:
    """Return the files a tensor is read from."""
    match tensor.storage:
        case Decoded(reader):
            return reader.paths
        case Extent(path):
            return (path,)
        case _:
            return tuple(dict.fromkeys(region.path for region in regions(tensor)))


def least_budget(tensor: Tensor, *, through_units: bool, uploads: bool) -> int:
    """Return the smallest budget that can decode every chunk of a tensor; 0 if no chunk decodes as a whole.

    Args:
        tensor: The tensor.
        through_units: Whether reads are verified or remote, which takes up to half of the budget, `CHECKING_BYTES` at
            most. Scratch alone takes a quarter, `SCRATCH_BYTES` at most.
        uploads: Whether shards are staged as well, in at most half of the rest.
    """
    if not _is_packed(tensor):
        return 0
    most = max(region.unpacking_bytes(tensor.dtype) for region in regions(tensor))
    # Twice a chunk's shards, as they get half of what is left.
    if uploads:
        most += 2 * max(region.size for region in regions(tensor)) * tensor.dtype.itemsize
    # ``most`` must fit into what units and scratch leave: the shares above, solved for the budget.
    if through_units:
        return min(2 * most, most + CHECKING_BYTES) + (2 << 20)
    return min(most * 4 // 3, most + SCRATCH_BYTES)


def _is_packed(tensor: Tensor) -> bool:
    match tensor.storage:
        case Chunked(extents=extents):
            return any(isinstance(extent, Packed) for extent in extents.values())
        case storage:
            return isinstance(storage, Packed)


def in_file_order(tensors: dict[str, Tensor]) -> Iterator[tuple[Tensor, Region]]:
    """Yield every region of some tensors, per file by offset; a decoded tensor follows its predecessor."""
    files: dict[Location, int] = {}
    reached: dict[Location, int] = {}
    placed = []
    for index, tensor in enumerate(tensors.values()):
        for region in regions(tensor):
            decoded = isinstance(tensor.storage, Decoded)
            offset = reached.get(region.path, 0) if decoded else region.offset
            reached[region.path] = offset + (0 if decoded else region.stored_bytes(tensor.dtype))
            placed.append((files.setdefault(region.path, len(files)), offset, index, tensor, region))
    placed.sort(key=lambda p: p[:3])
    return ((tensor, region) for *_, tensor, region in placed)


__all__ = ["Region", "RegionView", "in_file_order", "least_budget", "paths_of", "regions", "view_in_region"]
