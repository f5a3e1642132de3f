"""Several processes load together: one reader for each byte against everyone reading what it needs.

    read         each process reads all that its devices need
    broadcast    each byte is read by one process, and the others get it by collectives (gloo, on CPUs)

The processes run on this machine and alternate both ways in one run; a round ends when the slowest process has loaded.
Both must give the same bits on every device, by checksums.
Bytes are those of `/proc/self/io`, which counts what a process reads from files, cached or not. All processes share
this machine's cores and page cache: seconds say little about many hosts with one store; bytes do.

With ``--from s3``, sources are paths of files or folders that a server on loopback serves as an object store. Bytes are
those that it has sent to all processes together: headers and comparisons included. With ``--mb-s``, it sends no more
than that to all of them, as a store or a network that many hosts share.

    python -m benchmarks.replicas [SOURCE ...] [--shapes 2x4:1x8 …] [--from s3 [--mb-s 200]] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.folders import gemma3_with_text
from benchmarks.store_server import StoreServer

SHAPES = ("2x4:1x8", "2x4:2x4", "4x2:1x8", "4x2:2x4", "8x1:1x8", "8x1:2x4", "8x1:8x1")
"""Processes x devices of each, and the mesh."""
WAYS = ("read", "broadcast")
_COUNTER = "BENCHMARK_STORE"
"""The environment variable with the address of the server of ``--from s3``."""


def child(source: str, mesh: str, rounds: int, *numbers: int) -> None:
    """Load in turn both ways; print one line of JSON."""
    index, processes, devices, port = numbers
    sys.modules.setdefault("tensorflow", None)  # type: ignore[arg-type]
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, index)
    import shardload

    runs: list[dict[str, Any]] = []
    bits: list[list[Any]] = []
    for number in range(rounds + 1):
        for way in WAYS if number % 2 else reversed(WAYS):
            _wait_for_all(f"{number} {way} begins")
            sent = _sent()
            _wait_for_all(f"{number} {way} counted")
            chars, cpu, began = _read_chars(), time.process_time(), time.perf_counter()
            model = shardload.load(source, mesh=mesh, replicas=way)  # type: ignore[arg-type]
            wall = time.perf_counter() - began
            report = shardload.report(model)
            assert report.cluster is not None
            _wait_for_all(f"{number} {way} ends")
            runs.append({
                "way": way, "first": not number, "wall_s": wall, "transfer_s": report.seconds.transfer,
                "cpu_s": time.process_time() - cpu, "chars": _read_chars() - chars, "sent": _sent() - sent,
                "ratio": report.cluster.ratio,
                "needed": report.cluster.needed, "received": report.cluster.received[index],
                "exchanged": report.cluster.exchanged, "variables": report.variables,
            })  # fmt: skip
            if not number:
                bits.append(_checksums(model))
            del model
    assert bits[0] == bits[1], "the two ways gave different bits"
    sys.stdout.write(json.dumps(runs) + "\n")


def _checksums(model: Any) -> list[Any]:
    """Checksums of all that this process's devices have, variable by variable."""
    shards = ((variable.path, shard) for variable in model.variables for shard in variable.value.addressable_shards)
    return [(path, str(shard.index), zlib.crc32(np.asarray(shard.data).view(np.uint8))) for path, shard in shards]


def _wait_for_all(what: str) -> None:
    """Wait until all processes are here: bytes that the server sends are counted for all together."""
    from jax._src.distributed import global_state

    global_state.client.wait_at_barrier(what, 600_000)


def _sent() -> int:
    """Bytes that the server of ``--from s3`` has sent; 0 without one."""
    server = os.environ.get(_COUNTER)
    return StoreServer.sent_by(server) if server else 0


def _read_chars() -> int:
    found = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    assert found is not None
    return int(found[1])


def run(source: str, shape: str, rounds: int, env: dict[str, str]) -> dict[str, Any]:
    """Start the processes of one shape; return the medians of each way."""
    counts, mesh = shape.split(":")
    processes, devices = map(int, counts.split("x"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = [source, mesh, str(rounds)]
    command = [sys.executable, "-m", "benchmarks.replicas", "--child", *given]
    env = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"} | env
    started = [
        subprocess.Popen(
            [*command, str(index), str(processes), str(devices), str(port)], stdout=subprocess.PIPE, text=True, env=env
        )
        for index in range(processes)
    ]
    outputs = [one.communicate()[0] for one in started]
    if any(one.returncode for one in started):
        raise SystemExit(f"a process of {shape} failed")
    told = [json.loads(next(line for line in output.splitlines() if line.startswith("[{"))) for output in outputs]
    return {"source": Path(source).name, "processes": processes, "devices": devices, "mesh": mesh, **_medians(told)}


def _medians(told: list[list[dict[str, Any]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rounds = list(zip(*told, strict=True))
    for way in WAYS:
        later = [each for each in rounds if each[0]["way"] == way and not each[0]["first"]]
        first = next(each for each in rounds if each[0]["way"] == way and each[0]["first"])
        found[way] = {
            "read_ratio": later[0][0]["ratio"],
            "chars_ratio": statistics.median(sum(one["chars"] for one in each) / one_needed(each) for each in later),
            "sent_ratio": statistics.median(each[0]["sent"] / one_needed(each) for each in later),
            "received_bytes": later[0][0]["received"],
            "exchanged": later[0][0]["exchanged"],
            "wall_s": statistics.median(max(one["wall_s"] for one in each) for each in later),
            "transfer_s": statistics.median(max(one["transfer_s"] for one in each) for each in later),
            "first_transfer_s": max(one["transfer_s"] for one in first),
            "cpu_s": statistics.median(sum(one["cpu_s"] for one in each) for each in later),
        }
    found["needed_bytes"] = rounds[0][0]["needed"]
    found["times_faster"] = found["read"]["wall_s"] / found["broadcast"]["wall_s"]
    found["saved"] = found["read"]["read_ratio"] / found["broadcast"]["read_ratio"]
    return found


def one_needed(each: Any) -> int:
    """Bytes that the mesh needs, as all processes of a round say."""
    needed: int = each[0]["needed"]
    return needed


def main() -> None:
    """Print a line for each source and shape."""
    if sys.argv[1:2] == ["--child"]:
        source, mesh, *numbers = sys.argv[2:]
        child(source, mesh, *map(int, numbers))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("sources", nargs="*", default=["gemma3_270m"])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--from", dest="store", choices=["disk", "s3"], default="disk")
    parser.add_argument("--mb-s", type=float, default=0.0, help="what the store sends at most; 0 for no limit")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        for source in given.sources:
            if given.store == "disk":
                measure(source, given, {})
                continue
            path = Path(source).resolve()
            if not path.exists() and source == "gemma3_270m":
                path = gemma3_with_text(Path(made) / "gemma3_270m")
            with StoreServer(path.parent, given.mb_s * 1e6) as server:
                measure(f"s3://bucket/{path.name}", given, {**server.environment, _COUNTER: server.root})


def measure(source: str, given: argparse.Namespace, env: dict[str, str]) -> None:
    """Run all shapes with one source, and print what was found."""
    for shape in given.shapes:
        found = run(source, shape, given.rounds, env)
        show(found | {"store": given.store, "shape": shape, "mb_s": given.mb_s}, given.json)


def show(found: dict[str, Any], as_json: bool) -> None:
    """Print what was measured with one source and shape, in words or as JSON."""
    if as_json:
        print(json.dumps(found), flush=True)
        return
    counted = "read_ratio" if found["store"] == "disk" else "sent_ratio"
    ways = ", ".join(
        f"{way}: {found[way][counted]:.3f} times the {found['needed_bytes'] / 1e6:.0f} MB "
        f"({found[way]['transfer_s']:.2f} s, first {found[way]['first_transfer_s']:.2f} s)"
        for way in WAYS
    )
    gain = f"{found['saved']:.2f} times less, {found['times_faster']:.2f} times faster"
    print(f"{found['source']} {found['shape']}: {ways}; {gain}", flush=True)


if __name__ == "__main__":
    main()
