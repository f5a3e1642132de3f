"""Models that are quantised while they are loaded, against a plain load and against Keras' `quantize` after it.

    gemma3-hf   real Gemma 3 270M as a Hugging Face folder in bfloat16
    gemma2-h5   a Gemma-2-shaped `.weights.h5` of 1.37 GB in bfloat16, whose kernels lie the other way round

Three sides, each run in a process of its own, in turn, onto eight CPU devices: `shardload.load(…)` in bfloat16, with
``quantize=MODE``, and in bfloat16 followed by ``model.quantize(MODE)`` of Keras. Imports are not timed. The last run of
each side is not timed either: it looks at the most bytes that a device and the host have at a time. ``--cold`` drops
the files from the page cache before each load, so that they are read from the disk.

    python -m benchmarks.quantised_loading [--pairs 5] [--only gemma3] [--modes int8 int4] [--cold] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.folders import gemma2_preset, gemma3_folder
from benchmarks.measure import memory_status, reset_peak_memory, warm_memory

SIDES = ("plain", "ours", "keras")
CASES = {"gemma3-hf": gemma3_folder, "gemma2-h5": gemma2_preset}
WARM_BYTES = 4 << 30


class DeviceBytes:
    """The most bytes of live arrays on the first device, looked at every few milliseconds by a thread."""

    def __init__(self) -> None:
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        import jax

        first = jax.devices()[0]
        while not self._stop.wait(0.005):
            buffers = {}
            for array in jax.live_arrays():
                for shard in array.addressable_shards if not array.is_deleted() else ():
                    if shard.device == first:
                        buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
            self.most = max(self.most, sum(buffers.values()))

    def __enter__(self) -> DeviceBytes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def drop_pages(source: Path) -> None:
    """Remove the files of a folder from the page cache."""
    for path in filter(Path.is_file, source.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def child(side: str, source: str, mode: str, *, looks: bool, cold: bool) -> dict[str, Any]:
    """One load in this process: seconds, CPU-seconds, and with ``looks`` the peaks of memory."""
    os.environ["KERAS_BACKEND"] = "jax"
    sys.modules["tensorflow"] = sys.modules["tensorflow_text"] = None  # type: ignore[assignment]  # nothing needs them
    import warnings

    import jax
    import keras_hub.src.utils.transformers.preset_loader  # noqa: F401 - imported on first use

    import shardload

    jax.config.update("jax_num_cpu_devices", 8)
    jax.devices()
    warnings.simplefilter("ignore")  # Keras names each layer that it does not quantise
    warm_memory(WARM_BYTES)
    if cold:
        drop_pages(Path(source))
    before = memory_status()["rss_bytes"]
    reset_peak_memory()

    def load() -> Any:
        quantize = mode if side == "ours" else None
        model = shardload.load(source, mesh="1x8", dtype="bfloat16", task=False, quantize=quantize)
        if side == "keras":
            model.quantize(mode)
        jax.block_until_ready([v.value for v in model.weights])
        return model

    wall, cpu, most = time.perf_counter(), time.process_time(), 0
    if looks:
        with DeviceBytes() as seen:
            model = load()
        most = seen.most
    else:
        model = load()
    found = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    shards = [v.value.addressable_shards[0].data.nbytes for v in model.weights]
    report = shardload.report(model)
    return {
        **found,
        "host_peak_bytes": memory_status()["peak_rss_bytes"] - before,
        "device_peak_bytes": most,
        "device_bytes": sum(shards),
        "weight_bytes": sum(v.value.nbytes for v in model.weights),
        "read_bytes": report.bytes.read,
        "digest": digest(model),
    }


def digest(model: Any) -> str:
    """A digest of all weights."""
    import hashlib

    import numpy as np

    found = hashlib.sha256()
    for variable in model.weights:
        found.update(np.ascontiguousarray(np.asarray(variable.value)).tobytes())
    return found.hexdigest()


def run(side: str, source: Path, mode: str, *, looks: bool, cold: bool) -> dict[str, Any]:
    """Run `child` in a process of its own."""
    flags = [str(int(looks)), str(int(cold))]
    code = [sys.executable, "-m", "benchmarks.quantised_loading", "--child", side, str(source), mode, *flags]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(code, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(name: str, source: Path, mode: str, *, pairs: int, cold: bool) -> dict[str, Any]:
    """Run all sides in turn, after one round to warm up."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for index in range(pairs + 1):
        for side in SIDES if index % 2 else reversed(SIDES):
            found = run(side, source, mode, looks=False, cold=cold)
            if index:
                runs[side].append(found)
    looked = {side: run(side, source, mode, looks=True, cold=cold) for side in SIDES}
    if looked["ours"]["digest"] != looked["keras"]["digest"]:
        raise SystemExit(f"{name}, {mode}: the weights differ from Keras'")

    def ratio(a: str, b: str, field: str) -> float:
        return statistics.median(x[field] / y[field] for x, y in zip(runs[a], runs[b], strict=True))

    return {
        "name": f"{name} {mode}" + (" from the disk" if cold else ""),
        "seconds": {side: statistics.median(r["wall_s"] for r in runs[side]) for side in SIDES},
        "cpu_s": {side: statistics.median(r["cpu_s"] for r in runs[side]) for side in SIDES},
        "time_of_plain": ratio("ours", "plain", "wall_s"),
        "cpu_of_plain": ratio("ours", "plain", "cpu_s"),
        "keras_time_of_ours": ratio("keras", "ours", "wall_s"),
        "memory": {
            side: {key: value for key, value in looked[side].items() if key.endswith("bytes")} for side in SIDES
        },
    }


def text(found: dict[str, Any]) -> str:
    """Lines for people."""
    lines = [
        f"{found['name']}: {found['time_of_plain']:.2f} of the time of a load in bfloat16 "
        f"({found['cpu_of_plain']:.2f} of its CPU time); Keras' way takes {found['keras_time_of_ours']:.1f} times that"
    ]
    for side in SIDES:
        memory = found["memory"][side]
        lines.append(
            f"  {side:<6} {found['seconds'][side]:7.2f} s {found['cpu_s'][side]:7.2f} CPU-s   device: "
            f"{memory['device_peak_bytes'] / 1e6:7.1f} MB at most, {memory['device_bytes'] / 1e6:6.1f} in the end"
            f"   host: {memory['host_peak_bytes'] / 1e6:7.1f} MB at most"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    if "--child" in (argv or sys.argv):
        side, source, mode, looks, cold = (argv or sys.argv)[-5:]
        sys.stdout.write(json.dumps(child(side, source, mode, looks=looks == "1", cold=cold == "1")) + "\n")
        return 0
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--modes", nargs="+", default=["int8", "int4"])
    parser.add_argument("--cold", action="store_true", help="read from the disk, not from the page cache")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name, make in CASES.items():
            if options.only in name:
                source = make(Path(folder) / name)
                for mode in options.modes:
                    results.append(measure(name, source, mode, pairs=options.pairs, cold=options.cold))
                    if not options.json:
                        sys.stdout.write(text(results[-1]) + "\n")
    if options.json:
        sys.stdout.write(json.dumps(results) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
