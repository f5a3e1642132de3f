"""Transfer against the copy floor: how close to plain reading a sharded load comes.

The floor is what the machine gives at best: as many threads read the same bytes of the same file from the page cache
into memory of the same freshness (fresh, allocated the same way), in the same block size, and do nothing else. What is
timed against it is the transfer: everything from a plan to arrays on the mesh. Planning is timed by itself. With both
layouts asked for, all on dim 1 is also run against all on dim 0.

    python -m benchmarks.transfer_floor [--gb 1] [--pairs 15] [--layouts dim0,dim1] [--json]
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import LAYOUTS, command, open_safetensors, targets_for
from benchmarks.measure import Comparison, compare


def floor(path: Path, sizes: list[int], threads: int) -> list[object]:
    """Read the file once into fresh memory, one allocation per tensor as a load has, and nothing more."""
    from shardload.transfer.host_memory import memory
    from shardload.transfer.planning import BLOCK_BYTES

    fd = os.open(path, os.O_RDONLY)
    buffers = [memory(n) for n in sizes]
    starts = itertools.accumulate(sizes, initial=path.stat().st_size - sum(sizes))
    jobs = [
        (memoryview(buffer)[at : at + BLOCK_BYTES], start + at)
        for buffer, start in zip(buffers, starts, strict=False)
        for at in range(0, buffer.nbytes, BLOCK_BYTES)
    ]

    def read(job: tuple[memoryview, int]) -> None:
        if os.preadv(fd, [job[0]], job[1]) != len(job[0]):
            raise OSError("short read")

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, jobs))
    os.close(fd)
    return list(buffers)


def transfer(plan: Any, manifest: Any, devices: list[Any], threads: int) -> dict[str, Any]:
    """Everything after planning."""
    from shardload.transfer.execution import execute

    arrays: dict[str, Any] = {}
    execute(plan, manifest, devices=devices, on_ready=arrays.__setitem__, threads=threads)
    return arrays


def planned(path: Path, layout: str, *, times: int = 5) -> tuple[Any, Any, float]:
    """Plan and manifest of the whole file, and how many seconds planning took, targets and all: the best of some."""
    from shardload.transfer.planning import plan_transfers

    took = []
    for _ in range(times):
        began = time.perf_counter()
        manifest = open_safetensors(path)
        plan = plan_transfers(manifest, targets_for(manifest, layout), host_memory_bytes=1 << 30)
        took.append(time.perf_counter() - began)
    return plan, manifest, min(took)


def measure(path: Path, layouts: list[str], *, pairs: int, threads: int) -> list[Comparison]:
    """One comparison per layout."""
    import jax

    devices = jax.devices()[:8]
    sizes = [t.nbytes for t in open_safetensors(path).tensors.values()]
    ready, found = {}, []
    for layout in layouts:
        plan, manifest, planning_s = planned(path, layout)
        print(f"{layout}: planning took {planning_s * 1e3:.1f} ms, which is not counted", file=sys.stderr)
        ready[layout] = functools.partial(transfer, plan, manifest, devices, threads)
    against = [(layout, ready[layout], functools.partial(floor, path, sizes, threads)) for layout in layouts]
    if {"dim0", "dim1"} <= set(layouts):
        against.append(("dim1 against dim0", ready["dim1"], ready["dim0"]))
    for name, ours, other in against:
        found.append(compare(name, ours, other, n_bytes=sum(sizes), pairs=pairs, warm_bytes=sum(sizes) * 5 // 4))
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    return command(argv, str(__doc__), peer="floor", pairs=15, layouts=",".join(LAYOUTS), measure=measure)


if __name__ == "__main__":
    sys.exit(main())
