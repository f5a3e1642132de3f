"""`shardload serve` as a process, and requests to it that no client would send."""

import contextlib
import http.client
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlencode, urlsplit

_FORM = {"Content-Type": "application/x-www-form-urlencoded"}


class Served:
    """A server of folders; ``address`` is its URL, ``log`` what it wrote to stderr so far, if anyone reads it."""

    def __init__(self, *options, reads_log=True, env=None):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardload", "serve", *map(str, options)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})},
        )  # fmt: skip
        self.told = self.process.stdout.readline()
        self.address = self.told.split()[-1] if self.told else ""
        self.place = urlsplit(self.address).netloc
        if not reads_log:
            self.process.stderr.close()
            return
        self.log = []
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
        self._reader.start()

    def get(self, path, *, method="GET", body=None, **headers):
        """Status, headers and body of one answer; ``_`` in names of headers stands for a hyphen."""
        with contextlib.closing(http.client.HTTPConnection(self.place, timeout=120)) as asked:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            asked.request(method, path, body, named)
            answer = asked.getresponse()
            return answer.status, answer.headers, answer.read()

    def sent(self, **headers):
        """Bytes of files that were sent so far."""
        found = re.search(r"shardload_sent_bytes_total\{[^}]*\} (\S+)", self.get("/metrics", **headers)[2].decode())
        return float(found[1]) if found else 0.0

    def metric(self, name, **headers):
        """The sum of a counter over its labels, or of one labelled like ``name{label="x"}``."""
        found = re.findall(
            rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", self.get("/metrics", **headers)[2].decode(), re.M
        )
        return sum(map(float, found))

    def raw(self, data, *, timeout=10):
        """All that comes back for some bytes."""
        host, _, port = self.place.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=timeout) as asked:
            with contextlib.suppress(OSError):
                asked.sendall(data)
            found = b""
            with contextlib.suppress(OSError):
                while part := asked.recv(1 << 16):
                    found += part
            return found

    def descriptors(self):
        """How many files and sockets the server has open."""
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def end(self):
        """Stop the server as an operator would, and return its exit code."""
        self.process.terminate()
        code = self.process.wait(timeout=60)
        self._reader.join(10)
        return code


def send_form(server, path, fields, *, origin="own", connection=http.client.HTTPConnection, **headers):
    """Post a form as a browser would, and return status, headers and body."""
    scheme = "http" if connection is http.client.HTTPConnection else "https"
    own = {"Origin": f"{scheme}://{server.place}" if origin == "own" else origin} if origin else {}
    body = fields if isinstance(fields, str | bytes) else urlencode(fields)
    with contextlib.closing(connection(server.place, timeout=30)) as asked:
        asked.request("POST", path, body=body, headers={**_FORM, **own, **headers})
        answer = asked.getresponse()
        return answer.status, answer.headers, answer.read()


@contextlib.contextmanager
def served(*options, **named):
    server = Served("--listen", "127.0.0.1:0", *options, **named)
    try:
        assert server.address, server.process.wait(timeout=10) or server.log
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def eventually(condition, *, within_s=90):
    """True once a condition is; it fails the test if that takes longer."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return True
