"""Where the threads of a load get the bytes of blocks (ranges of files): it depends on store and verification.

============  ====================================  ========================================================
store         bytes are not verified                bytes are verified, by the store or by a `Verifier`
============  ====================================  ========================================================
local         `FileReads`: reads by ``preadv``      `UnitReads`: reads each MiB once, compares and keeps it
cached        `CachedFileReads`: the same           as of a remote store
remote        `RangeReads`: requests in advance     `RangeReads`, if the store verifies; else `UnitReads`
nearby        the same for short blocks; long ones  as of a remote store
              go straight into the shards
============  ====================================  ========================================================

A digest covers a MiB of a file (a *unit*). Blocks end where rows end, so neighbouring blocks share a unit. The first
block that needs a unit reads all of it. The unit is kept until the last block that overlaps it is done.

A request of any length costs a round trip. So neighbouring MiB of a remote file are fetched together, as a *range*.
Ranges are requested in the order of the plan, several of them in advance::

    file      |unit|unit|unit|unit|unit|unit|unit|unit|
    blocks       [ block 0   )[ block 1       )
    ranges    [ range 0      )[ range 1      )             only bytes that some block needs, and gaps of up to
                 in use          on its way                128 KiB; whole units if verified. A range is released
                                                           when its last byte was used

Only *staged* and *packed* blocks, which pass through scratch memory, are read in units or ranges. With a
`Verifier`, all other blocks are read twice: first to be verified, then to be used. The same holds for every block if
the budget has no room for units. No byte reaches a shard before it has been verified.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from shardload.errors import BudgetError, SourceError, SourceNotFoundError, TransferError
from shardload.manifest import Decoded, Tensor
from shardload.stores.location import Location
from shardload.stores.store import UNIT_BYTES, File, cancel_reads, scatter_into
from shardload.transfer.geometry import regions
from shardload.transfer.host_memory import memory
from shardload.transfer.load_plan import Block, LoadPlan
from shardload.transfer.preadv import Grid, ReadCall, calls, scatter_read
from shardload.transfer.scratch import BlockMemory
from shardload.units import exact_bytes

_MIN_REMOTE_BUDGET_BYTES = 16 << 20
"""Smallest host-memory budget, in bytes, for a load from a remote store: ranges fetched in advance need it."""
_MIN_UNITS_BUDGET_BYTES = 4 * UNIT_BYTES
"""Smallest host-memory budget, in bytes, with room for verified units (MiB) of files. With less, a load reads all bytes
twice: to verify them, and to use them."""
IN_SCRATCH = ("staged", "packed")
"""Values of `Block.how` for blocks that pass through scratch memory: only such blocks are read in units or ranges."""

Unit = tuple[Location, int]
"""One unit of a file (the MiB that one digest covers): the file, and the unit's number, counted from 0."""


class Verifier(Protocol):
    """Compares the bytes of a checkpoint's files with saved digests, one for each unit (MiB) of a file. Thread-safe."""

    @property
    def bytes_checked(self) -> int:
        """Bytes of files that were read and compared with their digests so far."""
        ...

    def check(self, path: Location, start: int, stop: int) -> None:
        """Verify every unit that overlaps bytes ``[start, stop)`` of a file; raise `DamagedError` if one differs."""
        ...

    def read_unit(self, path: Location, unit: int, into: memoryview) -> int:
        """Read one unit of a file into ``into`` and verify it; return its length, 0 past the end of the file."""
        ...

    def units_by_file(self) -> Mapping[str, Sequence[str]]:
        """Return, for each file (by its name in the checkpoint), the digests of all its units (MiB), in order."""
        ...


def check_tensor(verifier: Verifier, tensor: Tensor) -> None:
    """Compare a tensor's stored bytes with their digests (`Verifier.check`); whole files if a reader decodes it."""
    if isinstance(tensor.storage, Decoded):
        for path in tensor.storage.reader.paths:
            verifier.check(path, 0, path.size)
    else:
        for region in regions(tensor):
            _check(verifier, region.path, region.offset, region.stored_bytes(tensor.dtype))


def _check(verifier: Verifier, path: Location, offset: int, n_bytes: int) -> None:
    """Compare ``n_bytes`` of a file from ``offset`` on with digests; if 0 (a value in a header), the whole file."""
    start, stop = (offset, offset + n_bytes) if n_bytes else (0, path.size)
    verifier.check(path, start, stop)


class ByteSource(ABC):
    """Where worker threads get the bytes of blocks (ranges of files), verified if need be. All threads share it."""

    shared_bytes: int = 0
    """Bytes of host memory that the source takes for all threads; the budget counts them when a load starts."""

    def __init__(self, verifier: Verifier | None) -> None:
        self.verifier = verifier
        self._files: dict[Location, File] = {}
        self._checked_before = 0 if verifier is None else verifier.bytes_checked

    @abstractmethod
    def fill(self, flat: BlockMemory, n_bytes: int, *, path: Location, offset: int) -> int:
        """Copy ``n_bytes`` of a file into scratch memory (``flat``); return how many: fewer only at the file's end.

        Raises `DamagedError` for bytes that differ from their digest; `TransferError` or `OSError` if a read fails.
        """

    def borrow(self, n_bytes: int, *, path: Location, offset: int) -> NDArray[np.uint8] | None:
        """Return bytes of a file where they are in memory already, or ``None``: then `fill` copies them to scratch.

        The caller passes them to `give_back` as soon as it has copied them.
        """
        del n_bytes, path, offset
        return None

    def scatter(self, wanted: Iterable[ReadCall], *, path: Location, offset: int) -> int:
        """Read one range of a file into many pieces of memory, such as rows of shards (`preadv.scatter_read`)."""
        raise AssertionError("verified bytes pass through scratch")

    def give_back(self, n_bytes: int, *, path: Location, offset: int) -> None:  # noqa: B027 - optional
        """Tell the source that borrowed bytes are no longer needed."""

    @abstractmethod
    def read_bytes(self, blocks: Sequence[Block]) -> int:
        """Return how many bytes a load has read for ``blocks``, with reads that only verify; its report shows this."""

    def verifies(self, block: Block) -> bool:
        """Whether `fill` verifies the bytes of a block as it delivers them, so that `check` need not read them."""
        return block.how in IN_SCRATCH

    def check(self, block: Block, tensor: Tensor) -> None:
        """Verify the bytes of a block before the block is moved, unless `fill` will verify them."""
        if self.verifier is None:
            return
        if isinstance(tensor.storage, Decoded):
            check_tensor(self.verifier, tensor)
        # Inline and unwritten chunks too: they are in a header, somewhere in the file, so all of it is verified.
        elif not block.read_bytes or not self.verifies(block):
            _check(self.verifier, block.path, block.offset, block.read_bytes)

    def release(self, block: Block) -> None:  # noqa: B027 - optional
        """Tell the source that a block has been moved: memory kept for the block can be freed."""

    def open(self, path: Location) -> File:
        """Open a file, or return it if it is open already; it stays open until `close`."""
        if (found := self._files.get(path)) is not None:
            return found
        try:
            mine = path.open()
        except (SourceError, SourceNotFoundError) as error:
            raise TransferError(f"Cannot open {path}: {error}") from error
        # Another thread may have opened it as well. No lock: a caller that is interrupted would not release it.
        if (found := self._files.setdefault(path, mine)) is not mine:
            mine.close()
        return found

    def cancel(self) -> None:
        """Cancel network requests in flight, so that no thread waits for them when a load ends early."""
        for file in list(self._files.values()):
            cancel_reads(file)

    def close(self) -> None:
        """Close all files, which no thread may use any more."""
        while self._files:
            self._files.popitem()[1].close()


def source_kind(plan: LoadPlan, verifier: Verifier | None) -> Literal["files", "units", "ranges"]:
    """Return which `ByteSource` a plan needs ("units": `UnitReads`); raise `BudgetError` if its budget is too small."""
    stores = {path.store for path in plan.files}
    is_verifying = any(store.is_verifying for store in stores)
    if any(store.is_requested for store in stores) and not plan.is_cached and (verifier is None or is_verifying):
        if plan.host_memory_bytes < _MIN_REMOTE_BUDGET_BYTES:
            raise BudgetError(
                f"Cannot load from a remote store with a host-memory budget of {exact_bytes(plan.host_memory_bytes)}. "
                f"Raise it to at least {_MIN_REMOTE_BUDGET_BYTES >> 20}MiB"
            )
        return "ranges"
    has_room = plan.host_memory_bytes >= _MIN_UNITS_BUDGET_BYTES
    return "units" if has_room and (verifier is not None or is_verifying) else "files"


class FileReads(ByteSource):
    """Reads blocks straight from files, without verifying them: a verifier has to read the same bytes once more."""

    def __init__(self, verifier: Verifier | None = None) -> None:
        super().__init__(verifier)
        self._own = threading.local()

    def fill(self, flat: BlockMemory, n_bytes: int, *, path: Location, offset: int) -> int:
        """Read bytes of a file straight into scratch, unverified; see `ByteSource.fill`."""
        # Describing a fill takes 50 µs between copies, and the layers of a model repeat a few of them. Its addresses
        # stay right, as they are those of the memory in the key.
        fills: dict[tuple[int, ...], list[ReadCall]] = self._own.__dict__.setdefault("fills", {})
        key = (flat.memory.ctypes.data, n_bytes, flat.row, flat.pitch, flat.dtype.itemsize)
        return self.scatter(fills.get(key) or fills.setdefault(key, _calls(flat, n_bytes)), path=path, offset=offset)

    def scatter(self, wanted: Iterable[ReadCall], *, path: Location, offset: int) -> int:
        """Read one range of a file into many pieces of memory, unverified; see `ByteSource.scatter`."""
        return scatter_read(self.open(path), wanted, offset)

    def verifies(self, block: Block) -> bool:
        """Return False: `fill` reads bytes without verifying them."""
        return False

    def read_bytes(self, blocks: Sequence[Block]) -> int:
        """Return the bytes read: those of the blocks, plus those that the verifier has read on its own."""
        checked = 0 if self.verifier is None else self.verifier.bytes_checked - self._checked_before
        return sum(block.read_bytes for block in blocks) + checked


class CachedFileReads(FileReads):
    """Reads blocks of remote files from the cache, which verifies them; what it has lost meanwhile, from the store."""

    def fill(self, flat: BlockMemory, n_bytes: int, *, path: Location, offset: int) -> int:
        """Copy bytes of a file into scratch, straight if rows are not padded there; see `ByteSource.fill`."""
        file = self.open(path)
        if not flat.row:
            scatter_into(file, [flat.memory[:n_bytes].data], offset)
            return n_bytes
        if not hasattr(self._own, "memory"):
            self._own.memory = memory(UNIT_BYTES)
        for at in range(0, n_bytes, UNIT_BYTES):
            part = self._own.memory[: min(UNIT_BYTES, n_bytes - at)]
            scatter_into(file, [part.data], offset + at)
            flat.write(part, at)
        return n_bytes


def _calls(flat: BlockMemory, n_bytes: int) -> list[ReadCall]:
    """Return the system calls that fill scratch with ``n_bytes`` of a file, at any offset, for `scatter_read`."""
    itemsize = flat.dtype.itemsize
    row_bytes, pitch_bytes = flat.row * itemsize or n_bytes, flat.pitch * itemsize
    grids = Grid.rows(0, flat.memory, n_bytes=n_bytes, row_bytes=row_bytes, pitch_bytes=pitch_bytes)
    found = calls(grids, start=0, stop=n_bytes, gap_memory=flat.memory)
    return [ReadCall(call.entries.copy(), call.n_bytes) for call in found]  # `calls` reuses the entries


class UnitReads(ByteSource):
    """Reads files in whole units (MiB), verified as they are read; keeps a unit in memory while more blocks need it."""

    def __init__(self, blocks: Iterable[Block], *, kept_units: int, verifier: Verifier | None) -> None:
        """Count how many of ``blocks`` need each unit: the unit is freed once each of them was passed to `release`."""
        super().__init__(verifier)
        self.kept_units = kept_units  # at most; a unit that does not fit is read again
        self.shared_bytes = kept_units * UNIT_BYTES
        self._left = Counter(unit for block in blocks for unit in _units_of(block))
        self.kept: dict[Unit, Future[NDArray[np.uint8]]] = {}
        """Units that stay in memory because later blocks need them, too; a future while a thread still reads it."""
        self._spare: list[NDArray[np.uint8]] = []
        self._unit_bytes = 0
        self._lock = threading.Lock()
        self._own = threading.local()

    def fill(self, flat: BlockMemory, n_bytes: int, *, path: Location, offset: int) -> int:
        """Copy bytes of a file into scratch from the file's units, which are verified first; see `ByteSource.fill`."""
        at = 0
        while at < n_bytes:
            unit, skip = divmod(offset + at, UNIT_BYTES)
            part = self._unit((path, unit))[skip : skip + n_bytes - at]
            if not part.size:
                if self.verifier is not None:
                    self.verifier.check(path, offset, offset + n_bytes)  # raises: it knows the file's length
                raise too_short(path, offset + n_bytes)
            flat.write(part, at)
            at += part.size
        return n_bytes

    def release(self, block: Block) -> None:
        """Free the memory of the block's units that no later block needs."""
        if block.how not in IN_SCRATCH:
            return
        with self._lock:
            for unit in _units_of(block):
                self._left[unit] -= 1
                if not self._left[unit] and (kept := self.kept.pop(unit, None)) is not None:
                    data = kept.result()
                    # Memory is reused, as no device ever adopts it. The short last unit of a file is only part of one.
                    self._spare += [data] if data.nbytes == UNIT_BYTES else []

    def read_bytes(self, blocks: Sequence[Block]) -> int:
        """Return the bytes read: those of all units, plus those of the blocks that are not read in units."""
        # A verifier counts the units, too, and what it read of other blocks.
        checked = self._unit_bytes if self.verifier is None else self.verifier.bytes_checked - self._checked_before
        return sum(block.read_bytes for block in blocks if block.how not in IN_SCRATCH) + checked

    def _unit(self, unit: Unit) -> NDArray[np.uint8]:
        # 1. The unit in this thread's own buffer.
        if getattr(self._own, "unit", None) == unit:
            return cast("NDArray[np.uint8]", self._own.data)
        with self._lock:
            # 2. A unit that another thread has read, or is reading.
            known = self.kept.get(unit)
            promise: Future[NDArray[np.uint8]] | None = None
            into: NDArray[np.uint8] | None = None
            # 3. If a later block needs it and there is room, promise it: other threads wait instead of reading it, too.
            if known is None and self._left[unit] > 1 and len(self.kept) < self.kept_units:
                promise = self.kept[unit] = Future()
                into = self._spare.pop() if self._spare else None
        if known is not None:
            return known.result()  # safe to wait: the thread that reads it never waits for others
        # 4. Else read it for this thread alone.
        if promise is None:
            # Into this thread's buffer, which its next own read overwrites. The number is forgotten first: a read that
            # fails must not leave half of another unit under it.
            if not hasattr(self._own, "memory"):
                self._own.memory = memory(UNIT_BYTES)
            self._own.unit = None
            data = self._own.data = self._read(unit, self._own.memory)
            self._own.unit = unit
            return data
        try:
            data = self._read(unit, memory(UNIT_BYTES) if into is None else into)
        except BaseException as error:
            promise.set_exception(error)
            raise
        promise.set_result(data)
        return data

    def _read(self, unit: Unit, into: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if self.verifier is not None:
            return into[: self.verifier.read_unit(*unit, into.data)]
        file, start = self.open(unit[0]), unit[1] * UNIT_BYTES
        data = into[: max(0, min(UNIT_BYTES, file.n_bytes - start))]
        file.read_into(data.data, start)
        with self._lock:
            self._unit_bytes += data.nbytes
        return data


def too_short(path: Location, stop: int) -> TransferError:
    """Return the error for a file that ends before byte ``stop``, which its headers promise."""
    return TransferError(f"Cannot read {path}: it ends before byte {stop}. It changed since its headers were read")


def _units_of(block: Block) -> Iterator[Unit]:
    """Yield the units (MiB) of a file that a block overlaps; none if a reader decodes the block."""
    if block.how != "decoded" and block.read_bytes:
        last = (block.offset + block.read_bytes - 1) // UNIT_BYTES
        for number in range(block.offset // UNIT_BYTES, last + 1):
            yield block.path, number
