"""Private folders for copies of files, which a process removes when it ends, also by ``os._exit``."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

from shardload.errors import ShardloadError, WriteError
from shardload.stores.local import LocalFile, LocalStore
from shardload.stores.location import Location
from shardload.units import exact_bytes

_folders: set[str] = set()


def make() -> Path:
    """Create an empty folder that only this user can read."""
    # `mkdtemp` gives the folder mode 0700.
    folder = os.path.realpath(tempfile.mkdtemp(prefix="shardload-copy-"))
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


class _Copy(LocalStore):
    """A store of one private file, which is removed when this object is garbage-collected."""

    def __init__(self, shown: str) -> None:
        self._shown = shown
        folder = make()
        self._remove = weakref.finalize(self, remove, folder)
        self.path = folder / "copy"

    def shown(self, key: str) -> str:
        """Return the name of what was copied."""
        del key
        return self._shown

    def open(self, key: str) -> LocalFile:
        """See `Store.open`."""
        return LocalFile(key, shown=self._shown)


def write(blocks: Iterable[bytes], *, n_bytes: int, shown: str) -> Location:
    """Write a private file; it is removed when nothing refers to the returned location, at the latest at exit.

    Args:
        blocks: Its content. What they raise is raised, and nothing is left.
        n_bytes: Their size, for which there must be room.
        shown: Its name for messages.

    Raises:
        WriteError: When there is no room, or the folder for temporary files cannot be written.
    """
    try:
        copy = _Copy(shown)
        free = shutil.disk_usage(copy.path.parent).free
        if n_bytes > free:
            raise _no_room(shown, f"{copy.path.parent.parent} has {exact_bytes(free)} free, expected {n_bytes}")
        with copy.path.open("xb") as file:
            file.writelines(blocks)
    except ShardloadError:
        # Some of these are an OSError as well, and say more.
        raise
    except OSError as error:
        raise _no_room(shown, str(error)) from error
    return Location(copy, str(copy.path))


def _no_room(shown: str, found: str) -> WriteError:
    return WriteError(f"Cannot unpack {shown}: {found}. Set TMPDIR to a folder with more room")
