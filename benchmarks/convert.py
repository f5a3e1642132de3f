"""Converting a checkpoint round the formats: seconds, and the peak of anonymous memory of the process that converts.

    h5 (KerasHub preset) ─► safetensors (Hugging Face) ─► Orbax ─► h5, which must be the first one again, bit for bit

Anonymous memory is ``RssAnon`` of the kernel, looked at every 20 ms: everything but the page cache. Each format is
removed as soon as the next one is made, so the disk must hold three times the checkpoint.

    python -m benchmarks.convert [SOURCE] [--folder DIR] [--host-memory 512MiB] [--scale 0.1]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shardload.stores.local import local_target

CHAIN = ("safetensors", "orbax", "h5")
LOOK_S = 0.02
COMMAND = (sys.executable, "-m", "shardload")


def watched(arguments: list[str]) -> dict[str, Any]:
    """Run one command of shardload; its JSON with ``peak_anon_bytes`` and ``wall_s``."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen([*COMMAND, *arguments, "--json", "--no-progress"], stdout=output)
        peak = 0
        while child.poll() is None:
            peak = max(peak, anonymous_bytes(child.pid))
            time.sleep(LOOK_S)
        wall_s = time.monotonic() - began
        output.seek(0)
        said = json.loads(output.read())
    if child.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed: {said}")
    return {**said, "peak_anon_bytes": peak, "wall_s": wall_s}


def anonymous_bytes(pid: int) -> int:
    """``RssAnon`` of a process now, 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)


def run(source: Path, folder: Path, host_memory: str, *, as_json: bool) -> None:
    """Go round once, printing a line per conversion."""

    def show(line: str, said: dict[str, Any]) -> None:
        print(json.dumps(said) if as_json else line, flush=True)

    previous = source
    for to in CHAIN:
        target = folder / f"converted-{to}"
        said = watched(["convert", str(previous), str(target), "--to", to, "--host-memory", host_memory])
        rate = said["n_bytes"] / 1e9 / said["seconds"]
        show(
            f"{said['format']:16} {said['n_bytes'] / 1e9:6.2f} GB {said['wall_s']:7.1f} s {rate:5.2f} GB/s "
            f"peak RssAnon {said['peak_anon_bytes'] / (1 << 30):.2f} GiB",
            said,
        )
        if previous != source:
            shutil.rmtree(previous)
        previous = target
    compared = watched(["diff", str(source), str(previous)])
    show(f"against the first: {compared['equal']} tensors equal, {len(compared['differences'])} not", compared)
    shutil.rmtree(previous)


def main() -> None:
    """Convert what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help="a KerasHub preset; a synthetic Gemma 2 9B by default")
    parser.add_argument("--folder", type=local_target, default=None, help="where to work; temporary by default")
    parser.add_argument("--host-memory", default="512MiB")
    parser.add_argument("--scale", type=float, default=0.1, help="of the synthetic checkpoint; 1 is 18.5 GB")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as work:
        source = Path(chosen.source) if chosen.source else _synthetic(Path(work), chosen.scale)
        run(source, Path(work), chosen.host_memory, as_json=chosen.json)


def _synthetic(folder: Path, scale: float) -> Path:
    from shardload.synth import synth

    return synth("gemma2_9b", scale=scale, directory=folder)


if __name__ == "__main__":
    main()
