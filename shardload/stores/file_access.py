"""Where the bytes of a path are: on this machine, or in a remote store that a mirror stands for.

A mirror is a private folder with the small files of a remote checkpoint under their own names. Its large files are not
there at all, so code that opens one by itself finds nothing, and never a placeholder full of zeros::

    mirror/7/shardload/step.json        a file, fetched and checked
    mirror/7/pytree/d/1d35…             no file: `opened` gets ranges of it from the store, each checked

Every reader of data asks here; without mirrors, which is the rule, an answer costs one look at an empty dict.
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
"""What is verified at once: one digest covers this many bytes of a file, and remote files are fetched in such units.

Smaller units would over-read less, but lists of digests grow (16 bytes per MiB).
"""


class File(Protocol):
    """Something bytes are read from, by any number of threads at once."""

    @property
    def n_bytes(self) -> int:
        """Its size."""
        ...

    @property
    def is_checked(self) -> bool:
        """Whether what it gives was compared with its digests."""
        ...

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` with the bytes from ``offset`` on.

        Raises:
            TransferError: When they cannot be read.
            DamagedError: When a remote file's bytes are not those that were saved.
        """
        ...

    def read_unchecked(self, buffer: memoryview, offset: int) -> None:
        """Like `read_into`, without verification; the caller verifies."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class PendingUnits(Protocol):
    """Some whole units of a remote file on their way."""

    def result(self) -> memoryview:
        """Their bytes, checked; raises like `File.read_into`."""
        ...

    def cancel(self) -> None:
        """Stop fetching; a thread that waits for them gets a `TransferError`."""
        ...


class RemoteFile(File, Protocol):
    """A file in a remote store; all its bytes are compared with digests."""

    def begin(self, unit: int, count: int) -> PendingUnits:
        """Start to fetch ``count`` MiB from the MiB ``unit`` on."""
        ...


class RemoteMirror(Protocol):
    """What stands for a remote checkpoint on this machine."""

    @property
    def folder(self) -> str:
        """Absolute and real."""
        ...

    @property
    def url(self) -> str:
        """What it stands for."""
        ...

    @property
    def checker(self) -> Any:
        """Knows the checkpoint's digests."""
        ...

    def remote_file(self, name: str) -> RemoteFile | None:
        """A file of the checkpoint that is not in the folder."""
        ...

    def fetch(self, name: str) -> None:
        """Put a file into the folder."""
        ...

    def name_damage(self) -> list[Any]:
        """What is missing or unexpected."""
        ...


_mirrors: dict[str, RemoteMirror] = {}


def enter(mirror: RemoteMirror) -> None:
    """From now on paths in the mirror's folder are looked up in its store."""
    _mirrors[mirror.folder] = mirror


def leave(folder: str) -> None:
    """The end of a mirror."""
    _mirrors.pop(folder, None)


def remove_mirrors() -> None:
    """Remove the folders of all mirrors, for a process that ends at once."""
    for folder in list(_mirrors):
        shutil.rmtree(os.path.split(folder)[0], ignore_errors=True)


def mirror_of(path: str | os.PathLike[str]) -> RemoteMirror | None:
    """The mirror a path lies in, or is."""
    if not _mirrors:
        return None
    name = os.fspath(path)
    return next((m for folder, m in list(_mirrors.items()) if name == folder or name.startswith(f"{folder}/")), None)


def remote_file(path: str | os.PathLike[str]) -> RemoteFile | None:
    """The remote file a path stands for; None for what lies on this machine, or nowhere."""
    mirror = mirror_of(path)
    return None if mirror is None else mirror.remote_file(os.fspath(path)[len(mirror.folder) + 1 :])


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether the bytes of a path are in a remote store."""
    return bool(_mirrors) and remote_file(path) is not None


def shown(path: str | os.PathLike[str]) -> str:
    """What to call a path in messages: what is mirrored goes by its address."""
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
    """The file a path stands for; the caller closes it.

    Raises:
        SourceNotFoundError: When there is none.
        SourceError: When it is not a regular file, or may not be read.
    """
    return remote_file(path) or _LocalFile(path)


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[File]:
    """`open_file`, closed at the end."""
    file = open_file(path)
    try:
        yield file
    finally:
        file.close()


def size_of(path: str | os.PathLike[str]) -> int:
    """Bytes of the file a path stands for; raises like `open_file`."""
    with opened(path) as file:
        return file.n_bytes


def read_header(path: str | os.PathLike[str], count: int, *, offset: int, what: str) -> bytes:
    """``count`` bytes of a header, never allocating more than the file holds; see `shardload.stores.local.read_header`.

    Raises:
        TruncatedSourceError: When the file ends before ``offset + count``.
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
    """Put a remote file onto this machine, for a library that opens files itself; nothing to do for others.

    Raises:
        UnsupportedError: When it is too large for that.
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
