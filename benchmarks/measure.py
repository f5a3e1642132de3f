"""Measuring side by side: alternate, warm first, report the median of ratios and its spread.

Absolute times on a shared machine say little; a ratio of two things done right after one another says more. Each
pair is one run of A and one of B, in alternating order, each timed with wall clock and CPU clock of the process.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GB = 1e9


@dataclass(frozen=True, slots=True)
class Run:
    """One timed call."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several pairs of A and B."""

    name: str
    n_bytes: int
    a: tuple[Run, ...]
    b: tuple[Run, ...]

    @property
    def ratios(self) -> list[float]:
        """Wall time of B over wall time of A, per pair: how many times faster A is."""
        return sorted(b.wall_s / a.wall_s for a, b in zip(self.a, self.b, strict=True))

    def summary(self) -> dict[str, Any]:
        """Medians, spread, rates."""
        ratios = self.ratios
        return {
            "name": self.name,
            "pairs": len(ratios),
            "ratio_median": statistics.median(ratios),
            "ratio_low": ratios[len(ratios) // 4],
            "ratio_high": ratios[-1 - len(ratios) // 4],
            "a_s": statistics.median(r.wall_s for r in self.a),
            "b_s": statistics.median(r.wall_s for r in self.b),
            "a_gb_s": self.n_bytes / GB / statistics.median(r.wall_s for r in self.a),
            "b_gb_s": self.n_bytes / GB / statistics.median(r.wall_s for r in self.b),
            "a_cpu_s_per_gb": statistics.median(r.cpu_s for r in self.a) / (self.n_bytes / GB),
            "b_cpu_s_per_gb": statistics.median(r.cpu_s for r in self.b) / (self.n_bytes / GB),
        }

    def runs(self) -> dict[str, Any]:
        """Every single measurement."""
        return {"a": [asdict(r) for r in self.a], "b": [asdict(r) for r in self.b]}


def timed(work: Callable[[], Any]) -> Run:
    """Run ``work`` once; what it returns is freed before the clock of the next run starts."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    run = Run(time.perf_counter() - wall, time.process_time() - cpu)
    del result
    gc.collect()
    return run


def compare(
    name: str,
    a: Callable[[], Any],
    b: Callable[[], Any],
    *,
    n_bytes: int,
    pairs: int,
    warm_up: int = 1,
    warm_bytes: int = 0,
) -> Comparison:
    """Alternate A and B; the order within a pair alternates too.

    Args:
        name: What is compared.
        a: One side.
        b: The other.
        n_bytes: What one run moves.
        pairs: How many runs of each.
        warm_up: How many runs of each before the clock runs.
        warm_bytes: Memory to touch before every run, see `warm_memory`.
    """
    for _ in range(warm_up):
        timed(a)
        timed(b)
    runs: tuple[list[Run], list[Run]] = ([], [])
    for i in range(pairs):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            warm_memory(warm_bytes)
            runs[which].append(timed((a, b)[which]))
    return Comparison(name, n_bytes, tuple(runs[0]), tuple(runs[1]))


def table(comparisons: Sequence[Comparison], *, a: str, b: str) -> str:
    """A table for people."""
    head = f"{'':<22}{a + ' GB/s':>18}{b + ' GB/s':>18}{'times faster':>14}{'quartiles':>16}{'CPU-s/GB':>16}"
    lines = [head]
    for comparison in comparisons:
        s = comparison.summary()
        spread, cpu = (
            f"{s['ratio_low']:.2f}-{s['ratio_high']:.2f}",
            f"{s['a_cpu_s_per_gb']:.2f} / {s['b_cpu_s_per_gb']:.2f}",
        )
        lines.append(
            f"{s['name']:<22}{s['a_gb_s']:>18.2f}{s['b_gb_s']:>18.2f}{s['ratio_median']:>14.2f}{spread:>16}{cpu:>16}"
        )
    return "\n".join(lines)


def warm_memory(n_bytes: int) -> None:
    """Touch this much memory and free it.

    A virtual machine gets it from its host at the first touch, many times slower than afterwards, and gives freed
    memory back within seconds: so this belongs right before each timing.
    """
    from shardload.transfer.host_memory import memory

    memory(n_bytes)[::4096] = 1


def warm_files(paths: Sequence[Path]) -> None:
    """Read files into the page cache."""
    buffer = bytearray(8 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def memory_status() -> dict[str, int]:
    """Resident bytes of this process, now and at most, from the kernel."""
    fields = (line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found = {key: value for key, value in fields if key in ("VmRSS", "VmHWM")}
    return {"rss_bytes": int(found["VmRSS"].split()[0]) << 10, "peak_rss_bytes": int(found["VmHWM"].split()[0]) << 10}


def reset_peak_memory() -> None:
    """Forget the peak so far (Linux); afterwards `memory_status` reports the peak from here on."""
    Path("/proc/self/clear_refs").write_text("5")


@dataclass(frozen=True, slots=True)
class Row:
    """What we do beside what it is compared with, round by round, and the limit it should keep."""

    name: str
    peer: str
    """What it is compared with."""
    ours: tuple[Run, ...]
    theirs: tuple[Run, ...]
    at_most: float | None = None
    """Largest median of the ratios that is wanted; ``None``: shown only."""
    slack_s: float = 0.0
    """So many seconds more are fine."""

    @property
    def ratios(self) -> list[float]:
        """Our wall time over the peer's, per round: below one, ours is faster."""
        return sorted(a.wall_s / b.wall_s for a, b in zip(self.ours, self.theirs, strict=True))

    @property
    def verdict(self) -> str:
        """The limit, and whether it was kept."""
        if self.at_most is None:
            return ""
        slack = f" + {self.slack_s * 1e3:.0f} ms" if self.slack_s else ""
        pairs = zip(self.ours, self.theirs, strict=True)
        over_s = statistics.median(a.wall_s - self.at_most * b.wall_s for a, b in pairs) - self.slack_s
        return f"<= {self.at_most:.2f}{slack}: {'met' if over_s <= 0 else 'MISSED'}"

    def summary(self) -> dict[str, Any]:
        """Medians, spread, every run."""
        ratios = self.ratios
        return {
            "name": self.name,
            "peer": self.peer,
            "rounds": len(ratios),
            "ratio_median": statistics.median(ratios),
            "ratio_low": ratios[len(ratios) // 4],
            "ratio_high": ratios[-1 - len(ratios) // 4],
            "ours_s": statistics.median(r.wall_s for r in self.ours),
            "theirs_s": statistics.median(r.wall_s for r in self.theirs),
            "ours_cpu_s": statistics.median(r.cpu_s for r in self.ours),
            "theirs_cpu_s": statistics.median(r.cpu_s for r in self.theirs),
            "wanted": self.verdict,
            "runs": {"ours": [asdict(r) for r in self.ours], "theirs": [asdict(r) for r in self.theirs]},
        }


def interleave(
    sides: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    between: Callable[[], None],
    warm_up: int = 1,
) -> dict[str, tuple[Run, ...]]:
    """Run every side once per round; who comes first, and in which direction it goes round, changes with each.

    Args:
        sides: What is timed, by name.
        rounds: How many runs of each.
        between: Called before every run and after the last one, outside the clock: removes what the last one left.
        warm_up: How many rounds before the clock runs.
    """
    names, found = list(sides), {name: list[Run]() for name in sides}
    for i in range(-warm_up, rounds):
        first = i % len(names)
        order = names[first:] + names[:first]
        for name in order if i % 2 == 0 else reversed(order):
            between()
            run = timed(sides[name])
            if i >= 0:
                found[name].append(run)
    between()
    return {name: tuple(runs) for name, runs in found.items()}


def rows_table(rows: Sequence[Row]) -> str:
    """A table for people: seconds, the median ratio with its quartiles, CPU-seconds, the limit."""
    head = f"{'':<26}{'against':<26}{'ours s':>9}{'theirs s':>10}{'ratio':>8}{'quartiles':>14}{'CPU-s':>15}  wanted"
    lines = [head]
    for row in rows:
        s = row.summary()
        spread, cpu = (
            f"{s['ratio_low']:.3f}-{s['ratio_high']:.3f}",
            f"{s['ours_cpu_s']:.2f} / {s['theirs_cpu_s']:.2f}",
        )
        lines.append(
            f"{row.name:<26}{row.peer:<26}{s['ours_s']:>9.3f}{s['theirs_s']:>10.3f}{s['ratio_median']:>8.3f}"
            f"{spread:>14}{cpu:>15}  {row.verdict}"
        )
    return "\n".join(lines)
