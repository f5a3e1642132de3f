"""What tests keep between runs, in the user's cache folder: compiled programs, by what they depend on."""

import hashlib
import os
import platform
import shutil
import time
from importlib import metadata
from pathlib import Path

KEPT_S = 14 * 24 * 3600
MOST_PROGRAMS = 50_000


def kept_between_runs():
    """Return the folder of these tests in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardload-tests"


def compilation_cache(conftest):
    """Return the folder for the installed versions, this kind of processor and the settings in ``conftest``."""
    root = kept_between_runs() / "jax"
    what = [platform.python_version(), _processor(), *(metadata.version(name) for name in ("jax", "jaxlib"))]
    folder = root / hashlib.sha256(repr(what).encode() + conftest).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if "PYTEST_XDIST_WORKER" not in os.environ and "PYTEST_CURRENT_TEST" not in os.environ:
            _tidy(root, folder)
        os.utime(folder)
    except OSError:  # no home, or one that is read-only
        return Path(__file__).parents[2] / ".cache" / "jax"
    return folder


def _processor():
    """Programs are compiled for the instructions that a processor has."""
    try:
        return next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return platform.processor()


def _tidy(root, used):
    """Remove the folders that nobody used for two weeks, and one that has grown too large."""
    for folder in root.iterdir():
        is_old = folder.stat().st_mtime < time.time() - KEPT_S
        if is_old or (folder == used and sum(1 for _ in os.scandir(folder)) > MOST_PROGRAMS):
            shutil.rmtree(folder, ignore_errors=True)
    used.mkdir(exist_ok=True)
