"""Detect that a checkpoint's files changed after their headers were read.

Sizes alone do not show it: a training job that rewrites its checkpoint in place keeps the file size but
changes the weights, and a load would mix both. So each file's identity and modification time are recorded
after the headers are read, and compared before the first read of data and after the last.
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
    """The time of the last modification in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The identity, size and modification time of files at one moment."""

    files: Mapping[str, _File]

    @classmethod
    def of(cls, paths: Iterable[str]) -> Fingerprint:
        """Record the current state of ``paths``.

        Raises:
            TransferError: If one of them has vanished.
        """
        return cls({path: _look(path) for path in paths})

    def check(self) -> None:
        """Compare the recorded state with the current one.

        Raises:
            TransferError: If a file changed; names the first such file and the change.
        """
        for path, before in self.files.items():
            now = _look(path)
            if now != before:
                raise TransferError(
                    f"{path} changed since its headers were read: {_difference(before, now)}. Load it again once "
                    "its writer has finished"
                )


def _look(path: str) -> _File:
    if (remote := file_access.remote_file(path)) is not None:  # each remote read is verified by digests
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
