"""Time to ready: from `shardload.load` to the first result, with and without ``warm_up``, from a warm and a cold disk.

Real Gemma 3 270M as a Hugging Face folder onto 1x8 CPU devices, then one call: ``generate`` of a prompt, ``predict`` of
a batch, or a step of ``fit``. Each run is a process of its own, with no compiled programs; all have the same result.

    python -m benchmarks.ready [--call generate] [--pairs 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.folders import gemma3_with_text

PROMPT = "The capital of France is"
CALLS = ("generate", "predict", "train")
WAYS = ("warm disk", "warm disk, warm_up", "cold disk", "cold disk, warm_up")


def child(call: str, way: str, folder: str) -> None:
    """One load and one call, timed; print one JSON object."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    import keras_hub  # noqa: F401
    import numpy as np

    import shardload
    from benchmarks.measure import warm_memory

    def plain(model: Any) -> Any:
        model.preprocessor = None  # x has token ids
        return model

    x = {"token_ids": np.ones((2, 64), np.int32), "padding_mask": np.ones((2, 64), np.bool_)}
    y = np.ones((2, 64), np.int32)
    firsts: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "generate": (PROMPT, lambda model: shardload.generate(model, PROMPT)),
        "predict": (x, lambda model: float(plain(model).predict(x, verbose=0).sum())),
        "train": ((x, y), lambda model: plain(model).fit(x, y, batch_size=2, verbose=0).history["loss"]),
    }
    example, first = firsts[call]
    options = {"warm_up": {call: example}} if "warm_up" in way else {}
    load = shardload.load  # imports what it needs
    jax.device_put(0, jax.devices()[0]).block_until_ready()
    warm_memory(2 << 30)
    for path in Path(folder).iterdir():
        with path.open("rb") as file:
            if "cold" in way:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 22):
                    pass
    began, cpu = time.perf_counter(), time.process_time()
    model = load(folder, mesh="1x8", **options)
    loaded = time.perf_counter()
    result = first(model)
    ready = time.perf_counter()
    notes = [note for note in shardload.report(model).notes if "not compiled" in note]
    found = {"load_s": loaded - began, "first_s": ready - loaded, "ready_s": ready - began, "result": result}
    print(json.dumps({**found, "cpu_s": time.process_time() - cpu, "notes": notes}))


def run(call: str, way: str, folder: Path) -> dict[str, Any]:
    """One run in a fresh process."""
    # Simulated devices wait for each other; XLA ends the process after 40 s, which a busy machine may take.
    patient = "--xla_cpu_collective_call_terminate_timeout_seconds=300"
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": patient}
    # With compiled modules, as after any first import.
    environment["PYTHONPYCACHEPREFIX"] = f"{folder.parent}/pyc"
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "benchmarks.ready", "--child", way, "--call", call, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{way} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(call: str, folder: Path, pairs: int) -> list[dict[str, Any]]:
    """Run all ways in turn, after one run that is not timed; return a row for each way."""
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    run(call, WAYS[0], folder)  # compiles Python's modules
    for index in range(pairs):
        for way in WAYS if index % 2 else reversed(WAYS):
            runs[way].append(run(call, way, folder))
    results = {json.dumps(found["result"]) for every in runs.values() for found in every}
    if len(results) > 1:
        raise AssertionError(f"the results differ: {results}")
    rows = []
    for way, every in runs.items():
        base = runs[way.split(",")[0]]
        row: dict[str, Any] = {"call": call, "way": way, "notes": every[0]["notes"]}
        row |= {key: statistics.median(f[key] for f in every) for key in ("load_s", "first_s", "ready_s", "cpu_s")}
        ratios = sorted(b["ready_s"] / a["ready_s"] for a, b in zip(every, base, strict=True))
        row |= {"times_faster": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]}
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--call", choices=CALLS, default="generate")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="the model's folder, if it exists already")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if options.child:
        child(options.call, options.child, str(options.folder))
        return 0
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or gemma3_with_text(Path(made) / "gemma")
        os.sync()  # only clean pages can be removed from the cache
        rows = measure(options.call, folder, options.pairs)
    if options.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        print(
            f"{row['call']}, {row['way']:<28}load {row['load_s']:>6.2f} s  first {row['first_s']:>6.2f} s  ready "
            f"{row['ready_s']:>6.2f} s  {row['cpu_s']:>6.1f} CPU-s  {row['times_faster']:.2f} times faster"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
