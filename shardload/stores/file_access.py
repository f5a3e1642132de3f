"""Open a path for reading, whether it is a local file or a remote file represented in a mirror folder.

A mirror is a private folder that contains the small files of a remote checkpoint under their own names. Its large files
do not exist there, so code that opens one directly fails instead of reading a placeholder full of zeros::

    mirror/7/shardload/step.json        a file, fetched and checked
    mirror/7/pytree/d/1d35…             not a file: `opened` fetches ranges of it from the store, each checked

All data is opened through this module; without mirrors, the usual case, the lookup tests one empty dict.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from shardload.errors import TruncatedSourceError
from shardload.stores import local

UNIT_BYTES = 1 << 20
"""The unit of verification: each digest covers this many bytes of a file, and remote files are fetched in such units.

Smaller units would over-read less, but the lists of digests would grow (16 bytes per MiB).
"""


class File(Protocol):
    """A readable file. Thread-safe."""

    @property
    def n_bytes(self) -> int:
        """The file's size."""
        ...

    @property
    def is_checked(self) -> bool:
        """Whether `read_into` verifies bytes against their digests."""
        ...

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` with the bytes that start at ``offset``.

        Raises:
            TransferError: If they cannot be read.
            DamagedError: If bytes of a remote file differ from the saved ones.
        """
        ...

    def read_unchecked(self, buffer: memoryview, offset: int) -> None:
        """Like `read_into`, without verification; the caller verifies."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class PendingUnits(Protocol):
    """A pending request for whole units of a remote file."""

    def result(self) -> memoryview:
        """Return the verified bytes; raises like `File.read_into`."""
        ...

    def cancel(self) -> None:
        """Cancel the request; a thread that waits for it gets a `TransferError`."""
        ...


class RemoteFile(File, Protocol):
    """A file in a remote store whose bytes are verified against digests."""

    def begin(self, unit: int, count: int) -> PendingUnits:
        """Start to fetch ``count`` units from index ``unit``."""
        ...


class RemoteMirror(Protocol):
    """A local folder that represents a remote checkpoint."""

    @property
    def folder(self) -> str:
        """The absolute path of the folder, with symbolic links resolved."""
        ...

    @property
    def url(self) -> str:
        """The URL of the remote checkpoint."""
        ...

    @property
    def checker(self) -> Any:
        """The `Checker` with the checkpoint's digests."""
        ...

    def remote_file(self, name: str) -> RemoteFile | None:
        """Return a file of the checkpoint that is not in the folder, else ``None``."""
        ...

    def fetch(self, name: str) -> None:
        """Fetch a file into the folder."""
        ...

    def name_damage(self) -> list[Any]:
        """Return the missing and the unexpected files."""
        ...


_mirrors: dict[str, RemoteMirror] = {}


def enter(mirror: RemoteMirror) -> None:
    """Register a mirror: paths in its folder are looked up in its store from now on."""
    _mirrors[mirror.folder] = mirror


def leave(folder: str) -> None:
    """Unregister a mirror."""
    _mirrors.pop(folder, None)


def remove_mirrors() -> None:
    """Remove the folders of all mirrors, for a process that exits immediately."""
    for folder in list(_mirrors):
        shutil.rmtree(os.path.split(folder)[0], ignore_errors=True)


def mirror_of(path: str | os.PathLike[str]) -> RemoteMirror | None:
    """Return the mirror whose folder is, or contains, a path, else ``None``."""
    if not _mirrors:
        return None
    name = os.fspath(path)
    return next((m for folder, m in list(_mirrors.items()) if name == folder or name.startswith(f"{folder}/")), None)


def remote_file(path: str | os.PathLike[str]) -> RemoteFile | None:
    """Return the remote file at a path; ``None`` for local and for missing files."""
    mirror = mirror_of(path)
    return None if mirror is None else mirror.remote_file(os.fspath(path)[len(mirror.folder) + 1 :])


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether the bytes of a path are in a remote store."""
    return bool(_mirrors) and remote_file(path) is not None


def shown(path: str | os.PathLike[str]) -> str:
    """Return the name of a path for messages: a URL if the path is in a mirror."""
    name, mirror = os.fspath(path), mirror_of(path)
    return name if mirror is None else mirror.url + name[len(mirror.folder) :]


class _LocalFile:
    is_checked = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._fd = local.open_readonly(path)
        self.n_bytes = os.fstat(self._fd).st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        local.read_exact(self._fd, buffer, offset, self._path)

    read_unchecked = read_into

    def close(self) -> None:
        os.close(self._fd)


def open_file(path: str | os.PathLike[str]) -> File:
    """Open the local or remote file at a path; the caller closes it.

    Raises:
        SourceNotFoundError: If there is no such file.
        SourceError: If it is not a regular file or is not readable.
    """
    return remote_file(path) or _LocalFile(path)


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[File]:
    """Open a file like `open_file`, and close it at the end of the block."""
    file = open_file(path)
    try:
        yield file
    finally:
        file.close()


def size_of(path: str | os.PathLike[str]) -> int:
    """Return the size in bytes of the file at a path; raises like `open_file`."""
    with opened(path) as file:
        return file.n_bytes


def read_header(path: str | os.PathLike[str], count: int, *, offset: int, what: str) -> bytes:
    """Read ``count`` bytes of a header without allocating more than the file's size; see `shardload.stores.local`.

    Raises:
        TruncatedSourceError: If the file ends before ``offset + count``.
    """
    if (file := remote_file(path)) is None:
        with local.opened(path) as (fd, _):
            return local.read_header(fd, count, offset=offset, path=os.fspath(path), what=what)
    if offset + count > file.n_bytes:
        raise TruncatedSourceError(
            f"{shown(path)} is truncated: {what} should take {count} bytes at offset {offset}, but it has "
            f"{file.n_bytes} bytes"
        )
    buffer = bytearray(count)
    file.read_into(memoryview(buffer), offset)
    return bytes(buffer)


def have_local(path: str | os.PathLike[str]) -> None:
    """Fetch a remote file into its mirror, for a library that opens files itself. Does nothing for local files.

    Raises:
        UnsupportedError: If the file is too large to be fetched.
    """
    if (mirror := mirror_of(path)) is not None and is_remote(path):
        mirror.fetch(os.fspath(path)[len(mirror.folder) + 1 :])


__all__ = [
    "File",
    "PendingUnits",
    "RemoteFile",
    "RemoteMirror",
    "enter",
    "have_local",
    "is_remote",
    "leave",
    "mirror_of",
    "open_file",
    "opened",
    "read_header",
    "remote_file",
    "shown",
    "size_of",
]
