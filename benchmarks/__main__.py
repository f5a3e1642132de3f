"""Every benchmark behind docs/performance.md, one after the other: ``python -m benchmarks`` (``make bench``).

Takes about an hour; nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import subprocess
import sys

COMMANDS = (
    ("models", "--pairs", "7"),
    ("transfer_orbax", "--pairs", "7"),
    ("transfer_floor", "--pairs", "15"),
    ("restore_orbax", "--pairs", "7"),
    ("save_orbax", "--pairs", "7"),
    ("keras_callback",),
)
"""Each in a process of its own: they set up different numbers of devices and warm memory."""


def main() -> int:
    """Run them all; the exit code of the first that fails."""
    for module, *arguments in COMMANDS:
        print(f"\n== python -m benchmarks.{' '.join([module, *arguments])}", flush=True)
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{module}", *arguments], check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
