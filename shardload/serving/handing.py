"""Hand open files to clients on this machine, over an abstract socket: they read the page cache, not a connection.

It is an address that only processes of this machine have, so a client that finds it need not be told where files are,
and gets no more than it would be sent: the same catalogue and the same tokens decide.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shardload.serving.roots.catalogue import Catalogue
from shardload.stores.handed import LINE_BYTES

_WAIT_S = 5.0
_RETRY_S = 0.5
_MOST_WAITING = 128
"""Most clients that are answered at a time."""


class Handing:
    """Hands over files of a catalogue. ``allows`` decides by the header that a request would have."""

    def __init__(
        self,
        catalogue: Catalogue,
        allows: Callable[[str | None], bool],
        *,
        log: Callable[[dict[str, Any]], None],
        handed: Callable[[str], None],
    ) -> None:
        """``log`` gets the facts of each file that was handed over, and ``handed`` its address below the server's."""
        self.socket_name = f"shardload-{secrets.token_hex(16)}" if sys.platform == "linux" else None
        """The name of the socket; ``None`` if this system has no such sockets."""
        self._catalogue, self._allows, self._log, self._handed = catalogue, allows, log, handed
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Answer until the task is cancelled."""
        if self.socket_name is None:
            return
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"\0{self.socket_name}")
            listener.listen(_MOST_WAITING)
            listener.setblocking(False)
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError:  # too many open files, or the client left
                    await asyncio.sleep(_RETRY_S)
                    continue
                if len(self._answering) >= _MOST_WAITING:
                    connection.close()
                    continue
                task = loop.create_task(self._answer(connection))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    async def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError, RecursionError):
            connection.setblocking(False)
            asked = await asyncio.wait_for(_line(connection), _WAIT_S)
            if not isinstance(asked, dict):
                return
            token = asked.get("token")
            if not self._allows(f"Bearer {token}" if isinstance(token, str) else None):
                return
            opened = await asyncio.to_thread(self._catalogue.open, str(asked.get("key")))
            if opened is None:
                return
            descriptor, found = opened
            try:
                socket.send_fds(connection, [json.dumps({"etag": found.tag}).encode()], [descriptor])
            finally:
                os.close(descriptor)
            facts = {"request": secrets.token_hex(8), "client": "this machine", "method": "HAND", "status": 200}
            self._log({**facts, "path": f"/{asked['key']}", "bytes": 0, "seconds": 0.0})
            self._handed(str(asked["key"]))


async def _line(connection: socket.socket) -> Any:
    loop, found = asyncio.get_running_loop(), b""
    while not found.endswith(b"\n"):
        part = await loop.sock_recv(connection, 4096)
        if not part or len(found) > LINE_BYTES:
            raise ValueError("no line")
        found += part
    return json.loads(found)
