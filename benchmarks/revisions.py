"""This tree against an earlier revision: the same benchmarks in both, alternating, each in a process of its own.

    models          `benchmarks.model_child`: our side of the whole models, 1x8
    transfer_floor  and restore_orbax, save_orbax: the whole benchmark, with its peers

Per row it prints our median seconds in both, the median over the rounds of the time here over the time there (below
one: faster now), and for benchmarks with peers the same of our time over the peer's. The peer is the same in both, so
that this quotient depends less on how fast the machine was.

    python -m benchmarks.revisions 3a2e571 [--only models] [--rounds 3] [--out results.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.models import CASES
from shardload.stores.local import local_target

COMMANDS = (
    ("transfer_floor", "--pairs", "5"),
    ("restore_orbax", "--pairs", "3"),
    ("save_orbax", "--pairs", "3", "--only", "save", "--only", "blocking"),
)
SIDES = "before", "after"
LOADS_PER_ROUND = 3
Numbers = tuple[float, float]
"""Our seconds, and our time over the peer's."""


def printed(tree: Path, module: str, *arguments: str) -> Any:
    """What a benchmark of ``tree`` prints as JSON, in its last line."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    code = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(code, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{module} failed in {tree}:\n{done.stderr[-3000:]}")
    return json.loads([line for line in done.stdout.splitlines() if line[:1] in ("[", "{")][-1])


def rows_of(found: Any) -> dict[str, Numbers]:
    """Rows by name, of both kinds: `measure.Comparison` has B over A, `measure.Row` ours over theirs."""
    if isinstance(found, dict):
        return {f"{row['name']} / {row['peer']}": (row["ours_s"], row["ratio_median"]) for row in found["rows"]}
    return {row["name"]: (row["a_s"], 1 / row["ratio_median"]) for row in found}


def in_turn(trees: Mapping[str, Path], rounds: int) -> Iterator[tuple[str, Path]]:
    """Every tree once per round; who comes first changes."""
    for index in range(rounds):
        for side in SIDES if index % 2 == 0 else reversed(SIDES):
            yield side, trees[side]


def whole(trees: Mapping[str, Path], command: tuple[str, ...], rounds: int) -> Iterator[dict[str, Any]]:
    """Every row of a benchmark that both trees have."""
    runs: dict[str, dict[str, list[Numbers]]] = {side: defaultdict(list) for side in SIDES}
    for side, tree in in_turn(trees, rounds):
        for name, values in rows_of(printed(tree, command[0], *command[1:], "--json")).items():
            runs[side][name].append(values)
    for name in runs["before"]:
        if name in runs["after"]:
            before, after = runs["before"][name], runs["after"][name]
            against_peer = statistics.median(a[1] / b[1] for b, a in zip(before, after, strict=True))
            yield summary(name, [r[0] for r in before], [r[0] for r in after]) | {"against_peer": against_peer}


def loads(trees: Mapping[str, Path], folder: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """Our loads of whole models, of those cases that both revisions know."""
    for name, case in CASES.items():
        if case.flags:
            continue
        source = folder / case.maker.__name__
        if not source.exists():
            case.maker(source)
        runs: dict[str, list[float]] = {side: [] for side in SIDES}
        for index, (side, tree) in enumerate(in_turn(trees, 1 + LOADS_PER_ROUND * rounds)):
            taken = printed(tree, "model_child", "ours", str(source), case.dtype)["wall_s"]
            if index >= len(SIDES):  # the first of each warms files and memory
                runs[side].append(taken)
        yield summary(name, runs["before"], runs["after"])


def summary(name: str, before: list[float], after: list[float]) -> dict[str, Any]:
    """Seconds of each round, and the median of their quotients."""
    ratio = statistics.median(a / b for b, a in zip(before, after, strict=True))
    return {"name": name, "after_over_before": ratio, "before_s": before, "after_s": after}


def line(row: Mapping[str, Any]) -> str:
    """For people."""
    seconds = "".join(f"{statistics.median(row[f'{side}_s']):>10.3f}" for side in SIDES)
    peer = f"{row['against_peer']:>18.3f}" if "against_peer" in row else ""
    return f"{row['name']:<58}{seconds}{row['after_over_before']:>14.3f}{peer}"


def main(argv: list[str] | None = None) -> int:
    """Check the revision out into a temporary folder, measure, print."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("revision")
    parser.add_argument("--only", default="", help="benchmarks whose name contains this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=local_target, help="also write all numbers to a JSON file")
    options = parser.parse_args(argv)
    here = Path(__file__).resolve().parent.parent
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        trees = {"before": Path(folder) / "before", "after": here}
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", trees["before"], options.revision], check=True)
        try:
            print(f"{'':<58}{'before s':>10}{'after s':>10}{'after/before':>14}{'against the peer':>18}")
            work = [loads(trees, Path(folder), options.rounds)] if options.only in "models" else []
            work += [whole(trees, each, options.rounds) for each in COMMANDS if options.only in each[0]]
            for each in work:
                for row in each:
                    rows.append(row)
                    print(line(row), flush=True)
                    if options.out:
                        options.out.write_text(json.dumps(rows, indent=1))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", trees["before"]], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
