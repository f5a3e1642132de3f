"""Private folders for copies of remote files, which a process removes when it ends, also by ``os._exit``."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_folders: set[str] = set()


def make() -> Path:
    """Create an empty folder that only this user can read."""
    # `mkdtemp` gives the folder mode 0700.
    folder = os.path.realpath(tempfile.mkdtemp(prefix="shardload-remote-"))
    _folders.add(folder)
    return Path(folder)


def remove(folder: str | os.PathLike[str]) -> None:
    """Remove a folder that `make` returned."""
    _folders.discard(os.fspath(folder))
    shutil.rmtree(folder, ignore_errors=True)


def remove_all() -> None:
    """Remove all folders, for a process that exits immediately: neither finalizers nor atexit functions run then."""
    # A copy of the set, because `remove` changes it.
    for folder in list(_folders):
        remove(folder)
