"""List the files below a folder without following symbolic links, and flush them to disk.

A step consists of regular files and folders only. Everything else is listed separately, for the caller to
refuse. Names are sorted, so the result does not depend on the file system.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SYNC_THREADS = 8
"""`fsync` waits for the disk, not for the CPU; concurrent calls let the disk reorder the writes."""


@dataclass(frozen=True, slots=True)
class FileTree:
    """The content of a folder; names are relative to the folder, separated by ``/``."""

    files: dict[str, int]
    """Regular files and their sizes in bytes."""

    folders: tuple[str, ...]
    """Subfolders, parents first; without the folder itself."""

    others: dict[str, str]
    """Symbolic links, pipes, sockets and devices, each with a description of its kind."""

    @property
    def n_bytes(self) -> int:
        """The total size of all files."""
        return sum(self.files.values())


def scan(folder: str | os.PathLike[str]) -> FileTree:
    """List everything below ``folder``.

    Raises:
        OSError: If a folder cannot be listed.
    """
    files: dict[str, int] = {}
    folders: list[str] = []
    others: dict[str, str] = {}
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        # Not os.walk: it silently skips folders that it cannot list.
        with os.scandir(os.path.join(folder, inside)) as entries:  # noqa: PTH118
            for entry in sorted(entries, key=lambda e: e.name):
                name = f"{inside}/{entry.name}" if inside else entry.name
                if entry.is_symlink():
                    others[name] = "a symbolic link"
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                    waiting.append(name)
                elif entry.is_file(follow_symlinks=False):
                    files[name] = entry.stat(follow_symlinks=False).st_size
                else:
                    others[name] = "a pipe, socket or device"
    return FileTree(dict(sorted(files.items())), tuple(folders), others)


def is_empty(path: Path) -> bool:
    """Whether ``path`` is an empty folder and not a symbolic link."""
    return path.is_dir() and not path.is_symlink() and next(path.iterdir(), None) is None


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file's data, or a folder's directory entries, so that they survive a power loss.

    Raises:
        OSError: If the disk rejects the data; then it is not safe, even if a later call succeeds.
    """
    # A folder can only be opened for reading, and fsync accepts such a descriptor for files, too.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_files(folder: Path, names: Iterable[str]) -> None:
    """`sync` the named files of a folder."""
    with ThreadPoolExecutor(SYNC_THREADS, thread_name_prefix="shardload-sync") as pool:
        # list: map raises the error of a call only when its result is taken.
        list(pool.map(sync, [folder / name for name in names]))


def sync_all(folder: Path) -> None:
    """`sync` all files and folders below ``folder``, then ``folder`` itself: contents before directory entries."""
    tree = scan(folder)
    sync_files(folder, tree.files)
    for name in reversed(tree.folders):
        sync(folder / name)
    sync(folder)
