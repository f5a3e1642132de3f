"""How a block (range of a file) lies in scratch memory, and the copies from there: one for each (block, shard).

A block in scratch is flat memory. NumPy strides select the elements of a variable's piece in the variable's own dim
order, so a transpose is an ordinary strided copy::

    scratch   row 0 ────── row_bytes ──────│ 64 │ row 1 ────────────│ 64 │ …        pitch = row + 64 bytes
    transpose shard[c, r] = element c of row r: along its last dim, each next element comes from the next row

Without the padding of 64 bytes, a walk down rows of 4 KiB hits the same few cache sets over and over, at 1.0 GB/s per
core. With padding, it copies 5.4 GB/s (2-byte elements, block of 1 MiB, in L2); tiles would not make it faster.

Copies without a cast use unsigned integers of the element's size: NumPy would convert ``ml_dtypes`` arrays element
by element and hold the GIL. A run of elements that goes to a shard unchanged is copied as one large element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from shardload.manifest import View
from shardload.sharding.layout import Bounds
from shardload.transfer.geometry import Ordered, address, contiguous_run, span
from shardload.transfer.load_plan import Block
from shardload.transfer.preadv import Grid

PITCH_ROW_BYTES = 1 << 10
"""Shortest row of a block, in bytes, that is padded in scratch: shorter ones spread over enough cache sets without
it."""
PAD_BYTES = 64
"""Bytes of padding after each row in scratch: one cache line."""
_UNLOCKED = 500
"""NumPy releases the GIL only while it copies more elements than this."""
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT16 = np.dtype(np.float16)
_FLOAT32 = np.dtype(np.float32)
_UNSEEN_OVERFLOWS = ((_BFLOAT16, _FLOAT16), (np.dtype(np.float64), _BFLOAT16))
"""Casts (from, to) whose overflow NumPy does not report. float32 to bfloat16 is left out: their ranges are alike."""


@dataclass(frozen=True, slots=True)
class CopyPart:
    """One copy to make: which elements of a block (a range of a file) go where in the buffer of one shard."""

    view: View
    box: Bounds
    """The box of the variable's indices to copy."""
    target: NDArray[Any]
    """Where to copy the elements: a view of the shard buffer, with the shape of ``box``."""


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """How a block's elements lie in memory: contiguous, or in rows of ``row`` elements every ``pitch`` elements."""

    memory: NDArray[np.uint8]
    dtype: np.dtype[Any]
    start: int
    """Which element is first in memory, counted from the first element of the tensor or chunk."""
    row: int = 0
    """Elements per row; 0 if all elements are contiguous."""
    pitch: int = 0
    """Elements from the start of one row to the start of the next."""

    def source(self, part: CopyPart) -> NDArray[Any]:
        """Return a NumPy view of the elements to copy for ``part``, in the variable's dim order."""
        return self.window(part.view, part.box.shape, address(part.view, part.box.start) - self.start)

    def window(self, view: View, shape: tuple[int, ...], at: int) -> NDArray[Any]:
        """Return a NumPy view of this memory: ``shape``, from the block's element ``at`` on, by ``view``'s strides."""
        return np.ndarray(shape, self.dtype, self.memory.data, *self.place(view, at))

    def place(self, view: View, at: int) -> tuple[int, tuple[int, ...]]:
        """Return the byte offset of the block's element ``at``, and ``view``'s strides in bytes; both count padding."""
        itemsize = self.dtype.itemsize
        if self.row:
            at = at // self.row * self.pitch + at % self.row
        strides = (t // self.row * self.pitch if self.row and t >= self.row else t for t in view.strides)
        return at * itemsize, tuple(t * itemsize for t in strides)

    def write(self, data: NDArray[Any], at: int) -> None:
        """Copy ``data``, the block's bytes from byte ``at`` on, into this memory; skip the padding after each row."""
        itemsize = self.dtype.itemsize
        row, pitch = self.row * itemsize, self.pitch * itemsize
        if not row:
            self.memory[at : at + data.size] = data
            return
        # The rest of a row that was begun, whole rows at once, the beginning of another one.
        head = min(-at % row, data.size)
        start = at // row * pitch + at % row
        self.memory[start : start + head] = data[:head]
        first, rows = -(-at // row), (data.size - head) // row
        if rows:
            whole = np.ndarray((rows, row), np.uint8, self.memory.data, first * pitch, (pitch, 1))
            whole[...] = data[head : head + rows * row].reshape(rows, row)
        tail = data[head + rows * row :]
        start = (first + rows) * pitch
        self.memory[start : start + tail.size] = tail


class RowCopy:
    """Copies one part of a block to a shard, a few rows at a time; it is created before scratch has an address."""

    def __init__(self, part: CopyPart, flat: BlockMemory, *, row_elements: int, rows: int) -> None:
        start = address(part.view, part.box.start) - flat.start
        shape = list(part.box.shape)
        dims = enumerate(zip(part.view.shape, part.view.strides, strict=True))
        # The planner makes sure that exactly one dim steps from row to row (`Planner._row_elements`).
        dim = next(d for d, (n, t) in dims if n > 1 and t == row_elements)
        self.first = start // row_elements
        self.last = self.first + shape[dim]
        shape[dim] = rows
        order = (dim, *(d for d in range(len(shape)) if d != dim))
        # Rows first, on both sides: `move` then takes a range of them with one slice.
        self.target = part.target.transpose(order)
        self.offset, strides = flat.place(part.view, start % row_elements)
        self.shape, self.strides = tuple(shape[d] for d in order), tuple(strides[d] for d in order)
        self.dtype = flat.dtype
        self.is_cast = part.target.dtype != flat.dtype
        bits = _UNSIGNED.get(flat.dtype.itemsize)
        if not self.is_cast and bits is not None:
            # Elements are copied as unsigned integers, or as runs of them.
            if (run := _run(self.target, self.shape, self.strides)) is not None:
                self.shape = (*self.shape[:-1], self.shape[-1] * flat.dtype.itemsize // run.itemsize)
                self.strides = (*self.strides[:-1], run.itemsize)
            self.dtype = np.dtype(bits) if run is None else run
            self.target = self.target.view(self.dtype)

    def source(self, scratch: NDArray[np.uint8]) -> NDArray[Any]:
        """Return a NumPy view of this part's elements in ``scratch``: of as many rows as are there.

        The last step of a block may end within a row, behind the last element that is needed.
        """
        inner = sum((n - 1) * stride for n, stride in zip(self.shape[1:], self.strides[1:], strict=True) if stride > 0)
        fitting = (scratch.nbytes - self.offset - inner - self.dtype.itemsize) // self.strides[0] + 1
        rows = max(0, min(self.shape[0], fitting))
        offset = self.offset if rows else 0
        return np.ndarray((rows, *self.shape[1:]), self.dtype, scratch.data, offset, self.strides)

    def move(self, source: NDArray[Any], start: int, stop: int) -> None:
        """Copy this part's elements of the block's rows ``start`` to ``stop``; row ``start`` is row 0 of ``source``."""
        a, b = max(start, self.first), min(stop, self.last)
        if a >= b:
            return
        target, source = self.target[a - self.first : b - self.first], source[a - start : b - start]
        if target.shape != source.shape:  # NumPy would copy a single row into all
            raise ValueError(f"rows {a} to {b} of a block should be {target.shape}, but {source.shape} are in memory")
        if self.is_cast:
            copy(target, source)
        else:
            target[...] = source


def _run(target: NDArray[Any], shape: tuple[int, ...], strides: tuple[int, ...]) -> np.dtype[np.void] | None:
    """Return a dtype whose elements are as long as a run of contiguous elements, so that NumPy copies a run as one.

    NumPy releases the GIL only if it copies more than `_UNLOCKED` elements. If there are too few runs for this, they
    are halved until there are enough. ``None`` if no elements are contiguous, or if halving does not yield enough runs.
    """
    itemsize = target.itemsize
    if len(shape) < 2 or target.strides[-1] != itemsize or strides[-1] != itemsize:
        return None
    length, count = shape[-1], math.prod(shape) // max(1, shape[-1])
    while count <= _UNLOCKED and length % 2 == 0:
        length, count = length // 2, count * 2
    return np.dtype((np.void, length * itemsize)) if length > 1 and count > _UNLOCKED else None


def pitch_row(block: Block, parts: list[CopyPart], itemsize: int) -> int:
    """Return the elements per row of scratch if a copy is faster with padding after each row; 0 if it is not."""
    view, box = parts[0].view, parts[0].box
    long = [d for d, n in enumerate(box.shape) if n > 1]
    row = view.strides[long[-1]] if long else 0
    # A fill is whole rows of ``row_elements``, so rows of scratch must divide them.
    if row * itemsize < PITCH_ROW_BYTES or PAD_BYTES % itemsize or block.row_elements % row:
        return 0
    return row if all(_keeps_rows(part, row, block.start) for part in parts) else 0


def _keeps_rows(part: CopyPart, row: int, start: int) -> bool:
    pairs = [(n, t) for n, t in zip(part.box.shape, part.view.strides, strict=True) if n > 1]
    if any(t > row and t % row for _, t in pairs):
        return False
    # A part that ran over the end of a row would have padding in its middle.
    inside = span(*zip(*[p for p in pairs if p[1] < row], strict=True)) if any(t < row for _, t in pairs) else 1
    return (address(part.view, part.box.start) - start) % row + inside <= row


def grid_of(block: Block, part: CopyPart, itemsize: int) -> Grid:
    """Return, for a direct read, where each contiguous run of a part is in the file, and where it goes in the shard."""
    ordered = Ordered.of(part.view, part.box)
    buffer = tuple(part.target.strides[d] // itemsize for d in ordered.order)
    length, outer = contiguous_run(ordered.shape, ordered.strides, buffer)
    return Grid(
        block.offset + (ordered.offset - block.start) * itemsize,
        part.target.ctypes.data,
        length * itemsize,
        ordered.shape[:outer],
        tuple(t * itemsize for t in ordered.strides[:outer]),
        tuple(t * itemsize for t in buffer[:outer]),
    )


def copy(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Copy like ``target[...] = source.astype(target.dtype)``, bit for bit, releasing the GIL where possible.

    If finite values become infinite, an overflow is reported in the way that the caller's `numpy.errstate` sets.
    """
    if target.dtype == source.dtype:
        bits = _UNSIGNED.get(target.dtype.itemsize)
        if bits is None:
            target[...] = source
        else:
            target.view(bits)[...] = source.view(bits)
    elif source.dtype == _BFLOAT16 and target.dtype == _FLOAT32:  # ml_dtypes' own cast holds the GIL
        # A bfloat16 is the upper half of the float32 with the same value: widening is a shift.
        wide = target.view(np.uint32)
        wide[...] = source.view(np.uint16)
        np.left_shift(wide, 16, out=wide)
    elif _same_order(target, source):
        target[...] = source
        _check_overflow(target, source)
    else:
        # In two passes where the orders differ: the cast runs along memory, the transpose is a copy of integers.
        cast = source.astype(target.dtype)
        _check_overflow(cast, source)
        copy(target, cast)


def _check_overflow(target: NDArray[Any], source: NDArray[Any]) -> None:
    if (source.dtype, target.dtype) not in _UNSEEN_OVERFLOWS and not target.dtype.name.startswith("float8"):
        return
    infinite = ~np.isfinite(target)  # of float8, some dtypes have no infinity, and overflow to NaN
    if infinite.any() and np.isfinite(source[infinite]).any() and callable(report := np.geterrcall()):
        report("overflow", 1)


def _same_order(target: NDArray[Any], source: NDArray[Any]) -> bool:
    order = sorted(range(target.ndim), key=lambda d: -target.strides[d])
    strides = [source.strides[d] for d in order if source.shape[d] > 1]
    return strides == sorted(strides, reverse=True)
