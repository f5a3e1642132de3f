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
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.folders import gemma2_preset, gemma3_folder
from benchmarks.measure import Table, summarise

CASES = {
    "gemma2-h5 bfloat16": ("preset", "bfloat16"),
    "gemma3-hf bfloat16": ("hf", "bfloat16"),
    "gemma3-hf float32": ("hf", "float32"),
}


def child(side: str, source: str, dtype: str) -> dict[str, float]:
    """One build + load in a fresh process; seconds, CPU-seconds and peak resident bytes."""
    code = [sys.executable, "-m", "benchmarks.model_child", side, source, dtype]
    env = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(code, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(source: Path, dtype: str, pairs: int) -> dict[str, object]:
    """Alternate the two sides ``pairs`` times, after one warm-up of each."""
    runs: dict[str, list[dict[str, float]]] = {"peer": [], "ours": []}
    for index in range(pairs + 1):
        for side in ("peer", "ours") if index % 2 else ("ours", "peer"):
            result = child(side, str(source), dtype)
            if index:
                runs[side].append(result)
    ratios = [p["wall_s"] / o["wall_s"] for p, o in zip(runs["peer"], runs["ours"], strict=True)]
    return {
        "ratio": summarise(ratios),
        **{side: {k: summarise([r[k] for r in rs]) for k in rs[0]} for side, rs in runs.items()},
    }


def main(argv: list[str] | None = None) -> dict[str, object]:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", help="run the cases whose name contains this")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        sources = {"preset": gemma2_preset, "hf": gemma3_folder}
        made: dict[str, Path] = {}
        for name, (kind, dtype) in CASES.items():
            if args.only and args.only not in name:
                continue
            if kind not in made:
                made[kind] = sources[kind](Path(folder) / kind)
            results[name] = compare(made[kind], dtype, args.pairs)
    print(json.dumps(results) if args.json else Table.of_models(results))
    return results


if __name__ == "__main__":
    main()
