"""A file or a folder in a store, used like a `pathlib.PurePosixPath` that can also read.

Listings leave out *litter*, which operating systems and file systems leave in folders and which belongs to no
checkpoint. Finder writes ``.DS_Store`` into folders that it shows. macOS writes ``._model.safetensors`` next to each
file on disks that cannot store its attributes, and into archives. Windows writes ``Thumbs.db`` and ``desktop.ini``. NFS
renames a deleted file that is still open to ``.nfs000000000012ab34``.
"""

from __future__ import annotations

import io
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from shardload.errors import SourceError, SourceNotFoundError, TransferError
from shardload.stores.file_reading import FileStream, read_header
from shardload.stores.store import File, FileIdentity, Store

_LITTER = frozenset({".DS_Store", "Thumbs.db", "desktop.ini"})
_LITTER_PREFIXES = ("._", ".nfs0")


@dataclass(frozen=True, slots=True)
class Location:
    """The place of a file or a folder, which need not exist.

    ``str(location)`` is its name for messages: an absolute path or a URL. Locations of one store are ordered by key.
    """

    store: Store
    key: str
    """Names joined by ``/``; an absolute path for local files."""

    def __lt__(self, other: Location) -> bool:
        return self.key < other.key

    def __str__(self) -> str:
        return self.store.shown(self.key)

    def __truediv__(self, name: str) -> Location:
        return Location(self.store, f"{self.key.rstrip('/')}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """The last part of its name."""
        return (self.key or str(self)).rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """The folder that contains it; the root is its own parent."""
        folder = self.key.rstrip("/").rpartition("/")[0]
        # Nothing before the last slash: the parent is "/" for an absolute key, else the empty key, the store's root.
        return Location(self.store, folder or self.key[: self.key.startswith("/")])

    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return self.store.kind(self.key) == "file"

    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return self.store.kind(self.key) == "folder"

    def exists(self) -> bool:
        """Whether anything has this name."""
        return self.store.kind(self.key) is not None

    def is_link(self) -> bool:
        """Whether it is a symbolic link."""
        return self.store.is_link(self.key)

    def resolved(self) -> Location:
        """Return the location with all symbolic links followed."""
        return Location(self.store, self.store.resolved(self.key))

    def is_inside(self, folder: Location) -> bool:
        """Whether it is ``folder`` or below it, by their names alone."""
        return self.relative_to(folder) is not None

    def relative_to(self, folder: Location) -> str | None:
        """Return its name within ``folder``, empty for the folder itself; ``None`` if it is not below it."""
        if self.store is not folder.store:
            return None
        if self.key == folder.key:
            return ""
        # With its slash, so that `/a/bc` is not taken to be below `/a/b`.
        prefix = f"{folder.key.rstrip('/')}/" if folder.key else ""
        return self.key[len(prefix) :] if self.key.startswith(prefix) else None

    def names(self) -> list[str]:
        """Return the names in the folder, sorted, without litter; raises `SourceError` if it cannot be listed."""
        return [name for name in self.store.names(self.key) if not is_litter(name)]

    def open(self) -> File:
        """Open the file; the caller closes it.

        Raises:
            SourceNotFoundError: If there is no such file.
            SourceError: If it is not a regular file or is not readable.
        """
        return self.store.open(self.key)

    def stream(self) -> io.BufferedReader:
        """Open the file as a Python file object, which closes the file; raises like `open`."""
        return io.BufferedReader(FileStream(self.open()))

    @property
    def size(self) -> int:
        """The file's size in bytes; raises like `open`."""
        with closing(self.open()) as file:
            return file.n_bytes

    def read_header(self, count: int, *, offset: int, what: str) -> bytes:
        """Read ``count`` bytes of a header without allocating more than the file's size.

        Raises:
            TruncatedSourceError: If the file ends before ``offset + count``.
        """
        with closing(self.open()) as file:
            return read_header(file, count, offset=offset, path=str(self), what=what)

    def identity(self) -> FileIdentity:
        """Return the current size and version of a file that was read before.

        Raises:
            TransferError: If the file has vanished.
        """
        try:
            return self.store.identity(self.key)
        except (SourceError, SourceNotFoundError, OSError) as error:
            raise TransferError(f"Cannot read {self} although its headers were read: {error}") from error

    def local_path(self) -> Path:
        """Return a path on this machine, for libraries that open files themselves.

        Raises:
            UnsupportedError: If the store has no such path, or the file is too large to be fetched.
        """
        return self.store.local_path(self.key)


def is_litter(path: str) -> bool:
    """Whether the last part of a path, separated by ``/``, is the name of such a file."""
    name = path.rpartition("/")[2]
    return name in _LITTER or name.startswith(_LITTER_PREFIXES)


__all__ = ["Location", "is_litter"]
