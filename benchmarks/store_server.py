"""A fast HTTP server of a folder for `benchmarks.stores`: ranges by ``sendfile``; latency and a rate limit if wanted.

Files may be longer than they are on the disk: the rest is sent as zeros.

It prints its port, and serves until its standard input ends. It speaks as much of HTTP/1.1 as clients of stores need:
GET and HEAD with one range, ETag, Last-Modified, connections that stay open; and lists folders as S3 does. A GET of
``/sent`` returns how many bytes of files it has sent to all clients together.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_RANGE = re.compile(rb"^range: *bytes=(\d+)-(\d*)", re.IGNORECASE | re.MULTILINE)
_LONG_AGO = "Wed, 01 Jan 2025 00:00:00 GMT"
_CHUNK_BYTES = 256 << 10
_ZEROS = bytes(_CHUNK_BYTES)


class Sent:
    """Bytes of files that were sent, on all connections together."""

    def __init__(self) -> None:
        self.n_bytes, self._lock = 0, threading.Lock()

    def add(self, n_bytes: int) -> None:
        """Count bytes."""
        with self._lock:
            self.n_bytes += n_bytes


_SENT = Sent()


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


@dataclass(frozen=True, slots=True)
class Served:
    """What is served, and how."""

    folder: Path
    latency_s: float
    limit: Limit
    least_bytes: int
    connection_bytes_per_s: float


def _serve(connection: socket.socket, served: Served) -> None:
    own = Limit(served.connection_bytes_per_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    held = b""
    with suppress(ConnectionError), connection:
        while True:
            while b"\r\n\r\n" not in held:
                if not (more := connection.recv(65536)):
                    return
                held += more
            head, _, held = held.partition(b"\r\n\r\n")
            _answer(connection, head, served, own)


def _answer(connection: socket.socket, head: bytes, served: Served, own: Limit) -> None:
    method, target, _ = head.split(b"\r\n", 1)[0].split(b" ")
    url = urllib.parse.urlsplit(target.decode())
    time.sleep(served.latency_s)
    if url.path == "/sent":
        _send(connection, str(_SENT.n_bytes))
        return
    query = dict(urllib.parse.parse_qsl(url.query))
    if "list-type" in query:
        _send(connection, _listing(served.folder, query.get("prefix", "")))
        return
    path, limit = served.folder / urllib.parse.unquote(url.path).lstrip("/").removeprefix("bucket/"), served.limit
    if not path.is_file():
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        return
    stored = path.stat().st_size
    size = max(stored, served.least_bytes)
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
            count = (stored if first < stored else size) - first
            count = min(count, last + 1 - first, _CHUNK_BYTES if limit.is_on or own.is_on or first >= stored else size)
            limit.wait(count)
            own.wait(count)
            if first < stored:
                sent = os.sendfile(connection.fileno(), file.fileno(), first, count)
            else:
                connection.sendall(memoryview(_ZEROS)[:count])
                sent = count
            _SENT.add(sent)
            first += sent


def _send(connection: socket.socket, text: str) -> None:
    connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text.encode())}\r\n\r\n{text}".encode())


def _listing(folder: Path, prefix: str) -> str:
    """Return S3's list of what is directly in a folder."""
    entries = ""
    for path in sorted((folder / prefix).iterdir()) if (folder / prefix).is_dir() else ():
        key = urllib.parse.quote(path.relative_to(folder).as_posix())
        if path.is_dir():
            entries += f"<CommonPrefixes><Prefix>{key}/</Prefix></CommonPrefixes>"
        else:
            size = path.stat().st_size
            entries += (
                f"<Contents><Key>{key}</Key><Size>{size}</Size><ETag>&quot;{size:x}&quot;</ETag>"
                "<LastModified>2025-01-01T00:00:00.000Z</LastModified></Contents>"
            )
    return f"<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"


class StoreServer:
    """The server in a process of its own, which is the bucket ``s3://bucket`` for processes with its `environment`.

    It sends at most ``bytes_per_s`` to all of them together; 0 is no limit.
    """

    def __init__(self, folder: Path, bytes_per_s: float = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.store_server", str(folder), "0", str(bytes_per_s), "0", "0"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.root = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate("")

    @property
    def environment(self) -> dict[str, str]:
        """Variables that lead clients of S3 to this server."""
        keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "any")
        return {"AWS_ENDPOINT_URL": self.root, "AWS_REGION": "us-east-1", **keys}

    @staticmethod
    def sent_by(root: str) -> int:
        """Bytes of files that the server at this address has sent."""
        with urllib.request.urlopen(f"{root}/sent") as answer:
            return int(answer.read())


def main() -> None:
    """Serve ``argv[1]``; each answer waits ``argv[2]`` seconds, and all together send ``argv[3]`` bytes per second.

    Each file has at least ``argv[4]`` bytes, and each connection sends at most ``argv[5]`` bytes per second. It listens
    at ``argv[6]``, by default to this machine only.
    """
    folder, latency_s, bytes_per_s, least_bytes, each = sys.argv[1:6]
    served = Served(Path(folder), float(latency_s), Limit(float(bytes_per_s)), int(least_bytes), float(each))
    listener = socket.create_server((sys.argv[6] if len(sys.argv) > 6 else "127.0.0.1", 0), backlog=256)
    print(listener.getsockname()[1], flush=True)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve, args=(connection, served), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
