"""Bytes from `shardload serve` nearby, received straight into the memory where they belong.

    the file's ETag is "shardload-…", http://, no proxy, and a round trip takes 2 ms at most
    GET, Range, If-Match  ─►  206 with this tag and range  ─►  recv_into(memory of shards)
    any other answer      ─►  what is missing is requested as from any other server (`shardload.stores.requests`)

obstore receives into memory of its own, from where bytes have to be copied: half of a load's CPU time, if no network is
slower than that. Here nothing is repeated, waited for or explained: what fails is requested again by obstore, with all
that belongs to it. A connection serves one thread at a time, and is kept for the next request.
"""

from __future__ import annotations

import http.client
import os
import re
import select
import socket
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import cached_property
from urllib.parse import quote

from shardload.errors import TransferError
from shardload.stores.clients import directly_reached
from shardload.stores.objects import Version
from shardload.stores.windows import body_s, stall_s

_NEAR_US = 2000
"""Longest round trip, in µs, as the system measured it. Nothing is requested in advance here: each request waits."""
_ROUND_TRIP_AT = 68
"""Where Linux tells it in ``struct tcp_info``: ``tcpi_rtt``, of 32 bits. Other systems are not asked."""
_CONNECT_S = 2.0
_MOST_FAILURES = 3
"""After so many requests in a row that did not bring all, the server gets no more of them."""
_WAKE_BYTES = 512 << 10
"""How much has to be there before the system wakes the thread that receives it: otherwise it wakes it four times as
often, and takes half as much CPU time again. A connection that needs longer for this than a stall is one for `body_s`,
too."""
_HEADER_BYTES = 16 << 10
"""Most bytes of an answer's headers."""
_PARTIAL = re.compile(rb"HTTP/1\.1 206 ")
_LOOK_S = 0.005
"""How often headers are looked at that come in parts."""
_PIECE_BYTES = 1 << 20
"""How much is received between two looks at the clock; a connection that breaks loses at most so much."""


class NearServer:
    """Connections to one server. Thread-safe."""

    def __init__(self, host: str, port: int | None, *, headers: Mapping[str, str]) -> None:
        self._host, self._port = host, port
        self.headers = {"User-Agent": "shardload", **headers}
        """What goes with each request."""
        self._idle: list[http.client.HTTPConnection] = []
        self._failures = 0
        self._process = os.getpid()
        weakref.finalize(self, _close_all, self._idle)

    @classmethod
    def at(cls, root: str, *, headers: Mapping[str, str]) -> NearServer | None:
        """Return the server at an address; ``None`` if it is not at http://, or behind a proxy, or this is not Linux.

        ``headers`` go with each request.
        """
        found = directly_reached(root) if sys.platform == "linux" else None
        return None if found is None else cls(*found, headers=headers)

    @cached_property
    def is_near(self) -> bool:
        """Whether a round trip takes so little time that requests in advance gain nothing; measured once."""
        with suppress(OSError):
            connection = self._new(_CONNECT_S)
            self.keep(connection)
            return _round_trip_us(connection.sock) <= _NEAR_US
        return False

    @property
    def is_usable(self) -> bool:
        """Whether it is worth a request; a forked process must not send any by its parent's connections."""
        return self.is_near and self._failures < _MOST_FAILURES and os.getpid() == self._process

    def note(self, *, is_whole: bool) -> None:
        """Note whether a request has brought all its bytes."""
        self._failures = 0 if is_whole else self._failures + 1

    def take(self) -> http.client.HTTPConnection:
        """Return an open connection, which nothing else uses until it is passed to `keep`."""
        while self._idle:
            with suppress(IndexError):  # another thread was faster
                if _is_open(found := self._idle.pop()):
                    return found
                found.close()
        return self._new(stall_s())

    def keep(self, connection: http.client.HTTPConnection) -> None:
        """Keep a connection, whose last answer was received completely, for the next request."""
        self._idle.append(connection)

    def close(self) -> None:
        """Close the connections that are not in use."""
        _close_all(self._idle)

    def _new(self, timeout_s: float) -> http.client.HTTPConnection:
        made = http.client.HTTPConnection(self._host, self._port, timeout=min(timeout_s, _CONNECT_S))
        made.connect()
        made.sock.settimeout(stall_s())
        return made


class NearFile:
    """A file on a server nearby, while one load reads it. Thread-safe."""

    def __init__(self, server: NearServer, path: str, version: Version, *, shown: str) -> None:
        self._server, self._path, self._version, self._shown = server, path, version, shown
        self._busy: set[http.client.HTTPConnection] = set()
        self._is_cancelled = False

    def receive(self, buffers: Sequence[memoryview], start: int) -> int:
        """Fill buffers, in turn, with bytes of this version from ``start`` on; return how many came, perhaps none.

        Raises:
            TransferError: When it was cancelled.
        """
        n_bytes = sum(map(len, buffers))
        if not n_bytes or not self._server.is_usable:
            return 0
        received = 0
        with suppress(OSError, http.client.HTTPException, ValueError):  # requests by obstore say what is wrong
            for count in self._pieces(buffers, start, start + n_bytes):
                received += count
        if self._is_cancelled:
            raise TransferError(f"The request for {self._shown} was cancelled")
        self._server.note(is_whole=received == n_bytes)
        return received

    def cancel(self) -> None:
        """End what other threads receive: they get a `TransferError`."""
        self._is_cancelled = True
        for connection in self._busy.copy():
            with suppress(OSError, AttributeError):  # it is closed already
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._server.close()

    def _pieces(self, buffers: Sequence[memoryview], start: int, stop: int) -> Iterator[int]:
        """Receive bytes; yield how many came each time."""
        connection, is_whole = self._server.take(), False
        self._busy.add(connection)
        try:
            if self._is_cancelled:
                return
            wanted = {"If-Match": f'"{self._version.tag}"', "Range": f"bytes={start}-{stop - 1}"}
            connection.request("GET", f"/{quote(self._path)}", headers={**self._server.headers, **wanted})
            receiving, until_s = connection.sock, time.monotonic() + body_s(stop - start)
            if not _is_partial_content(receiving, until_s):
                return
            with closing(connection.getresponse()) as answer:
                if not self._is_expected(answer, start, stop):
                    return
                left = stop - start
                for piece in _pieces_of(buffers):
                    left -= len(piece)
                    _wake_at(receiving, _WAKE_BYTES if left >= _WAKE_BYTES else 1)
                    count = answer.readinto(piece)
                    yield count
                    if count < len(piece) or time.monotonic() > until_s:
                        return
                is_whole = answer.isclosed() and not answer.will_close
        finally:
            self._busy.discard(connection)
            if is_whole:
                self._server.keep(connection)
            else:
                connection.close()

    def _is_expected(self, answer: http.client.HTTPResponse, start: int, stop: int) -> bool:
        """Whether an answer has these bytes of this version, and nothing else."""
        told = answer.status, answer.getheader("ETag"), answer.getheader("Content-Range"), answer.length
        wanted = 206, f'"{self._version.tag}"', f"bytes {start}-{stop - 1}/{self._version.size}", stop - start
        return told == wanted and answer.getheader("Content-Encoding") is None


def _round_trip_us(connected: socket.socket) -> int:
    """Return how many µs the round trip of connecting took, by the system's clock: busy cores do not count."""
    told = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP_AT + 4)
    return int.from_bytes(told[_ROUND_TRIP_AT:], sys.byteorder)


def _is_open(connection: http.client.HTTPConnection) -> bool:
    """Whether the server has not closed a connection that nothing was requested by since."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return not poll.poll(0)


def _is_partial_content(receiving: socket.socket, until_s: float) -> bool:
    """Whether all headers of an answer with status 206 are there in time; `http.client` would wait for each byte."""
    poll = select.poll()
    poll.register(receiving, select.POLLIN)
    while (left_s := until_s - time.monotonic()) > 0:
        if not poll.poll(1000 * min(left_s, stall_s())):
            return False
        found = receiving.recv(_HEADER_BYTES, socket.MSG_PEEK)
        if b"\r\n\r\n" in found:
            return _PARTIAL.match(found) is not None
        if not found or len(found) == _HEADER_BYTES:
            return False
        time.sleep(_LOOK_S)
    return False


def _wake_at(receiving: socket.socket, n_bytes: int) -> None:
    """Have a socket wait until so many bytes are there, or its connection ends."""
    receiving.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, n_bytes)


def _pieces_of(buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    for buffer in buffers:
        yield from (buffer[at : at + _PIECE_BYTES] for at in range(0, len(buffer), _PIECE_BYTES))


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    while connections:
        connections.pop().close()
