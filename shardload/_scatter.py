"""Reading one range of a file into many places with one system call.

``preadv`` takes a list of memory pieces. `Runs` holds such a list as arrays, so that a block of ten thousand
runs costs a few NumPy operations and a handful of calls, never a Python step per run::

    file     ─[ row 0: a0 b0 c0 ][ row 1: a1 b1 c1 ]─
    memory    shard a: a0 a1 …    shard b: b0 b1 …    shard c: c0 c1 …

The call goes to libc directly: `os.preadv` would need one memoryview per run. ctypes releases the GIL.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IOV_MAX = 1024
"""Entries one call takes on Linux and macOS."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
_libc.preadv.restype = ctypes.c_ssize_t


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte ranges of a file and where in memory each goes; the caller keeps that memory alive."""

    starts: NDArray[np.int64]
    """Byte offset of each run in the file."""
    addresses: NDArray[np.int64]
    """Where it goes."""
    length: NDArray[np.int64]
    """Bytes of each run."""

    @classmethod
    def strided(cls, start: int, address: int, *, length: int, grid: Sequence[tuple[int, int, int]]) -> Runs:
        """Runs of equal length; ``grid`` has (count, bytes apart in the file, bytes apart in memory) per dim."""
        starts, addresses = np.array(start, np.int64), np.array(address, np.int64)
        for n, step, jump in grid:
            index = np.arange(n, dtype=np.int64)
            starts = starts[..., None] + index * step
            addresses = addresses[..., None] + index * jump
        return cls(starts.ravel(), addresses.ravel(), np.full(starts.size, length, np.int64))

    @classmethod
    def rows(cls, start: int, target: NDArray[Any], *, n_bytes: int, row_bytes: int, pitch_bytes: int) -> Runs:
        """``n_bytes`` as rows of ``row_bytes`` that start ``pitch_bytes`` apart in ``target``."""
        count = -(-n_bytes // row_bytes)
        runs = cls.strided(start, target.ctypes.data, length=row_bytes, grid=[(count, row_bytes, pitch_bytes)])
        runs.length[-1] = n_bytes - (count - 1) * row_bytes
        return runs

    @classmethod
    def joined(cls, parts: list[Runs], *, start: int, stop: int, junk: NDArray[np.uint8]) -> Runs:
        """Several lists as one in file order from ``start`` to ``stop``, gaps between them going to ``junk``."""
        end = [cls(np.array([stop]), np.array([0]), np.array([0]))]
        starts = np.concatenate([p.starts for p in parts + end])
        order = np.argsort(starts, kind="stable")
        starts = starts[order]
        addresses = np.concatenate([p.addresses for p in parts + end])[order]
        length = np.concatenate([p.length for p in parts + end])[order]
        reached = np.concatenate([[start], (starts + length)[:-1]])
        gaps = starts - reached
        if int(gaps.min()) < 0 or int(gaps.max()) > junk.nbytes:
            raise AssertionError("a direct block has overlapping runs or a gap that planning should have cut out")
        where = np.flatnonzero(gaps)
        return cls(
            np.insert(starts, where, reached[where]),
            np.insert(addresses, where, junk.ctypes.data),
            np.insert(length, where, gaps[where]),
        )


def scatter_read(fd: int, runs: Runs) -> int:
    """Read contiguous runs in as few calls as possible.

    Args:
        fd: An open file.
        runs: In file order and without gaps.

    Returns:
        Bytes received; fewer than asked for only where the file ends.

    Raises:
        OSError: What the system call reports.
    """
    entries = np.stack((runs.addresses, runs.length), axis=1)
    offset, received, at = int(runs.starts[0]) if len(entries) else 0, 0, 0
    while at < len(entries):
        batch = entries[at : at + IOV_MAX]
        got = preadv(fd, batch, offset + received)
        if got == 0:
            break
        received += got
        ends = np.cumsum(batch[:, 1])
        done = int(np.searchsorted(ends, got, side="right"))
        at += done
        if done < len(batch) and (rest := got - (int(ends[done - 1]) if done else 0)):
            entries[at] += (rest, -rest)
    return received


def preadv(fd: int, entries: NDArray[np.int64], offset: int) -> int:
    """One ``preadv``: ``entries`` is an array of (address, bytes) pairs.

    Raises:
        OSError: What the system call reports, interruptions by signals apart.
    """
    while True:
        got = int(_libc.preadv(fd, entries.ctypes.data, len(entries), offset))
        if got >= 0:
            return got
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
