"""Carry out a `LoadPlan`: read blocks (ranges of files), copy them to shards (`workers`), place these (`placement`).

The calling thread submits blocks in file order and places variables as they complete. A few worker threads
read and copy, and release the GIL while they do::

    caller    map shards ─ prepare blocks ─ submit block ─ … ─ variable complete ─► jax.Array ─► on_ready(name, array)
    workers        read block ─► shard buffers        (direct blocks: without scratch memory in between)

A variable is placed in one of two ways:

* ``adopt`` (CPU devices): a shard buffer becomes the device's memory, and does not count against the budget.
* ``upload`` (accelerators): a shard buffer is copied to the device, and counts against the budget until that is done;
  then other variables use its memory (clearing fresh pages for each took a third of the time). A
  variable larger than its part of the budget is uploaded in pieces. Casts to a wider dtype run on the device, so that
  fewer bytes cross the bus; all other casts run on the host.

Deadlock cannot happen: a block is submitted only when all the memory that it needs has been taken, and the pieces that
are being filled at a time fit into half of the budget.

Imports JAX: import this module only when a transfer is about to start.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from shardload.errors import BudgetError
from shardload.manifest import Manifest
from shardload.sharding.layout import Bounds
from shardload.stores.store import UNIT_BYTES
from shardload.transfer.budgets import SCRATCH_BYTES
from shardload.transfer.byte_source import Verifier, source_kind
from shardload.transfer.casts import needs_64_bits
from shardload.transfer.direct_io import ALIGNMENT, DIRECT_THREADS, PIECE_BYTES, DirectReads
from shardload.transfer.encoded_variables import EncodedVariable
from shardload.transfer.encoding import Output
from shardload.transfer.host_memory import Budget, UploadBuffer, UploadMemory, arena_bytes, zeroed_memory
from shardload.transfer.load_plan import BUDGET_PARTS, Binding, Block, LoadPlan, local_bounds
from shardload.transfer.placement import (
    Chunk,
    IncrementalArray,
    UploadedPiece,
    VariableTransfer,
    assemble,
    check_devices,
    encoded_chunks,
    limited_chunks,
    named_sharding,
    place,
    whole_chunks,
    widen,
    widens_on_device,
)
from shardload.transfer.sources import byte_source
from shardload.transfer.workers import BlockCopier, BlockTimes, Task, WorkerThreads, default_threads
from shardload.units import exact_bytes

__all__ = ["TransferMode", "TransferStats", "execute", "named_sharding", "place"]

_QUEUED_PER_THREAD = 4
"""Most jobs per thread that are submitted and not finished. A job reads and copies blocks. One of a thread's jobs runs;
the others wait, so that the thread has work while the caller is busy. All threads together have at most `BUDGET_PARTS`
such jobs: each may take one of the parts into which the host-memory budget is divided."""
_JOB_BYTES = 4 << 20
"""Most bytes that one job reads, if it moves many short blocks: 1 ms of reading and copying for 0.1 ms of Python. Small
plans have smaller jobs, so that every thread gets several."""
PREPARED = 1024
"""How many staged blocks (which pass through scratch memory) to prepare before the first read. That takes 16 µs and 2
kB each; during the reads, it would take 100 µs, because copying empties the CPU's caches. (Direct blocks take longer to
prepare: not worth it.)"""
_MISALIGNED = 8
"""Added to the addresses of buffers that CPU devices should copy: they would adopt aligned memory."""
_PLACED_TOGETHER = 32
"""Number of complete variables to place on devices together: each takes 0.1 ms then, 0.4 ms if placed on its own."""

TransferMode = Literal["auto", "adopt", "upload"]


@dataclass(frozen=True, slots=True)
class TransferStats:
    """How many bytes a load has read, and how much time and memory that took: for the load's report."""

    read_bytes: int
    direct_bytes: int
    """Bytes read straight into the memory of shards, without a copy through scratch memory."""
    peak_staging_bytes: int
    """Most bytes of host memory in use at a time for reading, decoding and uploading. Buffers that become the devices'
    memory do not count."""
    read_s: float
    """Seconds of reading and decoding, summed over threads."""
    copy_s: float
    """Seconds of copying from scratch to shards and casting, summed over threads."""
    wall_s: float
    cpu_s: float
    """CPU seconds of the whole process during the transfer."""
    threads: int
    placement: TransferMode
    overflowed: tuple[str, ...] = ()
    """Names of tensors in which a cast made finite values infinite."""


def execute(
    plan: LoadPlan,
    manifest: Manifest,
    *,
    devices: Sequence[Any],
    on_ready: Callable[[str, Any], None],
    on_start: Callable[[str], None] | None = None,
    progress: Callable[[int], None] | None = None,
    threads: int | None = None,
    placement: TransferMode = "auto",
    check: Verifier | None = None,
    shardings: Mapping[str, Any] | None = None,
    direct: bool = False,
) -> TransferStats:
    """Read the blocks of a plan and pass each complete variable, as a sharded array, to ``on_ready`` on this thread.

    Args:
        plan: What to read, and where to put it.
        manifest: The manifest the plan was made from.
        devices: One per mesh position, in order.
        on_ready: Called with name and array when a variable is complete.
        on_start: Called with a variable's name before memory is allocated for it, to release the value it replaces.
        progress: Called with the number of bytes read since the last call.
        threads: Worker threads; see `default_threads`.
        placement: ``adopt``: host buffers become device memory; ``upload``: devices get a copy; ``auto``: by platform.
        check: Verifies the bytes read against the checkpoint's digests; None if it has none.
        shardings: Sharding objects for the arrays, by variable name; `named_sharding` makes the others. Each must place
            the shards as the variable's layout does, in the devices' default memory.
        direct: Read local files past the page cache. The plan was made with ``scatter=False``, and ``check`` is None.
    """
    if direct:
        threads = threads or max(DIRECT_THREADS, default_threads())
    if plan.bindings:
        check_devices(plan.bindings[0].layout.mesh, devices)
    narrowed = {dtype for dtype in {b.dtype for b in plan.bindings} if jax.dtypes.canonicalize_dtype(dtype) != dtype}
    for binding in plan.bindings:
        if binding.dtype in narrowed:
            raise needs_64_bits(binding.name, binding.dtype)
    plan.check_files(manifest)
    if placement == "auto":
        placement = "adopt" if all(d.platform == "cpu" for d in devices) else "upload"
    began, cpu = time.perf_counter(), time.process_time()
    options: Any = {
        "threads": threads or default_threads(),
        "check": check,
        "shardings": shardings or {},
        "direct": direct,
    }
    transfer = Transfer(plan, manifest, devices, placement, **options)
    try:
        transfer.run(on_ready, on_start or (lambda _: None), progress or (lambda _: None))
    finally:
        transfer.close()
    return TransferStats(
        read_bytes=transfer.source.read_bytes(plan.blocks),
        direct_bytes=plan.direct_bytes,
        peak_staging_bytes=transfer.budget.peak_bytes,
        read_s=transfer.read_s,
        copy_s=transfer.copy_s,
        wall_s=time.perf_counter() - began,
        cpu_s=time.process_time() - cpu,
        threads=transfer.threads,
        placement=placement,
        overflowed=tuple(sorted(transfer.copier.overflowed)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Upload:
    """Arrays on their way to the devices, and the host memory that JAX reads until they are ready."""

    arrays: Sequence[Any]
    buffer: UploadBuffer | None
    n_bytes: int
    """Bytes to give back to the budget when they are ready."""
    then: Callable[[], None] | None
    """What to do when they are ready."""


class Transfer:
    """Carries out a `LoadPlan`, once. Jobs (reads, copies) run in `WorkerThreads`, all else in the calling thread."""

    def __init__(
        self,
        plan: LoadPlan,
        manifest: Manifest,
        devices: Sequence[Any],
        placement: str,
        *,
        threads: int,
        check: Verifier | None,
        shardings: Mapping[str, Any],
        direct: bool,
    ) -> None:
        self.plan, self.manifest, self.devices, self.placement = plan, manifest, devices, placement
        self.budget = Budget(plan.host_memory_bytes)
        self.read_s = self.copy_s = 0.0
        scratch = plan.scratch_bytes + (0 if source_kind(plan, check) == "files" and not plan.is_cached else UNIT_BYTES)
        scratch += (PIECE_BYTES + ALIGNMENT) if direct else 0
        # Scratch gets a quarter of the budget at most; where that is too little, fewer threads run.
        most = min(self.budget.limit_bytes // 4, SCRATCH_BYTES)
        self.threads = max(1, min(threads, most // scratch)) if scratch else max(1, threads)
        self.source = DirectReads() if direct else byte_source(plan, check, threads=self.threads)
        self._must_take(self.threads * scratch + self.source.shared_bytes, "Scratch memory")
        self.uploads: deque[_Upload] = deque()
        self.copier = BlockCopier(self.source)
        self.variables = self._variables()
        decoded = max((block.host_bytes for block in plan.blocks if block.is_decoded), default=0)
        free = self.budget.limit_bytes - self.budget.taken_bytes - decoded
        # The chunk that each (block, piece) belongs to.
        if placement == "adopt":
            self.chunks = whole_chunks(plan.blocks, self.variables)
            # Mapping memory later would wait for the threads that touch it for the first time, and then block them.
            for chunk in dict.fromkeys(self.chunks.values()):
                self._take(chunk)
        else:
            self.chunks = limited_chunks(plan.blocks, self.variables, plan.bindings, free_bytes=free)
        self.chunks |= encoded_chunks(plan.blocks, self.variables, manifest.tensors, free_bytes=free)
        distinct = {id(v): v for v in self.variables}.values()
        staged = [v for v in distinct if placement == "upload" or v.encoded is not None]
        total = sum(arena_bytes([b.shape for b in v.shards], v.staged) for v in staged)
        on_cpu = any(device.platform == "cpu" for device in devices)
        self.upload_memory = UploadMemory(max(0, min(free, total)), misaligned=_MISALIGNED if on_cpu else 0)
        self.complete: list[Chunk] = []
        self.encoded: list[tuple[VariableTransfer, EncodedVariable]] = []
        """Variables that are encoded completely, to be placed together."""
        self.moving = threading.Lock()
        # Buffers of what is staged are taken when a block is submitted, so its destinations are unknown before.
        alone = (run.start for run in plan.runs if len(run) == 1)
        early = (index for index in alone if plan.blocks[index].how == "staged" and self._has_memory(index))
        self.tasks = {index: self._task_of(index) for index in itertools.islice(early, PREPARED)}
        self.shardings = shardings
        self.sharding_of_layout = functools.cache(lambda layout: named_sharding(layout, devices))
        self.workers = WorkerThreads[BlockTimes](self.threads)  # last: a failure before this leaves no thread behind

    def run(
        self, on_ready: Callable[[str, Any], None], on_start: Callable[[str], None], progress: Callable[[int], None]
    ) -> None:
        """Read all blocks and pass each complete variable to ``on_ready``; return when the last upload has finished."""
        self.on_ready, self.on_start, self.progress = on_ready, on_start, progress
        # Without elements to load, so no block completes them.
        for variable in {id(v): v for v in self.variables}.values():
            if not variable.chunks_left:
                self._place(Chunk(variable, Bounds.whole(variable.binding.view.shape)))
        most = min(self.threads * _QUEUED_PER_THREAD, BUDGET_PARTS)
        for job in self._jobs():
            if self.workers.in_flight >= most:
                # Half of them at once: whenever the caller wakes, it takes a core from the workers.
                self._complete(at_least=most // 2)
            self._submit(job)
        while self.workers.in_flight:
            self._complete(at_least=self.workers.in_flight - self.threads + 1)
            self._place_complete()  # a core is free
        while self.uploads:
            self._finish_upload()
        self._finish_encoded()

    def close(self) -> None:
        """Stop the workers, close all files and drop references to shard memory; needed after an error too."""
        try:
            self.source.cancel()
            self.workers.close()
        finally:  # after the workers: a closed number may be reused by another file while a read uses it
            self.source.close()
        # A caught error keeps its traceback, whose frames refer to this object: shard memory must not live as long.
        self.variables.clear()
        self.tasks.clear()
        self.chunks.clear()
        self.complete.clear()
        self.encoded.clear()
        self.uploads.clear()

    def _variables(self) -> list[VariableTransfer]:
        """Return the variable that each binding fills; several bindings may fill one array."""
        parts: dict[str | int, list[Binding]] = {}
        for i, binding in enumerate(self.plan.bindings):
            parts.setdefault(i if binding.box is None else binding.name, []).append(binding)
        found = {key: self._variable(of_array) for key, of_array in parts.items()}
        return [found[i if b.box is None else b.name] for i, b in enumerate(self.plan.bindings)]

    def _variable(self, parts: Sequence[Binding]) -> VariableTransfer:
        stored, binding = {self.manifest.tensors[part.view.tensor].dtype for part in parts}, parts[0]
        if binding.encoding is not None:
            shards = local_bounds(binding.layout, binding.view.shape, self.plan.positions)
            encoded = EncodedVariable(binding, self.plan.positions)
            return VariableTransfer(binding, shards, binding.dtype, encoded=encoded)
        widens = self.placement == "upload" and len(stored) == 1 and widens_on_device(min(stored), binding.dtype)
        shards = local_bounds(binding.layout, binding.view.shape, self.plan.positions)
        padded = sum(part.filled.size for part in parts) < math.prod(binding.view.shape)
        return VariableTransfer(binding, shards, min(stored) if widens else binding.dtype, padded=padded)

    def _has_memory(self, index: int) -> bool:
        return all(self.chunks[index, p].buffers for p in range(len(self.plan.blocks[index].pieces)))

    def _jobs(self) -> Iterator[list[range]]:
        """Yield the jobs for the threads: lists of runs (ranges of blocks read together). Short runs share a job."""
        # In a small plan, jobs are small enough for every thread to get several.
        share = self.plan.read_bytes // (self.threads * _QUEUED_PER_THREAD * 2)
        most = min(_JOB_BYTES, share, self.plan.block_bytes, self.budget.limit_bytes // BUDGET_PARTS)
        job: list[range] = []
        n_bytes = 0
        for run in self.plan.runs:
            run_bytes = sum(block.read_bytes for block in self._blocks(run))
            free = self.placement == "adopt" and not self.plan.blocks[run.start].is_decoded
            if job and (n_bytes + run_bytes > most or not free):
                yield job
                job, n_bytes = [], 0
            job.append(run)
            n_bytes += run_bytes if free else most
        if job:
            yield job

    def _blocks(self, run: range) -> tuple[Block, ...]:
        return self.plan.blocks[run.start : run.stop]

    def _submit(self, job: list[range]) -> None:
        # Memory is taken and files are opened here, on the calling thread; workers only read and copy.
        moves = [self._move_of(run) for run in job]
        self.workers.submit(job, lambda: sum((move() for move in moves), BlockTimes(0.0, 0.0)))

    def _move_of(self, run: range) -> Callable[[], BlockTimes]:
        first = self.plan.blocks[run.start]
        for index, block in enumerate(self._blocks(run), run.start):
            for p in range(len(block.pieces)):
                self._open(self.chunks[index, p])
        if first.is_decoded:
            self._must_take(first.host_bytes, f"A block of tensor {first.tensor!r}")
        else:
            self.source.open(first.path)
        ready = self.tasks.pop(run.start, None)
        chunks = [self.chunks[index, p] for index in run for p in range(len(self.plan.blocks[index].pieces))]
        to_encode = [chunk for chunk in chunks if chunk.variable.encoded is not None]

        def move() -> BlockTimes:
            tasks = [ready] if ready else [self._task_of(index, alone=len(run) == 1) for index in run]
            for task in tasks:
                self.source.check(task.block, task.tensor)
            moved = self.copier.move(tasks[0]) if len(tasks) == 1 else self.copier.move_together(tasks)
            for task in tasks:
                self.source.release(task.block)
            return moved + self._encode(to_encode) if to_encode else moved

        return move

    def _encode(self, chunks: Sequence[Chunk]) -> BlockTimes:
        """Note a moved block for each of ``chunks``, and encode those that are complete; called on the threads."""
        began = time.perf_counter()
        for chunk in chunks:
            with self.moving:
                chunk.unmoved -= 1
                complete = not chunk.unmoved
            if complete:
                chunk.encode()
        return BlockTimes(0.0, time.perf_counter() - began)

    def _task_of(self, index: int, *, alone: bool = True) -> Task:
        block = self.plan.blocks[index]
        parts = [
            part for p, piece in enumerate(block.pieces) for part in self.chunks[index, p].parts(piece, by_rows=alone)
        ]
        tensor = self.manifest.tensors[block.tensor]
        return Task.of(block, tensor, parts) if alone else Task(block, tensor, parts)

    def _open(self, chunk: Chunk) -> None:
        variable = chunk.variable
        if not variable.started:
            variable.started = True
            for output in variable.binding.outputs:
                self.on_start(output.name)
            if variable.encoded is not None:
                # Where devices have memory of their own, what is uploaded in pieces is never whole on the host.
                variable.encoded.take_memory(first=self.placement == "adopt" or variable.chunks_left == 1)
        if not chunk.buffers:
            self._take(chunk)

    def _take(self, chunk: Chunk) -> None:
        n_bytes = 0
        if self.placement == "upload" or chunk.variable.encoded is not None:
            n_bytes = arena_bytes([box.shape for box in chunk.common.values()], chunk.variable.staged)
        if not n_bytes:
            chunk.take_memory(zeroed_memory if chunk.variable.padded else None)
            return
        if self.placement == "upload" and chunk.variable.encoded is not None:
            chunk.result_bytes = (
                chunk.variable.encoded.nbytes * chunk.box.size // math.prod(chunk.variable.binding.view.shape)
            )
        self._must_take(n_bytes + chunk.result_bytes, f"A piece of variable {chunk.variable.binding.name!r}")

        def allocate(wanted: int) -> NDArray[np.uint8]:
            while (buffer := self.upload_memory.take(n_bytes)) is None and self.uploads:
                self._finish_upload()
            chunk.upload = buffer or self.upload_memory.take_apart(n_bytes)
            if not chunk.blocks_left:  # a shard without anything to load is all zero
                chunk.upload.memory[:wanted] = 0
            return chunk.upload.memory[:wanted]

        chunk.take_memory(allocate)

    def _must_take(self, n_bytes: int, what: str) -> None:
        """Take ``n_bytes`` from the budget for ``what``; while there is no room, wait for jobs and uploads to end."""
        while not self.budget.try_take(n_bytes, what=what):
            if self.uploads:
                self._finish_upload()
            elif self.workers.in_flight:
                self._complete()
            else:
                raise BudgetError(
                    f"{what} needs {exact_bytes(n_bytes)} of host memory, but {self.budget.taken_bytes} of the "
                    f"{exact_bytes(self.budget.limit_bytes)} in the budget are in use. Raise it to at least "
                    f"{exact_bytes(self.budget.taken_bytes + n_bytes)}"
                )

    def _complete(self, at_least: int = 1) -> None:
        for done in self.workers.collect(at_least):
            if done.error is not None:
                raise done.error
            assert done.result is not None
            self.read_s += done.result.read_s
            self.copy_s += done.result.copy_s
            indices = range(done.job[0].start, done.job[-1].stop)
            for index in indices:
                block = self.plan.blocks[index]
                if block.is_decoded:
                    self.budget.give_back(block.host_bytes)
                for p in range(len(block.pieces)):
                    chunk = self.chunks.pop((index, p))
                    chunk.blocks_left -= 1
                    if not chunk.blocks_left:
                        self.complete.append(chunk)
            self.progress(sum(self.plan.blocks[index].read_bytes for index in indices))
            encoded = any(chunk.variable.encoded is not None for chunk in self.complete)
            if encoded or self.placement == "upload" or len(self.complete) >= _PLACED_TOGETHER:
                self._place_complete()
            if len(self.encoded) >= _PLACED_TOGETHER // 2:  # two or more arrays each
                self._finish_encoded()
            # Free without waiting: budget that is returned early keeps the workers busy.
            while self.uploads and all(a.is_ready() for a in self.uploads[0].arrays):
                self._finish_upload()

    def _place_complete(self) -> None:
        chunks, self.complete = self.complete, []
        for chunk in chunks:
            self._place(chunk)

    def _place(self, chunk: Chunk) -> None:
        variable, binding = chunk.variable, chunk.variable.binding
        if variable.encoded is not None:
            self._place_encoded(chunk, variable.encoded)
            return
        sharding = self.shardings.get(binding.name, None) or self.sharding_of_layout(binding.layout)
        then = None
        if chunk.box == Bounds.whole(binding.view.shape):
            self._open(chunk)  # no block has, if the variable has no elements
            array = assemble(binding.view.shape, sharding, {s: memory for s, (_, memory) in chunk.buffers.items()})
            uploaded = [array]
            array = array if variable.staged == binding.dtype else widen(array, dtype=binding.dtype)
            self.on_ready(binding.name, array)
        else:
            variable.incremental = variable.incremental or IncrementalArray(binding.view.shape, binding.dtype, sharding)
            pieces = variable.incremental.upload(chunk.buffers)
            uploaded = [piece.array for piece in pieces]
            then = functools.partial(self._write, variable, pieces)
        # Not given back yet: JAX reads the buffers until the transfer to the device has finished.
        if chunk.upload is not None:
            self.uploads.append(_Upload(uploaded, chunk.upload, chunk.upload.n_bytes, then))
        # JAX keeps what it adopted; everything else is free now.
        chunk.buffers, chunk.stack, chunk.upload = {}, None, None

    def _place_encoded(self, chunk: Chunk, encoded: EncodedVariable) -> None:
        """Free the memory of an encoded chunk, and pass on what was computed if the chunk was the last one."""
        pieces_of_shards = chunk.results
        assert chunk.upload is not None
        self.upload_memory.give_back(chunk.upload)
        self.budget.give_back(chunk.upload.n_bytes)
        chunk.buffers, chunk.stack, chunk.upload, chunk.results = {}, None, None, []
        variable = chunk.variable
        if pieces_of_shards:
            output = encoded.binding.outputs[0]
            if variable.incremental is None:
                variable.incremental = IncrementalArray(output.shape, output.dtype, self._sharding(output))
            pieces = [one for shards in pieces_of_shards for one in variable.incremental.upload(shards)]
            then = functools.partial(self._write_encoded, variable, encoded, pieces)
            self.uploads.append(_Upload([one.array for one in pieces], None, chunk.result_bytes, then))
            return
        encoded.boxes_left -= 1
        if not encoded.boxes_left:
            self.encoded.append((variable, encoded))
        self.budget.give_back(chunk.result_bytes)

    def _write_encoded(
        self, variable: VariableTransfer, encoded: EncodedVariable, pieces: Sequence[UploadedPiece]
    ) -> None:
        assert variable.incremental is not None
        variable.incremental.write(pieces)
        encoded.boxes_left -= 1
        if not encoded.boxes_left:
            self.encoded.append((variable, encoded))

    def _finish_encoded(self) -> None:
        """Pass the variables that were computed from complete ones to ``on_ready``."""
        done, self.encoded = self.encoded, []
        for variable, encoded in done:
            for output, shards in zip(encoded.binding.outputs, encoded.shards, strict=True):
                if output.constant is not None:
                    array = place(output.constant, output.layout, self.devices)
                elif not shards:
                    assert variable.incremental is not None
                    array, variable.incremental = variable.incremental.finish(), None
                else:
                    array = assemble(output.shape, self._sharding(output), shards)
                self.on_ready(output.name, array)
            encoded.shards.clear()

    def _sharding(self, output: Output) -> NamedSharding:
        found: NamedSharding = self.shardings.get(output.name) or self.sharding_of_layout(output.layout)
        return found

    def _write(self, variable: VariableTransfer, pieces: Sequence[UploadedPiece]) -> None:
        assert variable.incremental is not None
        variable.incremental.write(pieces)
        variable.chunks_left -= 1
        if not variable.chunks_left:
            self.on_ready(variable.binding.name, variable.incremental.finish())
            variable.incremental = None

    def _finish_upload(self) -> None:
        upload = self.uploads.popleft()
        for array in upload.arrays:
            array.block_until_ready()
        if upload.buffer is not None:
            self.upload_memory.give_back(upload.buffer)
        self.budget.give_back(upload.n_bytes)
        if upload.then is not None:
            upload.then()
