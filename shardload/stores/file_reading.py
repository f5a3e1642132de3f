"""Two ways to read an open `File`: as the header of an untrusted file, and as a Python file object.

A header never takes more memory than the file has bytes, whatever it declares. Libraries such as zipfile and h5py
accept a file object, so they read from any store.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

from shardload.errors import TransferError, TruncatedSourceError
from shardload.stores.store import File
from shardload.units import exact_bytes


def read_header(file: File, count: int, *, offset: int, path: str, what: str) -> bytes:
    """Read ``count`` bytes of a header.

    Args:
        file: An open file.
        count: The number of bytes to read.
        offset: Byte offset in the file.
        path: The file's name, for messages.
        what: A name for the bytes in messages (``the JSON header``).

    Raises:
        TruncatedSourceError: If the file ends before ``offset + count``.
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


class MemoryStream(io.BytesIO):
    """A file object in memory, for what no other library should see."""


class FileStream(io.RawIOBase):
    """A read-only stream over a part of a file; closing it closes the file.

    Args:
        file: The file.
        start: First byte of the part.
        n_bytes: Bytes of the part; the rest of the file by default.
        before_read: Called with position and length before each read; may raise to refuse it.
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
        """Always true."""
        return True

    def seekable(self) -> bool:
        """Always true."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position, which may be past the end."""
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._n_bytes}[whence]
        if at < 0:
            raise ValueError(f"cannot seek to position {at}")
        self._at = at
        return at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read as many bytes as fit into ``buffer``; fewer at the end."""
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
