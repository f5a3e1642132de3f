"""Reading part of each row: skip the rest of the row, or read it too? By the length of the gap between two parts.

python -m benchmarks.strided_reads [--gaps 4 32 128 512] [--bytes 256] [--folder DIR]

A transposed matrix split over processes is such a case: of stored rows, each process needs a part. One process of two
needs half, with gaps as long as its parts; one of four needs a quarter, with gaps three times as long. "Skipping" makes
one `preadv` per part; "reading" makes one per 8 MiB, with the gaps into scratch, as shardload does below
`SKIP_BYTES`. Cold reads drop the file from the page cache first; ``read_bytes`` of ``/proc/self/io`` says what the disk
gave. Each figure is the median of ``--rounds``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 8 << 20
MOST_BUFFERS = 1024
"""Most buffers of one ``preadv``, a limit of the kernel."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One pass over the file."""

    wall_ms: float
    cpu_ms: float
    disk_mib: float


def skipping(fd: int, wanted: int, gap: int, n_bytes: int) -> None:
    """Read the parts alone."""
    buffer = memoryview(bytearray(wanted))
    for offset in range(0, n_bytes - wanted + 1, wanted + gap):
        os.preadv(fd, [buffer], offset)


def reading(fd: int, wanted: int, gap: int, n_bytes: int) -> None:
    """Read parts and gaps, many rows at a time."""
    buffer, scratch = memoryview(bytearray(wanted)), memoryview(bytearray(gap))
    row = wanted + gap
    rows = min(max(1, BLOCK_BYTES // row), MOST_BUFFERS // 2)
    for offset in range(0, n_bytes - row * rows + 1, row * rows):
        os.preadv(fd, [buffer, scratch] * rows, offset)


def measured(do: Callable[[], None], *, cold: int | None) -> Cost:
    """Run once; ``cold`` is the file to drop from the page cache before."""
    if cold is not None:
        os.posix_fadvise(cold, 0, 0, os.POSIX_FADV_DONTNEED)
    disk, wall, cpu = _from_disk(), time.perf_counter(), time.process_time()
    do()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Cost(wall * 1e3, cpu * 1e3, (_from_disk() - disk) / 2**20)


def _from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gaps", type=int, nargs="+", default=[4, 12, 24, 36, 64, 128, 256, 512, 1024], help="KiB")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bytes", type=int, default=256, help="MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    given = parser.parse_args()
    with tempfile.NamedTemporaryFile(dir=given.folder) as file:
        for _ in range(given.bytes):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        fd = os.open(file.name, os.O_RDONLY)
        print("processes  gap KiB  cache  how       wall ms  CPU ms  from disk MiB")
        for processes in given.processes:
            for gap in given.gaps:
                _row(fd, processes, gap << 10, given.bytes << 20, given.rounds)


def _row(fd: int, processes: int, gap: int, n_bytes: int, rounds: int) -> None:
    wanted = gap // (processes - 1)
    for cold in (None, fd):
        costs: dict[str, list[Cost]] = {"reading": [], "skipping": []}
        for _ in range(rounds):
            for how, do in (("reading", reading), ("skipping", skipping)):
                costs[how].append(measured(lambda do=do: do(fd, wanted, gap, n_bytes), cold=cold))  # type: ignore[misc]
        for how, found in costs.items():
            of = [
                statistics.median(getattr(one, field) for one in found) for field in ("wall_ms", "cpu_ms", "disk_mib")
            ]
            print(
                f"{processes:9}  {gap >> 10:7}  {'warm' if cold is None else 'cold'}   {how:8}"
                f"  {of[0]:7.0f}  {of[1]:6.0f}  {of[2]:13.0f}"
            )


if __name__ == "__main__":
    main()
