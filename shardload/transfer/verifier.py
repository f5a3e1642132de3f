"""What a transfer is given to use only bytes that are as they were saved: this protocol, and no format of digests."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol


class Verifier(Protocol):
    """Knows digests of a checkpoint's files, one for each unit of `shardload.stores.file_access.UNIT_BYTES`.

    Any number of threads may share one. `shardload.steps.digests.Checker` is that of our training steps.
    """

    bytes_checked: int
    """Bytes read and compared so far."""

    def check(self, path: str | os.PathLike[str], start: int, stop: int) -> None:
        """Return once every unit that meets bytes ``[start, stop)`` of a file is known to be as saved.

        Raises:
            DamagedError: When one is not; names step, file and offset.
            TransferError: When the file cannot be read.
        """
        ...

    def read_unit(self, path: str | os.PathLike[str], unit: int, into: memoryview) -> int:
        """Read one unit of a file into ``into`` and compare it; return its length, 0 past the end of the file.

        Raises:
            DamagedError: When it is not as saved; names step, file and offset.
            TransferError: When the file cannot be read.
        """
        ...

    def units_by_file(self) -> Mapping[str, Sequence[str]]:
        """The digest of each unit, by the file's name within the checkpoint."""
        ...


__all__ = ["Verifier"]
