"""Where the elements of a tensor and of its views lie in files.

A tensor is stored as one run of a file, or in several chunks: its *regions*. A chunk stores its elements in C order
(after decoding, if it is packed), including elements past the tensor's edge. Seen from one chunk, a variable is a view
with the chunk's own strides, and only a box of the variable is in the chunk::

    tensor (4, 6), chunks (4, 3)      variable = tensor, seen from chunk (0, 1)
        0  1  2 │ 3  4  5                 strides (3, 1), offset -3: index (0, 3) is element 0 of the chunk
        6  7  8 │ 9 10 11                 box [0:4, 3:6]

A view is cut into boxes, each of which spans one short run of the file. For this, its dims are sorted by stride, the
largest first: in this *address order*, later elements lie at higher addresses. A box then has one index in each of the
first dims, a range in the next dim, and all indices in the rest::

    stored (6, 4), view transposed to (4, 6)      one step along dim 0 of the view is 1 element of the file
        0  1  2  3  ┐                             one step along dim 1 is 4 elements: address order is dim 1, dim 0
        4  5  6  7  ┘ box 0 = view[:, 0:2]        elements 0 to 7, which lie side by side in the file
        8  9 10 11  ┐
       12 13 14 15  ┘ box 1 = view[:, 2:4]        elements 8 to 15
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardload.errors import LayoutError
from shardload.manifest import Chunked, Decoded, Extent, Packed, Tensor, View, c_strides
from shardload.sharding.layout import Bounds
from shardload.stores.location import Location

SKIP_BYTES = 128 << 10
"""Shortest gap of unneeded bytes in a file that is skipped. A shorter gap is read, as that is faster than a new read.
Reading 128 KiB takes 0.1 ms at 1 GB/s. ``benchmarks.strided_reads`` measured on a disk from which length on skipping is
faster: from 128 KiB in one case, from more than 512 KiB in another."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a tensor that is stored contiguously: a chunk, or the whole tensor if it has no chunks."""

    path: Location
    """The file that contains the region; if a reader decodes the tensor, the first of its files."""
    offset: int
    """Byte offset of the region's first element in the file; meaningless if a reader decodes the tensor."""
    size: int
    """Number of elements in the region."""
    origin: tuple[int, ...] | None = None
    """Of a chunk: the index in the tensor of the chunk's first element. None if the region is the whole tensor."""
    shape: tuple[int, ...] = ()
    """Shape of the chunk; () if the region is the whole tensor."""
    packed: Packed | None = None
    """How the region is encoded, if it can only be decoded as a whole; else None."""

    def stored_bytes(self, dtype: np.dtype[Any]) -> int:
        """Return how many bytes of the file the region takes; if a reader decodes it, how many it has when decoded."""
        return self.size * dtype.itemsize if self.packed is None else self.packed.n_bytes

    def unpacking_bytes(self, dtype: np.dtype[Any]) -> int:
        """Return the host memory in bytes that decoding takes: encoded plus twice the decoded size; 0 if not packed."""
        if self.packed is None:
            return 0
        return 2 * self.size * dtype.itemsize + self.packed.n_bytes + len(self.packed.kept)


@dataclass(frozen=True, slots=True)
class RegionView:
    """The part of a variable that is stored in one region (one chunk of a tensor, or the whole tensor)."""

    view: View
    """Which element of the region each index of the variable is, by offset and strides; only for indices in ``box``."""
    box: Bounds
    """The box of the variable's indices whose elements are in the region."""


def regions(tensor: Tensor) -> Iterator[Region]:
    """Yield the regions of a tensor: its chunks in the order in which they are listed, or the whole tensor."""
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


def view_in_region(view: View, tensor: Tensor, region: Region, box: Bounds | None = None) -> RegionView | None:
    """Return the part of a variable's view that a region contains; None if the region contains none of its elements.

    ``box`` is the part of the variable that the view fills, if not all of it (`shardload.transfer.load_plan.Binding`).
    """
    if 0 in (view.shape if box is None else box.shape):
        return None
    if region.origin is None:
        return RegionView(view, Bounds.whole(view.shape) if box is None else box)
    if box is not None:
        part = View(view.tensor, address(view, box.start), box.shape, view.strides)
        found = view_in_region(part, tensor, region)
        return None if found is None else _in_array(found, view.shape, box.start)
    if not math.prod(tensor.shape):
        return None
    tensor, region = _with_split_dims(view, tensor, region)
    assert region.origin is not None
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


def _with_split_dims(view: View, tensor: Tensor, region: Region) -> tuple[Tensor, Region]:
    """Return a tensor and one of its chunks with more dims, where a view splits a dim into several, such as heads.

    A dim is split only where chunks are as well: (heads * 4) in chunks of 8 becomes (heads, 4) in chunks of (2, 4).
    """
    assert region.origin is not None
    strides = sorted({t for n, t in zip(view.shape, view.strides, strict=True) if n > 1}, reverse=True)
    # Of each dim: length in the tensor, length in the chunk, and where the chunk starts.
    dims: list[tuple[int, int, int]] = []
    for dim, t in zip(
        zip(tensor.shape, region.shape, region.origin, strict=True), c_strides(tensor.shape), strict=True
    ):
        dims.append(dim)
        for stride in strides:
            step, rest = divmod(stride, t)
            n, c, a = dims[-1]
            if not rest and 1 < step < n and not n % step and not c % step:
                dims[-1:] = [(n // step, c // step, a // step), (step, step, 0)]
    if len(dims) == len(tensor.shape):
        return tensor, region
    shape, chunk, origin = zip(*dims, strict=True)
    return replace(tensor, shape=shape), replace(region, shape=chunk, origin=origin)


def _in_array(seen: RegionView, shape: tuple[int, ...], origin: tuple[int, ...]) -> RegionView:
    """Return what is seen of a part of an array, in the indices of the array: the part begins at ``origin``."""
    view, start, stop = seen.view, seen.box.start, seen.box.stop
    offset = view.offset - sum(o * t for o, t in zip(origin, view.strides, strict=True))
    first, last = (tuple(i + o for i, o in zip(edge, origin, strict=True)) for edge in (start, stop))
    return RegionView(View(view.tensor, offset, shape, view.strides), Bounds(first, last))


def _dims(view: View, tensor: Tensor) -> list[int | None]:
    """Return, for each dim of a view, the dim of the tensor that it runs along; None for a dim of length 1."""
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
    """Return the files that contain a tensor, each once."""
    if isinstance(tensor.storage, Decoded):
        return tensor.storage.reader.paths
    return tuple(dict.fromkeys(region.path for region in regions(tensor)))


def in_file_order(tensors: dict[str, Tensor]) -> Iterator[tuple[Tensor, Region]]:
    """Yield the regions of ``tensors``, each with its tensor, in the order of reading: by file, then by byte offset.

    A tensor that a reader decodes has no offset: in its file, it follows the region that ``tensors`` lists before it.
    """
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


@dataclass(frozen=True, slots=True)
class Ordered:
    """A box of a view, with its dims in *address order*: the dim with the largest stride first.

    A view is a stored tensor as a variable sees it, for example transposed; a box is a range of indices per dim. One
    step along the first dim here goes furthest in the file, one along the last dim the least. If a tensor of shape
    (6, 4) is seen transposed to (4, 6), the view has the strides (1, 4), and its whole box has here ``order`` (1, 0),
    ``shape`` (6, 4) and ``strides`` (4, 1). Dims of length 1 are before all others.
    """

    order: tuple[int, ...]
    """The view's dim numbers, in address order."""
    shape: tuple[int, ...]
    """Length of the box in each dim, in address order."""
    strides: tuple[int, ...]
    """Per dim, in address order: elements of the tensor from one index to the next."""
    offset: int
    """Number of the element at which the box starts, counted from the tensor's first element."""
    origin: tuple[int, ...]
    """Index in the view at which the box starts, in the view's own order of dims."""

    @classmethod
    def of(cls, view: View, box: Bounds) -> Ordered:
        """Sort the dims of ``box``, a box of ``view``: first dims of length 1, then by stride, the largest first."""
        shape = box.shape
        # Dims of length 1 come first, where `_level` never chooses one: it divides by the stride, and theirs may be 0.
        order = sorted(range(len(shape)), key=lambda d: (shape[d] != 1, -view.strides[d]))
        return cls(
            tuple(order),
            tuple(shape[d] for d in order),
            tuple(view.strides[d] for d in order),
            address(view, box.start),
            box.start,
        )

    def to_view(self, start: list[int], stop: list[int]) -> Bounds:
        """Return a box inside this one as a box of the view, with the view's order of dims.

        ``start`` and ``stop`` have their dims in address order, and count from the start of this box.
        """
        first, last = [0] * len(start), [0] * len(start)
        for d, a, b in zip(self.order, start, stop, strict=True):
            first[d], last[d] = self.origin[d] + a, self.origin[d] + b
        return Bounds(tuple(first), tuple(last))


def address(view: View, index: tuple[int, ...]) -> int:
    """Return which element of the tensor, counted from its first, is at ``index`` of a view."""
    return view.offset + sum(i * t for i, t in zip(index, view.strides, strict=True))


def within(view: View, box: Bounds | None) -> View:
    """Return the part of a view in a box of its indices; all of it without a box."""
    return view if box is None else View(view.tensor, address(view, box.start), box.shape, view.strides)


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how many elements of the tensor lie from the first to the last element of a non-empty box, inclusive."""
    return sum((n - 1) * t for n, t in zip(shape, strides, strict=True)) + 1


def is_injective(view: View, box: Bounds) -> bool:
    """Whether a box of a view has each element of the tensor at most once, so that each byte has a single place."""
    # Sufficient, not necessary: interleaved dims that never meet count as overlapping, and are then staged.
    ordered = Ordered.of(view, box)
    inner = [span(ordered.shape[d + 1 :], ordered.strides[d + 1 :]) for d in range(len(ordered.shape))]
    return all(n == 1 or t >= i for n, t, i in zip(ordered.shape, ordered.strides, inner, strict=True))


def contiguous_run(shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, int]:
    """Return how many elements are contiguous both in the file and in a shard, and how many dims step between runs.

    ``shape`` is that of the elements to move, ``source`` their strides in the file, and ``target`` those in the shard.
    Example: shape (8, 6), strides (12, 1) in the file and (6, 1) in a shard: runs of 6 elements, 1 dim outside.
    """
    length, outer = 1, len(shape)
    while outer and (shape[outer - 1] == 1 or source[outer - 1] == target[outer - 1] == length):
        outer -= 1
        length *= shape[outer]
    return length, outer


def cut(whole: Ordered, *, limit: int, skip: int) -> Iterator[Bounds]:
    """Cut a box of a tensor into boxes that are read one by one: each spans at most ``limit`` elements of the tensor.

    A box *spans* all stored elements from its first to its last. Elements between them that the box does not contain
    are gaps: they are read, too. A gap is shorter than ``skip`` elements. Boxes are yielded in address order.
    """
    if 0 in whole.shape:
        return
    level, rows = _level(whole, limit, skip)
    if level < 0:
        yield whole.to_view([0] * len(whole.shape), list(whole.shape))
        return
    stride, length = whole.strides[level], whole.shape[level]
    inner = list(whole.shape[level + 1 :])
    for prefix in itertools.product(*(range(n) for n in whole.shape[:level])):
        base = whole.offset + sum(i * t for i, t in zip(prefix, whole.strides, strict=False))
        # Rows since the last multiple of ``rows`` in the tensor, where the box of every view of it ends.
        phase = (base // stride) % rows
        edges = [0, *range(rows - phase, length, rows), length]
        for a, b in itertools.pairwise(edges):
            yield whole.to_view([*prefix, a, *[0] * len(inner)], [*(i + 1 for i in prefix), b, *inner])


def _level(whole: Ordered, limit: int, skip: int) -> tuple[int, int]:
    """Return the dim along which `cut` cuts, and how many indices of it each box gets; dim -1 to keep the box whole."""
    shape, strides = whole.shape, whole.strides
    dims = range(len(shape))
    inner = [span(shape[d + 1 :], strides[d + 1 :]) for d in dims]
    # Cutting at the innermost dim with such a gap leaves none inside a box, not even of an outer dim.
    gap = max((d for d in dims if shape[d] > 1 and strides[d] - inner[d] >= skip), default=-1)
    # Whole rows: if this box stays whole and the rest of its rows does not fit with it, both would read the same bytes.
    outer = next((d for d in dims if shape[d] > 1), -1)
    whole_rows = shape[outer] * strides[outer] if outer >= 0 and strides[outer] >= inner[outer] else 0
    if max(span(shape, strides), whole_rows) <= limit:
        return gap, 1
    level = next(d for d in dims if shape[d] > 1 and inner[d] <= limit)
    if gap >= level:
        return gap, 1
    stride = strides[level]
    # Where rows do not overlap, their number depends on the stride alone, not on how much of a row a view needs:
    # views of different columns are then cut at the same rows.
    rows = limit // stride if inner[level] <= stride else (limit - inner[level]) // stride + 1
    return level, max(1, rows)


def largest_stride(view: View) -> int:
    """Return the largest stride of a view's dims longer than 1, usually the length of a row; 0 if there are none."""
    return max((t for n, t in zip(view.shape, view.strides, strict=True) if n > 1), default=0)
