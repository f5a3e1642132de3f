"""Where the threads of a load get the bytes of blocks (ranges of files): it depends on store and verification.

============  ====================================  ========================================================
store         bytes are not verified                bytes are verified, by the store or by a `Verifier`
============  ====================================  ========================================================
local         `FileReads`: reads by ``preadv``      `UnitReads`: reads each MiB once, compares and keeps it
remote        `RangeReads`: requests in advance     `RangeReads`, if the store verifies; else `UnitReads`
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
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from shardload.errors import BudgetError, SourceError, SourceNotFoundError, TransferError
from shardload.manifest import Decoded, Tensor
from shardload.stores.location import Location
from shardload.stores.store import UNIT_BYTES, File, PendingBytes, RemoteFile
from shardload.transfer.geometry import SKIP_BYTES, regions
from shardload.transfer.host_memory import memory
from shardload.transfer.load_plan import Block, LoadPlan
from shardload.transfer.preadv import Grid, ReadCall, calls, scatter_read
from shardload.transfer.scratch import BlockMemory
from shardload.units import exact_bytes

MAX_RANGE_UNITS = 4
"""Most units (of 1 MiB each) that one request to a remote store asks for. 4 MiB take 70 ms at 60 MB/s per connection,
so that a round trip hardly counts. Longer requests would leave fewer requests in flight."""
_MAX_AHEAD_BYTES = 64 << 20
"""Most bytes of memory for ranges of remote files (up to 4 MiB each) that were requested and are not yet used up.
Sixteen ranges fit. Each thread may need two of them: one for itself, and one that it shares with a neighbouring block.
With two threads, this leaves twelve ranges that are on their way."""
_MIN_REMOTE_BUDGET_BYTES = 16 << 20
"""Smallest host-memory budget, in bytes, for a load from a remote store: ranges fetched in advance need it."""
_MIN_UNITS_BUDGET_BYTES = 4 * UNIT_BYTES
"""Smallest host-memory budget, in bytes, with room for verified units (MiB) of files. With less, a load reads all bytes
twice: to verify them, and to use them."""
_IN_SCRATCH = ("staged", "packed")
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

    @abstractmethod
    def read_bytes(self, blocks: Sequence[Block]) -> int:
        """Return how many bytes a load has read for ``blocks``, with reads that only verify; its report shows this."""

    def verifies(self, block: Block) -> bool:
        """Whether `fill` verifies the bytes of a block as it delivers them, so that `check` need not read them."""
        return block.how in _IN_SCRATCH

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

    def cancel(self) -> None:  # noqa: B027 - optional
        """Cancel network requests in flight, so that no thread waits for them when a load ends early."""

    def close(self) -> None:
        """Close all files, which no thread may use any more."""
        while self._files:
            self._files.popitem()[1].close()


def source_kind(plan: LoadPlan, verifier: Verifier | None) -> Literal["files", "units", "ranges"]:
    """Return which `ByteSource` a plan needs ("units": `UnitReads`); raise `BudgetError` if its budget is too small."""
    stores = {path.store for path in plan.files}
    is_verifying = any(store.is_verifying for store in stores)
    if any(store.is_remote for store in stores) and (verifier is None or is_verifying):
        if plan.host_memory_bytes < _MIN_REMOTE_BUDGET_BYTES:
            raise BudgetError(
                f"Cannot load from a remote store with a host-memory budget of {exact_bytes(plan.host_memory_bytes)}. "
                f"Raise it to at least {_MIN_REMOTE_BUDGET_BYTES >> 20}MiB"
            )
        return "ranges"
    has_room = plan.host_memory_bytes >= _MIN_UNITS_BUDGET_BYTES
    return "units" if has_room and (verifier is not None or is_verifying) else "files"


def byte_source(plan: LoadPlan, verifier: Verifier | None, *, threads: int) -> ByteSource:
    """Create the `ByteSource` that delivers the bytes of a plan to ``threads`` threads; raises like `source_kind`."""
    blocks = (block for block in plan.blocks if block.how in _IN_SCRATCH)
    match source_kind(plan, verifier):
        case "files":
            return FileReads(verifier)
        case "units":
            kept = max(1, min(threads + 2, plan.host_memory_bytes // (8 * UNIT_BYTES)))
            return UnitReads(blocks, kept_units=kept, verifier=verifier)
        case "ranges":
            limit = min(_MAX_AHEAD_BYTES, plan.host_memory_bytes // 4)
            return RangeReads(blocks, limit_bytes=limit, threads=threads, verifier=verifier)


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
        """Read one range of a file into many pieces of memory, such as rows of shards (`preadv.scatter_read`)."""
        return scatter_read(self.open(path), wanted, offset)

    def verifies(self, block: Block) -> bool:
        """Return False: `fill` reads bytes without verifying them."""
        return False

    def read_bytes(self, blocks: Sequence[Block]) -> int:
        """Return the bytes read: those of the blocks, plus those that the verifier has read on its own."""
        checked = 0 if self.verifier is None else self.verifier.bytes_checked - self._checked_before
        return sum(block.read_bytes for block in blocks) + checked


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
                raise _too_short(path, offset + n_bytes)
            flat.write(part, at)
            at += part.size
        return n_bytes

    def release(self, block: Block) -> None:
        """Free the memory of the block's units that no later block needs."""
        if block.how not in _IN_SCRATCH:
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
        return sum(block.read_bytes for block in blocks if block.how not in _IN_SCRATCH) + checked

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


@dataclass(slots=True, eq=False)
class _Range:
    """Neighbouring units (MiB) of a remote file that one request fetches, and the state of this request."""

    path: Location
    start: int
    stop: int
    """Offset in the file one past the range's last byte; it may lie past the end of the file."""
    left_bytes: int = 0
    """Bytes of the range that blocks still need; at 0, the range's memory is freed."""
    pending: PendingBytes | None = None
    data: memoryview | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def n_bytes(self) -> int:
        """Length of the range in bytes; the file may end before the range does."""
        return self.stop - self.start


class _Runs:
    """Where in files there are bytes that blocks need, without a gap that is worth another request.

    Processes that load together read neighbouring parts of each tensor: a range across such a gap would fetch what
    another process reads.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        spans: dict[Location, list[tuple[int, int]]] = {}
        for block in blocks:
            if any(_units_of(block)):
                spans.setdefault(block.path, []).append(_span(block))
        self._starts: dict[Location, list[int]] = {}
        for path, found in spans.items():
            skipped = 1 if path.store.is_verifying else SKIP_BYTES
            starts, end = self._starts.setdefault(path, []), -SKIP_BYTES
            for start, stop in sorted(found):
                if start - end >= skipped:
                    starts.append(start)
                end = max(end, stop)

    def number(self, path: Location, offset: int) -> int:
        """Return the number of the run that contains this byte of a file."""
        return bisect_right(self._starts[path], offset)


def _span(block: Block) -> tuple[int, int]:
    """Return where the bytes that are fetched for a block begin and end; digests are for whole units."""
    start, stop = block.offset, block.offset + block.read_bytes
    if block.path.store.is_verifying:
        return start // UNIT_BYTES * UNIT_BYTES, -(-stop // UNIT_BYTES) * UNIT_BYTES
    return start, stop


class RangeReads(ByteSource):
    """Requests ranges of remote files (up to 4 MiB) in advance; their bytes are verified only if the store does so."""

    def __init__(
        self, blocks: Iterable[Block], *, limit_bytes: int, threads: int, verifier: Verifier | None = None
    ) -> None:
        """Decide which ranges to request for ``blocks``, all of which pass through scratch memory.

        ``verifier``, if any, reads and verifies the bytes of a load's other blocks before they are used.
        """
        super().__init__(verifier)
        self.shared_bytes = limit_bytes
        # Ranges in use come on top of those in flight: each thread has one, and shares one with its neighbour.
        most = max(1, min(MAX_RANGE_UNITS, limit_bytes // (4 * threads * UNIT_BYTES))) * UNIT_BYTES
        self.ahead_bytes = max(most, limit_bytes - 2 * threads * most)
        self.held_bytes = self.peak_bytes = 0
        self._range_bytes = 0
        self._ranges: list[_Range] = []
        self._of: dict[tuple[Unit, int], _Range] = {}
        self._next = 0
        self._lock = threading.Lock()
        wanted = list(blocks)
        self._runs = _Runs(wanted)
        for block in wanted:
            self._add(block, most)

    def fill(self, flat: BlockMemory, n_bytes: int, *, path: Location, offset: int) -> int:
        """Copy bytes of a file into scratch from the ranges that were requested in advance; see `ByteSource.fill`."""
        at = 0
        while at < n_bytes:
            wanted = self._of[(path, (offset + at) // UNIT_BYTES), self._runs.number(path, offset + at)]
            skip = offset + at - wanted.start
            part = np.frombuffer(self._data(wanted)[skip : skip + n_bytes - at], np.uint8)
            if not part.size:
                raise _too_short(path, offset + n_bytes)
            flat.write(part, at)
            at += part.size
            with self._lock:
                wanted.left_bytes -= part.size
                if wanted.left_bytes <= 0:
                    wanted.data = wanted.pending = None
                    self.held_bytes -= wanted.n_bytes
                    self._top_up()
        return n_bytes

    def read_bytes(self, blocks: Sequence[Block]) -> int:
        """Return the bytes read: those of all ranges received, plus those of blocks that are not read in ranges."""
        return sum(block.read_bytes for block in blocks if block.how not in _IN_SCRATCH) + self._range_bytes

    def cancel(self) -> None:
        """Cancel the requests for ranges that are on their way, and send no more."""
        with self._lock:
            # Nothing new begins: `_top_up` is past the last range.
            self._next = len(self._ranges)
            for one in self._ranges:
                if one.pending is not None:
                    one.pending.cancel()

    def _add(self, block: Block, most_bytes: int) -> None:
        for path, unit in _units_of(block):
            run = self._runs.number(path, block.offset)
            first, end = unit * UNIT_BYTES, (unit + 1) * UNIT_BYTES
            start, stop = max(block.offset, first), min(block.offset + block.read_bytes, end)
            n_bytes = stop - start
            if path.store.is_verifying:
                start, stop = first, end  # digests are for whole units
            one = self._of.get(((path, unit), run))
            # A unit that two blocks share belongs to one range, which is released after both.
            if one is None:
                # A range grows as long as the next needed unit follows, without a long gap.
                one = self._of.get(((path, unit - 1), run))
                if one is None or one is not self._ranges[-1] or stop - one.start > most_bytes:
                    one = _Range(path, start, stop)
                    self._ranges.append(one)
                self._of[(path, unit), run] = one
            one.start, one.stop = min(one.start, start), max(one.stop, stop)
            one.left_bytes += n_bytes

    def _data(self, wanted: _Range) -> memoryview:
        with self._lock:
            # Begun even above the limit: a thread that needs a range now must not wait for others to release theirs.
            if wanted.pending is None and wanted.data is None:
                self._start(wanted)
            self._top_up()
        # Not under `_lock`: while one thread waits for the network, the others go on.
        with wanted.lock:
            if wanted.data is None:
                assert wanted.pending is not None
                wanted.data = wanted.pending.result()
                with self._lock:
                    self._range_bytes += wanted.data.nbytes
            return wanted.data

    def _top_up(self) -> None:
        while self._next < len(self._ranges):
            one = self._ranges[self._next]
            if one.pending is None and one.data is None and one.left_bytes > 0:
                # Stop, never skip: ranges are needed in this order, and a shorter one further on would take the room.
                if self.held_bytes + one.n_bytes > self.ahead_bytes:
                    return
                self._start(one)
            self._next += 1

    def _start(self, one: _Range) -> None:
        file = self.open(one.path)
        # A store may have a local copy of a small file, and a plan may have local files, too.
        is_here = not one.path.store.is_remote or file.descriptor is not None
        one.pending = _LocalBytes(file, one) if is_here else cast("RemoteFile", file).begin(one.start, one.stop)
        self.held_bytes += one.n_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


class _LocalBytes:
    """Takes the place of a request to a remote store if the file is local: `result` reads the range from the file."""

    def __init__(self, file: File, one: _Range) -> None:
        self._file, self._start, self._stop = file, one.start, min(one.stop, file.n_bytes)

    def result(self) -> memoryview:
        data = memoryview(bytearray(max(0, self._stop - self._start)))
        self._file.read_into(data, self._start)
        return data

    def cancel(self) -> None:
        pass


def _too_short(path: Location, stop: int) -> TransferError:
    return TransferError(f"Cannot read {path}: it ends before byte {stop}. It changed since its headers were read")


def _units_of(block: Block) -> Iterator[Unit]:
    """Yield the units (MiB) of a file that a block overlaps; none if a reader decodes the block."""
    if block.how != "decoded" and block.read_bytes:
        last = (block.offset + block.read_bytes - 1) // UNIT_BYTES
        for number in range(block.offset // UNIT_BYTES, last + 1):
            yield block.path, number
