"""Memory in which variables are staged.

A variable is *staged* in shard buffers, in chunks: one chunk for all of it where the buffers become device memory
or fit the budget, else boxes of it, each gathered from consecutive blocks, uploaded and released before the
last of them is read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.errors import TransferError
from shardload.manifest import View
from shardload.sharding.layout import Bounds
from shardload.transfer.geometry import largest_stride
from shardload.transfer.host_memory import arena, stack
from shardload.transfer.load_plan import Binding, Block, BlockPiece
from shardload.transfer.placement import IncrementalArray
from shardload.transfer.scratch import CopyPart
from shardload.units import exact_bytes


@dataclass(eq=False, slots=True)
class Variable:
    """A variable in transfer."""

    binding: Binding
    shards: tuple[Bounds, ...]
    staged: np.dtype[Any]
    """Dtype on the host."""
    incremental: IncrementalArray | None = None
    chunks_left: int = 0
    started: bool = False


@dataclass(frozen=True, slots=True)
class StackedShards:
    """Shards that are consecutive along one dim and equally spaced in memory, as one array.

    A block of rows has a piece of each of eight shards that split the columns. Locating each piece took
    0.15 ms of Python, twice that with cold caches, for a block that moves in 3 ms. So the split dim becomes two dims,
    shard and position in the shard, and the piece is one part::

        variable (rows, 8 * w), strides (s, 1)  =  (8, rows, w), strides (w, s, 1)
    """

    dim: int
    """The split dim of the variable."""
    first: Bounds
    """The box of the first shard."""
    memory: NDArray[Any]
    """Shards first, then their own dims."""
    shards: Sequence[tuple[Bounds, NDArray[Any]]]
    """The box of each shard, and its memory."""

    def overlapping(self, box: Bounds) -> Sequence[tuple[Bounds, NDArray[Any]]]:
        """Return the shards that overlap a box along ``dim``."""
        width, begin = self.first.shape[self.dim], self.first.start[self.dim]
        first, last = (box.start[self.dim] - begin) // width, -(-(box.stop[self.dim] - begin) // width)
        return self.shards[max(0, first) : max(0, last)]

    def part(self, piece: BlockPiece, *, by_rows: bool) -> CopyPart | None:
        """Return the destination of a piece if it covers ``dim`` completely and overlaps every shard, else None."""
        view, box, d = piece.view, piece.box, self.dim
        width, count = self.first.shape[d], len(self.memory)
        begin = self.first.start[d]
        apart = width * view.strides[d]
        if box.start[d] > begin or box.stop[d] < begin + width * count:
            return None
        # Only shards side by side within one row of the file: `scratch.RowCopy` has a few rows at a time, and shards
        # that divide the rows themselves are further apart.
        if by_rows and apart * count > largest_stride(view):
            return None
        start, stop = list(map(max, box.start, self.first.start)), list(map(min, box.stop, self.first.stop))
        start[d], stop[d] = begin, begin + width
        if any(b <= a for a, b in zip(start, stop, strict=True)):
            return None
        place = (slice(a - o, b - o) for a, b, o in zip(start, stop, self.first.start, strict=True))
        shape = (*view.shape[:d], begin + width, *view.shape[d + 1 :])
        stacked = View(view.tensor, view.offset, (count, *shape), (apart, *view.strides))
        return CopyPart(stacked, Bounds((0, *start), (count, *stop)), self.memory[(slice(None), *place)])


@functools.lru_cache(maxsize=1024)
def stacked_dim(boxes: tuple[Bounds, ...]) -> int | None:
    """Return the dim along which boxes of one shape are consecutive; ``None`` if there is none."""
    if len(boxes) < 2 or not boxes[0].size:
        return None
    first, second = boxes[:2]
    dims = [d for d, (a, b) in enumerate(zip(first.start, second.start, strict=True)) if a != b]
    if len(dims) != 1:
        return None
    step = tuple(n if d == dims[0] else 0 for d, n in enumerate(first.shape))
    following = (tuple(a + k * n for a, n in zip(first.start, step, strict=True)) for k in range(len(boxes)))
    alike = all(box.shape == first.shape and box.start == at for box, at in zip(boxes, following, strict=True))
    return dims[0] if alike else None


@dataclass(eq=False, slots=True)
class Chunk:
    """The box of a variable that is staged at once, usually all of it."""

    variable: Variable
    box: Bounds
    blocks_left: int = 0
    n_bytes: int = 0
    """Bytes taken from the budget."""
    buffers: dict[Bounds, tuple[Bounds, NDArray[Any]]] = field(default_factory=dict)
    """Shard → the staged box of the variable, and its memory."""
    stack: StackedShards | None = None
    """View of all buffers as one array, if they are regular."""

    @property
    def common(self) -> dict[Bounds, Bounds]:
        """Shard → its overlap with this chunk."""
        if self.box.shape == self.variable.binding.view.shape:
            return dict(zip(self.variable.shards, self.variable.shards, strict=True))
        pairs = ((shard, self.box.intersect(shard) if shard.size else shard) for shard in self.variable.shards)
        return {shard: box for shard, box in pairs if box is not None}

    def take_memory(self) -> None:
        """Allocate memory for the overlap with every shard."""
        common, dtype = self.common, self.variable.staged
        boxes = tuple(common.values())
        dim = stacked_dim(boxes)
        try:
            if dim is None:
                held = list(zip(boxes, arena([box.shape for box in boxes], dtype), strict=True))
            else:
                # Regular shards, which nearly all are, get one array with a dim for the shard.
                whole = stack(len(boxes), boxes[0].shape, dtype)
                held = list(zip(boxes, whole, strict=True))
                self.stack = StackedShards(dim, boxes[0], whole, held)
        except (OSError, MemoryError) as error:
            n_bytes = sum(box.size for box in boxes) * dtype.itemsize
            raise TransferError(
                f"Cannot allocate {exact_bytes(n_bytes)} for the shards of variable {self.variable.binding.name!r} "
                f"on this host: {error}. Use a mesh over more hosts, a smaller dtype, or a smaller model"
            ) from error

        self.buffers = dict(zip(common, held, strict=True))

    def parts(self, piece: BlockPiece, *, by_rows: bool = True) -> list[CopyPart]:
        """Return the destinations of a piece of the variable; ``by_rows`` if it is copied a few rows at a time."""
        if self.stack is not None and (part := self.stack.part(piece, by_rows=by_rows)) is not None:
            return [part]
        found = []
        for held, buffer in self.buffers.values() if self.stack is None else self.stack.overlapping(piece.box):
            if (both := held.intersect(piece.box)) is not None:
                # The Ellipsis keeps rank 0 an array.
                place: tuple[Any, ...] = (*both.relative_to(held.start).slices, ...)
                found.append(CopyPart(piece.view, both, buffer if both == held else buffer[place]))
        return found


def whole_chunks(blocks: Sequence[Block], variables: Sequence[Variable]) -> dict[tuple[int, int], Chunk]:
    """Return the chunk of each (block, piece), where shard buffers need no room in the budget: one per variable."""
    chunks: dict[int, Chunk] = {}
    found: dict[tuple[int, int], Chunk] = {}
    for b, block in enumerate(blocks):
        for p, piece in enumerate(block.pieces):
            if (chunk := chunks.get(piece.binding)) is None:
                variable = variables[piece.binding]
                chunk = chunks[piece.binding] = Chunk(variable, Bounds.whole(variable.binding.view.shape))
                variable.chunks_left = 1
            chunk.blocks_left += 1
            found[b, p] = chunk
    return found


def limited_chunks(
    blocks: Sequence[Block], variables: Sequence[Variable], *, free_bytes: int
) -> dict[tuple[int, int], Chunk]:
    """Return the chunk of each (block, piece), where all chunks that are open together must fit into half a budget."""
    pieces: dict[int, list[tuple[int, int, Bounds]]] = {}
    sharing: dict[str, set[int]] = {}
    for b, block in enumerate(blocks):
        for p, piece in enumerate(block.pieces):
            pieces.setdefault(piece.binding, []).append((b, p, piece.box))
            sharing.setdefault(block.tensor, set()).add(piece.binding)
    found: dict[tuple[int, int], Chunk] = {}
    for t, of_target in pieces.items():
        variable = variables[t]
        # Divided among the variables of a tensor: all of them are open at once.
        limit = free_bytes // (2 * len(sharing[variable.binding.view.tensor]))
        for chunk, members in _grouped(variable, of_target, limit):
            variable.chunks_left += 1
            chunk.blocks_left = len(members)
            found.update(dict.fromkeys(members, chunk))
    return found


def _grouped(
    variable: Variable, pieces: list[tuple[int, int, Bounds]], limit: int
) -> list[tuple[Chunk, list[tuple[int, int]]]]:
    """Group a variable's pieces, in file order, into boxes of at most ``limit`` bytes."""
    whole = Bounds.whole(variable.binding.view.shape)
    itemsize = variable.staged.itemsize
    if sum(b.size for b in variable.shards) * itemsize <= limit:
        return [(Chunk(variable, whole), [(b, p) for b, p, _ in pieces])]
    groups: list[tuple[Chunk, list[tuple[int, int]]]] = []
    for b, p, box in pieces:
        if groups:
            chunk, members = groups[-1]
            joined = Bounds(tuple(map(min, chunk.box.start, box.start)), tuple(map(max, chunk.box.stop, box.stop)))
            # Only where both together are a box: a hull with holes would be uploaded with memory that was never filled.
            if joined.size == chunk.box.size + box.size and joined.size * itemsize <= limit:
                chunk.box = joined
                members.append((b, p))
                continue
        groups.append((Chunk(variable, box), [(b, p)]))
    return groups
