"""The files below a folder, as they lie there: no symbolic link is ever followed.

A step holds regular files in folders and nothing else, so everything that is neither is listed apart, for
the caller to refuse. Order is by name: what is written from it does not depend on the file system.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SYNC_THREADS = 8
"""`fsync` waits for the disk, not for a core: a few at once let the disk order them."""


@dataclass(frozen=True, slots=True)
class FileTree:
    """What lies below a folder; names are relative to it, with ``/`` between their parts."""

    files: dict[str, int]
    """Regular files and their sizes in bytes."""

    folders: tuple[str, ...]
    """Folders, each before those in it; without the folder itself."""

    others: dict[str, str]
    """Symbolic links, pipes, sockets and devices, and what each is."""

    @property
    def n_bytes(self) -> int:
        """All files together."""
        return sum(self.files.values())


def scan(folder: str | os.PathLike[str]) -> FileTree:
    """Everything below ``folder``.

    Raises:
        OSError: When a folder cannot be listed.
    """
    files: dict[str, int] = {}
    folders: list[str] = []
    others: dict[str, str] = {}
    waiting = [""]
    while waiting:
        inside = waiting.pop()
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
    """Whether it is a folder with nothing in it, and no link to one."""
    return path.is_dir() and not path.is_symlink() and next(path.iterdir(), None) is None


def sync(path: str | os.PathLike[str]) -> None:
    """Make a file's bytes, or a folder's list of names, survive a power loss.

    Raises:
        OSError: When the disk could not take them; the data is then not safe, even if a later call succeeds.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_files(folder: Path, names: Iterable[str]) -> None:
    """`sync` some files of a folder."""
    with ThreadPoolExecutor(SYNC_THREADS, thread_name_prefix="shardload-sync") as pool:
        list(pool.map(sync, [folder / name for name in names]))


def sync_all(folder: Path) -> None:
    """`sync` every file and folder below ``folder``, then ``folder``: names only after what they name."""
    tree = scan(folder)
    sync_files(folder, tree.files)
    for name in reversed(tree.folders):
        sync(folder / name)
    sync(folder)
