"""What is staged of each variable at once.

A variable is *staged* in shard buffers, in chunks: one chunk of everything where the buffers become device memory
or fit the budget, else boxes of it, each gathered from consecutive blocks, uploaded and let go before its last
relative is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload._fanout import Part
from shardload._placement import Growing
from shardload.bounds import Bounds
from shardload.planner import Piece, Target


@dataclass(eq=False, slots=True)
class Variable:
    """A variable on its way."""

    target: Target
    shards: tuple[Bounds, ...]
    staged: np.dtype[Any]
    """Dtype on the host."""
    growing: Growing | None = None
    chunks_left: int = 0
    started: bool = False


@dataclass(eq=False, slots=True)
class Chunk:
    """What is staged of a variable at once: a box of it, usually all."""

    variable: Variable
    box: Bounds
    blocks_left: int = 0
    n_bytes: int = 0
    """What it takes from the budget."""
    buffers: dict[Bounds, tuple[Bounds, NDArray[Any]]] = field(default_factory=dict)
    """Shard → the box of the variable that is staged of it, and its memory."""

    @property
    def common(self) -> dict[Bounds, Bounds]:
        """Shard → what it has in common with this chunk."""
        pairs = ((shard, self.box.intersect(shard) if shard.size else shard) for shard in self.variable.shards)
        return {shard: box for shard, box in pairs if box is not None}

    def parts(self, piece: Piece) -> list[Part]:
        """Where a piece of the variable goes."""
        found = []
        for held, buffer in self.buffers.values():
            if (both := held.intersect(piece.box)) is not None:
                # The Ellipsis keeps rank 0 an array.
                place: tuple[Any, ...] = (*both.relative_to(held.start).slices, ...)
                found.append(Part(piece.view, both, buffer[place]))
        return found


def grouped(
    variable: Variable, pieces: list[tuple[int, int, Bounds]], limit: int | None
) -> list[tuple[Chunk, list[tuple[int, int]]]]:
    """Group a variable's pieces, in file order, into boxes of at most ``limit`` bytes; ``None``: one of everything."""
    whole = Bounds.whole(variable.target.view.shape)
    itemsize = variable.staged.itemsize
    if limit is None or sum(b.size for b in variable.shards) * itemsize <= limit:
        return [(Chunk(variable, whole), [(b, p) for b, p, _ in pieces])]
    groups: list[tuple[Chunk, list[tuple[int, int]]]] = []
    for b, p, box in pieces:
        if groups:
            chunk, members = groups[-1]
            joined = _hull(chunk.box, box)
            if joined.size == chunk.box.size + box.size and joined.size * itemsize <= limit:
                chunk.box = joined
                members.append((b, p))
                continue
        groups.append((Chunk(variable, box), [(b, p)]))
    return groups


def _hull(one: Bounds, other: Bounds) -> Bounds:
    return Bounds(tuple(map(min, one.start, other.start)), tuple(map(max, one.stop, other.stop)))
