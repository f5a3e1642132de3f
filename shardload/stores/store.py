"""What a store of files offers: the one interface through which checkpoints are read.

    Location(store, key) ─► store.kind │ store.names │ store.open ─► File ─► read_into(buffer, offset)

A key names a file or a folder inside a store; parts are joined by ``/``. Implementations: `shardload.stores.local`
(this machine), `shardload.runs.remote_store` (a training step in an object store). A new store subclasses `Store` and
inherits the tests of ``tests/support/store_contract.py``.
"""

from __future__ import annotations

import functools
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from shardload.errors import TransferError, TruncatedSourceError, UnsupportedError
from shardload.stores.pace import Pace
from shardload.units import exact_bytes

UNIT_BYTES = 1 << 20
"""The unit of verification: each digest covers this many bytes of a file, and remote files are fetched in such units.
Smaller units would over-read less, but the lists of digests would grow (16 bytes per MiB)."""

Kind = Literal["file", "folder", "other"]
"""What a name in a store belongs to. ``other`` is something that cannot be read, such as a pipe or a device."""


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
        """Fill ``buffer`` from ``offset`` on; raise `TransferError` if this fails, `DamagedError` if bytes differ."""
        ...

    def read_unchecked(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` with the bytes from ``offset`` on, not compared with digests: the caller compares them."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class PendingBytes(Protocol):
    """A request for bytes of a file; `result` waits for its answer."""

    def result(self) -> memoryview:
        """Wait for the bytes and return them: fewer at the end of the file. Raises like `File.read_into`."""
        ...

    def cancel(self) -> None:
        """Cancel the request; a thread that waits for it gets a `TransferError`."""
        ...


class RemoteFile(File, Protocol):
    """A file of a remote store that has no local copy: its bytes can be requested before they are needed."""

    def begin(self, start: int, stop: int) -> PendingBytes:
        """Request bytes ``[start, stop)``, to be awaited later; whole units (MiB) if the store verifies them.

        ``stop`` may be past the end of the file.
        """
        ...


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Size and version of a file. If they differ from those noted before, the file was changed or replaced."""

    size: int
    """Size in bytes."""
    version: tuple[int, ...] = ()
    """For a local file: device, inode and modification time. For others: any numbers that differ between versions."""


class Store(ABC):
    """Something that contains files: this machine, or a URL. Shared by threads, and compared by identity."""

    is_remote: bool = False
    """Whether each read is a network request: callers then make few large reads, before they need the bytes."""
    hands_files: bool = False
    """Whether files of a remote store are open files of this machine, which are read like local ones."""
    pace: Pace | None = None
    """How fast the store answers, as measured; ``None`` if nothing measures it."""
    is_verifying: bool = False
    """Whether all bytes are compared with digests before a file returns them, so that callers need not."""

    @property
    def is_requested(self) -> bool:
        """Whether bytes are requested from another computer, or at least by way of a connection."""
        return self.is_remote and not self.hands_files

    @abstractmethod
    def shown(self, key: str) -> str:
        """Return the name of a file or folder for messages: a path or a URL."""

    @abstractmethod
    def kind(self, key: str) -> Kind | None:
        """Return what a key names, ``None`` if nothing; raise `SourceError` if the store does not say (permissions)."""

    @abstractmethod
    def names(self, key: str) -> list[str]:
        """Return the names of the files and folders directly in a folder, sorted; raise `SourceError` if that fails."""

    @abstractmethod
    def open(self, key: str) -> File:
        """Open a file; the caller closes it. Raise `SourceNotFoundError`, or `SourceError` if it cannot be opened."""

    def identity(self, key: str) -> FileIdentity:
        """Return a file's size and version, which show later whether it was changed; raises like `open`."""
        file = self.open(key)
        try:
            return FileIdentity(file.n_bytes)
        finally:
            file.close()

    def is_current(self, key: str) -> bool:
        """Whether a file of a remote store is still there, in the version that was read; the store is asked again."""
        return True

    def is_unchanged(self, key: str) -> bool:
        """Whether a file is still what it was when it was first read, if its store can tell more than `identity`."""
        return True

    def tag(self, key: str) -> str | None:
        """Return text that is equal for equal bytes of a file that was opened, however many computers ask for it.

        ``None`` if the store has no such text (an ETag or digest); then only the bytes themselves can be compared.
        """
        return None

    def sha256(self, key: str) -> str | None:
        """Return the SHA-256 of a whole file, in hexadecimal, as its store tells it; ``None`` if it tells none."""
        return None

    def local_path(self, key: str) -> Path:
        """Return a local path, perhaps of a copy, for libraries that open files; else raise `UnsupportedError`."""
        raise UnsupportedError(
            f"Cannot open {self.shown(key)} in place: the library that reads it needs a file on this machine. "
            "Copy the checkpoint to this machine and load it from there"
        )

    def local_folder(self, key: str) -> Path:
        """Return a path that has the small files (configuration, tokenizer, assets) of a folder, or would have them."""
        return Path(self.shown(key))

    def local_part(self, key: str, start: int, stop: int) -> Path:
        """Return a local path of a file that has at least bytes ``[start, stop)`` of it in their place."""
        del start, stop
        return self.local_path(key)

    def read_ahead(self, keys: Iterable[str]) -> None:  # noqa: B027 - optional
        """Expect that the first bytes of these files are needed soon: a remote store requests them together."""

    def is_here(self, key: str, ranges: Iterable[tuple[int, int]]) -> bool:
        """Whether all these ranges of a file are on this machine; of a remote file, whether the cache has them."""
        return not self.is_remote

    def is_near(self, key: str) -> bool:
        """Whether bytes of a file that are requested come at once, straight into the memory where they belong."""
        return False

    def is_listed(self, key: str) -> bool:
        """Whether `names` returns all names in a folder; an HTTP server may show none, so that usual ones are tried."""
        return True

    def is_link(self, key: str) -> bool:
        """Whether a key names a symbolic link."""
        return False

    def resolved(self, key: str) -> str:
        """Return the key with all symbolic links followed."""
        return key


def read_bytes(file: File, count: int, *, offset: int, path: str, what: str) -> bytes:
    """Read ``count`` bytes of a header. Errors name the file, ``path``, and what was to be read, ``what``.

    It never takes more memory than the file has bytes, whatever the header declares.
    """
    if offset + count > file.n_bytes:
        raise TruncatedSourceError(
            f"{path} is truncated: {what} should take {exact_bytes(count)} at offset {offset}, but the file has "
            f"{exact_bytes(file.n_bytes)}. Download or save it again"
        )
    # A remote store that does not respond says nothing about the file, so its errors stay as they are.
    if file.descriptor is None:
        buffer = bytearray(count)
        file.read_into(memoryview(buffer), offset)
        return bytes(buffer)
    try:
        # `pread` makes the bytes without the copy that a buffer needs. It returns at most 2 GiB, and network file
        # systems may return less; then `read_into` repeats the call.
        found = os.pread(file.descriptor, count, offset)
        if len(found) == count:
            return found
        buffer = bytearray(count)
        file.read_into(memoryview(buffer), offset)
    except (OSError, TransferError) as error:
        raise TruncatedSourceError(
            f"Cannot read {what} of {path}: reading {exact_bytes(count)} at offset {offset} failed: {error}"
        ) from error
    return bytes(buffer)


def fill_exactly(file: File, buffer: memoryview, offset: int) -> None:
    """Fill ``buffer`` like `File.read_into`; of a remote file, request no more: neighbouring bytes are not needed."""
    read = getattr(file, "read_exactly", file.read_into)
    read(buffer, offset)


def fill_runs(file: File, buffer: memoryview, first: int, pitch: int, n_bytes: int, *, in_pages: bool) -> None:
    """Fill ``buffer`` with runs of ``n_bytes``: the first begins at ``first``, each other ``pitch`` bytes later.

    Of a remote file, whole pages are read, and kept, if ``in_pages``; else like `fill_exactly`.
    """
    fill = file.read_into if in_pages else functools.partial(fill_exactly, file)
    for number, into in enumerate(range(0, len(buffer), max(1, n_bytes))):
        piece, at = buffer[into : into + n_bytes], first + number * pitch
        if file.descriptor is None or not _filled(file.descriptor, piece, at):
            fill(piece, at)


def _filled(descriptor: int, buffer: memoryview, offset: int) -> bool:
    """Whether a single system call fills ``buffer``: of thousands of short runs, all else would take longer."""
    try:
        return os.preadv(descriptor, [buffer], offset) == len(buffer)
    except OSError:
        return False  # the method that reads again says what is wrong


def scatter_into(file: File, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill buffers, in turn, with a file's bytes from ``offset`` on; raises like `File.read_into`."""
    if (scatter := getattr(file, "scatter_into", None)) is not None:
        scatter(buffers, offset)
        return
    for buffer in buffers:
        file.read_into(buffer, offset)
        offset += len(buffer)


def cancel_reads(file: File) -> None:
    """End what other threads read of a file, if it comes by way of a connection: they get a `TransferError`."""
    if (cancel := getattr(file, "cancel", None)) is not None:
        cancel()


def between(buffers: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Return bytes ``start`` to ``stop`` of what lies in buffers, one after the other, as pieces of these."""
    found: list[memoryview] = []
    for buffer in buffers:
        if start < len(buffer) and stop > 0:
            found.append(buffer[max(0, start) : stop])
        start, stop = start - len(buffer), stop - len(buffer)
    return found


class FileStream(io.RawIOBase):
    """A part of a file as a read-only Python file object, for libraries that accept one; closing it closes the file.

    ``before_read`` is called with position and length before each read, and may raise to refuse it.
    """

    def __init__(
        self,
        file: File,
        *,
        start: int = 0,
        n_bytes: int | None = None,
        before_read: Callable[[int, int], None] | None = None,
    ) -> None:
        self._file, self._start = file, start
        self._n_bytes = file.n_bytes - start if n_bytes is None else n_bytes
        self._before_read = before_read
        self._at = 0

    def readable(self) -> bool:
        """Return True: bytes can be read from the stream."""
        return True

    def seekable(self) -> bool:
        """Return True: the position can be set."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position in the stream, which may be past its end."""
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._n_bytes}[whence]
        if at < 0:
            raise ValueError(f"Cannot seek to position {at}: it is before the start of the file")
        self._at = at
        return at

    def tell(self) -> int:
        """Return the position in the stream."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read bytes from the position on into ``buffer``, fewer at the end of the stream; return how many."""
        view = memoryview(buffer).cast("B")
        if self._before_read is not None:
            # Before the length is cut at the end of the part: libhdf5 asks for the length that a header declares.
            self._before_read(self._at, len(view))
        view = view[: max(0, self._n_bytes - self._at)]
        if view:
            self._file.read_into(view, self._start + self._at)
        self._at += len(view)
        return len(view)

    def close(self) -> None:
        """Close the stream and its file."""
        if not self.closed:
            self._file.close()
        super().close()
