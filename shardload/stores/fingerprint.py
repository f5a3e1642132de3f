"""Detect that a checkpoint's files changed after their headers were read.

Sizes alone do not show it: a training job that rewrites its checkpoint in place keeps the file size but
changes the weights, and a load would mix both. So each file's identity and modification time are recorded
after the headers are read, and compared before the first read of data and after the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardload.errors import TransferError
from shardload.stores.location import Location
from shardload.stores.store import FileIdentity
from shardload.units import exact_bytes


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The identity, size and modification time of files at one moment."""

    files: Mapping[Location, FileIdentity]

    @classmethod
    def of(cls, paths: Iterable[Location]) -> Fingerprint:
        """Record the current state of files.

        Raises:
            TransferError: If one of them has vanished.
        """
        return cls({path: path.identity() for path in paths})

    def check(self) -> None:
        """Compare the recorded state with the current one.

        Raises:
            TransferError: If a file changed; names the first such file and the change.
        """
        for path, before in self.files.items():
            now = path.identity()
            if now != before:
                raise TransferError(
                    f"{path} changed since its headers were read: {_difference(before, now)}. Load it again once "
                    "its writer has finished"
                )


def _difference(before: FileIdentity, now: FileIdentity) -> str:
    if now.size != before.size:
        return f"expected {exact_bytes(before.size)}, found {now.size}"
    # Device and inode: writers often write a new file and rename it over the old one.
    if now.version[:2] != before.version[:2]:
        return f"another file of {exact_bytes(now.size)} took its place"
    return f"its {exact_bytes(now.size)} were written to"
