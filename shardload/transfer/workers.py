"""Worker threads, and what they do with one block (range of a file): read it, and copy each part to its shard.

The caller would compete with its workers for cores, so it sleeps until a given number of jobs has finished. The threads
start before there is work: starting one while another touches fresh memory took 3 ms, a tenth of the time to read
300 MB. Scratch memory belongs to one thread, is reused from block to block and never leaves this module.

Ctrl-C may interrupt the caller between any two instructions. An interrupted `threading.Condition` (or an executor or
event, which use one) keeps its lock, and a worker would wait for that lock forever. So all shared objects are
implemented in C: queues, a deque, plain attributes.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardload.errors import ShardloadError, TransferError
from shardload.manifest import Decoded, Packed, Tensor
from shardload.transfer.byte_source import ByteSource, FileReads
from shardload.transfer.host_memory import memory
from shardload.transfer.load_plan import Block
from shardload.transfer.preadv import Grid, calls
from shardload.transfer.read_tensor import stored_of
from shardload.transfer.scratch import PAD_BYTES, BlockMemory, CopyPart, RowCopy, copy, grid_of, pitch_row
from shardload.units import exact_bytes, plural

T = TypeVar("T")

MAX_THREADS = 8
"""Most worker threads by default: enough to saturate the page cache or a fast disk; more would only take memory."""


def default_threads() -> int:
    """Return the default number of worker threads: one per core this process may use, at most `MAX_THREADS`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_THREADS)


@dataclass(frozen=True, slots=True)
class Completed(Generic[T]):
    """A finished job (reads and copies of blocks), with its result or the error that it raised."""

    job: Any
    """The object that identifies the job, as given to `WorkerThreads.submit`."""
    result: T | None
    error: BaseException | None


class WorkerThreads(Generic[T]):
    """Threads that run jobs (reads and copies of blocks) in the order in which the caller submits them."""

    def __init__(self, threads: int) -> None:
        self.in_flight = 0
        """Number of jobs that were submitted, but not yet returned by `collect`."""
        self._table = _Table[T]()
        # Not only in `close`: an error before the caller gets there must not leave threads behind.
        self._dismiss = weakref.finalize(self, self._table.jobs.put, None)
        # Daemons: a read that hangs must not keep the program from ending.
        self._threads = [
            threading.Thread(target=self._table.work, name=f"shardload_{k}", daemon=True) for k in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._dismiss()
            raise

    def submit(self, job: Any, work: Callable[[], T]) -> None:
        """Run ``work`` on one of the threads; ``job`` identifies it in the results of `collect`."""
        self.in_flight += 1
        self._table.jobs.put((job, work))

    def collect(self, at_least: int = 1) -> list[Completed[T]]:
        """Return all jobs that have finished since the last call; wait until there are ``at_least`` of them.

        The wait ends earlier if fewer jobs are in flight and all of these have finished, or if a job has failed.
        """
        table = self._table
        # Set before looking: a worker that finishes in between sees the new number and wakes us.
        table.wanted = max(1, min(at_least, self.in_flight))
        while len(table.completed) < table.wanted and not table.failed:
            table.wakeups.get()
        found = [table.completed.popleft() for _ in range(len(table.completed))]
        self.in_flight -= len(found)
        return found

    def close(self) -> None:
        """Drop jobs that have not started, and wait until the threads end."""
        # The workers still empty the queue, but run nothing more: its end (``None``) comes after the jobs.
        self._table.closed = True
        self._dismiss()
        for thread in self._threads:
            thread.join()
        self._table.completed.clear()


class _Table(Generic[T]):
    """State that the threads share. It must not keep the `WorkerThreads` alive: the threads end when that is freed."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[Any, Callable[[], T]] | None] = queue.SimpleQueue()
        """Jobs that have not started; ``None`` tells a thread to end."""
        self.completed: deque[Completed[T]] = deque()
        self.wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Each entry wakes the waiting caller once, to look at ``completed``; there may be more entries than needed."""
        self.wanted = 1
        self.failed = self.closed = False

    def work(self) -> None:
        while (task := self.jobs.get()) is not None:
            if not self.closed:
                self._do(*task)
            del task  # it refers to shard memory
        self.jobs.put(None)  # stops the next thread

    def _do(self, job: Any, work: Callable[[], T]) -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failure, self.failed = error, True
        self.completed.append(Completed(job, result, failure))
        # Appended before this check, and the caller checks after setting `wanted`: no wake-up is lost.
        if self.failed or len(self.completed) >= self.wanted:
            self.wakeups.put(None)


_NOWHERE = np.empty(0, np.uint8)
"""Stand-in for scratch memory (a thread's own buffer), to compute how a block will lie in it before there is any."""


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Seconds spent on reading and on copying blocks, for a load's statistics; of several threads, the sum."""

    read_s: float
    copy_s: float

    def __add__(self, other: BlockTimes) -> BlockTimes:
        return BlockTimes(self.read_s + other.read_s, self.copy_s + other.copy_s)


@dataclass(frozen=True, slots=True)
class Task:
    """One block (range of a file) to move to shards, and all that can be computed about the move before it is read."""

    block: Block
    tensor: Tensor
    """The stored tensor that the block belongs to."""
    parts: list[CopyPart]
    """What to copy to which shard buffer: the boxes of variables that lie inside the block."""
    grids: Sequence[Grid] = ()
    """For a direct block, which is read straight into shards: one grid for each of ``parts``. It says where contiguous
    bytes of the part begin in the file, how many they are, and to which memory addresses they go."""
    row: int = 0
    """Elements from the start of one row to the next in scratch memory, if rows are padded there; otherwise 0."""
    row_copies: Sequence[RowCopy] = ()
    """For a block that goes through scratch a few rows at a time: for each of ``parts``, the copy to repeat for
    the rows that have just been read. Empty for other blocks."""

    @classmethod
    def of(cls, block: Block, tensor: Tensor, parts: list[CopyPart]) -> Task:
        """Compute all that moving a block needs, before any read: copies empty the CPU's caches and so slow Python."""
        itemsize = tensor.dtype.itemsize
        if block.how == "direct":
            return cls(block, tensor, parts, [grid_of(block, part, itemsize) for part in parts])
        row = pitch_row(block, parts, itemsize) if block.how == "staged" else 0
        row_copies: list[RowCopy] = []
        if block.how == "staged" and block.row_elements:
            flat, rows = _flat(_NOWHERE, block, tensor, row), block.step // block.row_elements
            row_copies = [RowCopy(part, flat, row_elements=block.row_elements, rows=rows) for part in parts]
        return cls(block, tensor, parts, (), row, row_copies)


class BlockCopier:
    """Reads blocks (ranges of files) and copies them into shard buffers; one instance serves all threads of a load."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.overflowed: set[str] = set()
        """Names of tensors in which a cast made finite values infinite. As in JAX and Keras, this is not an error."""
        self._own = threading.local()

    def move(self, task: Task) -> BlockTimes:
        """Read one block and copy it into the shard buffers of the task."""
        overflowed = self.overflowed.add
        try:
            with np.errstate(all="ignore", over="call", call=lambda *_: overflowed(task.block.tensor)):
                return self._move(task)
        except OSError as error:
            if isinstance(error, ShardloadError):  # TransferError is an OSError and already says what failed
                raise
            block = task.block
            raise TransferError(
                f"Cannot read tensor {block.tensor!r}, {exact_bytes(block.read_bytes)} at offset {block.offset} of "
                f"{block.path}: {error}"
            ) from error

    def move_together(self, tasks: Sequence[Task]) -> BlockTimes:
        """Read small neighbouring blocks of a file in one read, and copy each into the shard buffers of its task."""
        first, last = tasks[0].block, tasks[-1].block
        began, n_bytes = time.perf_counter(), last.offset + last.read_bytes - first.offset
        borrowed = self.source.borrow(n_bytes, path=first.path, offset=first.offset)
        whole = BlockMemory(self._scratch(n_bytes) if borrowed is None else borrowed, np.dtype(np.uint8), 0)
        try:
            arrived = n_bytes
            if borrowed is None:
                arrived = self.source.fill(whole, n_bytes, path=first.path, offset=first.offset)
        except OSError as error:
            if isinstance(error, ShardloadError):
                raise
            arrived = 0
        if arrived != n_bytes:
            # One by one, for the error to name the tensor.
            alone = (Task.of(task.block, task.tensor, task.parts) for task in tasks)
            return sum((self.move(task) for task in alone), BlockTimes(0.0, 0.0))
        read, block = time.perf_counter(), first
        with np.errstate(all="ignore", over="call", call=lambda *_: self.overflowed.add(block.tensor)):
            for task in tasks:
                block = task.block  # which the lambda above sees, too
                at = block.offset - first.offset
                flat = BlockMemory(whole.memory[at : at + block.read_bytes], task.tensor.dtype, block.start)
                for part in task.parts:
                    copy(part.target, flat.source(part))
        if borrowed is not None:
            self.source.give_back(n_bytes, path=first.path, offset=first.offset)
        return BlockTimes(read - began, time.perf_counter() - read)

    def _move(self, task: Task) -> BlockTimes:
        block, began = task.block, time.perf_counter()
        if block.how == "direct":
            stop, gap_memory = block.offset + block.read_bytes, self._scratch(block.scratch_bytes)
            wanted = calls(task.grids, start=block.offset, stop=stop, gap_memory=gap_memory)
            received = self.source.scatter(wanted, path=block.path, offset=block.offset)
            self._check(block, block.offset, block.read_bytes, received)
            return BlockTimes(time.perf_counter() - began, 0.0)
        if block.how == "staged":
            return self._stage(task)
        tensor, packed = task.tensor, block.packed
        flat = self._decode(block, tensor) if packed is None else self._unpack(block, tensor, packed)
        read = time.perf_counter()
        for part in task.parts:
            copy(part.target, flat.source(part))
        return BlockTimes(read - began, time.perf_counter() - read)

    def _stage(self, task: Task) -> BlockTimes:
        """Move a staged block: read as much of it as fits into scratch, copy that to the shards, and repeat."""
        block = task.block
        itemsize, elements = task.tensor.dtype.itemsize, block.stop - block.start
        filled: _Staged | None = None
        read_s = copy_s = 0.0
        for step, start in enumerate(range(0, elements, block.step)):
            began = time.perf_counter()
            n_bytes = min(block.step, elements - start) * itemsize
            place: Any = {"path": block.path, "offset": block.offset + start * itemsize}
            # Rows that need padding are copied to scratch, where they get it.
            borrowed = None if task.row else self.source.borrow(n_bytes, **place)
            if borrowed is None:
                # Each fill overwrites the same scratch, so the views of it are made once per block.
                filled = filled or self._staged(task)
                self._check(block, place["offset"], n_bytes, self.source.fill(filled.flat, n_bytes, **place))
            read = time.perf_counter()
            staged = filled if borrowed is None else _Staged.of(task, borrowed)
            assert staged is not None
            staged.copy_step(step)
            if borrowed is not None:
                del staged, borrowed  # views of the memory that is freed now
                self.source.give_back(n_bytes, **place)
            read_s, copy_s = read_s + read - began, copy_s + time.perf_counter() - read
        return BlockTimes(read_s, copy_s)

    def _staged(self, task: Task) -> _Staged:
        padding = task.block.step // task.row * PAD_BYTES if task.row else 0
        return _Staged.of(task, self._scratch(task.block.step * task.tensor.dtype.itemsize + padding))

    def _decode(self, block: Block, tensor: Tensor) -> BlockMemory:
        assert isinstance(tensor.storage, Decoded)
        row = max(1, tensor.size // max(1, tensor.rows))
        first, last = block.start // row, block.stop // row
        # Readers of any installed format run here, so what they return is checked before it is taken apart.
        rows = np.ascontiguousarray(tensor.storage.reader.read_rows(first, last))
        if rows.size != block.stop - block.start or rows.dtype != tensor.dtype:
            raise TransferError(
                f"Cannot decode rows {first} to {last} of tensor {tensor.name!r} in {block.path}: found "
                f"{plural(rows.size, 'element')} of {rows.dtype}, expected {block.stop - block.start} of {tensor.dtype}"
            )
        return BlockMemory(rows.reshape(-1).view(np.uint8), tensor.dtype, block.start)

    def _unpack(self, block: Block, tensor: Tensor, packed: Packed) -> BlockMemory:
        if isinstance(self.source, FileReads) or not packed.n_bytes:
            stored = stored_of(packed)
        else:
            # Units end anywhere in a chunk, but a codec needs all of its bytes in one piece.
            stored = bytearray(packed.n_bytes)
            whole = BlockMemory(np.frombuffer(stored, np.uint8), np.dtype(np.uint8), 0)
            self.source.fill(whole, packed.n_bytes, path=block.path, offset=packed.offset)
        found = packed.codec.decode(stored)
        if found.size != block.stop or found.dtype != tensor.dtype:
            raise TransferError(
                f"Cannot decode the chunk of tensor {tensor.name!r} at byte {packed.offset} of {block.path}: found "
                f"{plural(found.size, 'element')} of {found.dtype}, expected {block.stop} of {tensor.dtype}"
            )
        return BlockMemory(found.reshape(-1).view(np.uint8), tensor.dtype, 0)

    def _scratch(self, n_bytes: int) -> NDArray[np.uint8]:
        held: NDArray[np.uint8] | None = getattr(self._own, "scratch", None)
        if held is None or held.nbytes < n_bytes:
            held = self._own.scratch = memory(n_bytes)
        return held

    @staticmethod
    def _check(block: Block, offset: int, expected: int, received: int) -> None:
        if received != expected:
            raise TransferError(
                f"Cannot read tensor {block.tensor!r}: {block.path} ends early. Found {exact_bytes(received)} at "
                f"offset {offset}, expected {expected}. The file changed while it was read; copy or download it again"
            )


@dataclass(frozen=True, slots=True)
class _Staged:
    """A step of a block in memory, and views of it for the copies from there."""

    task: Task
    flat: BlockMemory
    row_copies: Sequence[tuple[RowCopy, NDArray[Any]]]

    @classmethod
    def of(cls, task: Task, memory: NDArray[np.uint8]) -> _Staged:
        """Make the views of memory that has a whole step, or the last one of a block, which may be shorter."""
        flat = _flat(memory, task.block, task.tensor, task.row)
        return cls(task, flat, [(row_copy, row_copy.source(memory)) for row_copy in task.row_copies])

    def copy_step(self, step: int) -> None:
        """Copy the elements of step number ``step`` to the shards."""
        # Step ``step`` has the rows from ``step * rows`` on. If the last one is short, so are the parts.
        block = self.task.block
        rows = block.step // block.row_elements if self.row_copies else 0
        for row_copy, source in self.row_copies:
            row_copy.move(source, step * rows, step * rows + rows)
        if not self.row_copies:
            for part in self.task.parts:
                copy(part.target, self.flat.source(part))


def _flat(scratch: NDArray[np.uint8], block: Block, tensor: Tensor, row: int) -> BlockMemory:
    """Describe how a block lies in scratch; ``row`` is the elements per row if rows are padded there, and 0 if not."""
    pitch = row + PAD_BYTES // tensor.dtype.itemsize if row else 0
    return BlockMemory(scratch, tensor.dtype, block.start, row, pitch)
