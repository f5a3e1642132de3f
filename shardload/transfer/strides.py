"""Cut a view into boxes that are short, ascending runs of the stored tensor.

Sort a view's dims by stride, largest first: in that *address order* later elements lie at higher
addresses. A box of a prefix of single indices, then a range in one dim, then full dims spans one short
run of the file::

    stored (6, 4), view transposed to (4, 6)      address order: view dims (1, 0), strides (4, 1)
        0  1  2  3  ┐
        4  5  6  7  ┘ box 0 = view[:, 0:2]        a box of the view *and* the bytes of elements 0..8
        8  9 10 11  ┐
       12 13 14 15  ┘ box 1 = view[:, 2:4]

Ranges start at multiples of the same number of rows of the *tensor*, so that several views of one
tensor (query, key and value out of one fused kernel) are cut at the same places and share their reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from shardload.manifest import View, c_strides
from shardload.sharding.bounds import Bounds

SKIP_BYTES = 128 << 10
"""Gaps from this length on are skipped, not read: 0.1 ms at 1 GB/s, the cost of one block.

``benchmarks.strided_reads`` measures it: from a disk, skipping breaks even at 128 KiB in one case, above 512 KiB in
another."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """A box of a view, its dims in address order."""

    order: tuple[int, ...]
    """View dims, largest stride first."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Elements to skip per index."""
    offset: int
    """Element at which the box starts."""
    origin: tuple[int, ...]
    """Start of the box in the view, in the view's own dim order."""

    @classmethod
    def of(cls, view: View, box: Bounds) -> Ordered:
        """Return ``box`` of ``view`` in address order; dims of length 1 (any stride) come first."""
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
        """Convert a box in address order to a box of the view."""
        first, last = [0] * len(start), [0] * len(start)
        for d, a, b in zip(self.order, start, stop, strict=True):
            first[d], last[d] = self.origin[d] + a, self.origin[d] + b
        return Bounds(tuple(first), tuple(last))


def address(view: View, index: tuple[int, ...]) -> int:
    """Return the tensor element at ``index`` of the view."""
    return view.offset + sum(i * t for i, t in zip(index, view.strides, strict=True))


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the elements from the first to the last one of a non-empty box, both included."""
    return sum((n - 1) * t for n, t in zip(shape, strides, strict=True)) + 1


def is_injective(view: View) -> bool:
    """Whether the elements of a view are distinct: no broadcast dims and no overlapping windows."""
    # Sufficient, not necessary: interleaved dims that never meet count as overlapping, and are then staged.
    ordered = Ordered.of(view, Bounds.whole(view.shape))
    inner = [span(ordered.shape[d + 1 :], ordered.strides[d + 1 :]) for d in range(len(ordered.shape))]
    return all(n == 1 or t >= i for n, t, i in zip(ordered.shape, ordered.strides, inner, strict=True))


def run(shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, int]:
    """Find the longest trailing run that is contiguous in both stride systems.

    Returns:
        Its length in elements and the number of leading dims outside it.
    """
    length, outer = 1, len(shape)
    while outer and (shape[outer - 1] == 1 or source[outer - 1] == target[outer - 1] == length):
        outer -= 1
        length *= shape[outer]
    return length, outer


def cut(whole: Ordered, *, limit: int, skip: int) -> Iterator[Bounds]:
    """Cut into boxes that each span at most ``limit`` elements, in address order.

    Args:
        whole: The box to cut; yields nothing when it is empty.
        limit: Longest span in elements, at least 1.
        skip: Gaps of at least this many elements inside a box are cut out.

    Yields:
        Boxes in the view's index space that tile it.
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
    """Return the dim to cut and the number of its indices per box; dim -1 when nothing is cut."""
    shape, strides = whole.shape, whole.strides
    dims = range(len(shape))
    inner = [span(shape[d + 1 :], strides[d + 1 :]) for d in dims]
    # Cutting at the innermost dim with such a gap leaves none inside a box, not even of an outer dim.
    gap = max((d for d in dims if shape[d] > 1 and strides[d] - inner[d] >= skip), default=-1)
    if span(shape, strides) <= limit:
        return gap, 1
    level = next(d for d in dims if inner[d] <= limit)
    if gap >= level:
        return gap, 1
    stride = strides[level]
    # Where rows do not overlap, their number depends on the stride alone, not on how much of a row a view needs:
    # views of different columns are then cut at the same rows.
    rows = limit // stride if inner[level] <= stride else (limit - inner[level]) // stride + 1
    return level, max(1, rows)


def largest_stride(view: View) -> int:
    """Return the largest stride of a view's dims longer than 1; 0 if there are none."""
    return max((t for n, t in zip(view.shape, view.strides, strict=True) if n > 1), default=0)


def shard_run(view: View, box: Bounds, shard: tuple[int, ...]) -> tuple[int, int]:
    """Return the longest run of ``box`` contiguous in the file and in a C-ordered buffer of shape ``shard``."""
    ordered = Ordered.of(view, box)
    strides = c_strides(shard)
    return run(ordered.shape, ordered.strides, tuple(strides[d] for d in ordered.order))
