"""A rack: a bucket, three servers and sixteen clients in network namespaces; servers are killed, stopped and corrupted.

    bucket 10.77.0.10 ──┬── server 10.77.0.11 ── clients 0, 3, 6, …
                        ├── server 10.77.0.12 ── clients 1, 4, 7, …      each server asks the two others first
                        └── server 10.77.0.13 ── clients 2, 5, 8, …

Each client loads all of the file onto 1x8, and its arrays are compared with the file. A fault comes when the bucket has
sent a third of it: `kill` (SIGKILL, started again after three seconds), `stop` (SIGSTOP for ten seconds) or `corrupt`
(each file in its cache has a byte changed). Needs root and iproute2. Prints what left the bucket, and how long it took.

    python -m benchmarks.rack [--gb 0.5] [--mb-s 100] [--clients 16] [--faults none kill stop corrupt]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from benchmarks.store_server import StoreServer

N_SERVERS = 3
N_TENSORS = 32
WIDTH = 2048
NETWORK = "10.77.0"
NAME = "model.safetensors"


def run(*words: object) -> None:
    """Run a command, which must succeed."""
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


@contextmanager
def namespaces() -> Iterator[None]:
    """A bridge, and a namespace `rack-N` at 10.77.0.N for the bucket (10), the servers (11, …) and all clients (20)."""
    numbers = (10, *range(11, 11 + N_SERVERS), 20)
    try:
        run("ip", "link", "add", "rack", "type", "bridge")
        run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", "rack")
        run("ip", "link", "set", "rack", "up")
        for number in numbers:
            name = f"rack-{number}"
            run("ip", "netns", "add", name)
            run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", name, "master", "rack", "up")
            run("ip", "-n", name, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for number in numbers:
            subprocess.run(["ip", "netns", "del", f"rack-{number}"], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", "rack"], check=False, capture_output=True)


def start(number: int, *words: object, env: dict[str, str], stderr: IO[str] | None = None) -> subprocess.Popen[str]:
    """Start a program of Python in a namespace."""
    command = ["ip", "netns", "exec", f"rack-{number}", sys.executable, "-m", *map(str, words)]
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", **env}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
    )


class Server:
    """One of the servers, which can be started again."""

    def __init__(self, index: int, folder: Path, env: dict[str, str]) -> None:
        self.number, self.cache, self._folder, self._env = 11 + index, folder / f"cache-{index}", folder, env
        self.start()

    def start(self) -> None:
        """Start it, and wait until it can be asked."""
        peers = [word for index in range(N_SERVERS) for word in ("--peer", f"http://{NETWORK}.{11 + index}:8600")]
        with (self._folder / f"log-{self.number}").open("a") as log:
            self.process = start(
                self.number, "shardload", "serve", "--root", f"s3://bucket/{NAME}", "--cache", self.cache,
                "--listen", f"{NETWORK}.{self.number}:8600", "--token-file", self._folder / "tokens", *peers,
                env=self._env, stderr=log,
            )  # fmt: skip
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()

    def corrupt(self) -> int:
        """Change a byte in each file of its cache; return how many there were."""
        found = [path for path in self.cache.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]
        for path in found:
            with suppress(OSError), path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 255]))
        return len(found)


def cause(fault: str, server: Server) -> None:
    """Cause a fault, and undo it as an operator's tools would."""
    if fault == "kill":
        server.kill()
        time.sleep(3)
        server.start()
    elif fault == "stop":
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(10)
        server.process.send_signal(signal.SIGCONT)
    elif fault == "corrupt":
        server.corrupt()


def load_all(fault: str, victim: int, folder: Path, options: argparse.Namespace, digest: str) -> dict[str, Any]:
    """One run: start everything, load with all clients at the same time, cause a fault; return what was seen."""
    store = start(
        10, "benchmarks.store_server", folder / "bucket", 0, options.mb_s * 1e6, 0, 0, f"{NETWORK}.10", env={}
    )
    assert store.stdout is not None
    root = f"http://{NETWORK}.10:{int(store.stdout.readline())}"
    token = (folder / "tokens").read_text().strip()
    hosts = [f"http://{NETWORK}.{11 + index}:8600" for index in range(N_SERVERS)]
    (folder / "clients").write_text("".join(f"{host} {token}\n" for host in hosts))
    (folder / "clients").chmod(0o600)
    keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "any")
    env = {"AWS_ENDPOINT_URL": root, "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true", **keys}
    env["SHARDLOAD_TOKENS"] = str(folder / "clients")
    servers: list[Server] = []
    clients: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(dir=folder) as caches:
        (Path(caches) / "tokens").write_text(token + "\n")
        (Path(caches) / "tokens").chmod(0o600)
        try:
            servers = [Server(index, Path(caches), env) for index in range(N_SERVERS)]
            for index in range(options.clients):
                source = f"{hosts[index % N_SERVERS]}/{NAME}"
                clients.append(start(20, "benchmarks.rack", "--client", source, options.gb, env=env))
            for client in clients:
                assert client.stdout is not None
                client.stdout.readline()  # it has imported what it needs
            began_s = time.perf_counter()
            for client in clients:
                assert client.stdin is not None
                client.stdin.write("go\n")
                client.stdin.flush()
            if fault != "none":
                while StoreServer.sent_by(root) < options.gb * 1e9 / 3:
                    time.sleep(0.05)
                cause(fault, servers[victim])
            told = [json.loads(client.communicate(timeout=600)[0].splitlines()[-1]) for client in clients]
            spent_s = time.perf_counter() - began_s
            sent = StoreServer.sent_by(root)
        finally:
            for process in (*clients, *(server.process for server in servers), store):
                process.kill()
                process.wait()
    ages = sorted(one["seconds"] for one in told)
    return {
        "fault": fault,
        "victim": victim,
        "equal": sum(one.get("digest") == digest for one in told),
        "wrong": sum("digest" in one and one["digest"] != digest for one in told),
        "errors": sorted({one["error"] for one in told if "error" in one}),
        "bucket_bytes": sent,
        "seconds": (statistics.median(ages), ages[-1], spent_s),
    }


def tensors(gb: float) -> dict[str, tuple[int, int]]:
    """Shapes of the tensors of the file, in float32."""
    rows = max(8, int(gb * 1e9 / N_TENSORS / WIDTH / 4) // 8 * 8)
    return {f"layer.{index:02}": (rows, WIDTH) for index in range(N_TENSORS)}


def client(source: str, gb: float) -> None:
    """Load the file onto 1x8; print a digest of the arrays, or the error."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    import numpy as np

    import shardload
    from shardload.errors import ShardloadError

    mesh = jax.make_mesh((8,), ("model",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
    targets = {
        name: jax.ShapeDtypeStruct(shape, np.dtype(np.float32), sharding=sharding)
        for name, shape in tensors(gb).items()
    }
    print("ready", flush=True)
    sys.stdin.readline()
    began_s = time.perf_counter()
    try:
        arrays = shardload.load_arrays(source, targets)
        seconds = time.perf_counter() - began_s
        found = hashlib.sha256()
        for name in sorted(arrays):
            found.update(np.ascontiguousarray(arrays[name]).data)
        print(json.dumps({"digest": found.hexdigest(), "seconds": seconds}))
    except ShardloadError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}", "seconds": time.perf_counter() - began_s}))


def main() -> None:
    """Run without a fault, and with each fault of each server; print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--mb-s", type=float, default=100)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--faults", nargs="+", default=["none", "kill", "stop", "corrupt"])
    parser.add_argument("--victims", nargs="+", type=int, default=list(range(N_SERVERS)))
    options = parser.parse_args()
    import numpy as np
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as made, namespaces():
        folder = Path(made)
        (folder / "bucket").mkdir()
        (folder / "tokens").write_text(secrets.token_urlsafe(32))
        random = np.random.default_rng(0)
        values = {name: random.random(shape, np.float32) for name, shape in tensors(options.gb).items()}
        save_file(values, folder / "bucket" / NAME)
        digest = hashlib.sha256()
        for name in sorted(values):
            digest.update(values[name].data)
        del values
        n_bytes = (folder / "bucket" / NAME).stat().st_size
        for fault in options.faults:
            for victim in options.victims if fault != "none" else [0]:
                found = load_all(fault, victim, folder, options, digest.hexdigest())
                median_s, last_s, _ = found["seconds"]
                print(
                    f"{fault:8} server {victim}: {found['equal']} of {options.clients} equal, {found['wrong']} wrong; "
                    f"bucket {found['bucket_bytes'] / n_bytes:.3f} of the file; a load {median_s:.1f} s, the longest "
                    f"{last_s:.1f} s (the bucket's limit: {n_bytes / options.mb_s / 1e6:.1f} s)",
                    *found["errors"], sep="\n    ", flush=True,
                )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        client(sys.argv[2], float(sys.argv[3]))
    else:
        main()
