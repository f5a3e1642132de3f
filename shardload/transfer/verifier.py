"""The protocol through which a transfer verifies bytes, independent of the format of digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from shardload.stores.location import Location


class Verifier(Protocol):
    """Digests of a checkpoint's files, one for each unit of `shardload.stores.store.UNIT_BYTES`.

    Threads may share one. `shardload.steps.digests.Checker` implements it for training steps.
    """

    @property
    def bytes_checked(self) -> int:
        """Bytes read and compared so far."""
        ...

    def check(self, path: Location, start: int, stop: int) -> None:
        """Return once every unit that overlaps bytes ``[start, stop)`` of a file has been verified.

        Raises:
            DamagedError: When a digest does not match; names step, file and offset.
            TransferError: When the file cannot be read.
        """
        ...

    def read_unit(self, path: Location, unit: int, into: memoryview) -> int:
        """Read one unit of a file into ``into`` and verify it; return its length, 0 past the end of the file.

        Raises:
            DamagedError: When its digest does not match; names step, file and offset.
            TransferError: When the file cannot be read.
        """
        ...

    def units_by_file(self) -> Mapping[str, Sequence[str]]:
        """Return the digest of each unit, by the file's name within the checkpoint."""
        ...


__all__ = ["Verifier"]
