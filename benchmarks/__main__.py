"""Every benchmark behind docs/performance*, one after the other: ``python -m benchmarks`` (``make bench``).

Takes over an hour; nothing else should run on the machine meanwhile. ``--out`` writes one JSON object with the facts
of the machine and all measurements. ``--long`` adds agreement with the unsharded model and the conversion of 18.5 GB,
which take hours, 24 GiB of memory and 60 GB of disk. ``--remote`` runs, instead, what reads from addresses, by several
processes, and until the first result: half an hour.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shardload.stores.local import local_target

COMMANDS = (
    ("models", "--pairs", "7"),
    ("load_peers", "--pairs", "7"),
    ("stacked_layers", "--pairs", "7"),
    ("small_tensors",),
    ("quantised_folders",),
    ("cold_disk",),
    ("transfer_floor", "--pairs", "15"),
    ("restore_orbax", "--pairs", "7"),
    ("save_orbax", "--pairs", "7"),
    ("keras_callback",),
    ("layouts",),
    ("planning",),
    ("rekls_steps",),
    ("parallel_training", "--rounds", "9"),
    ("saving_memory",),
)
"""Each in a process of its own: they set up different numbers of devices and warm memory."""
LONG = (("ready",), ("agreement",), ("convert", "--scale", "1"), ("rekls_training",), ("rekls_start",))
_LIMITS = ((), ("--mb-s", "1000"), ("--mb-s", "500"), ("--mb-s", "500", "--latency-ms", "20"))
REMOTE = (
    *(("stores", "load", *limit) for limit in _LIMITS),
    ("stores", "cache", "--gb", "0.5", "--mb-s", "300", "--latency-ms", "20"),
    ("stores", "cache", "--gb", "0.5", "--mb-s", "300", "--latency-ms", "20", "--cold", "--pairs", "5"),
    ("store_memory",),
    ("replicas", "--rounds", "1", "--shapes", "2x4:1x8", "4x2:2x4", "8x1:1x8"),
    ("replicas", "--rounds", "1", "--shapes", "2x4:2x4", "4x2:2x4", "8x1:2x4", "--from", "s3", "--mb-s", "100"),
    *(("ready", "--call", call, "--pairs", "2") for call in ("generate", "predict", "train")),
)
PACKAGES = ("jax", "jaxlib", "keras", "keras-hub", "orbax-checkpoint", "tensorstore", "safetensors", "numpy", "h5py")


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    described = Path("/proc/cpuinfo").read_text().splitlines()
    models = {line.partition(":")[2].strip() for line in described if line.startswith("model name")}
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "system": platform.platform(),
        "cpu": sorted(models),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def main(argv: list[str] | None = None) -> int:
    """Run them all; the exit code of the first that fails."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--out", type=local_target, help="write a JSON file instead of tables")
    parser.add_argument("--long", action="store_true", help="also what takes hours")
    parser.add_argument("--remote", action="store_true", help="what concerns addresses, and the time to ready, instead")
    parser.add_argument("--only", default="", help="only the benchmarks whose name contains this")
    parser.add_argument("name", nargs="?", help="run this one only, also if it takes long")
    options = parser.parse_args(argv)
    found: dict[str, Any] = {"machine": machine()}
    chosen = REMOTE if options.remote else COMMANDS + LONG if options.long or options.name else COMMANDS
    for module, *arguments in chosen:
        if options.only not in module or options.name not in (None, module):
            continue
        command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, *(["--json"] if options.out else [])]
        print(f"\n== {' '.join(command[1:])}", file=sys.stderr, flush=True)
        done = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE if options.out else None)
        if done.returncode:
            return done.returncode
        if options.out:
            found.setdefault(module, []).extend(
                json.loads(line) for line in done.stdout.splitlines() if line[:1] in ("[", "{")
            )
            options.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
