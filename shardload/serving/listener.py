"""The socket that a server listens at: it counts open connections, and closes those that are too many.

It counts when a connection is accepted, and until its socket is closed. So those count, too, that have not said
anything yet, or not finished the handshake of TLS. `shardload.serving.limits` says how many are too many.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shardload.errors import SourceError
from shardload.serving.limits import ConnectionShare, client_of

_UNREAD_MS = 75_000
"""Milliseconds after which the system closes a connection whose client takes nothing of what is sent."""


class TooManyConnectionsError(ConnectionAbortedError):
    """Raised when a connection was closed at once, because ``client`` or all together have too many."""

    def __init__(self, client: str) -> None:
        super().__init__(errno.ECONNABORTED, "there are too many connections")
        self.client = client


class Listener(socket.socket):
    """A bound socket that accepts at most so many connections at a time."""

    def __init__(self, family: int, kind: int, protocol: int, *, share: ConnectionShare) -> None:
        super().__init__(family, kind, protocol)
        self._share = share
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
            with suppress(OSError):
                self.setsockopt(socket.IPPROTO_TCP, option, _UNREAD_MS)  # connections inherit it

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, or close it at once and raise a `TooManyConnectionsError`."""
        made, address = super().accept()
        client = client_of(address[0])
        if not self._share.take(client):
            made.close()
            raise TooManyConnectionsError(address[0])
        return _Accepted(made, lambda: self._share.give_back(client)), address


class _Accepted(socket.socket):
    """An open connection; ``closed`` is called once it is closed."""

    def __init__(self, made: socket.socket, closed: Callable[[], None]) -> None:
        super().__init__(made.family, made.type, made.proto, fileno=made.detach())
        self._closed: Callable[[], None] | None = closed

    def close(self) -> None:
        """Close the connection."""
        closed, self._closed = self._closed, None
        if closed is not None:
            closed()
        super().close()


def bound(host: str, port: int, *, share: ConnectionShare) -> Listener:
    """Return a socket that is bound to an address; a `SourceError` says why that is impossible."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = Listener(family, kind, number, share=share)
    except OSError as error:
        raise SourceError(f"Cannot listen at {host}: {error.strerror or error}") from error
    try:
        found.bind(address)
    except OSError as error:
        found.close()
        raise SourceError(
            f"Cannot listen at {host}:{port}: {error.strerror}. --listen takes another address"
        ) from error
    return found
