"""Send bytes of a file as the body of a response: by ``sendfile``, from the page cache to the socket without a copy.

    Range, If-Range, If-Match, If-None-Match  ─►  200 whole │ 206 one range │ 206 several, as multipart/byteranges
                                                  304 │ 412 │ 416

The tag of a file is compared again before the last bytes of a body are sent. If the file was written to meanwhile, the
connection is cut, so that the client sees an error. What is written to the file after that, while pages of it wait in
the socket, still reaches the client: `sendfile` hands over the pages themselves.
"""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import format_datetime
from io import FileIO
from typing import Any

from aiohttp import web

from shardload.serving.ranges import UnsatisfiableError, parse_ranges
from shardload.serving.roots.catalogue import ServedFile

_PIECE_BYTES = 16 << 20
"""Bytes that are sent before the client must have taken them, in `_STALL_S`."""
_LAST_BYTES = 64 << 10
"""Bytes at the end of a body that are sent after the file was looked at again."""
_STALL_S = 60.0
"""Seconds in which a client must take a piece: slower than 0.3 MB/s counts as stalled."""
_COPIED_BYTES = 1 << 20
"""Bytes that are read at once where ``sendfile`` cannot send them, as over TLS."""
_PROBED_BYTES = 1 << 20
"""How far apart the pages are that are looked for in the page cache."""
_KIND = "application/octet-stream"


async def send_bytes(
    request: web.Request,
    file: FileIO,
    found: ServedFile,
    *,
    is_same: Callable[[int], bool],
    sent: Callable[[int], None],
    sha256: str | None,
) -> web.StreamResponse:
    """Answer a request for bytes of an open file.

    Args:
        request: A GET or HEAD request.
        file: The open file.
        found: What the file was when it was opened.
        is_same: Whether the file with this descriptor is still what it was.
        sent: Called with the number of bytes of the file that were sent.
        sha256: The SHA-256 of the whole file, in hexadecimal digits, if it is known.
    """
    body = _FileBody(request, file, is_same=is_same, sent=sent)
    return await send_version(
        request, body, tag=found.tag, n_bytes=found.n_bytes, changed_s=found.changed_s, sha256=sha256
    )


def wants_digest(request: web.Request) -> bool:
    """Whether a request is for the whole file, or asks for the digest of it."""
    return "Range" not in request.headers or "Want-Repr-Digest" in request.headers


async def send_version(
    request: web.Request, body: Body, *, tag: str, n_bytes: int, changed_s: float, sha256: str | None = None
) -> web.StreamResponse:
    """Answer a request for bytes of one version of a file, as its conditions and ranges say.

    Args:
        request: A GET or HEAD request.
        body: What sends the bytes.
        tag: The ETag of the version, without quotes.
        n_bytes: The file's size.
        changed_s: When it was last changed, in seconds since 1970; 0 if that is not known.
        sha256: The SHA-256 of the whole file, in hexadecimal digits, if it is known.
    """
    headers = {"ETag": f'"{tag}"', "Accept-Ranges": "bytes", "Cache-Control": "private, no-cache"}
    if changed_s:
        headers["Last-Modified"] = format_datetime(datetime.fromtimestamp(int(changed_s), UTC), usegmt=True)
    if sha256 is not None:  # RFC 9530
        headers["Repr-Digest"] = f"sha-256=:{base64.b64encode(bytes.fromhex(sha256)).decode()}:"
    if not _fits(request.headers.getall("If-Match", []), tag, otherwise=True):
        return web.Response(status=412, headers=headers)
    # A proxy that compresses makes tags weak; for a copy that is compared as a whole, these are as good.
    known = [each.replace('W/"', '"') for each in request.headers.getall("If-None-Match", [])]
    if _fits(known, tag, otherwise=False):
        return web.Response(status=304, headers=headers)
    try:
        ranges = parse_ranges(_range_header(request, headers["ETag"]), n_bytes)
    except UnsatisfiableError as error:
        headers["Content-Range"] = f"bytes */{n_bytes}"
        return web.Response(status=416, text=f"{error}\n", headers=headers)
    if ranges is None:
        return await body.send(200, headers | {"Content-Type": _KIND}, [(b"", (0, n_bytes))])
    if len(ranges) == 1:
        headers |= {"Content-Range": _content_range(*ranges[0], n_bytes), "Content-Type": _KIND}
        return await body.send(206, headers, [(b"", ranges[0])])
    mark = secrets.token_hex(12)
    parts = [(_part_head(mark, each, n_bytes), each) for each in ranges]
    headers["Content-Type"] = f"multipart/byteranges; boundary={mark}"
    return await body.send(206, headers, parts, end=f"\r\n--{mark}--\r\n".encode())


def cut_off(transport: asyncio.Transport | None, error: BaseException) -> None:
    """End a connection at once, because of an error.

    If that is a `TimeoutError`, what waits in the socket is dropped: the system would keep it for as long as the client
    takes a byte now and then.
    """
    if transport is None:
        return
    if isinstance(error, TimeoutError) and (connection := transport.get_extra_info("socket")) is not None:
        with suppress(OSError):  # it is closed already
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _range_header(request: web.Request, tag: str) -> str | None:
    """Return the header ``Range`` if it counts: of a GET, once, and with a condition only if that is this very tag.

    A date is no such condition: two versions may have the same, as dates of files count seconds, or are copied.
    """
    found = request.headers.getall("Range", [])
    is_same = request.headers.get("If-Range", tag) == tag
    return found[0] if request.method == "GET" and is_same and len(found) == 1 else None


def _fits(headers: Iterable[str], tag: str, *, otherwise: bool) -> bool:
    """Whether a list of ETags contains this one, or any; ``otherwise`` if there is no list."""
    tags = [each.strip() for header in headers for each in header.split(",")]
    return any(each in ("*", f'"{tag}"') for each in tags) if tags else otherwise


def _content_range(start: int, stop: int, n_bytes: int) -> str:
    return f"bytes {start}-{stop - 1}/{n_bytes}"


def _part_head(mark: str, part: tuple[int, int], n_bytes: int) -> bytes:
    lines = (f"--{mark}", f"Content-Type: {_KIND}", f"Content-Range: {_content_range(*part, n_bytes)}", "", "")
    return b"\r\n" + "\r\n".join(lines).encode()


class Body(ABC):
    """The body of one response."""

    def __init__(self, request: web.Request) -> None:
        self._request = request

    async def begin(self, ranges: list[tuple[int, int]]) -> dict[str, str]:
        """Prepare to send ranges, before the answer begins; return more headers for it."""
        return {}

    @abstractmethod
    async def send_range(self, response: web.StreamResponse, start: int, stop: int, end: bytes | None) -> None:
        """Send a range of the file, and ``end`` after it if that is the end of the body, else ``None``."""

    async def send(
        self, status: int, headers: dict[str, str], parts: list[tuple[bytes, tuple[int, int]]], *, end: bytes = b""
    ) -> web.StreamResponse:
        """Send parts of the file, each after some text, and ``end`` after the last one."""
        if self._request.method != "HEAD":
            headers = headers | await self.begin([each for _, each in parts])
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
                await self.send_range(response, start, stop, end if number == len(parts) else None)
            await response.write_eof()
        except BaseException as error:
            # The length was promised: only a connection that ends early says that bytes are missing.
            cut_off(transport, error)
            raise
        return response


class _FileBody(Body):
    """The body of a response with bytes of an open file."""

    def __init__(
        self, request: web.Request, file: FileIO, *, is_same: Callable[[int], bool], sent: Callable[[int], None]
    ) -> None:
        super().__init__(request)
        self._file, self._is_same, self._sent = file, is_same, sent
        self._loop = asyncio.get_running_loop()

    async def send_range(self, response: web.StreamResponse, start: int, stop: int, end: bytes | None) -> None:
        """Send a range, the end of the body after another look at the file; see `Body.send_range`."""
        last = stop if end is None else max(start, stop - _LAST_BYTES)
        await self._send_file(response, self._request.transport, start, last)
        if end is not None and last < stop:
            await self._send_last(response, last, stop, end)

    async def _send_file(
        self, response: web.StreamResponse, transport: asyncio.Transport | None, start: int, stop: int
    ) -> None:
        is_plain = transport is not None and transport.get_extra_info("sslcontext") is None
        for at in range(start, stop, _PIECE_BYTES):
            count = min(_PIECE_BYTES, stop - at)
            if is_plain:
                await _read_ahead(self._file.fileno(), at, count)
            async with asyncio.timeout(_STALL_S):
                if is_plain:
                    await self._send_piece(transport, at, count)
                else:
                    await self._copy_piece(response, at, count)

    async def _send_piece(self, transport: asyncio.Transport | None, at: int, count: int) -> None:
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client left")
        sending: Any = self._loop.sendfile(transport, self._file, at, count, fallback=True)
        self._note(await sending, count)

    async def _copy_piece(self, response: web.StreamResponse, start: int, n_bytes: int) -> None:
        for at in range(start, start + n_bytes, _COPIED_BYTES):
            count = min(_COPIED_BYTES, start + n_bytes - at)
            data = await asyncio.to_thread(os.pread, self._file.fileno(), count, at)
            await response.write(data)
            self._note(len(data), count)

    def _note(self, taken: int, expected: int) -> None:
        self._sent(taken)
        if taken < expected:
            raise ConnectionAbortedError("the file became shorter while it was sent")

    async def _send_last(self, response: web.StreamResponse, start: int, stop: int, end: bytes) -> None:
        data, is_same = await asyncio.to_thread(self._read_last, start, stop)
        if len(data) < stop - start or not is_same:
            raise ConnectionAbortedError("the file changed while it was sent")
        await asyncio.wait_for(response.write(data + end), _STALL_S)
        self._sent(len(data))

    def _read_last(self, start: int, stop: int) -> tuple[bytes, bool]:
        data = os.pread(self._file.fileno(), stop - start, start)
        return data, self._is_same(self._file.fileno())


async def _read_ahead(descriptor: int, at: int, count: int) -> None:
    """Read bytes into the page cache, if they are not there: ``sendfile`` would wait for the disk, and all clients too.

    Only a few of the pages are looked at, as whoever reads a file reads it in large pieces.
    """
    last = at + count - 1
    if not all(_is_cached(descriptor, each) for each in (*range(at, last, _PROBED_BYTES), last)):
        await asyncio.to_thread(_read_over, descriptor, at, count)


def _is_cached(descriptor: int, at: int) -> bool:
    flag = getattr(os, "RWF_NOWAIT", None)
    if flag is None:
        return True
    try:
        return os.preadv(descriptor, [bytearray(1)], at, flag) >= 0
    except OSError:  # it is not, or the file system cannot tell
        return False


def _read_over(descriptor: int, at: int, count: int) -> None:
    buffer = memoryview(bytearray(min(count, _COPIED_BYTES)))
    stop = at + count
    while at < stop and (taken := os.preadv(descriptor, [buffer[: stop - at]], at)):
        at += taken
