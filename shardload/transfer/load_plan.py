"""What a load will do, as values: which blocks (ranges of files) it reads, and which variables they fill.

Every stored tensor is a row-major sequence of elements. A `Binding` names a variable's view of a tensor and its layout;
`shardload.transfer.planning.plan_transfers` cuts the views into `Block`s::

    file    ──[ block 0 )[ block 1 )[ block 2 )──      ascending offsets, at most block_bytes each
                  │ pieces: boxes of variables
                  ├─► kernel[0:64, :]   ─► the shards of kernel that meet the box
                  └─► bias …                one vectorised copy per (block, shard)

A block is moved in one of four ways (``how``):

* ``direct``: the file has runs of at least `DIRECT_RUN_BYTES` in the element order and dtype of the shards. One
  scatter read puts each run where it belongs, without scratch. Such a block has up to 16 MiB: shorter ones would need
  more Python calls, and more of them would write to the same huge page.
* ``staged``: the elements are transposed, cast, or shared between variables, or the runs are short. The block goes row
  by row through a 2 MiB scratch buffer, which stays in a core's L2 cache, so that the copy from there is fast.
* ``packed``: the block is a chunk that is compressed, or can only be decoded as a whole. It is decoded only once.
* ``decoded``: a `RowReader` returns the rows. Such a block is 2 MiB long, because each call has a fixed cost.

Small blocks next to each other are read together, through scratch, in *runs* (`joined_runs`): to copy a few KiB takes a
few microseconds, but a separate read, with all that Python does around it, takes thirty.
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
from shardload.transfer.encoding import Encoding, Output
from shardload.transfer.geometry import SKIP_BYTES
from shardload.units import exact_bytes

BUDGET_PARTS = 16
"""The host-memory budget is divided into this many parts. A block (range of a file) that is staged or uploaded takes
one part at most, so that several blocks are in work at a time."""
SMALL_BLOCK_BYTES = 64 << 10
"""Longest block, in bytes, that is read together with its neighbours: one more copy, through scratch memory, is faster
than a separate read."""
RUN_BYTES = 512 << 10
"""Most bytes of small blocks in one read: they stay in a core's L2 cache until they are copied from there."""


# A binding has a layout from the start, never None: one that nobody chose is then an error about meshes
# (`planning` refuses several), not a variable that is silently replicated.
ONE_DEVICE = MeshSpec(DEFAULT_AXES, (1, 1))
"""A mesh with a single position, for variables that one device stores as a whole."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A variable to load: the elements of one stored tensor that it consists of, its dtype, and its layout."""

    name: str
    """The variable's path, made unique: ``#2`` is appended where another variable has the same path."""
    view: View
    """Which elements of the tensor the variable consists of; ``view.shape`` is the variable's shape."""
    dtype: np.dtype[Any]
    """The variable's dtype; the load casts if the tensor has another."""
    layout: Layout
    # Not compared: `==` on Keras variables compares their values and returns an array.
    variable: Any = field(default=None, compare=False, repr=False)
    """The ``keras.Variable``, for the caller's use; a transfer neither reads nor assigns the variable."""
    encoding: Encoding | None = field(default=None, compare=False, repr=False)
    """What to compute from the variable while it is loaded: devices then store the results. ``dtype`` and ``layout``
    are those in which the variable is staged on the host."""
    box: Bounds | None = None
    """The part of the array that the view fills, if several bindings of the same name fill one array, or if a part of
    the array has no tensor: that part is zero. The view has the shape of the whole array, but only indices in the box
    address elements of the tensor; its offset may be negative. ``None``: the view fills the array."""

    @property
    def filled(self) -> Bounds:
        """The part of the array that the view fills: the whole array, unless `box` says otherwise."""
        return Bounds.whole(self.view.shape) if self.box is None else self.box

    @classmethod
    def unsharded(cls, name: str, view: View, dtype: np.dtype[Any], variable: Any) -> Binding:
        """Return a binding without a chosen layout: it has a stand-in (all on one device) that the caller replaces."""
        return cls(name, view, dtype, Layout.replicated(ONE_DEVICE, len(view.shape)), variable)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The variables that devices store: this one, or those that are computed from it."""
        if self.encoding is not None:
            return self.encoding.outputs
        return (Output(self.name, self.view.shape, self.dtype, self.layout, self.variable),)


How = Literal["direct", "staged", "packed", "decoded"]


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """The part of one variable that is in one block, which is a range of a file."""

    binding: int
    """Number of the variable in the plan's ``bindings``."""
    box: Bounds
    """The box of the variable's indices whose elements are in the block."""
    view: View
    """Where the variable's elements are: a view of the block's region, which is the whole tensor or one chunk of it."""


@dataclass(frozen=True, slots=True)
class Block:
    """A range of a file that is read in one go, and the parts of variables that are in it."""

    tensor: str
    path: Location
    """The file to read; if a reader decodes the tensor, the first of its files."""
    offset: int
    """Byte offset of the block in the file; not used if a reader decodes the tensor."""
    start: int
    """First element of the block, as an offset in elements from the start of its region (the tensor, or a chunk)."""
    stop: int
    """End of the block, exclusive, as an offset in elements from the start of its region."""
    read_bytes: int
    """Bytes that the block takes in the file: for packed and decoded blocks, encoded bytes."""
    host_bytes: int
    """Bytes of host memory that moving the block needs besides shards; 0 if it is read straight into the shards."""
    row_elements: int
    """Elements per row of the tensor, if a staged block passes through scratch a few rows at a time; else 0."""
    step: int
    """Elements that go through scratch at a time: a multiple of ``row_elements``, or if that is 0, the whole block."""
    how: How
    pieces: tuple[BlockPiece, ...]
    packed: Packed | None = None
    """For a ``packed`` block: the encoded chunk, which can only be decoded as a whole."""

    @property
    def is_decoded(self) -> bool:
        """Whether the block has to be decoded. Its elements are then in memory of the decoder, not in scratch."""
        return self.how in ("packed", "decoded")

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch (a thread's own buffer) that the thread needs to move the block; 0 if it is decoded."""
        if self.how == "direct":
            # The bytes that the read skips, in total.
            size = self.stop - self.start
            gap_bytes = self.read_bytes * (size - sum(piece.box.size for piece in self.pieces)) // max(1, size)
            return min(SKIP_BYTES, gap_bytes)
        return self.host_bytes if self.how == "staged" else 0


@functools.lru_cache(maxsize=1024)
def local_bounds(layout: Layout, shape: tuple[int, ...], positions: tuple[int, ...]) -> tuple[Bounds, ...]:
    """Return the boxes of a variable that the devices at these mesh positions store, without duplicates."""
    # Equal boxes are one object: ids are enough, and fast on meshes of thousands of devices.
    return tuple({id(box): box for box in layout.bounds_at(shape, positions)}.values())


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What one load has to do: which blocks (ranges of files) to read, in which order, and which variables to fill."""

    bindings: tuple[Binding, ...]
    blocks: tuple[Block, ...]
    """All blocks to read, ordered by offset within each file."""
    positions: tuple[int, ...]
    """Mesh positions whose devices belong to this process."""
    files: tuple[Location, ...]
    """Files to read, in the order in which ``blocks`` first uses them."""
    needed_bytes: int
    """Stored bytes that this process's shards need, each counted once; ``read_bytes`` also counts unneeded gaps."""
    read_bytes: int
    device_bytes: tuple[int, ...]
    """For each mesh position: bytes of the loaded variables that its device stores."""
    host_memory_bytes: int
    """Limit in bytes on the host memory for reading, decoding and uploading; shards of CPU devices do not count."""
    block_bytes: int
    """Most bytes that one block (a range of a file) reads."""
    runs: tuple[range, ...]
    """Index ranges of ``blocks``: those of one range are read together, because they are small (`joined_runs`)."""
    budget_raised: bool = False
    """Whether the default budget was raised, because a chunk that decodes as a whole needs more memory."""
    is_cached: bool = False
    """Whether some files are remote, and the cache on this machine has all that the load needs of them."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch that each thread needs: the most that any block, or run of blocks read together, takes."""
        return max(itertools.chain(self._together(), (b.scratch_bytes for b in self.blocks)), default=0)

    @property
    def direct_bytes(self) -> int:
        """Bytes that are read straight into the memory of shards, not through scratch memory."""
        alone = (self.blocks[r.start] for r in self.runs if len(r) == 1)
        return sum(block.read_bytes for block in alone if block.how == "direct")

    def check_files(self, manifest: Manifest) -> None:
        """Raise `TransferError` if the size of a file to read is no longer that in the manifest."""
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
        """Most bytes of host memory that scratch, decoding and encoding may take; shard buffers do not count."""
        # The transfer has at most BUDGET_PARTS jobs in flight; at worst, they are the largest.
        each = itertools.chain(self._together(), (b.host_bytes for b in self.blocks))
        jobs = sum(sorted(each, reverse=True)[:BUDGET_PARTS])
        return min(jobs + sum(map(self._encoded_bytes, self.bindings)), self.host_memory_bytes)

    def _encoded_bytes(self, binding: Binding) -> int:
        """Return the bytes of a variable that is staged on this host to be encoded; 0 for others."""
        if binding.encoding is None:
            return 0
        boxes = local_bounds(binding.layout, binding.view.shape, self.positions)
        return sum(box.size for box in boxes) * binding.dtype.itemsize

    def _together(self) -> Iterator[int]:
        """Yield how many bytes each run (of two or more blocks that are read together) reads."""
        for run in self.runs:
            if len(run) > 1:
                yield sum(block.read_bytes for block in self.blocks[run.start : run.stop])


def joined_runs(blocks: Sequence[Block], *, staged: Callable[[Block], int], limit_bytes: int) -> Iterator[range]:
    """Group neighbouring small blocks into runs, each read at once; yield the index range of each run.

    ``staged`` returns the bytes of all shards that a block writes to. Their sum over a run is at most ``limit_bytes``,
    because a load that uploads shards holds them all in host memory at that time.
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
