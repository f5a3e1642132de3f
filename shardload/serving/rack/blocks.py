"""Blocks of remote files: aligned pieces of 8 MiB, each fetched once however many clients ask for it.

    get(file, number) ─► in memory │ on its way │ in the cache │ from a peer │ from the store ─► memory, and the cache

A fetch belongs to no client: one that leaves takes nothing from others. What is held in memory is bounded: blocks that
were used lately, those being fetched, and those that wait to be written to the cache. A cache that fails, is full or
does not keep up makes no request fail.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np

from shardload.serving.metrics import Metrics
from shardload.serving.rack.cache_contents import IN_USE_S
from shardload.serving.rack.peers import FileBlock, Peers, digest_of
from shardload.serving.roots.pinned_files import PinnedFile
from shardload.stores.range_cache import RangeCache

FILE_BLOCK_BYTES = 8 << 20
"""Bytes of a block: long enough for the rate of a bucket's connection, short enough for a first byte soon."""
HELD_BYTES = 512 << 20
"""Most bytes of blocks that are kept in memory after their use."""
MOST_FETCHES = 24
"""Most blocks that are fetched, or wait to be written to the cache, at a time."""
_MOST_AHEAD = 4
"""Most blocks that a response fetches in advance."""
_WRITE_WAIT_S = 5.0
"""How long a block waits for a disk that does not keep up; then it is not stored."""
_IN_USE_STEP_S = 10.0
"""A cache that is full of what is in use looks so often whether that has changed."""

_Name = tuple[str, int]
"""The tag of a file, and the number of a block in it."""


class FileBlocks:
    """Blocks of remote files. Used by one event loop."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        cache: RangeCache | None,
        note_error: Callable[[str, str], None],
        peers: Peers | None = None,
        held_bytes: int = HELD_BYTES,
    ) -> None:
        """``note_error`` is called with the kind and the text of an error that no request shows."""
        self.cache, self._metrics, self._note_error = cache, metrics, note_error
        self._peers = peers or None
        self._most_held = max(FILE_BLOCK_BYTES, held_bytes)
        self._held: OrderedDict[_Name, FileBlock] = OrderedDict()
        self._held_bytes = 0
        self._coming: dict[tuple[_Name, bool], asyncio.Task[FileBlock]] = {}
        """By name, and whether peers may be asked to fetch it."""
        # One for each step on the way of a block between servers: what waits for a step must not keep others from it.
        self._room, self._asking, self._looking = (asyncio.Semaphore(MOST_FETCHES) for _ in range(3))
        self._sending = asyncio.Semaphore(max(1, self._most_held // FILE_BLOCK_BYTES))
        self._keeping: set[asyncio.Task[None]] = set()
        self._writers = ThreadPoolExecutor(2, "blocks-to-cache")
        self._n_notes = 0
        self._n_readers = 0

    @property
    def n_ahead(self) -> int:
        """How many blocks a response may fetch in advance, so that none of them is dropped before it is used."""
        return min(_MOST_AHEAD, self._most_held // (2 * FILE_BLOCK_BYTES * max(1, self._n_readers)))

    def keeps(self, file: PinnedFile) -> bool:
        """Whether blocks of a file go into the cache, so that what memory has no room for is not fetched again."""
        return self.cache is not None and self.cache.is_on and file.stored is not None

    def sending(self, file: PinnedFile) -> AbstractAsyncContextManager[None]:
        """Wait until a block may be kept for one client until it has taken it; see `keeps`."""
        return nullcontext() if self.keeps(file) else self._sent_whole()

    @asynccontextmanager
    async def _sent_whole(self) -> AsyncIterator[None]:
        async with self._sending:
            yield

    async def stored(self, file: PinnedFile) -> bool:
        """Whether the cache has all of a file, once it has written what it was given."""
        while self._keeping:
            await asyncio.wait(self._keeping)
        n_blocks = -(-file.n_bytes // FILE_BLOCK_BYTES)
        bounds = [_bounds(file, number) for number in range(n_blocks)]

        def is_stored() -> bool:
            if self.cache is not None:
                self.cache.settle()
            return all(self._is_cached(file, start, stop) for start, stop in bounds)

        return await asyncio.to_thread(is_stored)

    async def get(self, file: PinnedFile, number: int, *, asks_peers: bool = True) -> FileBlock:
        """Return a block of a file; keep it no longer than it is needed.

        Without ``asks_peers``, it is for a peer: no other one is asked to fetch it.

        Raises:
            ChangedError: When the store has another version of the file by now.
            ShardloadError: When it cannot be fetched.
        """
        if (held := self._held.get((file.tag, number))) is not None:
            self._held.move_to_end((file.tag, number))
            self._metrics.blocks.labels("memory").inc()
            return held
        return await asyncio.shield(self._begin(file, number, asks_peers=asks_peers))

    def begin(self, file: PinnedFile, number: int) -> None:
        """Start to fetch a block that is needed soon, unless it is here."""
        if (file.tag, number) in self._held:
            self._held.move_to_end((file.tag, number))
        else:
            self._begin(file, number, asks_peers=True)

    async def look(self, file: PinnedFile, number: int) -> FileBlock | None:
        """Return a block of a file if it is in memory or in the cache; nothing is fetched."""
        name = file.tag, number
        if name not in self._held:
            data, gaps = await asyncio.to_thread(self._read_cache, file, *_bounds(file, number))
            if data is None or gaps:
                return None
            self._hold(name, FileBlock(data))
        return self._held[name]

    async def has(self, file: PinnedFile, number: int) -> bool:
        """Whether a block is in memory, or the cache seems to have it."""
        if (file.tag, number) in self._held:
            return True
        return await asyncio.to_thread(self._is_cached, file, *_bounds(file, number))

    def _is_cached(self, file: PinnedFile, start: int, stop: int) -> bool:
        if self.cache is None or file.stored is None:
            return False
        with suppress(OSError):
            return all(piece.segment is not None for piece in self.cache.find(file.stored, start, stop))
        return False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count the with block as one that reads blocks."""
        self._n_readers += 1
        try:
            yield
        finally:
            self._n_readers -= 1

    def _begin(self, file: PinnedFile, number: int, *, asks_peers: bool) -> asyncio.Task[FileBlock]:
        name = file.tag, number
        asks_peers = asks_peers and self._peers is not None and file.stored is not None
        if (task := self._coming.get((name, asks_peers))) is None:
            task = asyncio.create_task(self._shared(file, number) if asks_peers else self._own(file, number))
            self._coming[name, asks_peers] = task
            task.add_done_callback(lambda ended: self._arrived(name, asks_peers, ended))
        return task

    def close(self) -> None:
        """Stop the threads that write to the cache; what waits there is written when the process ends."""
        self._writers.shutdown(wait=False, cancel_futures=True)

    def _arrived(self, name: _Name, asks_peers: bool, ended: asyncio.Task[FileBlock]) -> None:
        del self._coming[name, asks_peers]
        if not ended.cancelled() and ended.exception() is None:
            self._hold(name, ended.result())

    def _hold(self, name: _Name, block: FileBlock) -> None:
        if name not in self._held:
            self._held[name] = block
            self._held_bytes += len(block.data)
            while self._held_bytes > self._most_held and len(self._held) > 1:
                self._held_bytes -= len(self._held.popitem(last=False)[1].data)

    async def _shared(self, file: PinnedFile, number: int) -> FileBlock:
        """Get a block from the cache, from the server that is to fetch it, or, if that is this one, as `_own`."""
        assert self._peers is not None
        start, stop = _bounds(file, number)
        data, gaps = await asyncio.to_thread(self._read_cache, file, start, stop)
        if data is not None and not gaps:
            self._metrics.blocks.labels("cache").inc()
            self._metrics.received.labels("cache").inc(len(data))
            return FileBlock(data)
        asked = self._peers.fetched(file, start, stop)
        if (block := await self._from_peer(asked, file, start, room=self._asking)) is not None:
            return block
        return await asyncio.shield(self._begin(file, number, asks_peers=False))

    async def _own(self, file: PinnedFile, number: int) -> FileBlock:
        """Get a block from the cache, from a server that has it already, or from its source."""
        start, stop = _bounds(file, number)
        data, gaps = await asyncio.to_thread(self._read_cache, file, start, stop)
        if gaps and self._peers is not None and file.stored is not None:
            asked = self._peers.found(file, start, stop)
            if (block := await self._from_peer(asked, file, start, room=self._looking)) is not None:
                return block
        self._metrics.blocks.labels("miss" if gaps else "cache").inc()
        self._metrics.received.labels("cache").inc(stop - start - sum(b - a for a, b in gaps))
        for first, last in gaps:
            fetched = await self._fetched(file, first, last)
            if data is None:
                data = fetched  # all of it
            else:
                data[first - start : last - start] = fetched
        assert data is not None
        return FileBlock(data, await asyncio.to_thread(digest_of, data) if self._peers is not None else "")

    async def _from_peer(
        self, asked: Coroutine[Any, Any, FileBlock | None], file: PinnedFile, start: int, *, room: asyncio.Semaphore
    ) -> FileBlock | None:
        await room.acquire()
        block = None
        try:
            block = await asked
        finally:
            if block is None:
                room.release()
        if block is not None:
            self._metrics.blocks.labels("peer").inc()
            self._metrics.received.labels("peer").inc(len(block.data))
            self._spawn(self._kept(file, start, block.data, room=room))
        return block

    def _read_cache(self, file: PinnedFile, start: int, stop: int) -> tuple[memoryview | None, list[tuple[int, int]]]:
        """Return memory with those bytes of a range that the cache has, ``None`` for none, and which are missing."""
        if self.cache is None or file.stored is None:
            return None, [(start, stop)]
        try:
            pieces = self.cache.find(file.stored, start, stop)
        except OSError:  # no rights, or a disk that fails
            return None, [(start, stop)]
        if all(piece.segment is None for piece in pieces):
            return None, [(start, stop)]
        block, gaps = np.empty(stop - start, np.uint8).data, []
        for piece in pieces:
            part = block[piece.start - start : piece.stop - start]
            if piece.segment is None or not self.cache.read_into([part], file.stored, piece):
                gaps.append((piece.start, piece.stop))
        return (None, [(start, stop)]) if gaps == [(start, stop)] else (block, gaps)

    async def _fetched(self, file: PinnedFile, start: int, stop: int) -> memoryview:
        await self._room.acquire()
        try:
            data = await file.fetch(start, stop)
        except BaseException:
            self._room.release()
            raise
        self._metrics.received.labels("source").inc(len(data))
        self._spawn(self._kept(file, start, data, room=self._room))
        return data

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._keeping.add(task)  # the loop keeps no reference
        task.add_done_callback(self._keeping.discard)

    async def _kept(self, file: PinnedFile, start: int, data: memoryview, *, room: asyncio.Semaphore) -> None:
        """Have the cache write bytes. Until it has taken them, others are not fetched: memory is bounded."""
        try:
            if self.cache is not None and file.stored is not None:
                await asyncio.get_running_loop().run_in_executor(self._writers, self._keep, file, start, data)
                notes = self.cache.traffic.notes[self._n_notes :]
                self._n_notes += len(notes)
                for text in notes:
                    self._note_error("cache", text)
        finally:
            room.release()

    def _keep(self, file: PinnedFile, start: int, data: memoryview) -> None:
        assert self.cache is not None
        assert file.stored is not None
        since_s = time.time() // _IN_USE_STEP_S * _IN_USE_STEP_S - IN_USE_S
        self.cache.keep(file.stored, start, data, used_since_s=since_s, wait_s=_WRITE_WAIT_S)


def _bounds(file: PinnedFile, number: int) -> tuple[int, int]:
    start = number * FILE_BLOCK_BYTES
    return start, min(file.n_bytes, start + FILE_BLOCK_BYTES)
