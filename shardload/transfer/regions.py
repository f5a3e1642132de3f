"""Where the elements of a tensor lie: in one run of a file, or in chunks each of which is one.

A chunk of shape ``chunk_shape`` holds its elements in C order (once decoded, where it is packed), also those past the
tensor's edge. Seen from one chunk, a variable is a view with the chunk's own strides, of which only a box is there::

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

SCRATCH_BYTES = 64 << 20
"""What a transfer takes at most for scratch, with fewer threads if need be: 8 MiB for each of eight."""
CHECKING_BYTES = SCRATCH_BYTES + (64 << 20)
"""For units that are kept or fetched ahead as well."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a tensor that lies in one place."""

    path: str
    """The file (of a decoded tensor, the first)."""
    offset: int
    """Byte offset of its first element; meaningless for a decoded tensor."""
    size: int
    """Elements."""
    origin: tuple[int, ...] | None = None
    """Which index of the tensor comes first, for a chunk; None where the region is the whole tensor."""
    shape: tuple[int, ...] = ()
    """The chunk's shape."""
    packed: Packed | None = None
    """How it is stored, where it decodes as a whole."""

    def stored_bytes(self, dtype: np.dtype[Any]) -> int:
        """What it takes up in its file; of a decoded tensor nothing is known."""
        return self.size * dtype.itemsize if self.packed is None else self.packed.n_bytes

    def unpacking_bytes(self, dtype: np.dtype[Any]) -> int:
        """Memory that decoding it takes: what goes in, and what comes out in TensorStore and here."""
        if self.packed is None:
            return 0
        return 2 * self.size * dtype.itemsize + self.packed.n_bytes + len(self.packed.kept)


@dataclass(frozen=True, slots=True)
class Seen:
    """A variable as one region has it."""

    view: View
    """Its elements counted from the region's first one; only those of ``box`` are there."""
    box: Bounds
    """In the variable's index space."""


def regions(tensor: Tensor) -> Iterator[Region]:
    """The places of a tensor, in the order they are declared."""
    match tensor.storage:
        case Extent(path, offset):
            yield Region(path, offset, tensor.size)
        case Packed() as whole:
            yield Region(whole.path, whole.offset, tensor.size, packed=whole)
        case Decoded(reader):
            yield Region(next(iter(reader.paths), ""), 0, tensor.size)
        case Chunked(shape, extents):
            for index, extent in extents.items():
                origin = tuple(i * n for i, n in zip(index, shape, strict=True))
                packed = extent if isinstance(extent, Packed) else None
                yield Region(extent.path, extent.offset, math.prod(shape), origin, shape, packed)


def see(view: View, tensor: Tensor, region: Region) -> Seen | None:
    """What a region has of a view; None for nothing.

    Raises:
        LayoutError: When a view of a chunked tensor is more than a choice, an order and ranges of its dims.
    """
    if 0 in view.shape:
        return None
    if region.origin is None:
        return Seen(view, Bounds.whole(view.shape))
    if not math.prod(tensor.shape):
        return None
    dims = _dims(view, tensor)
    first = tuple(view.offset // t % n for t, n in zip(c_strides(tensor.shape), tensor.shape, strict=True))
    inner = c_strides(region.shape)
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
    offset = sum((i - a) * t for i, a, t in zip(first, region.origin, inner, strict=True))
    return Seen(View(view.tensor, offset, view.shape, strides), Bounds(tuple(start), tuple(stop)))


def _dims(view: View, tensor: Tensor) -> list[int | None]:
    """For each dim of a view the tensor's dim it walks along; None for a dim of length 1."""
    strides = c_strides(tensor.shape)
    along = {t: j for j, (t, n) in enumerate(zip(strides, tensor.shape, strict=True)) if n > 1}
    found = [along.get(t) if n > 1 else None for n, t in zip(view.shape, view.strides, strict=True)]
    walked = [(n, j) for n, j in zip(view.shape, found, strict=True) if n > 1]
    known = [j for _, j in walked if j is not None]
    first = [view.offset // t % n for t, n in zip(strides, tensor.shape, strict=True)]
    fits = all(j is not None and first[j] + n <= tensor.shape[j] for n, j in walked)
    if not fits or len(set(known)) < len(known):
        raise LayoutError(
            f"Tensor {tensor.name!r} of shape {tensor.shape} is stored in chunks, and a view of shape {view.shape} "
            f"with strides {view.strides} is no permutation of its dims"
        )
    return found


def paths_of(tensor: Tensor) -> tuple[str, ...]:
    """The files a tensor is read from."""
    match tensor.storage:
        case Decoded(reader):
            return reader.paths
        case _:
            return tuple(dict.fromkeys(region.path for region in regions(tensor)))


def least_budget(tensor: Tensor, *, verified: bool, uploads: bool) -> int:
    """The smallest budget that every chunk of a tensor can be decoded in; 0 where none decodes as a whole.

    Args:
        tensor: The tensor.
        verified: Whether what is read is checked: that takes up to half of the budget, `CHECKING_BYTES` at most.
            Scratch alone takes a quarter, `SCRATCH_BYTES` at most.
        uploads: Whether shards are staged as well, in at most half of what is left.
    """
    if not _is_packed(tensor):
        return 0
    most = max(region.unpacking_bytes(tensor.dtype) for region in regions(tensor))
    if uploads:
        most += 2 * max(region.size for region in regions(tensor)) * tensor.dtype.itemsize
    if verified:
        return min(2 * most, most + CHECKING_BYTES) + (2 << 20)
    return min(most * 4 // 3, most + SCRATCH_BYTES)


def _is_packed(tensor: Tensor) -> bool:
    match tensor.storage:
        case Chunked(extents=extents):
            return any(isinstance(extent, Packed) for extent in extents.values())
        case storage:
            return isinstance(storage, Packed)


def in_file_order(tensors: dict[str, Tensor]) -> list[tuple[Tensor, Region]]:
    """Every region of some tensors, per file by offset; a decoded tensor counts as lying where its predecessor ends."""
    files: dict[str, int] = {}
    reached: dict[str, int] = {}
    placed = []
    for index, tensor in enumerate(tensors.values()):
        for region in regions(tensor):
            decoded = isinstance(tensor.storage, Decoded)
            offset = reached.get(region.path, 0) if decoded else region.offset
            reached[region.path] = offset + (0 if decoded else region.stored_bytes(tensor.dtype))
            placed.append((files.setdefault(region.path, len(files)), offset, index, tensor, region))
    placed.sort(key=lambda p: p[:3])
    return [(tensor, region) for *_, tensor, region in placed]


__all__ = ["Region", "Seen", "in_file_order", "least_budget", "paths_of", "regions", "see"]
