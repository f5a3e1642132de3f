"""A server under everything at once, for an hour: no wrong answer, and no memory, descriptor or thread that stays.

A `shardload serve` with a folder, a bucket, a cache that is smaller than the bucket, jobs and a token. Clients in
processes of their own (`benchmarks.soak_clients`) do all that clients can do, as fast as the machine lets them: ranges,
whole files, pages, JSON, conditions, jobs and their streams, files that are handed over, connections that are cut off
or never finish a request, wrong tokens and hostile requests. Each body is compared with the file. Checkpoints appear
and disappear meanwhile.

Each minute a line says what the server takes. At the end, the medians of the last quarter of the time are compared with
those of the second quarter: the server leaks if it has 5 % and 16 MiB more of memory of its own, or ten more
descriptors or threads. Once all clients have left, its descriptors must be back where they were, but for 100 that it
keeps for the bucket and the cache. Exits with 1 if it leaks, a wrong answer was given, or its log has a traceback. Less
than half an hour says little of memory, as blocks of the bucket fill 512 MiB of it in the first six minutes.

    python -m benchmarks.soak [--minutes 60] [--clients 2] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.store_server import StoreServer

N_REMOTE = 64
REMOTE_BYTES = 12 << 20
CACHE_SIZE = "320MiB"
_SHIFT_S = 8.0
"""After so many seconds, one of the files of the bucket that are read gives way to another."""
_MORE_DESCRIPTORS = 100
_LEAVING_S = 150.0
"""How long the server has for ending what clients left behind: it closes idle connections after 75 s."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the server took at one time."""

    at_s: float
    rss: int
    own: int
    """Bytes of memory that only this process has: not those of mapped files."""
    descriptors: int
    threads: int
    connections: int
    cache: int
    """Bytes of files in its cache."""
    state: int
    """Bytes of files that keep its jobs."""
    requests: int
    sent: int
    """Bytes of files that were sent."""

    def line(self) -> str:
        """Return it as a line."""
        mib = (f"{name} {getattr(self, name) / (1 << 20):.0f} MiB" for name in ("rss", "own", "cache"))
        return (
            f"{self.at_s / 60:5.1f} min: {', '.join(mib)}, state {self.state >> 10} KiB, {self.descriptors} "
            f"descriptors, {self.threads} threads, {self.connections} connections; {self.requests:,} requests, "
            f"{self.sent / 1e9:.1f} GB"
        )


class Server:
    """The server that is measured."""

    def __init__(self, folder: Path, environment: dict[str, str], token: str) -> None:
        self._folder, self._token = folder, token
        (folder / "tokens").write_text(token + "\n")
        (folder / "tokens").chmod(0o600)
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "shardload", "serve", "--root", folder / "root", "--root", "s3://bucket/remote",
                    "--root", "s3://bucket/alone.safetensors",
                    "--listen", "127.0.0.1:0", "--cache", folder / "cache", "--cache-size", CACHE_SIZE,
                    "--state", folder / "state", "--token-file", folder / "tokens", "--client-requests", "1000000",
                ],
                stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, **environment, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"},
            )  # fmt: skip
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]

    def descriptors(self) -> int:
        """How many files and sockets it has open."""
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def get(self, path: str) -> bytes:
        """Return the body of an answer."""
        asked = urllib.request.Request(f"{self.address}{path}", headers={"Authorization": f"Bearer {self._token}"})
        with urllib.request.urlopen(asked, timeout=300) as answer:
            found: bytes = answer.read()
            return found

    def sample(self, began_s: float) -> Sample:
        """Measure it."""
        kernel = Path(f"/proc/{self.process.pid}")
        memory = dict(re.findall(r"^(\w+): +(\d+) kB$", (kernel / "smaps_rollup").read_text(), re.M))
        threads = re.search(r"^Threads:\s+(\d+)$", (kernel / "status").read_text(), re.M)
        metrics = self.get("/metrics").decode()

        def total(name: str) -> int:
            found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", metrics, re.M)
            return int(sum(map(float, found)))

        return Sample(
            time.monotonic() - began_s,
            rss=int(memory["Rss"]) << 10,
            own=int(memory["Anonymous"]) << 10,
            descriptors=self.descriptors(),
            threads=int(threads[1]) if threads else 0,
            connections=total("shardload_connections"),
            cache=_size(self._folder / "cache"),
            state=_size(self._folder / "state"),
            requests=total("shardload_requests_total"),
            sent=total("shardload_sent_bytes_total"),
        )


def _size(folder: Path) -> int:
    n_bytes = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # it was removed to make room
            n_bytes += path.stat().st_size if path.is_file() else 0
    return n_bytes


def write_files(folder: Path) -> dict[str, Path]:
    """Write what is served; return the files by their addresses."""
    import numpy as np
    from safetensors.numpy import save_file

    chance = np.random.default_rng(0)
    models, bucket = folder / "root" / "models", folder / "bucket" / "remote"
    for each in (models, bucket):
        each.mkdir(parents=True)
    for number in range(2):
        save_file({f"x{number}": chance.random((2 << 20), np.float32)}, models / f"model-{number}.safetensors")
    (models / "config.json").write_text('{"model_type": "llama"}')
    for number in range(N_REMOTE):
        (bucket / f"model-{number:03}.safetensors").write_bytes(_safetensors(chance.bytes(REMOTE_BYTES)))
    (folder / "bucket" / "alone.safetensors").write_bytes(_safetensors(chance.bytes(REMOTE_BYTES)))
    (bucket / "config.json").write_text('{"model_type": "llama"}' + " " * 1000)
    (folder / "root" / "secret").write_text("in no checkpoint")
    for kind in ("h5", "preset"):
        command = ["synth", "gemma2_9b", "--scale", "0.02", "--format", kind, "--directory", folder / "root" / kind]
        subprocess.run([sys.executable, "-m", "shardload", *map(str, command), "--no-progress"], check=True)
    subprocess.run([sys.executable, "-c", _SAVE, str(folder / "root" / "run")], check=True)
    files = {
        path.relative_to(folder / "root").as_posix(): path
        for path in (folder / "root").rglob("*")
        if path.is_file() and path.stat().st_size > 500 and not path.name.endswith(".sqlite")
    }
    in_bucket = (path for path in (folder / "bucket").rglob("*") if path.is_file())
    return files | {path.relative_to(folder / "bucket").as_posix(): path for path in in_bucket}


_SAVE = """
import sys, keras, shardload
model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(1024), keras.layers.Dense(256)])
with shardload.Checkpointer(sys.argv[1]) as saver:
    saver.save(1, model)
"""


def _safetensors(data: bytes) -> bytes:
    header = json.dumps({"x": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return len(header).to_bytes(8, "little") + header + data


def add_and_remove(root: Path, ended: threading.Event) -> None:
    """Let checkpoints appear and disappear."""
    number = 0
    while not ended.wait(1):
        number = (number + 1) % 10
        folder, new = root / "changing" / str(number), root / f".new-{number}"
        if folder.exists():
            shutil.rmtree(folder)
        else:
            new.mkdir()
            (new / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
            folder.parent.mkdir(exist_ok=True)
            new.rename(folder)


def leaks(samples: list[Sample]) -> list[str]:
    """Return in words what the server had more of in the last quarter of the time than in the second one."""
    quarter = len(samples) // 4
    found = []
    for name, factor, more in (("own", 1.05, 16 << 20), ("descriptors", 1.0, 10), ("threads", 1.0, 10)):
        early = statistics.median(getattr(each, name) for each in samples[quarter : 2 * quarter])
        late = statistics.median(getattr(each, name) for each in samples[-quarter:])
        if late > early * factor + more:
            found.append(f"{name}: {early:,.0f} in the second quarter of the time, {late:,.0f} in the last one")
    return found


def read_counts(stream: IO[str], counts: dict[int, Counter[str]], number: int) -> None:
    """Keep what a process of clients told last."""
    for line in stream:
        counts[number] = Counter(json.loads(line))


def soak(folder: Path, server: Server, files: dict[str, Path], token: str, options: argparse.Namespace) -> list[str]:
    """Run clients, and measure the server; return in words what is wrong."""
    at_rest, began_s, n_samples = server.descriptors(), time.monotonic(), max(8, round(options.minutes))
    checkpoints = [each["name"] for each in json.loads(server.get("/api/v1/checkpoints"))["checkpoints"]]
    own = [name for name in checkpoints if name not in ("remote", "alone.safetensors")]
    facts = {
        "address": server.address,
        "token": token,
        "files": {name: str(path) for name, path in files.items()},
        "checkpoints": own,
        "jobs": [(kind, name) for kind in ("verify", "prefetch") for name in own] + [("prefetch", "alone.safetensors")],
        "began_s": time.time(),
        "until_s": time.time() + options.minutes * 60,
        "shift_s": _SHIFT_S,
    }
    (folder / "facts").write_text(json.dumps(facts))
    ended, counts = threading.Event(), dict[int, Counter[str]]()
    threads = [threading.Thread(target=add_and_remove, args=(folder / "root", ended))]
    clients = []
    for number in range(options.clients):
        command = [sys.executable, "-m", "benchmarks.soak_clients", str(folder / "facts"), str(number)]
        clients.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        threads.append(threading.Thread(target=read_counts, args=(clients[-1].stdout, counts, number)))
    for each in threads:
        each.start()
    samples = []
    try:
        for number in range(n_samples):
            time.sleep(max(0.0, began_s + (number + 1) * options.minutes * 60 / n_samples - time.monotonic()))
            samples.append(server.sample(began_s))
            print(samples[-1].line(), flush=True)
        codes = [each.wait(timeout=400) for each in clients]
    finally:
        ended.set()
        for client in clients:
            client.kill()
        for each in threads:
            each.join()
    told = sum(counts.values(), Counter[str]())
    print("clients:", ", ".join(f"{name} {count:,}" for name, count in sorted(told.items())))
    problems = leaks(samples)
    if any(codes) or told["wrong"] or told["lost"]:
        problems.append(f"{told['wrong']} wrong answers, {told['lost']} lost connections, clients ended with {codes}")
    deadline = time.monotonic() + _LEAVING_S
    while (now := server.descriptors()) > at_rest + _MORE_DESCRIPTORS and time.monotonic() < deadline:
        time.sleep(1)
    print(f"descriptors: {at_rest} before the first client, {now} after the last one")
    print(server.sample(began_s).line())
    if now > at_rest + _MORE_DESCRIPTORS:
        problems.append(f"{now} descriptors are open though all clients left")
    return problems


def main() -> int:
    """Run, and say what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=2, help="processes of six clients each")
    parser.add_argument("--folder", type=Path, help="where to make a folder for what is served and cached")
    options = parser.parse_args()
    token = secrets.token_urlsafe(32)
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder = Path(made)
        files = write_files(folder)
        with StoreServer(folder / "bucket") as store:
            server = Server(folder, store.environment, token)
            try:
                problems = soak(folder, server, files, token, options)
                server.process.terminate()
                code = server.process.wait(timeout=60)
            finally:
                server.process.kill()
                server.process.wait()
        log = (folder / "log").read_text(errors="replace")
        if code or "Traceback" in log:
            problems.append(f"the server ended with {code}: {log[log.find('Traceback') :][:3000] if log else ''}")
    print(*(problems or ["nothing grew, and no answer was wrong"]), sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
