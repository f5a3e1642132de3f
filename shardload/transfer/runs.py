"""Small blocks that follow each other in a file are read together: one read for many tensors.

A block of a few KiB is copied in microseconds, but a read of its own, with everything Python does around it, takes
thirty. So neighbours form a *run*, which passes through scratch memory as a whole::

    file   ─[ a )[ b )[ c )[        d        )[ e )[ f )─
    runs    └──── 0 ───┘└──────── 1 ────────┘└─── 2 ──┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shardload.transfer.block_plan import Block

SMALL_BYTES = 64 << 10
"""Longest block of a run: copying it a second time, out of scratch, still takes less than a read of its own."""
RUN_BYTES = 512 << 10
"""Longest run: a part of a core's L2, so that the second copy does not come from memory."""


def runs(blocks: Sequence[Block], *, staged: Callable[[Block], int], limit_bytes: int) -> Iterator[range]:
    """Yield ranges of blocks to read together; of a large model, nearly all have one block.

    Args:
        blocks: In file order.
        staged: Returns the host memory that the shards of a block take.
        limit_bytes: Most of it per run, as a run takes all of it at once.
    """
    first = read_bytes = staged_bytes = 0
    before: Block | None = None
    for index, block in enumerate(blocks):
        small = block.read_bytes <= SMALL_BYTES and not block.is_decoded
        added = staged(block) if small else limit_bytes + 1
        read_bytes, staged_bytes = read_bytes + block.read_bytes, staged_bytes + added
        joins = before is not None and _adjoin(before, block) and read_bytes <= RUN_BYTES
        if index and not (joins and staged_bytes <= limit_bytes):
            yield range(first, index)
            first, read_bytes, staged_bytes = index, block.read_bytes, added
        before = block if small else None
    if blocks:
        yield range(first, len(blocks))


def _adjoin(one: Block, other: Block) -> bool:
    return one.offset + one.read_bytes == other.offset and one.path == other.path
