"""A file of a store as a Python file object, for libraries that accept one (zipfile, h5py)."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

from shardload.stores.store import File


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
