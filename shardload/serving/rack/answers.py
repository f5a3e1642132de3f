"""Answers to requests for files at addresses: the same headers, ranges and pages as for files on this machine.

    Remote.answer(request, key) ─► which version? ─► first block ─► headers ─► blocks, some of them in advance

The first block is there before the headers are sent, so that a source that fails is an error with a reason. Later, only
a connection that ends early says so.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from aiohttp import web

from shardload.errors import ShardloadError, SourceNotFoundError, UsageError, WriteError
from shardload.serving.metrics import Metrics
from shardload.serving.rack.blocks import FILE_BLOCK_BYTES, FileBlocks
from shardload.serving.rack.cache_contents import CacheContents
from shardload.serving.rack.peers import DIGEST_HEADER, FETCH, PEER_HEADER, FileBlock, Peers, digest_of
from shardload.serving.ranges import UnsatisfiableError, parse_ranges
from shardload.serving.roots.pinned_files import PinnedFile, PinnedFiles
from shardload.serving.roots.remote_roots import RemoteCatalogue
from shardload.serving.roots.scanning import LeftOut, ServedCheckpoint
from shardload.serving.sending import Body, send_version
from shardload.stores.answers import ChangedError
from shardload.stores.range_cache import RangeCache
from shardload.units import exact_bytes

_SLICE_BYTES = 256 << 10
"""Bytes of a block that are copied for a client at a time. A slow one keeps these from being freed, not the block."""
_STALL_S = 60.0
_STALL_BYTES = 16 << 20
"""A client must take so many bytes in this time, as of files on this machine."""
_TAGS_AT_ONCE = 16
"""Files whose versions are asked for at a time."""
_LIST_WAIT_S = 10.0
"""How long a request waits until addresses are listed again; then what was found before counts."""


class RemoteFiles:
    """Serves the files of a catalogue of addresses. Used by one event loop."""

    def __init__(
        self,
        catalogue: RemoteCatalogue,
        metrics: Metrics,
        log: Callable[[dict[str, Any]], None],
        *,
        cache: RangeCache | None = None,
        peers: Iterable[str] = (),
        server_id: str = "",
    ) -> None:
        """``log`` gets errors that no request shows; ``peers`` are addresses of servers of the same files."""
        self.catalogue, self._metrics, self._log = catalogue, metrics, log
        self.peers = Peers(peers, own_id=server_id, note_error=self._note_error)
        self.blocks = FileBlocks(metrics, cache=cache, note_error=self._note_error, peers=self.peers)
        self.cached = CacheContents(cache)
        self._pins = PinnedFiles(lambda error: self._note_error("source", str(error)))
        self._refreshing: asyncio.Task[None] | None = None
        self._left_out = LeftOut(catalogue.left_out(), log)

    async def ended(self, application: web.Application) -> None:
        """Stop what runs in threads; an application calls it at its end."""
        self.blocks.close()
        await self.peers.close()

    async def look_for(self, key: str) -> None:
        """List the addresses again if a file or folder is not known, or a list of names is old."""
        if self.catalogue.file(key) is None:
            await self.refresh(is_search=self.catalogue.names(key) is None)

    async def tags(self, keys: Sequence[str]) -> list[str]:
        """Return the ETags of files at addresses, without quotes; of what is gone, an empty text.

        Raises:
            ShardloadError: When a store does not answer, and has never told a version.
        """
        asked = asyncio.Semaphore(_TAGS_AT_ONCE)

        async def tag(key: str) -> str:
            async with asked:
                listed = self.catalogue.file(key)
                file = None if listed is None else await self._pins.get(listed, path=key)
                return "" if file is None else file.tag

        return await asyncio.gather(*map(tag, keys))

    async def _told(self, request: web.Request, file: PinnedFile) -> web.Response:
        """Tell another server whether a block is here."""
        if request.headers.get("If-Match") != f'"{file.tag}"':
            return web.Response(status=412)
        try:
            ranges = parse_ranges(request.headers.get("Range"), file.n_bytes) or [(0, 0)]
        except UnsatisfiableError:
            return web.Response(status=416)
        return web.Response(status=200 if await self.blocks.has(file, ranges[0][0] // FILE_BLOCK_BYTES) else 404)

    async def prefetch(self, found: ServedCheckpoint, advance: Callable[[int], None]) -> None:
        """Fetch all of a checkpoint into the cache; ``advance`` is called with numbers of bytes.

        Raises:
            UsageError: When there is no cache, or it is too small.
            ShardloadError: When a file cannot be fetched.
        """
        if (cache := self.blocks.cache) is None:
            raise UsageError(f"Cannot prefetch {found.name} without a cache: start the server with --cache DIR")
        if found.n_bytes > cache.limit_bytes:
            raise UsageError(
                f"Cannot prefetch {found.name}: it has {exact_bytes(found.n_bytes)}, and the cache keeps "
                f"{exact_bytes(cache.limit_bytes)}. Start the server with a larger --cache-size"
            )
        for key in self.catalogue.files_of(found):
            listed = self.catalogue.file(key)
            if listed is None or (file := await self._pins.get(listed, path=key)) is None:
                raise SourceNotFoundError(f"Cannot prefetch {key}: it is no longer at its address")
            try:
                await self._prefetch_file(file, advance)
            except ShardloadError as error:
                self._failed(file, error)
                raise
            if not await self.blocks.stored(file):
                raise WriteError(
                    f"Cannot prefetch {key}: the cache did not store all of it. It may be full of what was used in the "
                    "last two minutes or is pinned: try again later, or start the server with a larger --cache-size. "
                    "The server's log says more"
                )

    async def _prefetch_file(self, file: PinnedFile, advance: Callable[[int], None]) -> None:
        n_blocks = -(-file.n_bytes // FILE_BLOCK_BYTES)
        with self.blocks.reading():
            for number in range(n_blocks):
                for following in range(number + 1, min(n_blocks, number + 1 + self.blocks.n_ahead)):
                    self.blocks.begin(file, following)
                advance(len((await self.blocks.get(file, number)).data))

    def facts(self, found: ServedCheckpoint) -> dict[str, Any]:
        """Return where a checkpoint is fetched from, and how much of it is in the cache; waits for the disk."""
        return {} if found.source is None else {"source": found.source, "cached_bytes": self.cached.bytes_of(found)}

    def count_removed(self) -> None:
        """Have the metrics say what the cache has removed to make room."""
        if self.blocks.cache is not None:
            self._metrics.removed.set(self.blocks.cache.traffic.removed)

    async def problems(self) -> list[str]:
        """Return why addresses were not reached yet, one sentence each, and try them again in the background."""
        found = self.catalogue.problems()
        if found:
            self._begin_refresh(is_search=True)
        return found

    async def refresh(self, *, is_search: bool = False) -> None:
        """List the addresses again if they may be, and wait for a while. Errors are counted and logged."""
        if (refreshing := self._begin_refresh(is_search=is_search)) is not None:
            await asyncio.wait({refreshing}, timeout=_LIST_WAIT_S)

    def _begin_refresh(self, *, is_search: bool) -> asyncio.Task[None] | None:
        if self._refreshing is None and self.catalogue.is_old(is_search=is_search):
            self._refreshing = asyncio.create_task(self._refresh(is_search))
        return self._refreshing

    async def _refresh(self, is_search: bool) -> None:
        try:
            await _in_own_thread(lambda: self.catalogue.refresh(is_search=is_search))
            self._left_out.tell(self.catalogue.left_out())
        except (ShardloadError, OSError) as error:  # what was found before is still served
            self._note_error("scan", f"cannot look for new checkpoints: {error}")
        finally:
            self._refreshing = None

    async def answer(self, request: web.Request, key: str, sent: Callable[[int], None]) -> web.StreamResponse | None:
        """Answer a request for a file; ``None`` if there is none. ``sent`` is called with numbers of bytes."""
        try:
            try:
                return await self._answer(request, key, sent)
            except ChangedError:
                return await self._answer(request, key, sent)  # with the version that is there now
        except ShardloadError as error:
            self._metrics.errors.labels("source").inc()
            raise web.HTTPBadGateway(text=f"{error}\n") from error

    async def _answer(self, request: web.Request, key: str, sent: Callable[[int], None]) -> web.StreamResponse | None:
        listed = self.catalogue.file(key)
        if listed is None or (file := await self._pins.get(listed, path=key)) is None:
            return None
        wish = request.headers.get(PEER_HEADER)
        if wish is not None and request.method == "HEAD":
            return await self._told(request, file)
        body = _BlockBody(request, file, self.blocks, wish, sent=sent)
        try:
            with self.blocks.reading():
                return await send_version(request, body, tag=file.tag, n_bytes=file.n_bytes, changed_s=file.changed_s)
        except ChangedError as error:
            self._failed(file, error)
            raise
        except ConnectionAbortedError as error:
            if isinstance(error.__cause__, ShardloadError):
                self._failed(file, error.__cause__)
            raise

    def _failed(self, file: PinnedFile, error: ShardloadError) -> None:
        """Count a source that failed: the line of the request, or of the job, says why. Forget an old version."""
        if isinstance(error, ChangedError):
            self._pins.forget(file)
        else:
            self._metrics.errors.labels("source").inc()

    def _note_error(self, kind: str, text: str) -> None:
        self._metrics.errors.labels(kind).inc()
        self._log({"problem": text})


class _BlockBody(Body):
    """The body of a response with bytes of a remote file; to another server, one block, with its digest."""

    def __init__(
        self,
        request: web.Request,
        file: PinnedFile,
        blocks: FileBlocks,
        wish: str | None,
        *,
        sent: Callable[[int], None],
    ) -> None:
        """``wish`` is what another server wants to be done; ``None`` for all other clients."""
        super().__init__(request)
        self._file, self._blocks, self._wish, self._sent = file, blocks, wish, sent
        self._to_come: Iterator[int] = iter(())
        self._ahead: deque[int] = deque()
        """Blocks that were begun in advance, and the one that is being sent."""
        self._n_sent, self._writing_s = 0, 0.0

    async def begin(self, ranges: list[tuple[int, int]]) -> dict[str, str]:
        """Fetch the first block; see `Body.begin`."""
        (start, stop), *others = ranges
        self._to_come = _blocks_of(ranges)
        block = await self._block(start // FILE_BLOCK_BYTES) if start < stop else None
        if self._wish is None or block is None:
            return {}
        if others or start % FILE_BLOCK_BYTES or stop - start != len(block.data):
            raise web.HTTPBadRequest(text="Servers ask for one whole block.\n")
        return {DIGEST_HEADER: block.digest or await asyncio.to_thread(digest_of, block.data)}

    async def send_range(self, response: web.StreamResponse, start: int, stop: int, end: bytes | None) -> None:
        """Send a range, block by block; see `Body.send_range`."""
        while start < stop:
            number = start // FILE_BLOCK_BYTES
            last = min(stop, (number + 1) * FILE_BLOCK_BYTES)
            async with self._blocks.sending(self._file):
                await self._send_block(response, number, start, last)
            start = last
        if end:
            await self._write(response, end)

    async def _send_block(self, response: web.StreamResponse, number: int, start: int, stop: int) -> None:
        block: FileBlock | None = None
        for at in range(start, stop, _SLICE_BYTES):
            skip, count = at - number * FILE_BLOCK_BYTES, min(_SLICE_BYTES, stop - at)
            try:
                # Each time: while a client is slow, the block may make room for others, as the cache has it, too.
                if block is None or self._blocks.keeps(self._file):
                    block = await self._block(number)
            except (ShardloadError, web.HTTPNotFound) as error:
                raise ConnectionAbortedError(f"the source failed: {error}") from error
            await self._write(response, bytes(block.data[skip : skip + count]))
            self._sent(count)

    async def _block(self, number: int) -> FileBlock:
        if self._wish is None:
            self._fetch_ahead(number)
            return await self._blocks.get(self._file, number)
        if self._wish == FETCH:
            return await self._blocks.get(self._file, number, asks_peers=False)
        if (found := await self._blocks.look(self._file, number)) is None:
            raise web.HTTPNotFound(text="The block is not here.\n")
        return found

    def _fetch_ahead(self, number: int) -> None:
        while self._ahead and self._ahead[0] < number:
            self._ahead.popleft()
        while len(self._ahead) <= self._blocks.n_ahead and (following := next(self._to_come, None)) is not None:
            self._ahead.append(following)
            self._blocks.begin(self._file, following)

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        began_s = time.monotonic()
        left_s = _STALL_S * (1 + self._n_sent / _STALL_BYTES) - self._writing_s
        async with asyncio.timeout(min(_STALL_S, max(0.0, left_s))):
            await response.write(data)
        self._writing_s += time.monotonic() - began_s
        self._n_sent += len(data)


async def _in_own_thread(work: Callable[[], None]) -> None:
    """Do something in a thread that the end of the process does not wait for: a store may be silent for minutes."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="list of addresses", daemon=True).start()
    await done.wait()
    if errors:
        raise errors[0]


def _blocks_of(ranges: list[tuple[int, int]]) -> Iterator[int]:
    """Yield the numbers of the blocks that ranges, in ascending order, are in."""
    last = -1
    for start, stop in ranges:
        first = max(last + 1, start // FILE_BLOCK_BYTES)
        last = max(last, (stop - 1) // FILE_BLOCK_BYTES)
        yield from range(first, last + 1)
