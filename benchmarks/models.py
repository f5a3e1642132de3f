"""Whole models: build + load with shardload against Keras and KerasHub, interleaved, each in a process of its own.

    gemma2-h5      a Gemma-2-shaped `.weights.h5` of 1.2+ GB bfloat16   Keras: build under ModelParallel + load_weights
    gemma3-hf      real Gemma 3 270M as a Hugging Face folder           KerasHub: Gemma3Backbone.from_preset
                   (bfloat16 and float32)
    ready          the same folder with its tokenizer, until a prompt   KerasHub: CausalLM.from_preset
                   is token ids: only the source is given, on either side, and there is one device
    ready on 1x8   the same onto eight devices in the dtype of the folder; the peer's layout map is made beforehand
    ready, cached  the same, where JAX finds all that it compiled in its compilation cache
    gemma3-hf cold the folder is not in the page cache

Both sides get the same files. The backbones also get the same dtype, mesh (1x8 CPU devices) and layout. Imports are not
timed. A process of its own per run gives both sides memory of the same freshness and no compiled code left over from
the run before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.folders import gemma2_preset, gemma3_folder, gemma3_with_text
from benchmarks.measure import Comparison, Run, table, warm_memory


@dataclass(frozen=True, slots=True)
class Case:
    """What is loaded, and how."""

    maker: Callable[[Path], Path]
    dtype: str = "bfloat16"
    flags: tuple[str, ...] = ()
    """Of `model_child`."""


CASES = {
    "gemma2-h5 bfloat16": Case(gemma2_preset),
    "gemma3-hf bfloat16": Case(gemma3_folder),
    "gemma3-hf float32": Case(gemma3_folder, "float32"),
    "gemma3-hf cold": Case(gemma3_folder, flags=("--cold",)),
    "ready": Case(gemma3_with_text, flags=("--defaults",)),
    "ready on 1x8": Case(gemma3_with_text, flags=("--defaults", "--mesh")),
    "ready, cached": Case(gemma3_with_text, flags=("--defaults", "--cache")),
}


def child(side: str, source: str, case: Case, cache: str) -> dict[str, float]:
    """One build + load in a fresh process; seconds, CPU-seconds and peak resident bytes."""
    flags = [f"{flag}={cache}-{side}" if flag == "--cache" else flag for flag in case.flags]
    code = [sys.executable, "-m", "benchmarks.model_child", side, source, case.dtype, *flags]
    # With compiled modules, as after any first import: some are imported while the clock runs.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPYCACHEPREFIX": f"{Path(cache).parent}/pyc"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(code, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(name: str, source: Path, case: Case, pairs: int) -> tuple[Comparison, dict[str, float]]:
    """Alternate the two sides ``pairs`` times, after one warm-up of each; and the peak memory of each."""
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
    for index in range(pairs + 1):
        for side in ("peer", "ours") if index % 2 else ("ours", "peer"):
            result = child(side, str(source), case, f"{source}-cache")
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
        made: dict[Callable[[Path], Path], Path] = {}
        warm_memory(8 << 30)
        for name, case in CASES.items():
            if options.only not in name:
                continue
            if case.maker not in made:
                made[case.maker] = case.maker(Path(folder) / case.maker.__name__)
            found.append(compare(name, made[case.maker], case, options.pairs))
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
