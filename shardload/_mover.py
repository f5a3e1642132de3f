"""What a worker thread does with one block: read it and put every part where it belongs.

Scratch memory belongs to a thread, is reused from block to block and never leaves this module.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardload._ahead import AheadReads
from shardload._buffers import memory
from shardload._fanout import PAD_BYTES, Flat, Lane, Part, copy, grid_of, pitch_row
from shardload._scatter import Call, Grid, calls, scatter_read
from shardload._verified import VerifiedReads
from shardload._whole import stored_of
from shardload.errors import ShardloadError, TransferError
from shardload.manifest import Decoded, Packed, Tensor
from shardload.planner import Block


@dataclass(frozen=True, slots=True)
class Moved:
    """How long blocks took, in seconds of one thread."""

    read_s: float
    copy_s: float

    def plus(self, other: Moved) -> Moved:
        """Both together."""
        return Moved(self.read_s + other.read_s, self.copy_s + other.copy_s)


class Mover:
    """Moves blocks; one instance serves all threads of a transfer.

    Args:
        verified: Where staged and packed blocks come from; files themselves by default.
    """

    def __init__(self, verified: VerifiedReads | AheadReads | None = None) -> None:
        self.verified = verified
        self._own = threading.local()

    def move(self, block: Block, tensor: Tensor, parts: list[Part], fd: int) -> Moved:
        """Read one block into its parts.

        Args:
            block: What to read.
            tensor: The stored tensor it belongs to.
            parts: Where in the shard buffers it goes; all boxes lie inside the block.
            fd: The open file, -1 for what is decoded.

        Raises:
            TransferError: When the file ends early or cannot be read.
            DamagedError: When verified reads find that it is not what was saved.
        """
        try:
            return self._move(block, tensor, parts, fd)
        except OSError as error:
            if isinstance(error, ShardloadError):
                raise
            raise TransferError(
                f"Tensor {block.tensor!r}: cannot read {block.read_bytes} bytes at offset {block.offset} of "
                f"{block.path}: {error}"
            ) from error

    def _move(self, block: Block, tensor: Tensor, parts: list[Part], fd: int) -> Moved:
        began = time.perf_counter()
        if block.how == "direct":
            self._scatter(block, parts, fd, tensor.dtype.itemsize)
            return Moved(time.perf_counter() - began, 0.0)
        if block.how == "staged":
            return self._stage(block, tensor, parts, fd)
        flat = self._decode(block, tensor) if block.packed is None else self._unpack(block, tensor, block.packed)
        read = time.perf_counter()
        for part in parts:
            copy(part.target, flat.source(part))
        return Moved(read - began, time.perf_counter() - read)

    def _scatter(self, block: Block, parts: list[Part], fd: int, itemsize: int) -> None:
        grids = [grid_of(block, part, itemsize) for part in parts]
        stop, junk = block.offset + block.read_bytes, self._scratch(block.scratch_bytes)
        wanted = calls(grids, start=block.offset, stop=stop, junk=junk)
        self._check(block, block.offset, block.read_bytes, scatter_read(fd, wanted, block.offset))

    def _stage(self, block: Block, tensor: Tensor, parts: list[Part], fd: int) -> Moved:
        """Read and fan out one scratch fill after the other."""
        itemsize, elements = tensor.dtype.itemsize, block.stop - block.start
        row = pitch_row(block, parts, itemsize)
        pitch = row + PAD_BYTES // itemsize if row else 0
        padding = block.step // row * PAD_BYTES if row else 0
        flat = Flat(self._scratch(block.step * itemsize + padding), tensor.dtype, block.start, row, pitch)
        rows = block.step // block.lead if block.lead else 0
        lanes = [Lane(part, flat, lead=block.lead, rows=rows) for part in parts] if rows else []
        read_s = copy_s = 0.0
        fills: dict[int, list[Call]] = {}
        for step, start in enumerate(range(0, elements, block.step)):
            began = time.perf_counter()
            n_bytes = min(block.step, elements - start) * itemsize
            offset = block.offset + start * itemsize
            if self.verified is not None:
                self.verified.fill(flat, n_bytes, path=block.path, offset=offset)
            else:
                fill = fills.get(n_bytes) or fills.setdefault(n_bytes, _fill(flat, n_bytes))
                self._check(block, offset, n_bytes, scatter_read(fd, fill, offset))
            read = time.perf_counter()
            for lane in lanes:
                lane.move(step * rows, step * rows + rows)
            if not rows:
                for part in parts:
                    copy(part.target, flat.source(part))
            read_s, copy_s = read_s + read - began, copy_s + time.perf_counter() - read
        return Moved(read_s, copy_s)

    def _decode(self, block: Block, tensor: Tensor) -> Flat:
        assert isinstance(tensor.storage, Decoded)
        row = max(1, tensor.size // max(1, tensor.rows))
        first, last = block.start // row, block.stop // row
        rows = np.ascontiguousarray(tensor.storage.reader.read_rows(first, last))
        if rows.size != block.stop - block.start or rows.dtype != tensor.dtype:
            raise TransferError(
                f"Tensor {tensor.name!r} in {block.path}: rows {first} to {last} should decode to "
                f"{block.stop - block.start} elements of {tensor.dtype}, received {rows.size} of {rows.dtype}"
            )
        return Flat(rows.reshape(-1).view(np.uint8), tensor.dtype, block.start)

    def _unpack(self, block: Block, tensor: Tensor, packed: Packed) -> Flat:
        found = packed.codec.decode(self._stored(block, packed))
        if found.size != block.stop or found.dtype != tensor.dtype:
            raise TransferError(
                f"Tensor {tensor.name!r}: the chunk at byte {packed.offset} of {block.path} should decode to "
                f"{block.stop} elements of {tensor.dtype}, received {found.size} of {found.dtype}"
            )
        return Flat(found.reshape(-1).view(np.uint8), tensor.dtype, 0)

    def _stored(self, block: Block, packed: Packed) -> bytes | bytearray:
        if self.verified is None or not packed.n_bytes:
            return stored_of(packed)
        stored = bytearray(packed.n_bytes)
        flat = Flat(np.frombuffer(stored, np.uint8), np.dtype(np.uint8), 0)
        self.verified.fill(flat, packed.n_bytes, path=block.path, offset=packed.offset)
        return stored

    def _scratch(self, n_bytes: int) -> NDArray[np.uint8]:
        held: NDArray[np.uint8] | None = getattr(self._own, "scratch", None)
        if held is None or held.nbytes < n_bytes:
            held = self._own.scratch = memory(n_bytes)
        return held

    @staticmethod
    def _check(block: Block, offset: int, expected: int, received: int) -> None:
        if received != expected:
            raise TransferError(
                f"Tensor {block.tensor!r}: {block.path} ends early. Expected {expected} bytes at offset {offset}, "
                f"received {received}. The file changed while it was read; copy or download it again"
            )


def _fill(flat: Flat, n_bytes: int) -> list[Call]:
    """How to read ``n_bytes`` into scratch, wherever in the file they are."""
    itemsize = flat.dtype.itemsize
    row_bytes, pitch_bytes = flat.row * itemsize or n_bytes, flat.pitch * itemsize
    grids = Grid.rows(0, flat.memory, n_bytes=n_bytes, row_bytes=row_bytes, pitch_bytes=pitch_bytes)
    found = calls(grids, start=0, stop=n_bytes, junk=flat.memory)
    return [Call(call.entries.copy(), call.n_bytes) for call in found]
