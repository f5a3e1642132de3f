"""Read one range of a file into many memory locations with few system calls.

``preadv`` takes a list of memory pieces. A `Grid` maps regularly spaced runs of the file to memory; `calls` turns
the grids of a block's shards into such lists with a few NumPy operations, never a Python step per run::

    file     ─[ row 0: a0 b0 c0 ][ row 1: a1 b1 c1 ]─
    memory    shard a: a0 a1 …    shard b: b0 b1 …    shard c: c0 c1 …

The call goes to libc directly: `os.preadv` would need one memoryview per run. ctypes releases the GIL.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.stores.store import File, scatter_into

Entries = NDArray[np.int64]
"""The pieces of memory that one ``preadv`` call fills: an array with rows (address, number of bytes), laid out like
``struct iovec`` on 64-bit systems."""

_IOV_MAX = 1024
"""Most entries that one ``preadv`` call accepts on Linux and macOS."""

# use_errno: ctypes keeps errno per thread, so another thread's call cannot overwrite it before it is read.
_libc = ctypes.CDLL(None, use_errno=True)
# Declared, as ctypes would pass the offset as a C int of 32 bits.
_libc.preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
_libc.preadv.restype = ctypes.c_ssize_t


@dataclass(frozen=True, slots=True)
class ReadCall:
    """Arguments of one ``preadv`` call, which reads one range of a file into many pieces of memory."""

    entries: Entries
    """The memory to fill, in file order: at most `_IOV_MAX` entries."""
    n_bytes: int
    """Bytes that the call reads: the sum over all entries."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Equally long runs of bytes at regular distances in a file and in memory, such as the rows of one shard.

    The caller keeps the memory alive.
    """

    start: int
    """Byte offset of the first run in the file."""
    address: int
    """Memory address of the first run."""
    length: int
    """Bytes of each run."""
    shape: tuple[int, ...] = ()
    """Number of runs along each dim of the grid."""
    steps: tuple[int, ...] = ()
    """Per dim: bytes in the file from the start of one run to the next; in descending order."""
    jumps: tuple[int, ...] = ()
    """Per dim: bytes in memory from the start of one run to the next."""

    @property
    def stop(self) -> int:
        """Byte offset in the file at which the last run ends."""
        return self.start + sum((n - 1) * s for n, s in zip(self.shape, self.steps, strict=True)) + self.length

    @classmethod
    def rows(cls, start: int, target: NDArray[Any], *, n_bytes: int, row_bytes: int, pitch_bytes: int) -> list[Grid]:
        """Return grids that read ``n_bytes`` of a file, from ``start`` on, as rows into ``target``.

        In memory, a row starts every ``pitch_bytes``, so rows may be padded. A shorter last row has a grid of its own.
        """
        count, rest = divmod(n_bytes, row_bytes)
        address = target.ctypes.data
        found = [cls(start, address, row_bytes, (count,), (row_bytes,), (pitch_bytes,))] if count else []
        tail = cls(start + count * row_bytes, address + count * pitch_bytes, rest)
        return [*found, tail] if rest else found


def calls(grids: Sequence[Grid], *, start: int, stop: int, gap_memory: NDArray[np.uint8]) -> Iterator[ReadCall]:
    """Yield the calls that read bytes ``start`` to ``stop`` of a file into the memory of ``grids``, in file order.

    Bytes in no grid go to ``gap_memory``, which must be as long as the longest gap. Grids must not overlap in the file.
    The list of memory pieces of a call is valid only until the next call is requested.
    """
    # Grids whose runs alternate form a group: one begins before the last run of another one.
    groups: list[list[Grid]] = []
    for grid in sorted(grids, key=lambda g: g.start):
        if groups and grid.start < groups[-1][0].stop:
            groups[-1].append(grid)
        else:
            groups.append([grid])
    # Nearly always, shards cover the block without a gap, and a few NumPy operations per group do. The general case
    # sorts every single run.
    reached = start
    for group in groups:
        if group[0].start != reached or not _tiles(group):
            break
        reached = max(g.stop for g in group)
    else:
        if reached == stop:
            if sum(map(_count, groups)) <= _IOV_MAX:  # all groups fit into one system call
                return _sliced(np.concatenate([_zipped(group) for group in groups]))
            each = (_stencilled(group) if _count(group) > _IOV_MAX else _sliced(_zipped(group)) for group in groups)
            return itertools.chain.from_iterable(each)
    return _sliced(_any_entries(grids, start, stop, gap_memory))


def _sliced(found: Entries) -> Iterator[ReadCall]:
    for at in range(0, len(found), _IOV_MAX):
        part = found[at : at + _IOV_MAX]
        yield ReadCall(part, int(part[:, 1].sum()))


def _stencilled(group: list[Grid]) -> Iterator[ReadCall]:
    """Yield the calls that read a group of grids: runs of bytes, for several shards, that alternate in the file.

    Only the list of the first call is computed: as many rows of runs as fit. Each later call moves its addresses on.
    """
    first = group[0]
    per_row = _count(group) // first.shape[0]
    rows = _IOV_MAX // per_row
    if not rows:
        yield from _sliced(_zipped(group))
        return
    # The stencil covers as many rows as one call takes; its addresses move on by that many rows after each call.
    stencil = _zipped([replace(grid, shape=(rows, *grid.shape[1:])) for grid in group])
    # Entries of the grids alternate in the stencil, so their steps do too.
    move = np.tile(np.array([rows * grid.jumps[0] for grid in group]), len(stencil) // len(group))
    for row in range(0, first.shape[0], rows):
        if row:
            stencil[:, 0] += move
        part = stencil[: (first.shape[0] - row) * per_row]
        yield ReadCall(part, len(part) * first.length)


def _count(group: list[Grid]) -> int:
    return math.prod(group[0].shape) * len(group)


def _tiles(group: list[Grid]) -> bool:
    """Whether the runs of the grids alternate in the file without a gap, like blocks of columns of a matrix."""
    first = group[0]
    if any((g.shape, g.steps, g.length) != (first.shape, first.steps, first.length) for g in group):
        return False
    if any(b.start - a.start != first.length for a, b in itertools.pairwise(group)):
        return False
    # The steps of an array whose rows are one run of each grid: then nothing lies between two rows either.
    whole = first.length * len(group)
    wanted = [whole * math.prod(first.shape[d + 1 :]) for d in range(len(first.shape))]
    return all(n == 1 or s == w for n, s, w in zip(first.shape, first.steps, wanted, strict=True))


def _zipped(group: list[Grid]) -> Entries:
    """Return where grids put their bytes, one entry per run; the runs must alternate in the file without a gap."""
    first = group[0]
    found = np.empty((*first.shape, len(group), 2), np.int64)
    found[..., 1] = first.length
    for k, grid in enumerate(group):
        found[..., k, 0] = _lattice(grid.address, grid.shape, grid.jumps)
    return found.reshape(-1, 2)


def _lattice(origin: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> NDArray[np.int64]:
    found = np.array(origin, np.int64)
    for n, step in zip(shape, steps, strict=True):
        found = found[..., None] + np.arange(n, dtype=np.int64) * step
    return found


def _any_entries(grids: Sequence[Grid], start: int, stop: int, gap_memory: NDArray[np.uint8]) -> Entries:
    """Return where the bytes ``start`` to ``stop`` of a file go, in file order: rows (address, number of bytes).

    Bytes between runs go to ``gap_memory``. All runs are sorted, so grids may interleave; runs must not overlap.
    """
    count = [math.prod(g.shape) for g in grids]
    # An empty run at ``stop`` turns the bytes after the last run into a gap like the others.
    starts = np.concatenate([_lattice(g.start, g.shape, g.steps).ravel() for g in grids] + [np.array([stop])])
    addresses = np.concatenate([_lattice(g.address, g.shape, g.jumps).ravel() for g in grids] + [np.array([0])])
    length = np.repeat([*(g.length for g in grids), 0], [*count, 1])
    order = np.argsort(starts, kind="stable")
    starts, addresses, length = starts[order], addresses[order], length[order]
    # From the end of each run to the start of the next; negative where runs overlap.
    gaps = starts - np.concatenate([[start], (starts + length)[:-1]])
    if int(gaps.min()) < 0 or int(gaps.max()) > gap_memory.nbytes:
        raise AssertionError("a direct block has overlapping runs or a gap that planning should have cut out")
    where = np.flatnonzero(gaps)
    addresses = np.insert(addresses, where, gap_memory.ctypes.data)
    return np.stack((addresses, np.insert(length, where, gaps[where])), axis=1, dtype=np.int64)


def scatter_read(file: File, wanted: Iterable[ReadCall], offset: int) -> int:
    """Read a file from ``offset`` on into the memory that ``wanted`` lists; return the bytes read: fewer at its end."""
    received = 0
    if (fd := file.descriptor) is None:
        for call in wanted:
            # Entries are bare addresses: ctypes makes a buffer of each, without owning its memory.
            views = (
                memoryview((ctypes.c_char * size).from_address(at)).cast("B") for at, size in call.entries.tolist()
            )
            scatter_into(file, list(views), offset + received)
            received += call.n_bytes
        return received
    for call in wanted:
        got = preadv(fd, call.entries, offset + received)
        if got < call.n_bytes:
            got += _rest(fd, call.entries, got, offset + received)
        received += got
        if got < call.n_bytes:
            break
    return received


def _rest(fd: int, wanted: Entries, got: int, offset: int) -> int:
    """Read the remaining bytes of a call that read only ``got`` bytes; return how many more were read."""
    before, ends = got, np.cumsum(wanted[:, 1])
    while got < ends[-1]:
        # The entry in which the call stopped; its rest comes first.
        at = int(np.searchsorted(ends, got, side="right"))
        left = wanted[at:].copy()
        skip = int(wanted[at, 1]) - (int(ends[at]) - got)
        left[0] += (skip, -skip)
        more = preadv(fd, left, offset + got)
        if more == 0:  # the end of the file; a signal or a read of 2 GiB only cuts a call short
            break
        got += more
    return got - before


def preadv(fd: int, wanted: Entries, offset: int) -> int:
    """Call ``preadv`` and return the number of bytes read; repeat the call only if a signal interrupts it."""
    while True:
        got = int(_libc.preadv(fd, wanted.ctypes.data, len(wanted), offset))
        if got >= 0:
            return got
        # Python repeats its own system calls after a signal (PEP 475); through ctypes we have to.
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
