"""What a transfer will do, as values: which blocks it reads, and which variables they fill.

Every stored tensor is a row-major sequence of elements. A `Binding` names a variable's view of a tensor and its layout;
`shardload.transfer.planning.plan_transfers` cuts the views into `Block`s::

    file    ──[ block 0 )[ block 1 )[ block 2 )──      ascending offsets, at most block_bytes each
                  │ pieces: boxes of variables
                  ├─► kernel[0:64, :]   ─► the shards of kernel that meet the box
                  └─► bias …                one vectorised copy per (block, shard)

A block is moved in one of four ways (``how``):

* ``direct``: element order and dtype of file and shards agree in runs of at least `DIRECT_RUN_BYTES`, so one
  scatter read puts each run where it belongs: one copy in all, no scratch. Blocks are 16 MiB: shorter ones
  need more Python calls, and share more huge pages of the shards.
* ``staged``: transposed, cast, shared between variables, or with short runs. The block goes row by row through a
  2 MiB scratch buffer, which mostly stays in a core's L2, so the second copy does not come from memory.
* ``packed``: a chunk that is compressed or otherwise decodes as a whole, once, in any layout.
* ``decoded``: rows come from a `RowReader`; 2 MiB, to spread its per-call cost.

Small blocks next to each other are read together, through scratch, in *runs*::

    file   ─[ a )[ b )[ c )[        d        )[ e )[ f )─
    runs    └──── 0 ───┘└──────── 1 ────────┘└─── 2 ──┘

A block of a few KiB is copied in microseconds, but a read of its own, with everything Python does around it, takes
thirty.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from shardload.errors import TransferError
from shardload.manifest import Manifest, Packed, View
from shardload.sharding.layout import Bounds, Layout
from shardload.sharding.mesh import DEFAULT_AXES, MeshSpec
from shardload.stores.location import Location
from shardload.transfer.geometry import SKIP_BYTES
from shardload.units import exact_bytes

BUDGET_PARTS = 16
"""A staged or uploaded block takes at most this fraction of the budget, so that several are in flight."""
SMALL_BLOCK_BYTES = 64 << 10
"""Longest block of a run: copying it a second time, out of scratch, still takes less than a read of its own."""
RUN_BYTES = 512 << 10
"""Longest run: a part of a core's L2, so that the second copy does not come from memory."""


# A binding has a layout from the start, never None: one that nobody chose is then an error about meshes
# (`planning` refuses several), not a variable that is silently replicated.
ONE_DEVICE = MeshSpec(DEFAULT_AXES, (1, 1))
"""The mesh of an array that is whole on one device."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A variable that is a view of one tensor, and its layout."""

    name: str
    """Unique: the variable's path, with ``#2`` where another variable has the same one."""
    view: View
    """The tensor elements of the variable; ``view.shape`` is its shape."""
    dtype: np.dtype[Any]
    """The variable's dtype; the load casts if the tensor has another."""
    layout: Layout
    # Not compared: `==` on Keras variables compares their values and returns an array.
    variable: Any = field(default=None, compare=False, repr=False)
    """The ``keras.Variable``; a transfer never touches it."""

    @classmethod
    def unsharded(cls, name: str, view: View, dtype: np.dtype[Any], variable: Any) -> Binding:
        """Return a binding whose layout is still to be chosen: whole, on one device."""
        return cls(name, view, dtype, Layout.replicated(ONE_DEVICE, len(view.shape)), variable)


How = Literal["direct", "staged", "packed", "decoded"]


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """The part of one variable in one block."""

    binding: int
    """Index into the plan's bindings."""
    box: Bounds
    """In the variable's index space."""
    view: View
    """The variable's elements, counted within the block's region: the binding's view, or a chunk's view of it."""


@dataclass(frozen=True, slots=True)
class Block:
    """One read."""

    tensor: str
    path: Location
    """The file to read (for a decoded tensor, the first one)."""
    offset: int
    """Byte offset in the file; meaningful for extents only."""
    start: int
    """First element of the region (the tensor, or its chunk)."""
    stop: int
    """One past the last element."""
    read_bytes: int
    """Bytes read from disk (encoded bytes for a decoded tensor)."""
    host_bytes: int
    """Memory needed in addition to shard buffers: none for ``direct``."""
    row_elements: int
    """Elements per row of all pieces, if a staged block can be moved a few rows at a time, else 0."""
    step: int
    """Elements that go through scratch at a time: a multiple of ``row_elements``, else the whole block."""
    how: How
    pieces: tuple[BlockPiece, ...]
    packed: Packed | None = None
    """For ``packed``: the encoded chunk, which decodes as a whole."""

    @property
    def is_decoded(self) -> bool:
        """Whether a decoder produces the elements, in separate memory."""
        return self.how in ("packed", "decoded")

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory for the thread that moves the block."""
        if self.how == "direct":
            # The bytes that the read skips, in total.
            size = self.stop - self.start
            gap_bytes = self.read_bytes * (size - sum(piece.box.size for piece in self.pieces)) // max(1, size)
            return min(SKIP_BYTES, gap_bytes)
        return self.host_bytes if self.how == "staged" else 0


@functools.lru_cache(maxsize=1024)
def local_bounds(layout: Layout, shape: tuple[int, ...], positions: tuple[int, ...]) -> tuple[Bounds, ...]:
    """Return the distinct shards of a variable at the given mesh positions."""
    # Equal boxes are one object (`Layout.bounds`): ids are enough, and fast on meshes of thousands of devices.
    everywhere = layout.bounds(shape)
    return tuple({id(box): box for box in map(everywhere.__getitem__, positions)}.values())


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Everything a transfer will do."""

    bindings: tuple[Binding, ...]
    blocks: tuple[Block, ...]
    """In file order: per file by offset."""
    positions: tuple[int, ...]
    """Mesh positions of this process."""
    files: tuple[Location, ...]
    """Files to read, in order."""
    needed_bytes: int
    """Distinct stored bytes that the local shards consist of."""
    read_bytes: int
    device_bytes: tuple[int, ...]
    """Final bytes per mesh position."""
    host_memory_bytes: int
    """The budget."""
    block_bytes: int
    """Longest direct read."""
    runs: tuple[range, ...]
    """Ranges of blocks that are read together; see `joined_runs`."""
    budget_raised: bool = False
    """Whether the budget exceeds the default because a chunk that decodes as a whole needs more."""

    @property
    def scratch_bytes(self) -> int:
        """Size of one scratch buffer: several small blocks, a fill of a staged one, or the gaps in a direct one."""
        return max(itertools.chain(self._together(), (b.scratch_bytes for b in self.blocks)), default=0)

    @property
    def direct_bytes(self) -> int:
        """Bytes that are read straight into shard memory."""
        alone = (self.blocks[r.start] for r in self.runs if len(r) == 1)
        return sum(block.read_bytes for block in alone if block.how == "direct")

    def check_files(self, manifest: Manifest) -> None:
        """Compare the sizes of the files to read with those in the manifest."""
        for path in self.files:
            if path.store.is_verifying:  # its bytes are compared with digests as they are read
                continue
            found = path.identity().size
            if found != (expected := manifest.files.get(path, found)):
                raise TransferError(
                    f"Cannot load {path}: it changed since its headers were read, from {expected} to "
                    f"{exact_bytes(found)}. Load it again once its writer has finished"
                )

    @property
    def peak_staging_bytes(self) -> int:
        """Peak host memory for staging, without the shards of devices that share the host's memory."""
        # The transfer has at most BUDGET_PARTS jobs in flight; at worst, they are the largest.
        each = itertools.chain(self._together(), (b.host_bytes for b in self.blocks))
        return min(sum(sorted(each, reverse=True)[:BUDGET_PARTS]), self.host_memory_bytes)

    def _together(self) -> Iterator[int]:
        """Yield the bytes of each run of several blocks."""
        for run in self.runs:
            if len(run) > 1:
                yield sum(block.read_bytes for block in self.blocks[run.start : run.stop])


def joined_runs(blocks: Sequence[Block], *, staged: Callable[[Block], int], limit_bytes: int) -> Iterator[range]:
    """Yield ranges of blocks to read together; of a large model, nearly all have one block.

    A run takes all the host memory that its shards take, as ``staged`` says, at once: ``limit_bytes`` at most.
    """
    first = read_bytes = staged_bytes = 0
    before: Block | None = None
    for index, block in enumerate(blocks):
        small = block.read_bytes <= SMALL_BLOCK_BYTES and not block.is_decoded
        added = staged(block) if small else limit_bytes + 1
        read_bytes, staged_bytes = read_bytes + block.read_bytes, staged_bytes + added
        joins = before is not None and (before.path, before.offset + before.read_bytes) == (block.path, block.offset)
        if index and not (joins and read_bytes <= RUN_BYTES and staged_bytes <= limit_bytes):
            yield range(first, index)
            first, read_bytes, staged_bytes = index, block.read_bytes, added
        before = block if small else None
    if blocks:
        yield range(first, len(blocks))
