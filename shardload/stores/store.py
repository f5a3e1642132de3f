"""What a store of files offers: the one interface through which checkpoints are read.

    Location(store, key) ─► store.kind │ store.names │ store.open ─► File ─► read_into(buffer, offset)

A key names a file or a folder inside a store; parts are joined by ``/``. Implementations: `shardload.stores.local`
(this machine), `shardload.runs.remote_store` (a training step in an object store). A new store subclasses `Store` and
inherits the tests of ``tests/support/store_contract.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from shardload.errors import UnsupportedError

UNIT_BYTES = 1 << 20
"""The unit of verification: each digest covers this many bytes of a file, and remote files are fetched in such units.

Smaller units would over-read less, but the lists of digests would grow (16 bytes per MiB).
"""

Kind = Literal["file", "folder", "other"]
"""``other``: something that cannot be read, such as a pipe or a device."""


class File(Protocol):
    """A file that is open for reading. Thread-safe."""

    @property
    def n_bytes(self) -> int:
        """The file's size."""
        ...

    @property
    def descriptor(self) -> int | None:
        """A file descriptor for system calls such as ``preadv``; ``None`` if the bytes are not in a local file."""
        ...

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` with the bytes that start at ``offset``.

        Raises:
            TransferError: If the file ends before the buffer is full, or cannot be read.
            DamagedError: If the bytes differ from the saved ones.
        """
        ...

    def read_unchecked(self, buffer: memoryview, offset: int) -> None:
        """Like `read_into`, without verification; the caller verifies."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class PendingBytes(Protocol):
    """A pending request for bytes of a file."""

    def result(self) -> memoryview:
        """Return the bytes, fewer at the end of the file; raises like `File.read_into`."""
        ...

    def cancel(self) -> None:
        """Cancel the request; a thread that waits for it gets a `TransferError`."""
        ...


class RemoteFile(File, Protocol):
    """A file of a remote store that has no local copy: its bytes can be requested before they are needed."""

    def begin(self, start: int, stop: int) -> PendingBytes:
        """Start to fetch bytes ``[start, stop)``; of a verifying store, whole units. ``stop`` may be past the end."""
        ...


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What shows that a file was changed or replaced."""

    size: int
    """Bytes."""
    version: tuple[int, ...] = ()
    """Device, inode and modification time of a local file; any numbers that differ between versions elsewhere."""


class Store(ABC):
    """A place with files. Instances are shared by threads, and compared by identity."""

    is_remote: bool = False
    """Whether each read is a request that takes a round trip: better a few large ones, ahead of their use."""
    is_verifying: bool = False
    """Whether all bytes are compared with digests before a file returns them, so that callers need not."""

    @abstractmethod
    def shown(self, key: str) -> str:
        """Return the name of a file or folder for messages: a path or a URL."""

    @abstractmethod
    def kind(self, key: str) -> Kind | None:
        """Return what a key names; ``None`` if nothing has that name.

        Raises:
            SourceError: If the store does not tell.
        """

    @abstractmethod
    def names(self, key: str) -> list[str]:
        """Return the names in a folder, sorted.

        Raises:
            SourceError: If the folder cannot be listed.
        """

    @abstractmethod
    def open(self, key: str) -> File:
        """Open a file; the caller closes it.

        Raises:
            SourceNotFoundError: If there is no such file.
            SourceError: If it is not a file, or cannot be opened.
        """

    def identity(self, key: str) -> FileIdentity:
        """Return a file's size and version; raises like `open`."""
        file = self.open(key)
        try:
            return FileIdentity(file.n_bytes)
        finally:
            file.close()

    def local_path(self, key: str) -> Path:
        """Return a path on this machine, for libraries that open files themselves; other stores may fetch a copy.

        Raises:
            UnsupportedError: If there is no such path.
        """
        raise UnsupportedError(
            f"Cannot open {self.shown(key)} in place: the library that reads it needs a file on this machine. "
            "Copy the checkpoint to this machine and load it from there"
        )

    def is_link(self, key: str) -> bool:
        """Whether a key names a symbolic link."""
        return False

    def resolved(self, key: str) -> str:
        """Return the key with all symbolic links followed."""
        return key


__all__ = ["UNIT_BYTES", "File", "FileIdentity", "Kind", "PendingBytes", "RemoteFile", "Store"]
