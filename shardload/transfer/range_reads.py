"""Ranges of remote files, requested in advance and used once; `shardload.transfer.ranges` decides which.

Long blocks from a server nearby are not requested in advance, but received straight into the memory of shards.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from shardload.errors import TransferError
from shardload.stores.location import Location
from shardload.stores.store import UNIT_BYTES, File, PendingBytes, RemoteFile
from shardload.transfer.byte_source import IN_SCRATCH, ByteSource, Verifier, too_short
from shardload.transfer.load_plan import Block
from shardload.transfer.preadv import ReadCall, scatter_read
from shardload.transfer.ranges import MAX_RANGE_BYTES, FileRange, RangePlan
from shardload.transfer.scratch import BlockMemory

_MOST_AT_ONCE = 64
"""Most ranges that are held at a time: the client keeps as many connections open."""


@dataclass(slots=True, eq=False)
class _Range:
    """A range that was formed, and the state of its request."""

    of: FileRange
    left_bytes: int
    """Bytes of the range that blocks still need; at 0, the range's memory is freed."""
    pending: PendingBytes | None = None
    data: memoryview | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def n_bytes(self) -> int:
        """Length of the range in bytes; the file may end before the range does."""
        return self.of.stop - self.of.start

    @property
    def is_new(self) -> bool:
        """Whether the range has still to be requested."""
        return self.pending is None and self.data is None


class RangeReads(ByteSource):
    """Requests ranges of remote files (up to 4 MiB) in advance; their bytes are verified only if the store does so."""

    def __init__(
        self, blocks: Iterable[Block], *, limit_bytes: int, threads: int, verifier: Verifier | None = None
    ) -> None:
        """Plan the ranges for ``blocks``, all of which pass through scratch memory; `scatter` needs no ranges.

        ``verifier``, if any, reads and verifies the bytes of a load's other blocks before they are used.
        """
        super().__init__(verifier)
        self.shared_bytes = limit_bytes
        # Ranges in use come on top of those in flight: each thread has one, and shares one with its neighbour.
        most = max(UNIT_BYTES, min(MAX_RANGE_BYTES, limit_bytes // (4 * threads) // UNIT_BYTES * UNIT_BYTES))
        self.ahead_bytes = max(most, limit_bytes - 2 * threads * most)
        self.held_bytes = self.peak_bytes = 0
        self._held = self._range_bytes = 0
        self._plan = RangePlan(blocks, most_bytes=most)
        self._formed: dict[Location, tuple[list[int], list[_Range]]] = {}
        self._waiting: deque[_Range] = deque()
        """Ranges that were formed, and are to be requested in this order."""
        self._is_cancelled = False
        self._lock = threading.Lock()

    def fill(self, flat: BlockMemory, n_bytes: int, *, path: Location, offset: int) -> int:
        """Copy bytes of a file into scratch from the ranges that were requested in advance; see `ByteSource.fill`."""
        at = 0
        while at < n_bytes:
            wanted = self._range_at(path, offset + at)
            skip = offset + at - wanted.of.start
            part = np.frombuffer(self._data(wanted)[skip : skip + n_bytes - at], np.uint8)
            if not part.size:
                raise too_short(path, offset + n_bytes)
            flat.write(part, at)
            at += part.size
            self._use(wanted, part.size)
        return n_bytes

    def borrow(self, n_bytes: int, *, path: Location, offset: int) -> NDArray[np.uint8] | None:
        """Return bytes of a file where they arrived, if one range has them all; see `ByteSource.borrow`."""
        wanted = self._range_at(path, offset)
        if offset + n_bytes > wanted.of.stop:
            return None
        skip = offset - wanted.of.start
        found = np.frombuffer(self._data(wanted), np.uint8)[skip : skip + n_bytes]
        return found if found.size == n_bytes else None

    def scatter(self, wanted: Iterable[ReadCall], *, path: Location, offset: int) -> int:
        """Receive a range of a file from nearby, straight into the memory of shards; see `ByteSource.scatter`."""
        file = self.open(path)
        if self._is_cancelled:  # looked at when the file is open, and `cancel` knows of it
            raise TransferError(f"The request for {path} was cancelled")
        return scatter_read(file, wanted, offset)

    def give_back(self, n_bytes: int, *, path: Location, offset: int) -> None:
        """Free memory whose last bytes these were."""
        self._use(self._range_at(path, offset), n_bytes)

    def read_bytes(self, blocks: Sequence[Block]) -> int:
        """Return the bytes read: those of all ranges received, plus those of blocks that are not read in ranges."""
        return sum(block.read_bytes for block in blocks if block.how not in IN_SCRATCH) + self._range_bytes

    def cancel(self) -> None:
        """Cancel the requests for ranges that are on their way, and send no more."""
        with self._lock:
            self._is_cancelled = True
            for _, ranges in self._formed.values():
                for one in ranges:
                    if one.pending is not None:
                        one.pending.cancel()
        super().cancel()

    def _range_at(self, path: Location, offset: int) -> _Range:
        with self._lock:
            while True:
                starts, ranges = self._formed.get(path, ((), ()))
                at = bisect_right(starts, offset) - 1
                if at >= 0 and offset < ranges[at].of.stop:
                    return ranges[at]
                # A thread that is ahead of the others: all ranges before its own are formed, and requested in order.
                if (formed := self._form()) is None:
                    raise too_short(path, offset)
                self._waiting.append(formed)

    def _form(self) -> _Range | None:
        if (planned := self._plan.next()) is None:
            return None
        formed = _Range(planned, planned.used_bytes)
        starts, ranges = self._formed.setdefault(planned.path, ([], []))
        starts.append(planned.start)
        ranges.append(formed)
        return formed

    def _use(self, one: _Range, n_bytes: int) -> None:
        with self._lock:
            one.left_bytes -= n_bytes
            if one.left_bytes <= 0:
                one.data = one.pending = None
                self.held_bytes -= one.n_bytes
                self._held -= 1
                self._top_up()

    def _data(self, wanted: _Range) -> memoryview:
        with self._lock:
            # Begun even above the limit: a thread that needs a range now must not wait for others to release theirs.
            if wanted.is_new:
                self._start(wanted)
            self._top_up()
        # Not under `_lock`: while one thread waits for the network, the others go on.
        with wanted.lock:
            if wanted.data is None:
                assert wanted.pending is not None
                wanted.data = wanted.pending.result()
                with self._lock:
                    self._range_bytes += wanted.data.nbytes
            return wanted.data

    def _top_up(self) -> None:
        while not self._is_cancelled and self._held < _MOST_AT_ONCE:
            while self._waiting and not self._waiting[0].is_new:
                self._waiting.popleft()
            if not self._waiting:
                if (formed := self._form()) is None:
                    return
                self._waiting.append(formed)
            # Stop, never skip: ranges are needed in this order, and a shorter one further on would take the room.
            if self.held_bytes + self._waiting[0].n_bytes > self.ahead_bytes:
                return
            self._start(self._waiting.popleft())

    def _start(self, one: _Range) -> None:
        path, start, stop = one.of.path, one.of.start, one.of.stop
        file = self.open(path)
        # A store may have a local copy of a small file, and a plan may have local files, too.
        is_here = not path.store.is_remote or file.descriptor is not None
        one.pending = _LocalBytes(file, start, stop) if is_here else cast("RemoteFile", file).begin(start, stop)
        self._held += 1
        self.held_bytes += one.n_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


class _LocalBytes:
    """Takes the place of a request to a remote store if the file is local: `result` reads the range from the file."""

    def __init__(self, file: File, start: int, stop: int) -> None:
        self._file, self._start, self._stop = file, start, min(stop, file.n_bytes)

    def result(self) -> memoryview:
        data = memoryview(bytearray(max(0, self._stop - self._start)))
        self._file.read_into(data, self._start)
        return data

    def cancel(self) -> None:
        pass
