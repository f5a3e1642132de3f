"""Prefetch reads of a remote step for the threads that use them.

A request of any length costs a round trip, so neighbouring MiB are fetched together, and several such ranges are
in flight while others are used, in the order of the plan::

    file      |unit|unit|unit|unit|unit|unit|unit|unit|    units of 1 MiB, as digests cover them
    blocks       [ block 0   )[ block 1       )
    ranges    [ range 0      )[ range 1      )             only units that some block needs
                 in use          on its way                a range is released when its last byte was used

Each unit is compared with its digest before any of its bytes reach a shard.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from shardload.errors import TransferError
from shardload.stores.location import Location
from shardload.stores.store import UNIT_BYTES, PendingUnits, PrefetchableFile
from shardload.transfer.planning import Block
from shardload.transfer.scratch import BlockMemory
from shardload.transfer.verified_reads import put, units_of

MAX_RANGE_UNITS = 4
"""4 MiB per request: at 60 MB/s per connection it takes 70 ms, much longer than a round
trip. Longer requests would leave fewer in flight."""
MAX_AHEAD_BYTES = 64 << 20
"""Enough for twelve ranges with two threads."""
MIN_BUDGET_BYTES = 16 << 20
"""The smallest budget that leaves room for ranges."""


@dataclass(slots=True, eq=False)
class _UnitRange:
    """Neighbouring units of a file."""

    path: Location
    first: int
    count: int
    left_bytes: int = 0
    """Bytes not yet used."""
    pending: PendingUnits | None = None
    data: memoryview | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def n_bytes(self) -> int:
        """Upper bound of its length."""
        return self.count * UNIT_BYTES


class PrefetchedReads:
    """Source of bytes of a remote step for the threads of one transfer.

    Args:
        blocks: All blocks to read, in submission order.
        limit_bytes: Memory limit for ranges in use and in flight.
        threads: Number of reading threads.
    """

    def __init__(self, blocks: Iterable[Block], *, limit_bytes: int, threads: int) -> None:
        # Ranges in use come on top of those in flight: each thread has one, and shares one with its neighbour.
        most = max(1, min(MAX_RANGE_UNITS, limit_bytes // (4 * threads * UNIT_BYTES)))
        self.ahead_bytes = max(most * UNIT_BYTES, limit_bytes - 2 * threads * most * UNIT_BYTES)
        self.held_bytes = self.peak_bytes = 0
        self._ranges: list[_UnitRange] = []
        self._of: dict[tuple[Location, int], _UnitRange] = {}
        self._next = 0
        self._lock = threading.Lock()
        for block in blocks:
            self._add(block, most)

    def fill(self, flat: BlockMemory, n_bytes: int, *, path: Location, offset: int) -> None:
        """Copy ``n_bytes`` of a file, from ``offset`` on, into scratch; see `verified_reads.VerifiedReads`.

        Raises:
            DamagedError: When they do not match their digest; names step, file and offset.
            TransferError: When the store cannot deliver them.
        """
        at = 0
        while at < n_bytes:
            wanted = self._of[path, (offset + at) // UNIT_BYTES]
            skip = offset + at - wanted.first * UNIT_BYTES
            part = np.frombuffer(self._data(wanted)[skip : skip + n_bytes - at], np.uint8)
            if not part.size:
                raise TransferError(
                    f"Cannot read {path}: it ends before byte {offset + n_bytes}. It changed since "
                    "its headers were read"
                )
            put(flat, at, part)
            at += part.size
            self._used(wanted, part.size)

    def release(self, block: Block) -> None:
        """Do nothing: used ranges are released immediately."""

    def close(self) -> None:
        """Cancel requests in flight."""
        with self._lock:
            # Nothing new begins: `_top_up` is past the last range.
            self._next = len(self._ranges)
            for one in self._ranges:
                if one.pending is not None:
                    one.pending.cancel()

    def _add(self, block: Block, most: int) -> None:
        start, stop = block.offset, block.offset + block.read_bytes
        for path, unit in units_of(block):
            one = self._of.get((path, unit))
            # A unit that two blocks share belongs to one range, which is released after both.
            if one is None:
                # A range grows as long as the next needed unit follows: a gap that no block needs ends it.
                last = self._ranges[-1] if self._ranges else None
                if last is not None and (last.path, last.first + last.count) == (path, unit) and last.count < most:
                    last.count += 1
                    one = last
                else:
                    one = _UnitRange(path, unit, 1)
                    self._ranges.append(one)
                self._of[path, unit] = one
            one.left_bytes += min(stop, (unit + 1) * UNIT_BYTES) - max(start, unit * UNIT_BYTES)

    def _data(self, wanted: _UnitRange) -> memoryview:
        with self._lock:
            # Begun even above the limit: a thread that needs a range now must not wait for others to release theirs.
            if wanted.pending is None and wanted.data is None:
                self._start(wanted)
            self._top_up()
        # Not under `_lock`: while one thread waits for the network, the others go on.
        with wanted.lock:
            if wanted.data is None:
                assert wanted.pending is not None
                wanted.data = wanted.pending.result()
            return wanted.data

    def _used(self, one: _UnitRange, n_bytes: int) -> None:
        with self._lock:
            one.left_bytes -= n_bytes
            if one.left_bytes <= 0:
                one.data = one.pending = None
                self.held_bytes -= one.n_bytes
                self._top_up()

    def _top_up(self) -> None:
        while self._next < len(self._ranges):
            one = self._ranges[self._next]
            if one.pending is None and one.data is None and one.left_bytes > 0:
                # Stop, never skip: ranges are needed in this order, and a shorter one further on would take the room.
                if self.held_bytes + one.n_bytes > self.ahead_bytes:
                    return
                self._start(one)
            self._next += 1

    def _start(self, one: _UnitRange) -> None:
        file = one.path.open()
        assert isinstance(file, PrefetchableFile), "stores that verify their bytes return such files"
        one.pending = file.begin(one.first, one.count)
        self.held_bytes += one.n_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
