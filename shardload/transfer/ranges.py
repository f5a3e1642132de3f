"""Which ranges of files a load requests from a store: decided by arithmetic, one after the other, as it goes on.

    blocks    [ block 0          )[ block 1 )   gap   [ block 2 )
    pieces    [ 2 MiB  )[ 2 MiB  )[         )         [         )     a block passes through scratch by pieces
    ranges    [ range 0          )[ range 1                     )     if the gap costs less than a request

A range ends where a piece does, so that a piece can be copied from the range as it arrived, without scratch memory.
Only ranges of verifying stores end at whole MiB, as each digest covers one.

How long ranges are, and which gaps are read, depends on the latency and rate that the load measures (`Pace`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardload.stores.location import Location
from shardload.stores.pace import Pace
from shardload.stores.store import UNIT_BYTES
from shardload.transfer.geometry import SKIP_BYTES
from shardload.transfer.load_plan import Block

MAX_RANGE_BYTES = 4 << 20
"""Longest range. 4 MiB take 70 ms at 60 MB/s per connection, so that a round trip hardly counts. Longer requests would
leave fewer of them in flight."""
_MIN_RANGE_BYTES = 2 << 20
"""Shortest range, if there is enough to read: each request costs 0.2 ms of CPU time, and stores charge for each."""
_RANGE_S = 0.05
"""How long a connection should need for a range. Of a slow connection, more are needed, so ranges are shorter."""
_MAX_GAP_BYTES = 1 << 20
_SPARE_PARTS, _SPARE_BYTES = 128, 32 << 10
"""All gaps that are read have one part in 128 of the needed bytes together, or 32 KiB. Of processes that load together,
one reads what lies in the gaps of another."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Neighbouring bytes of a file that one request fetches."""

    path: Location
    start: int
    stop: int
    """Offset in the file one past the last byte; it may be past the end of the file."""
    used_bytes: int
    """How many of its bytes blocks use; bytes that two blocks use count twice."""


class RangePlan:
    """Forms the ranges for the blocks of a load, in the order of the plan; not thread-safe."""

    def __init__(self, blocks: Iterable[Block], *, most_bytes: int) -> None:
        """Note what ``blocks`` need. No range has more than ``most_bytes``, which are whole units (MiB)."""
        self._most_bytes = most_bytes
        self._blocks: dict[Location, list[tuple[int, int, int]]] = {}
        for block in blocks:
            if block.how != "decoded" and block.read_bytes:
                step = max(1, block.step * block.read_bytes // max(1, block.stop - block.start))
                self._blocks.setdefault(block.path, []).append((block.offset, block.offset + block.read_bytes, step))
        for found in self._blocks.values():
            found.sort()
        needed = sum(stop - start for found in self._blocks.values() for start, stop, _ in found)
        self._spare_bytes = max(needed // _SPARE_PARTS, _SPARE_BYTES)
        self._pieces = self._all_pieces()
        self._ahead = next(self._pieces, None)
        self._first = dict.fromkeys(self._blocks, 0)  # index of the first block that may use bytes of later ranges

    def next(self) -> FileRange | None:
        """Return the next range to request; ``None`` after the last one."""
        if self._ahead is None:
            return None
        path, start, stop = self._ahead
        most = range_bytes(path.store.pace, self._most_bytes)
        # Another process of the run may read the units in between.
        gap = 0 if path.store.is_verifying else gap_bytes(path.store.pace)
        while (ahead := next(self._pieces, None)) is not None:
            self._ahead = ahead
            skipped = ahead[1] - stop
            if ahead[0] != path or skipped > min(gap, self._spare_bytes) or ahead[2] - start > most:
                break
            self._spare_bytes -= skipped
            stop = ahead[2]
        else:
            self._ahead = None
        return FileRange(path, start, stop, self._used(path, start, stop))

    def _all_pieces(self) -> Iterator[tuple[Location, int, int]]:
        for path, blocks in self._blocks.items():
            done = 0
            for start, stop, step in blocks:
                for first, last in pieces(start, stop, step, most_bytes=self._most_bytes, path=path):
                    if last > done:  # a unit that two blocks share is fetched once
                        yield path, max(first, done), last
                        done = last

    def _used(self, path: Location, start: int, stop: int) -> int:
        blocks, used = self._blocks[path], 0
        first = self._first[path]
        while first < len(blocks) and blocks[first][1] <= start:
            first += 1
        self._first[path] = first
        for begin, end, _ in blocks[first:]:
            if begin >= stop:
                break
            used += max(0, min(end, stop) - max(begin, start))
        return used


def pieces(start: int, stop: int, step: int, *, most_bytes: int, path: Location) -> Iterator[tuple[int, int]]:
    """Yield the pieces of a block at which ranges may end: whole steps of it, or units if the store verifies them."""
    if path.store.is_verifying:
        first = start - start % UNIT_BYTES
        yield from ((at, at + UNIT_BYTES) for at in range(first, stop, UNIT_BYTES))
        return
    # Short steps are joined: there would be many.
    length = most_bytes if step > most_bytes else step * max(1, UNIT_BYTES // step)
    yield from ((at, min(at + length, stop)) for at in range(start, stop, length))


def range_bytes(pace: Pace | None, most_bytes: int) -> int:
    """Return how long the next range should be, given what was measured of its store."""
    if pace is None or (rate := pace.bytes_per_s) is None:
        return most_bytes
    return max(min(_MIN_RANGE_BYTES, most_bytes), min(int(rate * _RANGE_S), most_bytes))


def gap_bytes(pace: Pace | None) -> int:
    """Return the longest gap of unneeded bytes that costs less time than another request."""
    if pace is None or (rate := pace.bytes_per_s) is None or (latency_s := pace.latency_s) is None:
        return SKIP_BYTES
    return min(int(latency_s * rate), _MAX_GAP_BYTES)
