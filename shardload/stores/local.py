"""Positional reads of local files: the only module that reads bytes at an offset.

No function moves a file position, so threads can share a descriptor. Header readers raise a
`SourceError` for every failure (the checkpoint is bad); after the headers were accepted, a failed
read is a `TransferError` (the file changed, or the disk failed).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardload.errors import SourceError, SourceNotFoundError, TransferError, TruncatedSourceError


def expanded(path: str | os.PathLike[str]) -> Path:
    """Expand ``~`` and ``~user`` in a path; a path with an unknown user is returned unchanged."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def read_exact(fd: int, buffer: memoryview, offset: int, path: str) -> None:
    """Fill ``buffer`` with the bytes of a file that start at ``offset``.

    Args:
        fd: An open file descriptor.
        buffer: The destination; writable and contiguous.
        offset: Byte offset in the file.
        path: The file's name, for messages.

    Raises:
        TransferError: If the file ends early (it shrank since its headers were read) or cannot be read.
    """
    rest = buffer.cast("B") if buffer.nbytes else memoryview(b"")  # cast rejects an empty view
    while rest:
        try:
            count = os.preadv(fd, [rest], offset)
        except OSError as error:
            raise TransferError(f"Reading {len(rest)} bytes at offset {offset} of {path} failed: {error}") from error
        if count == 0:
            raise TransferError(
                f"{path} ends at or before byte {offset}, but {len(rest)} more bytes were expected there. "
                "The file shrank after its headers had been read; restore it and load again"
            )
        rest = rest[count:]
        offset += count


def open_readonly(path: str | os.PathLike[str]) -> int:
    """Open a regular file for positional reads; the caller closes the descriptor.

    Raises:
        SourceNotFoundError: If there is no such file.
        SourceError: If it is a directory, a pipe or a device, or is not readable.
    """
    try:
        # O_NONBLOCK: without it, opening a named pipe waits for a writer forever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _open_error(path, error) from error
    except ValueError as error:
        raise SourceError(f"{os.fspath(path)!r} is not a file name: {error}") from error
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        what = "a folder" if stat.S_ISDIR(mode) else "not a regular file (a pipe, socket or device)"
        raise SourceError(f"{os.fspath(path)} should be a file, but it is {what}")
    return fd


def _open_error(path: str | os.PathLike[str], error: OSError) -> SourceError | SourceNotFoundError:
    name = os.fspath(path)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        dangling = " (a symbolic link that points to nothing)" if Path(path).is_symlink() else ""
        return SourceNotFoundError(f"There is no file {name}{dangling}. Check the path, or download the file again")
    if error.errno in (errno.EACCES, errno.EPERM):
        return SourceError(f"{name} may not be read by this user: {error.strerror}. Try: chmod u+r {name!r}")
    return SourceError(f"{name} cannot be opened: {error.strerror}")


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[tuple[int, int]]:
    """Yield a file's descriptor and its size in bytes; close it at the end. Raises like `open_readonly`."""
    fd = open_readonly(path)
    try:
        yield fd, os.fstat(fd).st_size
    finally:
        os.close(fd)


def read_header(fd: int, count: int, *, offset: int, path: str, what: str) -> bytes:
    """Read ``count`` bytes of a header without allocating more than the file's size.

    Args:
        fd: An open file descriptor.
        count: The number of bytes to read.
        offset: Byte offset in the file.
        path: The file's name, for messages.
        what: A name for the bytes in messages (``the JSON header``).

    Raises:
        TruncatedSourceError: If the file ends before ``offset + count``.
    """
    size = os.fstat(fd).st_size
    if offset + count > size:
        raise TruncatedSourceError(
            f"{path} is truncated: {what} should take {count} bytes at offset {offset}, but the file has {size} bytes. "
            "Download or save it again"
        )
    try:
        found = os.pread(fd, count, offset)
    except OSError as error:
        raise TruncatedSourceError(
            f"{path}: {what} could not be read: {count} bytes at offset {offset} failed: {error}"
        ) from error
    if len(found) == count:
        return found
    buffer = bytearray(count)  # a system call returns at most 2 GiB; network file systems may return less
    try:
        read_exact(fd, memoryview(buffer), offset, path)
    except TransferError as error:
        raise TruncatedSourceError(f"{path}: {what} could not be read: {error}") from error
    return bytes(buffer)
