"""Whether a checkpoint's files are still those whose headers were read.

Sizes alone do not tell: a training job that rewrites its checkpoint in place leaves a file of the same size with
other weights in it, and half of each would be loaded. So the files' identity and time of change are noted right
after the headers were read, and compared before the first byte is read and after the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardload.errors import TransferError
from shardload.stores import file_access


@dataclass(frozen=True, slots=True)
class _File:
    device: int
    inode: int
    size: int
    """Bytes."""
    changed_ns: int
    """When its content last changed, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the files looked like at one moment."""

    files: Mapping[str, _File]

    @classmethod
    def of(cls, paths: Iterable[str]) -> Fingerprint:
        """Note what ``paths`` look like now.

        Raises:
            TransferError: When one of them has vanished.
        """
        return cls({path: _look(path) for path in paths})

    def check(self) -> None:
        """Compare with what the files look like now.

        Raises:
            TransferError: When a file has changed; names the first one and how.
        """
        for path, before in self.files.items():
            now = _look(path)
            if now != before:
                raise TransferError(
                    f"{path} changed since its headers were read: {_difference(before, now)}. Load it again once "
                    "its writer has finished"
                )


def _look(path: str) -> _File:
    if (remote := file_access.remote_file(path)) is not None:  # each read of it is compared with its digests
        return _File(0, 0, remote.n_bytes, 0)
    try:
        found = Path(path).stat()
    except OSError as error:
        raise TransferError(f"{path} cannot be read any more: {error}") from error
    return _File(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _difference(before: _File, now: _File) -> str:
    if now.size != before.size:
        return f"expected {before.size} bytes, found {now.size}"
    if (now.device, now.inode) != (before.device, before.inode):
        return f"another file of {now.size} bytes took its place"
    return f"its {now.size} bytes were written to"
