"""Reading one range of a file into many places with one system call.

``preadv`` takes a list of memory pieces. A `Grid` says where regularly spaced runs of the file go; `entries` turns
the grids of a block's shards into such a list with a few NumPy operations, never a Python step per run::

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Entries = NDArray[np.int64]
"""Rows of (address, bytes), as ``struct iovec`` has them on 64-bit systems."""

IOV_MAX = 1024
"""Entries one call takes on Linux and macOS."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
_libc.preadv.restype = ctypes.c_ssize_t


@dataclass(frozen=True, slots=True)
class Grid:
    """Runs of one length, spaced regularly in the file and in memory; the caller keeps that memory alive."""

    start: int
    """Byte offset of the first run in the file."""
    address: int
    """Where it goes."""
    length: int
    """Bytes of each run."""
    shape: tuple[int, ...] = ()
    """How many runs there are, per dim."""
    steps: tuple[int, ...] = ()
    """Bytes from run to run in the file; descending."""
    jumps: tuple[int, ...] = ()
    """Bytes from run to run in memory."""

    @property
    def stop(self) -> int:
        """Where the last run ends in the file."""
        return self.start + sum((n - 1) * s for n, s in zip(self.shape, self.steps, strict=True)) + self.length

    @classmethod
    def rows(cls, start: int, target: NDArray[Any], *, n_bytes: int, row_bytes: int, pitch_bytes: int) -> list[Grid]:
        """``n_bytes`` as rows of ``row_bytes``, the last one maybe shorter, ``pitch_bytes`` apart in ``target``."""
        count, rest = divmod(n_bytes, row_bytes)
        address = target.ctypes.data
        found = [cls(start, address, row_bytes, (count,), (row_bytes,), (pitch_bytes,))] if count else []
        tail = cls(start + count * row_bytes, address + count * pitch_bytes, rest)
        return [*found, tail] if rest else found


def entries(grids: Sequence[Grid], *, start: int, stop: int, junk: NDArray[np.uint8]) -> Entries:
    """One list in file order that covers ``start`` to ``stop``; what no grid wants goes to ``junk``.

    Args:
        grids: Their runs do not overlap in the file, and lie between ``start`` and ``stop``.
        start: Byte offset in the file.
        stop: One past the last byte.
        junk: Memory that may be overwritten, as long as the longest gap.
    """
    grids = sorted(grids, key=lambda g: g.start)
    parts, reached = [], start
    for group in _interleaved(grids):
        if group[0].start != reached or not _tiles(group):
            return _any_entries(grids, start, stop, junk)
        parts.append(_zipped(group))
        reached = max(g.stop for g in group)
    if reached != stop:
        return _any_entries(grids, start, stop, junk)
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _interleaved(grids: Sequence[Grid]) -> list[list[Grid]]:
    """Grids in file order, those that run through each other together."""
    groups: list[list[Grid]] = []
    for grid in grids:
        if groups and grid.start < groups[-1][0].stop:
            groups[-1].append(grid)
        else:
            groups.append([grid])
    return groups


def _tiles(group: list[Grid]) -> bool:
    """Whether grids take turns, run by run, without a gap: columns of rows."""
    first = group[0]
    if any((g.shape, g.steps, g.length) != (first.shape, first.steps, first.length) for g in group):
        return False
    if any(b.start - a.start != first.length for a, b in itertools.pairwise(group)):
        return False
    whole = first.length * len(group)
    wanted = [whole * math.prod(first.shape[d + 1 :]) for d in range(len(first.shape))]
    return all(n == 1 or s == w for n, s, w in zip(first.shape, first.steps, wanted, strict=True))


def _zipped(group: list[Grid]) -> Entries:
    """The entries of grids that take turns."""
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


def _any_entries(grids: Sequence[Grid], start: int, stop: int, junk: NDArray[np.uint8]) -> Entries:
    """The general case: sort all runs, fill the gaps."""
    count = [math.prod(g.shape) for g in grids]
    starts = np.concatenate([_lattice(g.start, g.shape, g.steps).ravel() for g in grids] + [np.array([stop])])
    addresses = np.concatenate([_lattice(g.address, g.shape, g.jumps).ravel() for g in grids] + [np.array([0])])
    length = np.repeat([*(g.length for g in grids), 0], [*count, 1])
    order = np.argsort(starts, kind="stable")
    starts, addresses, length = starts[order], addresses[order], length[order]
    gaps = starts - np.concatenate([[start], (starts + length)[:-1]])
    if int(gaps.min()) < 0 or int(gaps.max()) > junk.nbytes:
        raise AssertionError("a direct block has overlapping runs or a gap that planning should have cut out")
    where = np.flatnonzero(gaps)
    return np.stack(
        (np.insert(addresses, where, junk.ctypes.data), np.insert(length, where, gaps[where])), axis=1, dtype=np.int64
    )


def scatter_read(fd: int, wanted: Entries, offset: int) -> int:
    """Read one range of a file into many places, in as few calls as possible.

    Args:
        fd: An open file.
        wanted: Where the bytes go, in file order; partly overwritten.
        offset: Byte offset in the file.

    Returns:
        Bytes received; fewer than asked for only where the file ends.

    Raises:
        OSError: What the system call reports.
    """
    received = at = 0
    while at < len(wanted):
        batch = wanted[at : at + IOV_MAX]
        got = preadv(fd, batch, offset + received)
        if got == 0:
            break
        received += got
        ends = np.cumsum(batch[:, 1])
        done = int(np.searchsorted(ends, got, side="right"))
        at += done
        if done < len(batch) and (rest := got - (int(ends[done - 1]) if done else 0)):
            wanted[at] += (rest, -rest)
    return received


def preadv(fd: int, wanted: Entries, offset: int) -> int:
    """One ``preadv``: ``wanted`` is an array of (address, bytes) pairs.

    Raises:
        OSError: What the system call reports, interruptions by signals apart.
    """
    while True:
        got = int(_libc.preadv(fd, wanted.ctypes.data, len(wanted), offset))
        if got >= 0:
            return got
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
