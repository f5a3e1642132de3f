"""A cache of ranges of remote objects on this machine: `RangeCache` finds, reads, keeps and evicts them.

    find(object, start, stop)    |--- stored ---|-- gap --|--- stored ---|      the gaps are requested from the store
    read_into(buffers, piece)    reads a stored piece and compares it with its digests
    keep(object, start, data)    ─► queue ─► threads write ─► a range on disk

Keeping never makes a load wait, and never fails it. If the disk does not keep up, ranges are left out, which the next
start fetches and stores. If the folder cannot be written to, nothing is stored for a minute, with one warning; then it
is tried again.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardload.stores.cache_space import make_room, remove_leftovers
from shardload.stores.range_files import MOST_RANGE_BYTES, CachedObject, CacheFolder, Segment, address_folder
from shardload.units import format_bytes

_QUEUED_BYTES = 64 << 20
"""Most bytes that wait to be written, on top of a load's budget: as many as are in flight from a store."""
_WRITERS = 4
"""Most threads that write, and at most half of the machine's cores: where memory is full, each page of a file costs the
kernel so much time that one thread writes 0.4 GB/s."""
_NICENESS = 10
"""Priority of these threads, lower than that of the load, where all cores are busy."""
_LEAST_HIT_BYTES = 256 << 10
"""A stored piece between two gaps that has fewer bytes is fetched with them: two requests cost more."""
_TOUCH_S = 60.0
"""How often the last use of an object is noted, in seconds."""
_LISTED_S = 2.0
"""For how long the list of an object's ranges is used before a miss reads it again: another process may store them."""
_SETTLE_S = 10.0
"""How long a process that ends waits for ranges to be written."""
_RETRY_S = 60.0
"""For how long nothing is written after a failure: a disk that is full may have room later."""
_SCANS = 32
"""What is in the folder is counted again each time this fraction of the limit was written: others write there, too."""
_LEAST_SCAN_BYTES = 1 << 20
_SPARE = 16
"""When the cache is full, this fraction of it is freed, so that not each range that is written needs a look at all."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a range that was asked for: stored, or a gap."""

    start: int
    stop: int
    segment: Segment | None
    """The stored range that contains it; ``None`` for a gap."""

    @property
    def n_bytes(self) -> int:
        """Its length in bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class CacheTraffic:
    """What a cache has done since it was opened."""

    cached: int = 0
    """Bytes that it delivered."""
    fetched: int = 0
    """Bytes that came from stores instead."""
    stored: int = 0
    """Bytes written to the cache."""
    left_out: int = 0
    """Bytes that were not written: the disk did not keep up, or the cache is full of what is in use."""
    removed: int = 0
    """Bytes of files that were removed to make room, with their headers."""
    notes: tuple[str, ...] = ()
    """What a person should know: damaged files, and why nothing is stored."""

    def since(self, before: CacheTraffic) -> CacheTraffic:
        """Return what was done after an earlier account."""
        return CacheTraffic(
            self.cached - before.cached,
            self.fetched - before.fetched,
            self.stored - before.stored,
            self.left_out - before.left_out,
            self.removed - before.removed,
            tuple(dict.fromkeys(self.notes[len(before.notes) :])),  # two files may be noted by turns
        )


def cover(segments: Sequence[Segment], start: int, stop: int) -> list[Piece]:
    """Divide a range into pieces that stored ranges (sorted) contain, and gaps, in order and without overlap."""
    pieces: list[Piece] = []
    at, reached = start, 0
    # Of the ranges that begin at or before a byte, the one that ends last serves it best.
    index = bisect.bisect_left(segments, (max(0, start - MOST_RANGE_BYTES), 0))
    best: Segment | None = None
    while at < stop:
        while index < len(segments) and segments[index][0] <= at:
            if segments[index][1] > reached:
                best, reached = segments[index], segments[index][1]
            index += 1
        if best is not None and reached > at:
            pieces.append(Piece(at, min(reached, stop), best))
        else:
            end = segments[index][0] if index < len(segments) else stop
            pieces.append(Piece(at, min(end, stop), None))
        at = pieces[-1].stop
    return _joined(pieces)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Return pieces with each short stored one between two gaps made part of them: one request in place of two."""
    found: list[Piece] = []
    for number, piece in enumerate(pieces):
        is_between = 0 < number < len(pieces) - 1 and pieces[number - 1].segment is pieces[number + 1].segment is None
        one = replace(piece, segment=None) if is_between and piece.n_bytes < _LEAST_HIT_BYTES else piece
        if found and one.segment is None and found[-1].segment is None:
            found[-1] = replace(found[-1], stop=one.stop)
        else:
            found.append(one)
    return found


@dataclass(slots=True)
class _Listed:
    """The ranges of an object that are stored, as far as this process knows."""

    segments: list[Segment]
    listed_s: float
    touched_s: float


class RangeCache:
    """A cache in a folder on this machine, of at most so many bytes. Thread-safe."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        """Open or create the cache; raise `UsageError` if others than the user may write to the folder."""
        self.folder, self.limit_bytes = CacheFolder(directory), limit_bytes
        self.pinned: Callable[[], Collection[str]] = tuple
        """Returns addresses: what is at or below them is never removed to make room by this process."""
        self._listed: dict[CachedObject, _Listed] = {}
        self._traffic = CacheTraffic()
        self._lock = threading.Lock()
        self._writer = _Writer(self)

    @property
    def is_on(self) -> bool:
        """Whether ranges are stored: not for a while after the folder could not be written to."""
        return self._writer.is_on

    @property
    def traffic(self) -> CacheTraffic:
        """What the cache has done so far."""
        with self._lock:
            return self._traffic

    def knows(self, address: str, variant: str) -> bool:
        """Whether it has ranges of any version of an object."""
        try:
            with self.folder.opened("objects", address_folder(address, variant)):
                return True
        except OSError:
            return False

    def find(self, found: CachedObject, start: int, stop: int, *, is_use: bool = True) -> list[Piece]:
        """Divide a range of an object into stored pieces and gaps; ``is_use`` if the object counts as used now."""
        now_s = time.monotonic()
        with self._lock:
            listed = self._listed.get(found)
        if listed is not None:
            pieces = cover(listed.segments, start, stop)
        if listed is None or (now_s - listed.listed_s > _LISTED_S and any(p.segment is None for p in pieces)):
            segments = self.folder.segments(found)
            with self._lock:
                touched_s = self._listed[found].touched_s if found in self._listed else -_TOUCH_S
                listed = self._listed[found] = _Listed(segments, now_s, touched_s)
            pieces = cover(segments, start, stop)
        if is_use and now_s - listed.touched_s >= _TOUCH_S:
            listed.touched_s = now_s
            self.folder.touch(found)
        return pieces

    def read_into(self, buffers: Sequence[memoryview], found: CachedObject, piece: Piece) -> bool:
        """Fill buffers, in turn, with a stored piece; false if its file is gone, or damaged, which is noted."""
        assert piece.segment is not None
        is_sound = self.folder.read_into(buffers, found, piece.segment, piece.start)
        if is_sound:
            self._count(cached=piece.n_bytes)
            return True
        self._forget(found, piece.segment)
        if is_sound is False:
            self.folder.discard(found, piece.segment)
            self.note(f"the cache {self.folder.path} had damaged files of {found.address}: fetched them again")
        return False

    def keep(
        self, found: CachedObject, start: int, data: memoryview, *, used_since_s: float, wait_s: float = 0.0
    ) -> None:
        """Store bytes of an object in the background; objects used after ``used_since_s`` are not removed for it.

        If too many bytes wait to be written, they are left out, after ``wait_s`` seconds.
        """
        self._count(fetched=len(data))
        for at in range(0, len(data), MOST_RANGE_BYTES):
            part = data[at : at + MOST_RANGE_BYTES]
            if not self._writer.add(found, start + at, part, used_since_s, wait_s=wait_s):
                self._count(left_out=len(part))

    def fetched(self, n_bytes: int) -> None:
        """Count bytes that came from a store and are not kept, as their version is not known for sure."""
        self._count(fetched=n_bytes)

    def settle(self, timeout_s: float = _SETTLE_S) -> None:
        """Wait until what was to be kept is written."""
        self._writer.settle(timeout_s)

    def note(self, text: str) -> None:
        """Add a note for reports, unless it is the last one already."""
        with self._lock:
            if self._traffic.notes[-1:] != (text,):
                self._traffic = replace(self._traffic, notes=(*self._traffic.notes, text))

    def stored(self, found: CachedObject, segment: Segment) -> None:
        """Note that a range was written."""
        self._count(stored=segment[1] - segment[0])
        with self._lock:
            if (listed := self._listed.get(found)) is not None and segment not in listed.segments:
                segments = listed.segments.copy()  # others read the list without the lock
                bisect.insort(segments, segment)
                listed.segments = segments

    def left_out(self, n_bytes: int) -> None:
        """Note that bytes are not stored."""
        self._count(left_out=n_bytes)

    def _forget(self, found: CachedObject, segment: Segment) -> None:
        with self._lock:
            if (listed := self._listed.get(found)) is not None:
                listed.segments = [each for each in listed.segments if each != segment]

    def removed(self, n_bytes: int) -> None:
        """Note that bytes were removed to make room."""
        self._count(removed=n_bytes)

    def _count(
        self, *, cached: int = 0, fetched: int = 0, stored: int = 0, left_out: int = 0, removed: int = 0
    ) -> None:
        with self._lock:
            t = self._traffic
            self._traffic = CacheTraffic(
                t.cached + cached,
                t.fetched + fetched,
                t.stored + stored,
                t.left_out + left_out,
                t.removed + removed,
                t.notes,
            )


@dataclass(frozen=True, slots=True)
class _Task:
    """A range to be written."""

    found: CachedObject
    start: int
    data: memoryview
    used_since_s: float


class _Writer:
    """The threads that write ranges to a cache; they begin with the first one."""

    def __init__(self, cache: RangeCache) -> None:
        self._cache = cache
        self._tasks: deque[_Task] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._counting = threading.Lock()
        self._has_begun = self._has_failed = self._has_warned = False
        self._retry_s = 0.0
        """When to write again after a failure."""
        self._total: int | None = None
        """Bytes in the folder when they were counted last, and what was written since; ``None`` before the first."""
        self._since_scan = 0
        self._full_for_s = -1.0
        """Loads that began then or earlier have filled the cache: none of what they use may be removed."""

    @property
    def is_on(self) -> bool:
        """Whether it writes: not for a while after a failure."""
        return not self._has_failed or time.monotonic() >= self._retry_s

    def add(
        self, found: CachedObject, start: int, data: memoryview, used_since_s: float, *, wait_s: float = 0.0
    ) -> bool:
        """Queue a range, perhaps after a wait; false if it will not be written."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_on or self._queued_bytes + len(data) <= _QUEUED_BYTES, wait_s)
            if not self.is_on or self._queued_bytes + len(data) > _QUEUED_BYTES:
                return False
            self._tasks.append(_Task(found, start, data, used_since_s))
            self._queued_bytes += len(data)
            self._changed.notify_all()
            if not self._has_begun:
                self._has_begun = True
                for _ in range(max(1, min(_WRITERS, (os.cpu_count() or 1) // 2))):
                    threading.Thread(target=self._run, name="writer-of-range-cache", daemon=True).start()
                atexit.register(self.settle, _SETTLE_S)
        return True

    def settle(self, timeout_s: float) -> None:
        """Wait until the queue is empty."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queued_bytes, timeout_s)

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # of this thread, as Linux has it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        remove_leftovers(self._cache.folder)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._tasks))
                task = self._tasks.popleft()
            try:
                self._write(task)
            except FileNotFoundError:  # another process has just removed the folder
                self._cache.left_out(len(task.data))
            except OSError as error:
                self._turn_off(error)
                self._cache.left_out(len(task.data))
            with self._changed:
                self._queued_bytes -= len(task.data)
                self._changed.notify_all()
            del task  # its memory, while this thread waits

    def _write(self, task: _Task) -> None:
        with self._counting:
            if not self.is_on or not self._has_room(task):
                self._cache.left_out(len(task.data))
                return
            self._since_scan += len(task.data)
            self._total = (self._total or 0) + len(task.data)
        self._cache.folder.write(task.found, task.start, task.data)
        self._cache.stored(task.found, (task.start, task.start + len(task.data)))
        with self._changed:
            if self._has_failed:
                self._has_failed = False
                self._cache.note(f"the cache {self._cache.folder.path} can be written to again")

    def _has_room(self, task: _Task) -> bool:
        limit, size = self._cache.limit_bytes, len(task.data)
        if self._full_for_s > time.time():  # the clock was set back
            self._full_for_s = -1.0
        if size > limit or (task.used_since_s <= self._full_for_s and self._total is not None):
            return False
        is_old = self._since_scan > max(limit // _SCANS, _LEAST_SCAN_BYTES)
        if self._total is None or is_old or self._total + size > limit:
            self._since_scan = 0
            self._total = self._bytes_after(limit, task)
            if self._total + size > limit:
                self._total = self._bytes_after(max(0, min(limit - size, limit - limit // _SPARE)), task)
        if self._total + size <= limit:
            return True
        self._full_for_s = max(self._full_for_s, task.used_since_s)
        pinned = " with what is pinned" if self._cache.pinned() else ""
        self._cache.note(
            f"the cache {self._cache.folder.path} is full: what this load reads does not fit in {format_bytes(limit)}"
            f"{pinned}"
        )
        return False

    def _bytes_after(self, limit_bytes: int, task: _Task) -> int:
        found = make_room(
            self._cache.folder,
            limit_bytes=limit_bytes,
            used_before_s=task.used_since_s,
            pinned=self._cache.pinned(),
        )
        self._cache.removed(found.removed)
        return found.left

    def _turn_off(self, error: OSError) -> None:
        with self._changed:
            if not self.is_on:
                return
            self._retry_s, self._has_failed = time.monotonic() + _RETRY_S, True
            is_first, self._has_warned = not self._has_warned, True
        text = (
            f"Cannot write to the cache {self._cache.folder.path}: {error.strerror or error}. What it has is read, and "
            "more is stored once it can be written to again. Free some space, or give a folder that can be written to"
        )
        self._cache.note(text)
        if is_first:
            with contextlib.suppress(Warning):  # an error, where a program makes warnings errors: not in this thread
                warnings.warn(text, RuntimeWarning, stacklevel=1)
