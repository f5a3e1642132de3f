"""Host memory of a load of an object that is larger than memory should be, from a server that makes it up.

    python -m benchmarks.store_memory [--gb 9] [--budget 256MiB] [--latency-ms 0] [--json]

A fresh process reads a safetensors file of zeros in bfloat16 from loopback, uploads each array to eight CPU devices,
as to accelerators, and drops it. Its peak of resident memory is compared with that before the load, once everything was
imported and a small file was loaded the same way. The arrays that devices hold at a time are counted too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.stores import NAME, server

SIDE = 1024
"""Rows and columns of each array: 2 MiB."""


def write_header(path: Path, count: int) -> int:
    """Write the header of a file of ``count`` arrays; return how many bytes the whole file would have."""
    step = SIDE * SIDE * 2
    tensors = {
        f"{number:05}": {"dtype": "BF16", "shape": [SIDE, SIDE], "data_offsets": [number * step, (number + 1) * step]}
        for number in range(count)
    }
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return 8 + len(text) + count * step


def read(address: str, budget: int) -> None:
    """Load all arrays by rows onto eight devices, uploaded and dropped."""
    import shardload
    from shardload.manifest import View
    from shardload.sharding.devices import resolve_devices
    from shardload.sharding.layout import Layout
    from shardload.transfer.execution import execute
    from shardload.transfer.planning import Binding, plan_transfers

    manifest, on = shardload.inspect(address), resolve_devices("1x8")
    layout = Layout(on.mesh, (("model",), ()))
    bindings = [Binding(name, View.whole(t), t.dtype, layout) for name, t in manifest.tensors.items()]
    plan = plan_transfers(manifest, bindings, host_memory_bytes=budget, uploads=True)
    execute(plan, manifest, devices=on.devices, on_ready=lambda name, array: None, placement="upload")


def resident() -> int:
    """Return this process' resident anonymous memory now, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def child(small: str, large: str, budget: int) -> dict[str, Any]:
    """Load a small file, then the large one; return the peaks."""
    read(small, budget)
    before, peak, ended = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.005):
            peak = max(peak, resident())

    thread = threading.Thread(target=watch)
    thread.start()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    read(large, budget)
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    ended.set()
    thread.join()
    return {"before_bytes": before, "peak_bytes": peak, "added_bytes": peak - before, "wall_s": wall_s, "cpu_s": cpu_s}


def main() -> None:
    """Run the load in a process of its own, and print its peak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=9.0)
    parser.add_argument("--budget", default="256MiB")
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    from shardload.units import parse_bytes

    budget = parse_bytes(args.budget)
    if args.child:
        print(json.dumps(child(*args.child, budget)))
        return
    with tempfile.TemporaryDirectory(prefix="shardload-memory-") as name:
        folder, small = Path(name) / "large", Path(name) / "small"
        folder.mkdir()
        small.mkdir()
        n_bytes = write_header(folder / NAME, int(args.gb * 1e9) // (SIDE * SIDE * 2))
        few = write_header(small / NAME, 8)
        with (
            server(folder, args.latency_ms / 1e3, least_bytes=n_bytes) as large,
            server(small, 0, least_bytes=few) as other,
        ):
            code = [sys.executable, "-m", "benchmarks.store_memory", "--budget", args.budget]
            code += ["--child", f"{other}/{NAME}", f"{large}/{NAME}"]
            found = json.loads(subprocess.run(code, check=True, capture_output=True, text=True).stdout)
    found |= {"object_bytes": n_bytes, "budget_bytes": budget, "of_budget": found["added_bytes"] / budget}
    if args.json:
        print(json.dumps({"arguments": vars(args), "results": found}))
        return
    print(
        f"{n_bytes / 1e9:.2f} GB read: {found['added_bytes'] / (1 << 20):.0f} MiB added at the peak, "
        f"{found['of_budget']:.2f} of the budget; {found['cpu_s'] / n_bytes * 1e9:.2f} CPU-s/GB"
    )


if __name__ == "__main__":
    import os

    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    main()
