"""Accept connections, with TLS or without it, and tell of those that come to nothing.

    listener ─► too many? ─► closed                             connections
            └─► handshake of TLS ─► fails, is too slow          tls
                                └─► http in its place           plain http
                                └─► a connection, which reads requests

asyncio's own server is silent about these.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from shardload.serving.listener import Listener, TooManyConnectionsError

_BACKLOG = 1024
_HANDSHAKE_S = 15.0
_RETRY_S = 1.0


class Accepting:
    """Accepts connections of a listener, for each of which ``connect`` returns what reads it."""

    def __init__(
        self,
        listener: Listener,
        connect: Callable[[], asyncio.Protocol],
        *,
        context: ssl.SSLContext | None,
        note_error: Callable[[str, str, str], None],
    ) -> None:
        """``note_error`` is called with the kind, the client and the text of an error."""
        self._listener, self._connect, self._context, self._note_error = listener, connect, context, note_error
        self._beginning: set[asyncio.Task[None]] = set()
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._accepting = asyncio.create_task(self._run())

    def close(self) -> None:
        """Accept no more connections: they are refused."""
        self._accepting.cancel()
        self._listener.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0)  # others must run, too, however many come
            try:
                made, address = await loop.sock_accept(self._listener)
            except TooManyConnectionsError as error:
                self._note_error("connections", error.client, "closed at once: there are too many")
            except ConnectionAbortedError:  # it left
                pass
            except OSError as error:  # too many open files
                self._note_error("connections", "-", f"cannot accept one: {error.strerror or error}")
                await asyncio.sleep(_RETRY_S)
            else:
                task = loop.create_task(self._begin(made, str(address[0])))
                self._beginning.add(task)  # the loop keeps no reference
                task.add_done_callback(self._beginning.discard)

    async def _begin(self, made: socket.socket, client: str) -> None:
        handshake_s = None if self._context is None else _HANDSHAKE_S
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connect, made, ssl=self._context, ssl_handshake_timeout=handshake_s
            )
        except ssl.SSLError as error:
            if error.reason == "HTTP_REQUEST":
                self._note_error("plain http", client, "it sent http, expected https")
            else:
                self._note_error("tls", client, f"the handshake failed: {error.reason or error}")
        except ConnectionAbortedError:
            self._note_error("tls", client, f"the handshake took longer than {_HANDSHAKE_S:g} s")
        except OSError:
            self._note_error("tls", client, "it left before the end of the handshake")
