"""A fast HTTP server of a folder for `benchmarks.stores`: ranges by ``sendfile``; latency and a rate limit if wanted.

It prints its port, and serves until its standard input ends. It speaks as much of HTTP/1.1 as clients of stores need:
GET and HEAD with one range, ETag, Last-Modified, connections that stay open.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from pathlib import Path

_RANGE = re.compile(rb"^range: *bytes=(\d+)-(\d*)", re.IGNORECASE | re.MULTILINE)
_LONG_AGO = "Wed, 01 Jan 2025 00:00:00 GMT"
_CHUNK_BYTES = 256 << 10


class Limit:
    """Lets bytes through at a rate, all connections together; 0 for no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_s, self._lock = bytes_per_s, 0.0, threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether there is a limit."""
        return self._bytes_per_s > 0

    def wait(self, n_bytes: int) -> None:
        """Wait until as many bytes may be sent."""
        if not self.is_on:
            return
        with self._lock:
            due_s = max(time.monotonic(), self._free_s)
            self._free_s = due_s + n_bytes / self._bytes_per_s
        time.sleep(max(0.0, due_s - time.monotonic()))


def _serve(connection: socket.socket, folder: Path, latency_s: float, limit: Limit) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    held = b""
    with connection:
        while True:
            while b"\r\n\r\n" not in held:
                if not (more := connection.recv(65536)):
                    return
                held += more
            head, _, held = held.partition(b"\r\n\r\n")
            _answer(connection, head, folder, latency_s, limit)


def _answer(connection: socket.socket, head: bytes, folder: Path, latency_s: float, limit: Limit) -> None:
    method, target, _ = head.split(b"\r\n", 1)[0].split(b" ")
    path = folder / target.partition(b"?")[0].decode().lstrip("/").removeprefix("bucket/")
    time.sleep(latency_s)
    if not path.is_file():
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        return
    size = path.stat().st_size
    found = _RANGE.search(head)
    first, last = (int(found[1]), min(int(found[2] or size - 1), size - 1)) if found else (0, size - 1)
    connection.sendall(
        (
            f"HTTP/1.1 {'206 Partial Content' if found else '200 OK'}\r\nContent-Length: {last + 1 - first}\r\n"
            f'ETag: "{size:x}"\r\nLast-Modified: {_LONG_AGO}\r\nAccept-Ranges: bytes\r\n'
            f"Content-Range: bytes {first}-{last}/{size}\r\n\r\n"
        ).encode()
    )
    if method == b"HEAD":
        return
    with path.open("rb") as file:
        while first <= last:
            count = min(_CHUNK_BYTES, last + 1 - first) if limit.is_on else last + 1 - first
            limit.wait(count)
            first += os.sendfile(connection.fileno(), file.fileno(), first, count)


def main() -> None:
    """Serve ``argv[1]``; each answer waits ``argv[2]`` seconds, and all together send ``argv[3]`` bytes per second."""
    folder, latency_s, limit = Path(sys.argv[1]), float(sys.argv[2]), Limit(float(sys.argv[3]))
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(listener.getsockname()[1], flush=True)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve, args=(connection, folder, latency_s, limit), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
