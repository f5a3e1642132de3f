"""Clients of remote stores, and loads from them, against plain ranged downloads in the same run.

A server on loopback (`benchmarks.store_server`, in its own process) sends a file of random bytes from the page cache.
``clients`` reads all of it in pieces, with as many requests in flight: obstore, as shardload uses it; TensorStore's
key-value store; and a plain client on sockets that reads into memory it has used before, the floor. ``load`` compares
`shardload.load_arrays` of a safetensors file at an address with the plain client, which forgets what it reads; with the
same client that keeps all of it in fresh memory, as a load must (``kept``); and with the same file on the disk.

    python -m benchmarks.stores clients [--gb 1] [--piece-mib 4] [--in-flight 16] [--latency-ms 0] [--mb-s 0] [--json]
    python -m benchmarks.stores load    [--gb 1] [--latency-ms 0] [--mb-s 0] [--connection-mb-s 0]
                                       [--layout rows] [--pairs 7] [--json]
    python -m benchmarks.stores serve   [--gb 1] [--floor plain|kept|local] [--layout rows] [--pairs 7] [--json]
    python -m benchmarks.stores many    [--gb 1] [--clients 8] [--seconds 4] [--pairs 7] [--json]
    python -m benchmarks.stores cache   [--gb 1] [--latency-ms 0] [--mb-s 0] [--pairs 7] [--cold] [--json]

``serve`` does the same with `shardload serve`: ``load`` receives the bytes straight into the shards, ``requested``
requests them in advance, as from any other server (because of a query), and ``handed`` gets the open file. ``many``
compares what it sends to several plain clients at once, each a process, with what it sends to one.

``cache`` loads the file at the address without a cache, with an empty one (first start), with a full one (second
start), and from the disk, in turn; ``--cold`` drops the file and the cache from the page cache before each.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

NAME = "model.safetensors"


@contextlib.contextmanager
def server(
    folder: Path, latency_s: float, bytes_per_s: float = 0, *, least_bytes: int = 0, connection_bytes_per_s: float = 0
) -> Iterator[str]:
    """Yield the address of a server of the folder; its files have ``least_bytes`` or more, by zeros at their end."""
    numbers = map(str, (latency_s, bytes_per_s, least_bytes, connection_bytes_per_s))
    code = [sys.executable, "-m", "benchmarks.store_server", str(folder), *numbers]
    with subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


@contextlib.contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    """Yield the address of a folder on a server that `shardload serve` runs."""
    code = [sys.executable, "-m", "shardload", "serve", "--root", str(folder), "--listen", "127.0.0.1:0", *options]
    with subprocess.Popen(code, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"{process.stdout.readline().split()[-1]}/{folder.name}"
        finally:
            process.terminate()


def plain(
    address: str,
    pieces: list[tuple[int, int]],
    in_flight: int,
    *,
    keep: bool = False,
    window_s: tuple[float, float] | None = None,
) -> int:
    """Read pieces by as many threads, each with one connection and one buffer; or keep all bytes in fresh memory.

    With a ``window_s`` of Unix time, the pieces are read again and again until it ends. Returns the bytes of pieces
    that were complete in that time.
    """
    place, _, path = address.removeprefix("http://").partition("/")
    host, port = place.split(":")
    name = f"/{path}/{NAME}".replace("//", "/")
    rest, lock = iter(pieces if window_s is None else itertools.cycle(pieces)), threading.Lock()
    failed: list[BaseException] = []
    counted: list[int] = []
    whole = memoryview(np.empty(pieces[-1][1] if keep else 0, np.uint8))

    def read() -> None:
        try:
            buffer = memoryview(bytearray(max(stop - start for start, stop in pieces)))
            with socket.create_connection((host, int(port))) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while True:
                    with lock:
                        if (piece := next(rest, None)) is None:
                            return
                    _fetch(connection, host, name, piece, whole[slice(*piece)] if keep else buffer)
                    if window_s is None or window_s[0] <= (now_s := time.time()) < window_s[1]:
                        counted.append(piece[1] - piece[0])
                    elif now_s >= window_s[1]:
                        return
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(in_flight)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return sum(counted)


def _fetch(connection: socket.socket, host: str, name: str, piece: tuple[int, int], buffer: memoryview) -> None:
    start, stop = piece
    connection.sendall(f"GET {name} HTTP/1.1\r\nHost: {host}\r\nRange: bytes={start}-{stop - 1}\r\n\r\n".encode())
    head = b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(4096)
    if not head.startswith(b"HTTP/1.1 206 "):
        raise OSError(f"the server answered {head[:30]!r}")
    body = head.partition(b"\r\n\r\n")[2]
    buffer[: len(body)] = body
    count = len(body)
    while count < stop - start:
        got = connection.recv_into(buffer[count : stop - start])
        if not got:
            raise OSError("the connection was closed")
        count += got


def by_obstore(address: str, pieces: list[tuple[int, int]], in_flight: int) -> None:
    """Read pieces as shardload does, and drop them."""
    from shardload.stores.requests import Requests

    requests = Requests(address)
    _in_flight(pieces, in_flight, lambda start, stop: requests.begin(NAME, start, stop))


def by_tensorstore(address: str, pieces: list[tuple[int, int]], in_flight: int) -> None:
    """Read pieces by TensorStore's key-value store, and drop them."""
    import tensorstore as ts

    store = ts.KvStore.open({"driver": "http", "base_url": address}).result()

    def begin(start: int, stop: int) -> Any:
        return store.read(NAME, byte_range=slice(start, stop))

    _in_flight(pieces, in_flight, begin)


def _in_flight(pieces: list[tuple[int, int]], count: int, begin: Callable[[int, int], Any]) -> None:
    pending: list[Any] = []
    for start, stop in pieces:
        if len(pending) == count:
            pending.pop(0).result()
        pending.append(begin(start, stop))
    for each in pending:
        each.result()


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return wall-clock and CPU seconds of one call in this process; the server's CPU is not counted."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def compare(cases: dict[str, Callable[[], object]], *, floor: str, pairs: int, n_bytes: int) -> dict[str, Any]:
    """Run the cases in turn; return for each its rate and, over the rounds, the median of floor time over its time."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for index in range(-1, pairs):
        for name in cases if index % 2 else reversed(list(cases)):
            found = timed(cases[name])
            if index >= 0:
                times[name].append(found)
    result = {}
    for name, runs in times.items():
        ratios = sorted(f[0] / r[0] for f, r in zip(times[floor], runs, strict=True))
        result[name] = {
            "gb_s": n_bytes / 1e9 / statistics.median(wall for wall, _ in runs),
            "cpu_s_per_gb": statistics.median(cpu for _, cpu in runs) / (n_bytes / 1e9),
            "rate_over_floor": statistics.median(ratios),
            "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        }
    return result


def clients(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Compare clients."""
    size = write_random(folder / NAME, args.gb)
    step = args.piece_mib << 20
    pieces = [(start, min(start + step, size)) for start in range(0, size, step)]
    with server(folder, args.latency_ms / 1e3, args.mb_s * 1e6) as address:
        kinds = {"plain": plain, "obstore": by_obstore, "tensorstore": by_tensorstore}
        cases = {
            name: lambda work=work: work(address, pieces, args.in_flight)  # type: ignore[misc]
            for name, work in kinds.items()
        }
        return compare(cases, floor="plain", pairs=args.pairs, n_bytes=size)


def write_random(path: Path, gb: float) -> int:
    """Write random bytes; return how many."""
    block = np.random.default_rng(0).bytes(1 << 24)
    count = max(1, int(gb * 1e9) >> 24)
    with path.open("wb") as file:
        for _ in range(count):
            file.write(block)
    return count << 24


def _array_load(layout: str) -> Callable[[str], None]:
    """Return a function that loads all arrays of a file, split by ``rows`` or ``columns`` over eight devices."""
    import jax
    from jax.sharding import PartitionSpec

    import shardload

    mesh = jax.make_mesh((8,), ("model",))
    dims = {"rows": PartitionSpec("model"), "columns": PartitionSpec(None, "model")}[layout]

    def spec(name: str, shape: tuple[int, ...]) -> PartitionSpec:
        return dims if len(shape) == 2 else PartitionSpec()

    def arrays(source: str) -> None:
        jax.block_until_ready(shardload.load_arrays(source, spec, mesh=mesh))

    return arrays


def _checkpoint(folder: Path, args: argparse.Namespace) -> tuple[Path, int, list[tuple[int, int]]]:
    """Write a safetensors file; return its path, its size, and the pieces in which a plain client reads it."""
    from benchmarks.checkpoint import write_safetensors

    path = write_safetensors(folder, int(args.gb * 1e9)).rename(folder / NAME)
    size, step = path.stat().st_size, args.piece_mib << 20
    return path, size, [(start, min(start + step, size)) for start in range(0, size, step)]


def load(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Compare a load from an address with a plain download of the same bytes, and with the file on the disk."""
    path, size, pieces = _checkpoint(folder, args)
    arrays, in_flight = _array_load(args.layout), args.in_flight
    each = args.connection_mb_s * 1e6
    with server(folder, args.latency_ms / 1e3, args.mb_s * 1e6, connection_bytes_per_s=each) as address:
        cases: dict[str, Callable[[], object]] = {
            "plain": lambda: plain(address, pieces, in_flight),
            "kept": lambda: plain(address, pieces, in_flight, keep=True),
            "load": lambda: arrays(f"{address}/{NAME}"),
            "local": lambda: arrays(str(path)),
        }
        return compare(cases, floor="plain", pairs=args.pairs, n_bytes=size)


def serve(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Compare loads from `shardload serve`, over a connection and with files handed over, with plain downloads."""
    path, size, pieces = _checkpoint(folder, args)
    arrays, in_flight = _array_load(args.layout), args.in_flight
    with served(folder, "--no-hand-over") as address, served(folder) as near:
        cases: dict[str, Callable[[], object]] = {
            "plain": lambda: plain(address, pieces, in_flight),
            "kept": lambda: plain(address, pieces, in_flight, keep=True),
            "load": lambda: arrays(f"{address}/{NAME}"),
            "requested": lambda: arrays(f"{address}/{NAME}?requested"),
            "handed": lambda: arrays(f"{near}/{NAME}"),
            "local": lambda: arrays(str(path)),
        }
        return compare(cases, floor=args.floor, pairs=args.pairs, n_bytes=size)


def many(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Compare several plain clients of `shardload serve` at once with one, by what they get in the same seconds."""
    _, _, pieces = _checkpoint(folder, args)
    pool = ProcessPoolExecutor(args.clients, mp_context=multiprocessing.get_context("spawn"))
    with served(folder, "--no-hand-over") as address, pool:
        read = functools.partial(plain, address, pieces, args.in_flight)

        def rates(count: int) -> list[float]:
            begin_s = time.time() + 1.0  # all processes have begun
            window_s = begin_s, begin_s + args.seconds
            reads = [pool.submit(read, window_s=window_s) for _ in range(count)]
            return [each.result() / 1e9 / args.seconds for each in reads]

        rates(args.clients)
        rounds = [(sum(rates(1)), rates(args.clients)) for _ in range(args.pairs)]
    return _shares(rounds)


def _shares(rounds: list[tuple[float, list[float]]]) -> dict[str, Any]:
    """Return medians, and quartiles of ratios, for the rate of one client and the rates of several in each round."""
    found = {
        "total_over_one": sorted(sum(each) / one for one, each in rounds),
        "least_over_share": sorted(min(each) * len(each) / sum(each) for _, each in rounds),
    }
    return {
        "one_gb_s": statistics.median(one for one, _ in rounds),
        "total_gb_s": statistics.median(sum(each) for _, each in rounds),
        **{name: [q[len(q) // 4], statistics.median(q), q[-1 - len(q) // 4]] for name, q in found.items()},
    }


def cache(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Compare first and second starts with the cache of ranges with loads without it, and from the disk."""
    import shardload
    from benchmarks.checkpoint import write_safetensors

    (folder / "files").mkdir()
    path = write_safetensors(folder / "files", int(args.gb * 1e9))
    path = path.rename(path.with_name(NAME))
    arrays = _array_load(args.layout)
    left_out: list[int] = []
    times: dict[str, list[tuple[float, float]]] = {"without": [], "first": [], "second": [], "local": []}
    with server(path.parent, args.latency_ms / 1e3, args.mb_s * 1e6) as address:
        source = f"{address}/{NAME}"
        for turn in range(-1, args.pairs):
            place = folder / f"cache-{turn}"
            cases: list[tuple[str, Path | None, str]] = [
                ("without", None, source),
                ("first", place, source),
                ("second", place, source),
                ("local", None, str(path)),
            ]
            # A second start follows a first one; otherwise, the order changes from turn to turn.
            for name, directory, what in cases if turn % 2 else [cases[3], cases[1], cases[2], cases[0]]:
                if args.cold:
                    _drop(folder)
                with shardload.cache(directory, size="100GB"):
                    found = timed(lambda what=what: arrays(what))  # type: ignore[misc]
                    if name == "first":
                        left_out.append(_completed(lambda: arrays(source)))
                if turn >= 0:
                    times[name].append(found)
            shutil.rmtree(place)
    size = path.stat().st_size
    rows = _cache_rows(times, size)
    rows["first"]["left_out"] = statistics.median(left_out) / size
    return rows


def _completed(again: Callable[[], None]) -> int:
    """Return how many bytes the disk was too slow for at a first start, and load again until the cache has all."""
    from shardload.stores.cache_choice import current_cache

    used = current_cache()
    assert used is not None
    used.settle(60.0)
    first = used.traffic.left_out
    counted, is_complete = first, not first
    while not is_complete:
        again()
        used.settle(60.0)
        is_complete, counted = used.traffic.left_out == counted, used.traffic.left_out
    return first


def _cache_rows(times: dict[str, list[tuple[float, float]]], n_bytes: int) -> dict[str, Any]:
    rows: dict[str, Any] = {
        name: {
            "gb_s": n_bytes / 1e9 / statistics.median(wall for wall, _ in runs),
            "cpu_s_per_gb": statistics.median(cpu for _, cpu in runs) / (n_bytes / 1e9),
        }
        for name, runs in times.items()
    }
    for name, base in (("first", "without"), ("second", "local"), ("second", "without")):
        pairs = list(zip(times[name], times[base], strict=True))
        ratios = {"time": sorted(a[0] / b[0] for a, b in pairs), "cpu": sorted(a[1] / b[1] for a, b in pairs)}
        for what, found in ratios.items():
            quartiles = [found[len(found) // 4], statistics.median(found), found[-1 - len(found) // 4]]
            rows[name][f"{what}_over_{base}"] = quartiles
    return rows


def _drop(folder: Path) -> None:
    """Drop all files below a folder from the page cache, once what was written is on the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def main() -> None:
    """Run one comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["clients", "load", "serve", "many", "cache"])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--piece-mib", type=int, default=4)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--mb-s", type=float, default=0.0, help="what the server sends at most; 0 for no limit")
    parser.add_argument("--connection-mb-s", type=float, default=0.0, help="what each connection sends at most (load)")
    parser.add_argument("--clients", type=int, default=8, help="how many at once (many)")
    parser.add_argument("--seconds", type=float, default=4.0, help="in which bytes are counted (many)")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--cold", action="store_true", help="drop files from the page cache before each load")
    parser.add_argument("--floor", choices=["plain", "kept", "local"], default="plain", help="compared with (serve)")
    parser.add_argument("--layout", choices=["rows", "columns"], default="rows")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardload-stores-") as name:
        found = {"clients": clients, "load": load, "serve": serve, "many": many, "cache": cache}[args.what](
            Path(name), args
        )
    if args.json:
        print(json.dumps({"arguments": vars(args), "results": found}))
        return
    if args.what == "many":
        print(
            f"one client: {found['one_gb_s']:.2f} GB/s; {args.clients} at once: {found['total_gb_s']:.2f} GB/s together"
        )
        for name in ("total_over_one", "least_over_share"):
            low, middle, high = found[name]
            print(f"{name.replace('_', ' ')}: {middle:.2f} ({low:.2f}-{high:.2f})")
        return
    if args.what == "cache":
        for case, row in found.items():
            ratios = (
                f"{key.replace('_', ' ')} {q[1]:.2f} ({q[0]:.2f}-{q[2]:.2f})" for key, q in row.items() if "over" in key
            )
            print(f"{case:8} {row['gb_s']:6.2f} GB/s {row['cpu_s_per_gb']:6.2f} CPU-s/GB  {'; '.join(ratios)}")
        print(f"first start: {100 * found['first']['left_out']:.0f} % left out, as the disk was too slow")
        return
    floor = f"the rate of {args.floor}" if args.what == "serve" and args.floor != "plain" else "the plain client's rate"
    for case, row in found.items():
        low, high = row["quartiles"]
        print(
            f"{case:12} {row['gb_s']:6.2f} GB/s {row['cpu_s_per_gb']:6.2f} CPU-s/GB  {row['rate_over_floor']:5.2f} of "
            f"{floor} ({low:.2f}-{high:.2f})"
        )


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("KERAS_BACKEND", "jax")
    main()
