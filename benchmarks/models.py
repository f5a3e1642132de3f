"""Whole models: build + load with shardload against Keras and KerasHub, interleaved, each in a process of its own.

    gemma2-h5      a Gemma-2-shaped `.weights.h5` of 1.2+ GB bfloat16   Keras: build under ModelParallel + load_weights
    gemma3-hf      real Gemma 3 270M as a Hugging Face folder           KerasHub: Gemma3Backbone.from_preset
                   (bfloat16 and float32)

Both sides get the same files, dtype, mesh (1x8 CPU devices) and the same layout; imports are not timed. A process
of its own per run gives both sides memory of the same freshness and no compiled code left over from the run before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.folders import gemma2_preset, gemma3_folder
from benchmarks.measure import Comparison, Run, table, warm_memory

CASES = {
    "gemma2-h5 bfloat16": ("preset", "bfloat16"),
    "gemma3-hf bfloat16": ("hf", "bfloat16"),
    "gemma3-hf float32": ("hf", "float32"),
}
"""Name → source and dtype."""
MAKERS = {"preset": gemma2_preset, "hf": gemma3_folder}


def child(side: str, source: str, dtype: str) -> dict[str, float]:
    """One build + load in a fresh process; seconds, CPU-seconds and peak resident bytes."""
    code = [sys.executable, "-m", "benchmarks.model_child", side, source, dtype]
    done = subprocess.run(code, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(name: str, source: Path, dtype: str, pairs: int) -> tuple[Comparison, dict[str, float]]:
    """Alternate the two sides ``pairs`` times, after one warm-up of each; and the peak memory of each."""
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
    for index in range(pairs + 1):
        for side in ("peer", "ours") if index % 2 else ("ours", "peer"):
            result = child(side, str(source), dtype)
            if index:
                runs[side].append(result)
    ours, peer = (tuple(Run(r["wall_s"], r["cpu_s"]) for r in runs[side]) for side in ("ours", "peer"))
    n_bytes = int(runs["ours"][0]["weight_bytes"])
    memory = {f"{side}_peak_gb": statistics.median(r["peak_bytes"] for r in rs) / 1e9 for side, rs in runs.items()}
    return Comparison(name, n_bytes, ours, peer), {"weights_gb": n_bytes / 1e9, **memory}


def main(argv: list[str] | None = None) -> int:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    found: list[tuple[Comparison, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        made: dict[str, Path] = {}
        warm_memory(8 << 30)
        for name, (kind, dtype) in CASES.items():
            if options.only not in name:
                continue
            if kind not in made:
                made[kind] = MAKERS[kind](Path(folder) / kind)
            found.append(compare(name, made[kind], dtype, options.pairs))
    if options.json:
        print(json.dumps([c.summary() | memory | c.runs() for c, memory in found]))
        return 0
    print(table([c for c, _ in found], a="shardload", b="keras"))
    for comparison, memory in found:
        shown = ", ".join(f"{key} {value:.2f}" for key, value in memory.items())
        times = f"{comparison.summary()['a_s']:.2f} s against {comparison.summary()['b_s']:.2f} s"
        print(f"{comparison.name}: {times}; {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
