"""Files that are not in the page cache: reads past it (``O_DIRECT``) against reads through it.

The same file onto the same eight CPU devices, with one to eight threads, in turn; before each run, the file is removed
from the page cache. Seconds are those of the disk and whatever else uses it; CPU-seconds say more.

    python -m benchmarks.cold_disk [--gb 1] [--pairs 5] [--folder FOLDER] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import Run, interleave, warm_memory

GEOMETRY = (4096, 2048)
"""Shape of each tensor, in bfloat16: 16 MiB."""


def evict(path: Path) -> None:
    """Remove a file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write(path: Path, gb: float) -> None:
    """Write a safetensors file of random bits, whose data start at no multiple of the disk's block."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    count = max(1, round(gb * 1e9 / (2 * GEOMETRY[0] * GEOMETRY[1])))
    bits = np.random.default_rng(0).integers(0, 1 << 16, GEOMETRY, np.uint16)
    save_file({f"t{i}": (bits + i).view(ml_dtypes.bfloat16) for i in range(count)}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())  # only clean pages can be removed


def reader(path: Path, *, direct: bool, threads: int) -> Any:
    """A call that loads the file onto eight devices in a mix of layouts, without Keras."""
    import jax

    from benchmarks.checkpoint import open_safetensors, targets_for
    from shardload.transfer import execution
    from shardload.transfer.planning import plan_transfers

    manifest = open_safetensors(path)
    plan = plan_transfers(manifest, targets_for(manifest, "mix"), host_memory_bytes=None, scatter=not direct)

    def run() -> dict[str, Any]:
        found: dict[str, Any] = {}
        devices = jax.devices()[:8]
        execution.execute(plan, manifest, devices=devices, on_ready=found.__setitem__, threads=threads, direct=direct)
        return found

    return run


def summary(runs: dict[str, tuple[Run, ...]], n_bytes: int) -> list[dict[str, Any]]:
    """Medians of each way, and of the ratios to the default: how many times faster, and less CPU time, it is."""
    base = runs["buffered, 2 threads"]
    return [
        {
            "name": name,
            "wall_s": statistics.median(run.wall_s for run in found),
            "gb_s": n_bytes / 1e9 / statistics.median(run.wall_s for run in found),
            "cpu_s_per_gib": statistics.median(run.cpu_s for run in found) / (n_bytes / 2**30),
            "times_faster": statistics.median(b.wall_s / a.wall_s for a, b in zip(found, base, strict=True)),
            "times_less_cpu": statistics.median(b.cpu_s / a.cpu_s for a, b in zip(found, base, strict=True)),
        }
        for name, found in runs.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write the file; a temporary folder by default")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "model.safetensors"
        write(path, options.gb)
        n_bytes = path.stat().st_size
        ways = [("buffered", 2), ("buffered", 4), ("direct", 1), ("direct", 2), ("direct", 4), ("direct", 8)]
        sides = {
            f"{how}, {threads} threads": reader(path, direct=how == "direct", threads=threads) for how, threads in ways
        }

        def between() -> None:
            warm_memory(2 * n_bytes)
            evict(path)

        found = summary(interleave(sides, rounds=options.pairs, between=between), n_bytes)
    if options.json:
        print(json.dumps(found))
        return 0
    for row in found:
        print(
            f"{row['name']:<22}{row['wall_s']:>8.2f} s{row['gb_s']:>8.2f} GB/s{row['cpu_s_per_gib']:>8.2f} CPU-s/GiB"
            f"{row['times_faster']:>8.2f} times faster{row['times_less_cpu']:>8.2f} times less CPU"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
