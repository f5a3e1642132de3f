"""A server with ten thousand slow connections: how many it keeps, what they cost, and what an honest client notices.

First, all of them come from one address, of which `--client-connections` allows a tenth. Then they come from a hundred
addresses, few enough from each. A third of them says nothing, a third sends its request a byte a second, and a third
asks for 32 MB and takes a byte a second. An honest client reads the file meanwhile, again and again. The server has to
close all of them by its own time limits, and to have as many open descriptors as before.

Needs Linux, where all addresses that begin with 127 are those of this machine, and a hard limit of open files (`ulimit
-Hn`) of half as many again as connections. Exits with 1 if more connections than allowed were kept, an answer was
wrong or took longer than 10 s, the server took 1 GiB more of memory, or descriptors stayed open.

    python -m benchmarks.slow_connections [--connections 10000]
"""

from __future__ import annotations

import argparse
import http.client
import os
import re
import resource
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

FILE_BYTES = 32 << 20
N_ADDRESSES = 100
_REQUEST = b"GET /models/model.safetensors HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"a" * 4000 + b"\r\n\r\n"
_END_S = 240.0
"""How long the server may take to close all connections: idle ones after 75 s, and each step of an answer in 60 s."""
_IP_BIND_ADDRESS_NO_PORT = 24


@dataclass
class SlowClients:
    """Connections that are slow in one of three ways, all in this thread: `step` moves each by a byte."""

    place: tuple[str, int]
    silent: list[socket.socket] = field(default_factory=list)
    sending: list[socket.socket] = field(default_factory=list)
    taking: list[socket.socket] = field(default_factory=list)
    _sent: int = 0

    def open(self, count: int, *, addresses: int) -> None:
        """Open so many connections more, from so many addresses in turn."""
        for number in range(count):
            made = socket.socket()
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            made.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
            made.bind((f"127.1.0.{1 + number % addresses}", 0))
            made.settimeout(30)
            made.connect(self.place)
            made.setblocking(False)
            kind = (self.silent, self.sending, self.taking)[number % 3]
            kind.append(made)
            if kind is self.taking:
                with suppress(OSError):  # it was one too many
                    made.sendall(_REQUEST)

    def step(self) -> None:
        """Let each connection send or take a byte."""
        for each in self.sending:
            with suppress(OSError):
                each.send(_REQUEST[self._sent : self._sent + 1])
        for each in self.taking:
            with suppress(OSError):
                each.recv(1)
        self._sent += 1

    def count_open(self) -> int:
        """Forget connections that the server has closed, and return how many are left."""
        kinds = {each.fileno(): (kind, each) for kind in (self.silent, self.sending, self.taking) for each in kind}
        with select.epoll() as found:
            for number in kinds:
                found.register(number, select.EPOLLRDHUP)  # and errors, in any case
            for number, _ in found.poll(0, max(1, len(kinds))):
                kind, each = kinds.pop(number)
                kind.remove(each)
                each.close()
        return len(kinds)

    def close(self) -> None:
        """Close all connections."""
        for kind in (self.silent, self.sending, self.taking):
            for each in kind:
                each.close()
            kind.clear()


class Server:
    """The server that is measured."""

    def __init__(self, root: Path, *, most: int, each: int) -> None:
        options = ("--max-connections", most, "--client-connections", each, "--listen", "127.0.0.1:0")
        command = [sys.executable, "-m", "shardload", "serve", "--root", root, *options]
        self.process = subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        host, _, port = self.process.stdout.readline().split()[-1].removeprefix("http://").rpartition(":")
        self.place = host, int(port)

    def descriptors(self) -> int:
        """How many files and sockets it has open."""
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def rss(self) -> int:
        """Bytes of its memory."""
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        return int(found[1]) << 10 if found else 0


def honest(place: tuple[str, int], data: bytes) -> float:
    """Read the file from an address of its own; return the seconds it took, and infinity if it was another one."""
    began_s = time.perf_counter()
    with closing(http.client.HTTPConnection(*place, timeout=120, source_address=("127.2.0.1", 0))) as asked:
        asked.request("GET", "/models/model.safetensors")
        is_right = asked.getresponse().read() == data
    return time.perf_counter() - began_s if is_right else float("inf")


def run(count: int, root: Path, data: bytes) -> list[str]:
    """Open connections from one address, then from many; print what was seen, and return what is wrong."""
    problems, each = [], max(count // 10, count // N_ADDRESSES + 1)
    server = Server(root, most=count + 100, each=each)
    slow = SlowClients(server.place)
    try:
        seconds = [honest(server.place, data)]
        before, rss = server.descriptors(), server.rss()
        slow.open(count, addresses=1)
        time.sleep(1)
        kept = slow.count_open()
        print(f"{count:,} connections from one address, {each:,} allowed: {kept:,} kept", flush=True)
        if kept > each:
            problems.append(f"{kept:,} connections of one address were kept")
        seconds.append(honest(server.place, data))
        slow.close()
        began_s = time.monotonic()
        while server.descriptors() > before and time.monotonic() < began_s + _END_S:
            time.sleep(0.2)
        slow.open(count, addresses=N_ADDRESSES)
        time.sleep(5)  # it accepts them one after the other
        kept, most_open, most_rss = slow.count_open(), server.descriptors(), server.rss()
        print(
            f"{count:,} connections from {N_ADDRESSES} addresses: {kept:,} kept, {most_open:,} descriptors", flush=True
        )
        began_s, left, ended_s = time.monotonic(), kept, 0.0
        while left and time.monotonic() < began_s + _END_S:
            slow.step()
            seconds.append(honest(server.place, data))
            most_rss, left = max(most_rss, server.rss()), slow.count_open()
            ended_s = time.monotonic() - began_s
            time.sleep(1)
        after = server.descriptors()
    finally:
        slow.close()
        server.process.kill()
        server.process.wait()
    print(
        f"the server closed them within {ended_s:.0f} s, {left:,} are left; "
        f"descriptors {before} before, {after} after\n"
        f"memory {rss / (1 << 20):.0f} MiB before, {most_rss / (1 << 20):.0f} MiB at most\n"
        f"an honest client read {FILE_BYTES >> 20} MiB {len(seconds)} times: {seconds[0]:.2f} s before, "
        f"{statistics.median(seconds[2:]):.2f} s (median) and {max(seconds[1:]):.2f} s (longest) meanwhile"
    )
    if left or after > before + 5:
        problems.append(f"{left:,} connections and {after - before:,} descriptors stayed")
    if max(seconds) > 10 or most_rss - rss > 1 << 30:
        problems.append("an honest client waited for too long or got other bytes, or the server took too much memory")
    return problems


def main() -> int:
    """Run, and say what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    count = parser.parse_args().connections
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as made:
        data = os.urandom(FILE_BYTES)
        header = b'{"x":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (FILE_BYTES, FILE_BYTES)
        data = len(header).to_bytes(8, "little") + header + data
        (Path(made) / "models").mkdir()
        (Path(made) / "models" / "model.safetensors").write_bytes(data)
        problems = run(count, Path(made), data)
    print(*(problems or ["as it should be"]), sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
