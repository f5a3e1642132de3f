"""Host memory: fresh, aligned buffers for shards, and the budget that limits what is staged.

JAX on CPU uses an aligned host array as device memory, without a copy. All shards of a variable lie in one arena::

    arena ─[ shard 0 │pad│ shard 1 │pad│ … ]      each shard on a 64-byte boundary

A load from the page cache spends most time on first touching fresh memory: 4.9 GB/s with 4 KiB pages, 17.8 GB/s with
huge pages (2 threads). So arenas of 2 MiB or more use huge pages, except at their end, where a huge page filled in part
would waste up to 2 MiB of memory per variable.
"""

from __future__ import annotations

import bisect
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.errors import BudgetError
from shardload.units import exact_bytes

ALIGNMENT_BYTES = 64
"""Alignment in bytes that JAX's runtime (PJRT) requires to use a host buffer as a CPU device's memory, uncopied."""
HUGE_PAGE_BYTES = 2 << 20
MAPPED_BYTES = 128 << 10
"""Smallest buffer, in bytes, that gets its own memory mapping, so that freeing it returns memory to the system at
once."""


def memory(n_bytes: int) -> NDArray[np.uint8]:
    """Allocate ``n_bytes`` of uninitialised memory on a 64-byte boundary; never reused, as a device may keep it."""
    if n_bytes >= MAPPED_BYTES and hasattr(mmap, "MAP_ANONYMOUS"):
        area, start = _mapping(n_bytes)
        # The array keeps the mapping alive until its last view is gone, and JAX keeps the views that it adopted.
        return np.frombuffer(area, np.uint8, n_bytes, start)
    # malloc aligns to 16 bytes only.
    raw = np.empty(n_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + n_bytes]


def zeroed_memory(n_bytes: int) -> NDArray[np.uint8]:
    """Allocate ``n_bytes`` of zeros, as `memory` does."""
    area = memory(n_bytes)
    if n_bytes < MAPPED_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):  # a new mapping is zero already
        area[...] = 0
    return area


def _mapping(n_bytes: int) -> tuple[mmap.mmap, int]:
    """Map memory; return the mapping and where in it the ``n_bytes`` begin, on a huge page if there is one."""
    huge = n_bytes - n_bytes % HUGE_PAGE_BYTES if hasattr(mmap, "MADV_HUGEPAGE") else 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    area = mmap.mmap(-1, n_bytes + (HUGE_PAGE_BYTES if huge else 0), flags=flags)
    # The kernel aligns only mappings whose length is a multiple of 2 MiB, so the start is aligned here.
    start = -np.frombuffer(area, np.uint8).ctypes.data % HUGE_PAGE_BYTES if huge else 0
    if huge:
        area.madvise(mmap.MADV_HUGEPAGE, start, huge)
    return area, start


Allocate = Callable[[int], NDArray[np.uint8]]
"""A function that returns memory of a number of bytes, as `memory` does."""


def stacked_arrays(
    count: int, shape: tuple[int, ...], dtype: np.dtype[Any], allocate: Allocate | None = None
) -> NDArray[Any]:
    """Allocate ``count`` shards of one shape as one array of shape (count, *shape): uninitialised, each one aligned."""
    # Built from strides, as no reshape skips the padding between two shards.
    strides = [math.prod(shape[d + 1 :]) * dtype.itemsize for d in range(len(shape))]
    step = _step(math.prod(shape) * dtype.itemsize)
    return np.ndarray((count, *shape), dtype, (allocate or memory)(count * step).data, 0, (step, *strides))


def arena(
    shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any], allocate: Allocate | None = None
) -> list[NDArray[Any]]:
    """Allocate all shards of a variable in one piece of memory; return an uninitialised, aligned array per shape."""
    if len(shapes) == 1:
        (shape,) = shapes
        return [np.ndarray(shape, dtype, (allocate or memory)(math.prod(shape) * dtype.itemsize).data)]
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    steps = [_step(size) for size in sizes]
    area = (allocate or memory)(sum(steps))
    starts = [sum(steps[:i]) for i in range(len(steps))]
    return [
        area[start : start + size].view(dtype).reshape(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=True)
    ]


def arena_bytes(shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> int:
    """Return the bytes that `arena` allocates for arrays of these shapes, with the padding between them."""
    return sum(_step(math.prod(shape) * dtype.itemsize) for shape in shapes)


def _step(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Budget:
    """Counts the bytes of host memory that a transfer has taken, up to a limit. Only the submitting thread uses it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self.peak_bytes = 0

    def try_take(self, n_bytes: int, *, what: str) -> bool:
        """Count ``n_bytes`` as taken for ``what``; return False if there is no room now, raise if there never is."""
        if n_bytes > self.limit_bytes:
            raise BudgetError(
                f"{what} needs {exact_bytes(n_bytes)} of host memory at once, but the budget is "
                f"{exact_bytes(self.limit_bytes)}. Raise the host-memory budget to at least {exact_bytes(n_bytes)}"
            )
        if self.taken_bytes + n_bytes > self.limit_bytes:
            return False
        self.taken_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.taken_bytes)
        return True

    def give_back(self, n_bytes: int) -> None:
        """Count ``n_bytes`` as free again, after their memory was freed or became a device's memory."""
        self.taken_bytes -= n_bytes
        # Not clamped to 0: whoever gives back too much lets later requests exceed the limit.
        if self.taken_bytes < 0:
            raise AssertionError("more bytes were given back than taken")


@dataclass(frozen=True, slots=True, eq=False)
class UploadBuffer:
    """Memory for shards that are filled, then copied to devices."""

    memory: NDArray[np.uint8]
    start: int | None
    """Where it begins in the `UploadMemory`; None: in a mapping of its own."""
    n_bytes: int
    """Bytes that it takes there, with the padding."""


class UploadMemory:
    """One mapping for all buffers to upload: the kernel clears each of its pages once, not for every buffer.

    A buffer lies in the first gap that is long enough. If there is none, it can get a mapping of its own. Until that is
    free again, the gaps of the shared mapping have no pages, so that both hold no more than what was taken.
    """

    def __init__(self, n_bytes: int, *, misaligned: int = 0) -> None:
        """Map memory; its pages take room once they are written. Addresses are ``misaligned`` by so many bytes."""
        self._misaligned = misaligned
        self._area, self._offset = _mapping(max(n_bytes, 1) + misaligned)
        self._gaps = [(0, n_bytes)] if n_bytes else []
        self._apart = 0

    def take(self, n_bytes: int) -> UploadBuffer | None:
        """Return a buffer of ``n_bytes``, uninitialised; None if no gap is long enough."""
        size = _step(n_bytes)
        found = next((k for k, (start, stop) in enumerate(self._gaps) if stop - start >= size), None)
        if found is None:
            return None
        start, stop = self._gaps[found]
        self._gaps[found : found + 1] = [(start + size, stop)] if start + size < stop else []
        at = self._offset + start + self._misaligned
        return UploadBuffer(np.frombuffer(self._area, np.uint8, n_bytes, at), start, size)

    def take_apart(self, n_bytes: int) -> UploadBuffer:
        """Return a buffer of ``n_bytes`` in a mapping of its own."""
        self._apart += 1
        for gap in self._gaps:
            self._drop_pages(*gap)
        return UploadBuffer(memory(n_bytes + self._misaligned)[self._misaligned :], None, _step(n_bytes))

    def give_back(self, buffer: UploadBuffer) -> None:
        """Free a buffer that no device reads any more."""
        if buffer.start is None:
            self._apart -= 1
            return
        start, stop = buffer.start, buffer.start + buffer.n_bytes
        if self._apart:
            self._drop_pages(start, stop)
        k = bisect.bisect(self._gaps, (start, stop))
        if k < len(self._gaps) and self._gaps[k][0] == stop:
            stop = self._gaps.pop(k)[1]
        if k and self._gaps[k - 1][1] == start:
            start = self._gaps.pop(k - 1)[0]
            k -= 1
        self._gaps.insert(k, (start, stop))

    def _drop_pages(self, start: int, stop: int) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            page = mmap.PAGESIZE
            first, last = -(-(self._offset + start + self._misaligned) // page), (self._offset + stop) // page
            if first < last:
                self._area.madvise(mmap.MADV_DONTNEED, first * page, (last - first) * page)
