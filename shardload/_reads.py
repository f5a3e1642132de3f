"""What is read at once, how it is moved, and where it goes; see `shardload.planner` for the picture.

Planning goes tensor by tensor: all views of a tensor are cut at the same rows (`_blocks.cut`), ranges that touch are
joined into one read as long as it stays short, and the way to move them follows from the worst of its variables.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shardload._blocks import SKIP_BYTES, Ordered, address, cut, is_injective, lead_stride, shard_run, span
from shardload._casts import check_cast
from shardload.bounds import Bounds
from shardload.errors import BudgetError, LayoutError, MismatchError
from shardload.layout import Layout
from shardload.manifest import Decoded, Extent, Manifest, Tensor, View

BLOCK_BYTES = 16 << 20
"""Longest block; see the module docstring."""
STAGED_BYTES = 1 << 20
"""One scratch fill: half an L2 of 2 MiB, all of one of 1 MiB; 5 GB/s per core transposed, 3 at 8 MiB."""
DECODED_BYTES = 2 << 20
"""Longest decoded block, unless the reader's unit is longer."""
DIRECT_RUN_BYTES = 512
"""Shortest run worth its own entry in a scatter read (35 ns); below, two cached copies are as fast."""
MIN_BLOCK_BYTES = 4 << 10
"""One page; a budget that cannot hold sixteen of them is refused."""
BUDGET_PARTS = 16
"""A staged or uploaded block takes at most this fraction of the budget, so that several are in flight."""

How = Literal["direct", "staged", "decoded"]


@dataclass(frozen=True, slots=True)
class Target:
    """One variable to fill."""

    name: str
    view: View
    """Which elements of which tensor; ``view.shape`` is the variable's shape."""
    dtype: np.dtype[Any]
    layout: Layout


@dataclass(frozen=True, slots=True)
class Piece:
    """What one block holds of one variable."""

    target: int
    """Index into the plan's targets."""
    box: Bounds
    """In the variable's index space."""


@dataclass(frozen=True, slots=True)
class Block:
    """One read."""

    tensor: str
    path: str
    """The file it comes from (of a decoded tensor, the first)."""
    offset: int
    """Byte offset in the file; meaningful for extents only."""
    start: int
    """First element of the tensor."""
    stop: int
    """One past the last element."""
    read_bytes: int
    """What it reads from disk (encoded bytes for a decoded tensor)."""
    host_bytes: int
    """Memory it takes besides shard buffers: none for ``direct``."""
    lead: int
    """Elements per row of all its pieces, when a staged block can be moved some rows at a time, else 0."""
    step: int
    """Elements that go through scratch at a time: a multiple of ``lead``, else the whole block."""
    how: How
    pieces: tuple[Piece, ...]

    @property
    def gap_bytes(self) -> int:
        """Bytes a direct read passes over, all together."""
        wanted = sum(piece.box.size for piece in self.pieces) if self.how == "direct" else self.stop - self.start
        return self.read_bytes * (self.stop - self.start - wanted) // max(1, self.stop - self.start)

    @property
    def scratch_bytes(self) -> int:
        """Memory the thread that moves it needs."""
        return {"direct": min(SKIP_BYTES, self.gap_bytes), "staged": self.host_bytes, "decoded": 0}[self.how]


def local_bounds(target: Target, positions: Iterable[int]) -> tuple[Bounds, ...]:
    """The distinct shards of a variable that the given mesh positions hold."""
    return _local_bounds(target.layout, target.view.shape, tuple(positions))


@functools.lru_cache(maxsize=1024)
def _local_bounds(layout: Layout, shape: tuple[int, ...], positions: tuple[int, ...]) -> tuple[Bounds, ...]:
    everywhere = layout.bounds(shape)
    return tuple(dict.fromkeys(everywhere[p] for p in positions))


def paths_of(tensor: Tensor) -> tuple[str, ...]:
    """The files a tensor is read from."""
    match tensor.storage:
        case Extent(path, _):
            return (path,)
        case Decoded(reader):
            return reader.paths


class Planner:
    """Holds what every step of planning needs; lives for one `make_plan`."""

    def __init__(
        self,
        manifest: Manifest,
        targets: tuple[Target, ...],
        positions: tuple[int, ...],
        *,
        block_bytes: int,
        budget: int,
    ) -> None:
        self.tensors = manifest.tensors
        self.targets = targets
        self.block_bytes = block_bytes
        self.budget = budget
        self.shards = [local_bounds(t, positions) for t in targets]
        self.by_tensor: dict[str, list[int]] = {}
        for index, target in enumerate(targets):
            self._check_target(target)
            self.by_tensor.setdefault(target.view.tensor, []).append(index)

    def _check_target(self, target: Target) -> None:
        view, tensor = target.view, self.tensors.get(target.view.tensor)
        if tensor is None:
            raise MismatchError(f"Variable {target.name!r} wants tensor {view.tensor!r}, which the checkpoint lacks")
        if len(view.shape) != len(view.strides) or min(view.strides, default=0) < 0 or view.offset < 0:
            raise LayoutError(f"Variable {target.name!r}: a view needs one stride >= 0 per dim, got {view}")
        stop = view.offset + span(view.shape, view.strides)
        if 0 not in view.shape and stop > tensor.size:
            raise MismatchError(
                f"Variable {target.name!r} of shape {view.shape} views elements up to {stop} of {view.tensor!r}, "
                f"which has {tensor.size} (shape {tensor.shape})"
            )
        check_cast(tensor.dtype, target.dtype, variable=target.name, tensor=view.tensor)

    def blocks(self) -> tuple[Block, ...]:
        """All blocks, per file by offset; a decoded tensor counts as lying where its predecessor ends."""
        files: dict[str, int] = {}
        place: dict[str, tuple[int, int, int]] = {}
        reached: dict[str, int] = {}
        for index, (name, tensor) in enumerate(self.tensors.items()):
            path = next(iter(paths_of(tensor)), "")
            offset = tensor.storage.offset if isinstance(tensor.storage, Extent) else reached.get(path, 0)
            reached[path] = offset + (tensor.nbytes if isinstance(tensor.storage, Extent) else 0)
            place[name] = (files.setdefault(path, len(files)), offset, index)
        names = sorted(self.by_tensor, key=place.__getitem__)
        return tuple(block for name in names for block in self._tensor_blocks(self.tensors[name]))

    def _tensor_blocks(self, tensor: Tensor) -> Iterator[Block]:
        indices = self.by_tensor[tensor.name]
        how = self._how(tensor, indices)
        limit = self._limit_bytes(tensor, how, len(indices)) // tensor.dtype.itemsize
        spans = sorted(
            ((start, stop, Piece(i, box)) for i in indices for start, stop, box in self._cut(i, tensor, limit)),
            key=lambda s: s[:2],
        )
        for start, stop, pieces in _merge(spans, limit):
            yield self._block(tensor, start, stop, how, pieces)

    def _cut(self, index: int, tensor: Tensor, limit: int) -> Iterator[tuple[int, int, Bounds]]:
        view, shards = self.targets[index].view, self.shards[index]
        if not shards or 0 in view.shape:
            return
        whole = Bounds.whole(view.shape)
        dense = sum(b.size for b in shards) == whole.size
        for box in (whole,) if dense else shards:
            for part in cut(Ordered.of(view, box), limit=limit, skip=max(1, SKIP_BYTES // tensor.dtype.itemsize)):
                start = address(view, part.start)
                yield start, start + span(part.shape, view.strides), part

    def _how(self, tensor: Tensor, indices: list[int]) -> How:
        if isinstance(tensor.storage, Decoded):
            return "decoded"
        ends = sorted((self._range(i) for i in indices), key=lambda r: r[0])
        disjoint = all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
        return "direct" if disjoint and all(self._is_direct(tensor, i) for i in indices) else "staged"

    def _range(self, index: int) -> tuple[int, int]:
        view = self.targets[index].view
        return view.offset, view.offset + (span(view.shape, view.strides) if 0 not in view.shape else 0)

    def _is_direct(self, tensor: Tensor, index: int) -> bool:
        """Whether the shards of a variable are made of long runs of the file, unchanged."""
        target = self.targets[index]
        if target.dtype != tensor.dtype or not is_injective(target.view):
            return False
        shard = target.layout.shard_shape(target.view.shape)
        length, outer = shard_run(target.view, Bounds.whole(shard), shard)
        whole = math.prod(shard) == length and outer == 0
        return whole or length * tensor.dtype.itemsize >= DIRECT_RUN_BYTES

    def _limit_bytes(self, tensor: Tensor, how: How, sharing: int) -> int:
        """Longest block of a tensor in bytes, a multiple of the element size (of the decoding unit)."""
        fits = how == "staged" and 2 * self._tensor_lead(tensor) * tensor.dtype.itemsize <= STAGED_BYTES
        staged = self.block_bytes if fits else STAGED_BYTES
        wanted = {"direct": self.block_bytes, "staged": staged, "decoded": DECODED_BYTES}[how]
        most = max(MIN_BLOCK_BYTES, self.budget // (BUDGET_PARTS * sharing))
        limit = max(min(wanted, self.block_bytes, most), tensor.dtype.itemsize)
        if not isinstance(tensor.storage, Decoded):
            return limit
        row = max(1, tensor.nbytes // max(1, tensor.rows))
        unit = row * max(1, min(tensor.storage.reader.row_alignment, tensor.rows))
        unit = unit if unit <= max(most, limit) else row
        if 2 * unit > self.budget:
            raise BudgetError(
                f"Tensor {tensor.name!r} decodes in units of {unit} bytes, which do not fit twice into the host-memory "
                f"budget of {self.budget} bytes. Raise the budget to at least {2 * unit} bytes"
            )
        return max(limit // unit, 1) * unit

    def _block(self, tensor: Tensor, start: int, stop: int, how: How, pieces: tuple[Piece, ...]) -> Block:
        path, offset, itemsize = next(iter(paths_of(tensor)), ""), 0, tensor.dtype.itemsize
        match tensor.storage:
            case Extent(_, base):
                offset, read_bytes = base + start * itemsize, (stop - start) * itemsize
            case Decoded(reader):
                row = max(1, tensor.size // tensor.rows)
                first, last = start // row, -(-stop // row)
                start, stop = first * row, last * row
                read_bytes = reader.stored_bytes * last // tensor.rows - reader.stored_bytes * first // tensor.rows
        lead, step = self._lead(tensor, start, pieces) if how == "staged" else 0, stop - start
        if lead:
            step = min(-(-step // lead), max(1, STAGED_BYTES // (lead * itemsize))) * lead
        host_bytes = self._host_bytes(tensor, step, how, pieces)
        return Block(tensor.name, path, offset, start, stop, read_bytes, host_bytes, lead, step, how, pieces)

    def _tensor_lead(self, tensor: Tensor) -> int:
        """The largest stride of all views of a tensor, if they have it in common; else the tensor's size."""
        leads = {lead_stride(self.targets[i].view) for i in self.by_tensor[tensor.name]}
        return max(1, leads.pop() if len(leads) == 1 else tensor.size)

    def _lead(self, tensor: Tensor, start: int, pieces: tuple[Piece, ...]) -> int:
        """The row all pieces of a block are made of, none of them reaching from one row into the next; else 0."""
        lead = self._tensor_lead(tensor)
        if 2 * lead * tensor.dtype.itemsize > STAGED_BYTES:
            return 0
        for piece in pieces:
            view = self.targets[piece.target].view
            inner = [(n, t) for n, t in zip(piece.box.shape, view.strides, strict=True) if t < lead]
            length = sum((n - 1) * t for n, t in inner) + 1
            repeated = sum(t == lead and n > 1 for n, t in zip(view.shape, view.strides, strict=True)) != 1
            if repeated or (address(view, piece.box.start) - start) % lead + length > lead:
                return 0
        return lead

    def _host_bytes(self, tensor: Tensor, elements: int, how: How, pieces: tuple[Piece, ...]) -> int:
        """The block as read, room to space its rows out (see `_fanout`), and a copy of it cast."""
        if how == "direct":
            return 0
        wanted = {self.targets[p.target].dtype for p in pieces} - {tensor.dtype}
        cast_bytes = elements * max((d.itemsize for d in wanted), default=0)
        stored_bytes = elements * tensor.dtype.itemsize
        return stored_bytes + cast_bytes + (stored_bytes // 16 + 64 if how == "staged" else 0)

    def needed_bytes(self) -> int:
        """Distinct stored bytes of the local shards; views that overlap count no more than their tensor."""
        total = 0
        for name, indices in self.by_tensor.items():
            tensor = self.tensors[name]
            seen: dict[View, set[Bounds]] = {}
            for i in indices:
                seen.setdefault(self.targets[i].view, set()).update(self.shards[i])
            elements = min(sum(_distinct(view, bounds) for view, bounds in seen.items()), tensor.size)
            total += tensor.stored_bytes * elements // max(1, tensor.size)
        return total


def _distinct(view: View, bounds: set[Bounds]) -> int:
    """Elements of the tensor in some boxes of a view; a broadcast dim (stride 0) counts once."""
    real = [d for d, t in enumerate(view.strides) if t or not view.shape[d]]
    return min(math.prod(view.shape[d] for d in real), sum(math.prod(b.shape[d] for d in real) for b in bounds))


def _merge(spans: list[tuple[int, int, Piece]], limit: int) -> Iterator[tuple[int, int, tuple[Piece, ...]]]:
    """Join ranges that touch as long as the union stays within ``limit`` elements (or is one of them)."""
    held: list[Piece] = []
    first = last = 0
    for start, stop, piece in spans:
        joint = max(last, stop) - first
        if held and start <= last and (joint <= limit or joint in (last - first, stop - start)):
            last = max(last, stop)
        else:
            if held:
                yield first, last, tuple(held)
            first, last, held = start, stop, []
        held.append(piece)
    if held:
        yield first, last, tuple(held)
