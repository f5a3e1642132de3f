"""This tree against an earlier revision: the same work by the public names of both, alternating.

Each revision has one process that lasts (`benchmarks.revisions_child`), so that neither imports, nor memory that the
machine touches for the first time, nor what JAX compiles is in any number. Per piece of work it prints the median
seconds of both and, over the pairs, the median and the quartiles of time here over time there (below one: faster now),
by the wall clock and in CPU-seconds, which other work on the machine disturbs less.

    python -m benchmarks.revisions 3a2e571 [--only restore] [--pairs 15] [--out results.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import write_safetensors
from benchmarks.folders import gemma2_preset, gemma3_folder
from shardload.stores.local import local_target

CHILD = Path(__file__).with_name("revisions_child.py")
FILE_BYTES = 600_000_000
"""Bytes of the safetensors file whose tensors are loaded as arrays."""


class Side:
    """A revision's lasting process."""

    def __init__(self, name: str, tree: Path, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        code = [sys.executable, str(CHILD), str(folder), name]
        self.log = folder / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                code, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def ask(self, request: str) -> Any:
        """Let the process do one piece of work, and wait for its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{request}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{request} failed:\n{self.log.read_text()[-3000:]}")
        return json.loads(answer)


def compare(name: str, sides: Mapping[str, Side], pairs: int) -> dict[str, Any]:
    """Alternate; who comes first changes. The first two runs of each, which compile and fill caches, do not count."""
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for index in range(-2, pairs):
        for side in list(sides) if index % 2 == 0 else reversed(list(sides)):
            found = sides[side].ask(name)
            if index >= 0:
                runs[side].append(found)
    row: dict[str, Any] = {"name": name, "pairs": pairs}
    for clock in ("wall_s", "cpu_s"):
        before, after = ([run[clock] for run in runs[side]] for side in ("before", "after"))
        ratios = sorted(a / b for b, a in zip(before, after, strict=True))
        row[clock] = {
            "before": before,
            "after": after,
            "after_over_before": statistics.median(ratios),
            "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        }
    return row


def line(row: Mapping[str, Any]) -> str:
    """For people."""
    text = f"{row['name']:<28}"
    for clock in ("wall_s", "cpu_s"):
        taken = row[clock]
        low, high = taken["quartiles"]
        text += "".join(f"{statistics.median(taken[side]):>10.3f}" for side in ("before", "after"))
        text += f"{taken['after_over_before']:>8.3f} ({low:.2f}-{high:.2f})"
    return text


def main(argv: list[str] | None = None) -> int:
    """Check the revision out into a temporary folder, measure, print."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("revision")
    parser.add_argument("--only", default="", help="work whose name contains this")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--out", type=local_target, help="also write all numbers to a JSON file")
    options = parser.parse_args(argv)
    here = Path(__file__).resolve().parent.parent
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        folder, old = Path(root), Path(root) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", old, options.revision], cwd=here, check=True)
        sides = {"before": Side("before", old, folder), "after": Side("after", here, folder)}
        try:
            write_safetensors(folder, FILE_BYTES)
            for maker in (gemma2_preset, gemma3_folder):
                maker(folder / maker.__name__)
            sides["before"].ask("step")
            print(f"{'':<28}{'wall: before s, after s, after/before':>44}{'CPU: before s, after s, after/before':>44}")
            for name in sides["before"].ask("names"):
                if options.only in name:
                    rows.append(compare(name, sides, options.pairs))
                    print(line(rows[-1]), flush=True)
                    if options.out:
                        options.out.write_text(json.dumps(rows, indent=1))
        finally:
            for side in sides.values():
                side.process.kill()
            subprocess.run(["git", "worktree", "remove", "--force", old], cwd=here, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
