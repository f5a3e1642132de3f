"""Read headers of untrusted files: never allocate more than a file's size, whatever its header declares."""

from __future__ import annotations

import os

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
