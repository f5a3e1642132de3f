"""Opens each path that comes in by a line and says how far that raised the process's resident peak, in bytes.

A process of its own, so that memory libhdf5 takes from `malloc` counts, which `tracemalloc` does not see, and freed
memory of other tests does not hide it; and so that a crash or a hang has the file that caused it.
"""

import contextlib
import gc
import pathlib
import sys

from shardload.errors import ShardloadError
from shardload.loaders import open_manifest


def status(field):
    text = pathlib.Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


def grown_by_opening(path):
    gc.collect(1)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status("VmRSS")
    with contextlib.suppress(ShardloadError):
        open_manifest(path)
    return max(0, status("VmHWM") - before)


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(f"{grown_by_opening(line.rstrip())}\n")
        sys.stdout.flush()
