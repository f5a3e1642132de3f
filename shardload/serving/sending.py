"""Send bytes of a file as the body of a response: by ``sendfile``, from the page cache to the socket without a copy.

    Range, If-Range, If-Match, If-None-Match  ─►  200 whole │ 206 one range │ 206 several, as multipart/byteranges
                                                  304 │ 412 │ 416

The tag of a file is compared again before the last bytes of a body are sent. If the file was written to meanwhile, the
connection is cut, so that the client sees an error, and never bytes of two versions.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from email.utils import format_datetime
from io import FileIO
from typing import Any

from aiohttp import web

from shardload.serving.catalogue import ServedFile
from shardload.serving.ranges import UnsatisfiableError, parse_ranges

_PIECE_BYTES = 16 << 20
"""Bytes that are sent before the client must have taken them, in `_STALL_S`."""
_LAST_BYTES = 64 << 10
"""Bytes at the end of a body that are sent after the file was looked at again."""
_STALL_S = 60.0
"""Seconds in which a client must take a piece: slower than 0.3 MB/s counts as stalled."""
_COPIED_BYTES = 1 << 20
"""Bytes that are read at once where ``sendfile`` cannot send them, as over TLS."""
_KIND = "application/octet-stream"


async def send_bytes(
    request: web.Request,
    file: FileIO,
    found: ServedFile,
    *,
    is_same: Callable[[int], bool],
    sent: Callable[[int], None],
) -> web.StreamResponse:
    """Answer a request for bytes of an open file.

    Args:
        request: A GET or HEAD request.
        file: The open file.
        found: What the file was when it was opened.
        is_same: Whether the file with this descriptor is still what it was.
        sent: Called with the number of bytes of the file that were sent.
    """
    headers = {
        "ETag": f'"{found.tag}"',
        "Last-Modified": format_datetime(datetime.fromtimestamp(int(found.changed_s), UTC), usegmt=True),
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
    }
    if not _fits(request.headers.getall("If-Match", []), found.tag, otherwise=True):
        return web.Response(status=412, headers=headers)
    if _fits(request.headers.getall("If-None-Match", []), found.tag, otherwise=False):
        return web.Response(status=304, headers=headers)
    wanted = request.headers.get("If-Range", headers["ETag"])
    header = request.headers.get("Range") if wanted in (headers["ETag"], headers["Last-Modified"]) else None
    try:
        ranges = parse_ranges(header, found.n_bytes)
    except UnsatisfiableError as error:
        headers["Content-Range"] = f"bytes */{found.n_bytes}"
        return web.Response(status=416, text=f"{error}\n", headers=headers)
    body = _Body(request, file, is_same=is_same, sent=sent)
    if ranges is None:
        return await body.send(200, headers | {"Content-Type": _KIND}, [(b"", (0, found.n_bytes))])
    if len(ranges) == 1:
        headers |= {"Content-Range": _content_range(*ranges[0], found.n_bytes), "Content-Type": _KIND}
        return await body.send(206, headers, [(b"", ranges[0])])
    mark = secrets.token_hex(12)
    parts = [(_part_head(mark, each, found.n_bytes), each) for each in ranges]
    headers["Content-Type"] = f"multipart/byteranges; boundary={mark}"
    return await body.send(206, headers, parts, end=f"\r\n--{mark}--\r\n".encode())


def _fits(headers: Iterable[str], tag: str, *, otherwise: bool) -> bool:
    """Whether a list of ETags contains this one, or any; ``otherwise`` if there is no list."""
    tags = [each.strip() for header in headers for each in header.split(",")]
    return any(each in ("*", f'"{tag}"') for each in tags) if tags else otherwise


def _content_range(start: int, stop: int, n_bytes: int) -> str:
    return f"bytes {start}-{stop - 1}/{n_bytes}"


def _part_head(mark: str, part: tuple[int, int], n_bytes: int) -> bytes:
    lines = (f"--{mark}", f"Content-Type: {_KIND}", f"Content-Range: {_content_range(*part, n_bytes)}", "", "")
    return b"\r\n" + "\r\n".join(lines).encode()


class _Body:
    """The body of one response."""

    def __init__(
        self, request: web.Request, file: FileIO, *, is_same: Callable[[int], bool], sent: Callable[[int], None]
    ) -> None:
        self._request, self._file, self._is_same, self._sent = request, file, is_same, sent
        self._loop = asyncio.get_running_loop()

    async def send(
        self, status: int, headers: dict[str, str], parts: list[tuple[bytes, tuple[int, int]]], *, end: bytes = b""
    ) -> web.StreamResponse:
        """Send parts of the file, each after some text, and ``end`` after the last one."""
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = sum(len(head) + stop - start for head, (start, stop) in parts) + len(end)
        await response.prepare(self._request)
        if self._request.method == "HEAD":
            return response
        transport = self._request.transport
        try:
            for number, (head, (start, stop)) in enumerate(parts, 1):
                if head:
                    await response.write(head)
                last = max(start, stop - _LAST_BYTES) if number == len(parts) else stop
                await self._send_file(response, transport, start, last)
                if last < stop:
                    await self._send_last(response, last, stop, end)
            await response.write_eof()
        except BaseException:
            # The length was promised: only a connection that ends early says that bytes are missing.
            if transport is not None:
                transport.abort()
            raise
        return response

    async def _send_file(
        self, response: web.StreamResponse, transport: asyncio.Transport | None, start: int, stop: int
    ) -> None:
        is_plain = transport is not None and transport.get_extra_info("sslcontext") is None
        step = _PIECE_BYTES if is_plain else _COPIED_BYTES
        for at in range(start, stop, step):
            count = min(step, stop - at)
            if is_plain:
                sending: Any = self._loop.sendfile(transport, self._file, at, count, fallback=True)  # type: ignore[arg-type]
                taken = await asyncio.wait_for(sending, _STALL_S)
            else:
                data = await asyncio.to_thread(os.pread, self._file.fileno(), count, at)
                await asyncio.wait_for(response.write(data), _STALL_S)
                taken = len(data)
            self._sent(taken)
            if taken < count:
                raise ConnectionAbortedError("the file became shorter while it was sent")

    async def _send_last(self, response: web.StreamResponse, start: int, stop: int, end: bytes) -> None:
        data = os.pread(self._file.fileno(), stop - start, start)
        if len(data) < stop - start or not self._is_same(self._file.fileno()):
            raise ConnectionAbortedError("the file changed while it was sent")
        await asyncio.wait_for(response.write(data + end), _STALL_S)
        self._sent(len(data))
