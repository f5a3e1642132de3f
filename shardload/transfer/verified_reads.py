"""Reads of a step that are verified on the way, each MiB read once.

A digest covers a MiB of a file (a *unit*), and blocks end where rows end, so neighbours share a unit. The first block
that needs a unit reads and verifies all of it; the unit is kept until the last block that overlaps it is done::

    file     |────unit────|────unit────|────unit────|
    blocks   [  block 0     )[ 1 )[  block 2       )
                          └ read, checked, kept for blocks 0, 1 and 2

Nothing reaches a shard before its unit has been verified.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.stores.location import Location
from shardload.stores.store import UNIT_BYTES
from shardload.transfer.buffers import memory
from shardload.transfer.planning import Block
from shardload.transfer.scratch import BlockMemory
from shardload.transfer.verifier import Verifier

Unit = tuple[Location, int]
"""A file, and the number of a unit in it."""


class VerifiedReads:
    """Source of verified bytes for the threads of one transfer.

    Args:
        verifier: Compares units with their digests.
        blocks: All blocks to read from files, each passed to `release` once.
        kept_units: Most units kept for later blocks; a unit that does not fit is read again.
    """

    def __init__(self, verifier: Verifier, blocks: Iterable[Block], *, kept_units: int) -> None:
        self.verifier = verifier
        self.kept_units = kept_units
        self._left = Counter(unit for block in blocks for unit in units_of(block))
        self._kept: dict[Unit, Future[NDArray[np.uint8]]] = {}
        self._spare: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()
        self._own = threading.local()

    @property
    def units_in_memory(self) -> int:
        """Number of units that are kept for later blocks now."""
        return len(self._kept)

    def fill(self, flat: BlockMemory, n_bytes: int, *, path: Location, offset: int) -> None:
        """Copy ``n_bytes`` of a file, from ``offset`` on, to the start of scratch.

        Raises:
            DamagedError: When a unit does not match its digest; names step, file and offset.
            TransferError: When the file cannot be read.
        """
        at = 0
        while at < n_bytes:
            unit, skip = divmod(offset + at, UNIT_BYTES)
            part = self._unit((path, unit))[skip : skip + n_bytes - at]
            if not part.size:
                self.verifier.check(path, offset, offset + n_bytes)  # raises: the file ends early
            put(flat, at, part)
            at += part.size

    def release(self, block: Block) -> None:
        """Release the units that no later block needs."""
        with self._lock:
            for unit in units_of(block):
                self._left[unit] -= 1
                if not self._left[unit] and (kept := self._kept.pop(unit, None)) is not None:
                    data = kept.result()
                    # Memory is reused, as no device ever adopts it. The short last unit of a file is only part of one.
                    self._spare += [data] if data.nbytes == UNIT_BYTES else []

    def _unit(self, unit: Unit) -> NDArray[np.uint8]:
        # 1. The unit in this thread's own buffer.
        if getattr(self._own, "unit", None) == unit:
            own: NDArray[np.uint8] = self._own.data
            return own
        with self._lock:
            # 2. A unit that another thread has read, or is reading.
            known = self._kept.get(unit)
            promise: Future[NDArray[np.uint8]] | None = None
            into: NDArray[np.uint8] | None = None
            # 3. If a later block needs it and there is room, promise it: other threads wait instead of reading it, too.
            if known is None and self._left[unit] > 1 and len(self._kept) < self.kept_units:
                promise = self._kept[unit] = Future()
                into = self._spare.pop() if self._spare else None
        if known is not None:
            return known.result()  # safe to wait: the thread that reads it never waits for others
        # 4. Else read it for this thread alone.
        if promise is None:
            return self._read_own(unit)
        try:
            data = self._read(unit, memory(UNIT_BYTES) if into is None else into)
        except BaseException as error:
            promise.set_exception(error)
            raise
        promise.set_result(data)
        return data

    def _read_own(self, unit: Unit) -> NDArray[np.uint8]:
        """Read into this thread's buffer, which its next own read overwrites."""
        if not hasattr(self._own, "memory"):
            self._own.memory = memory(UNIT_BYTES)
        # Forgotten first: a read that fails must not leave half of another unit under this number.
        self._own.unit = None
        data = self._own.data = self._read(unit, self._own.memory)
        self._own.unit = unit
        return data

    def _read(self, unit: Unit, into: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return into[: self.verifier.read_unit(*unit, into.data)]


def units_of(block: Block) -> Iterator[Unit]:
    """Yield the units a block overlaps; none for a decoded block."""
    if block.how != "decoded" and block.read_bytes:
        last = (block.offset + block.read_bytes - 1) // UNIT_BYTES
        for number in range(block.offset // UNIT_BYTES, last + 1):
            yield block.path, number


def put(flat: BlockMemory, at: int, data: NDArray[Any]) -> None:
    """Copy bytes into scratch, ``at`` bytes after its first, with its row spacing."""
    itemsize = flat.dtype.itemsize
    row, pitch = flat.row * itemsize, flat.pitch * itemsize
    if not row:
        flat.memory[at : at + data.size] = data
        return
    # The rest of a row that was begun, whole rows at once, the beginning of another one.
    head = min(-at % row, data.size)
    start = at // row * pitch + at % row
    flat.memory[start : start + head] = data[:head]
    first, rows = -(-at // row), (data.size - head) // row
    if rows:
        whole = np.ndarray((rows, row), np.uint8, flat.memory.data, first * pitch, (pitch, 1))
        whole[...] = data[head : head + rows * row].reshape(rows, row)
    tail = data[head + rows * row :]
    start = (first + rows) * pitch
    flat.memory[start : start + tail.size] = tail
