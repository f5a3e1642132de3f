"""Decide which bytes are read, in which order, and where they go: pure arithmetic, printable without reading data.

Every stored tensor is a row-major sequence of elements. A `Binding` names a variable's view of a tensor
and its layout; `make_plan` cuts the views into `Block`s::

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

Small blocks next to each other are read together, through scratch, whatever they would do alone (`runs`).

Views with overlapping byte ranges on one tensor (fused kernels, tied weights) share blocks, so that each
byte is read once. Columns that no local shard needs are trimmed; unneeded bytes that are read are counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardload.errors import BudgetError, LayoutError, TransferError
from shardload.manifest import Manifest, Tensor
from shardload.stores.location import Location
from shardload.transfer.binding import Binding
from shardload.transfer.block_plan import (
    BLOCK_BYTES,
    BUDGET_PARTS,
    MIN_BLOCK_BYTES,
    Block,
    BlockPiece,
    Planner,
    local_bounds,
)
from shardload.transfer.regions import least_budget, paths_of, regions
from shardload.transfer.runs import runs
from shardload.units import exact_bytes

__all__ = ["BLOCK_BYTES", "Binding", "Block", "BlockPiece", "LoadPlan", "local_bounds", "make_plan"]


DEFAULT_HOST_MEMORY = 256 << 20
"""Most bytes staged. Enough to keep every reader thread busy with several blocks, and small compared with any model;
more does not make loading faster (docs/performance.md)."""


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
    """Ranges of blocks that are read together; see `shardload.transfer.runs`."""
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

    @property
    def decoded_bytes(self) -> int:
        """Size of the largest decoded block."""
        return max((b.host_bytes for b in self.blocks if b.is_decoded), default=0)

    def check_files(self, manifest: Manifest) -> None:
        """Compare the sizes of the files to read with those in the manifest.

        Raises:
            TransferError: If one has another size or is gone.
        """
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


def make_plan(
    manifest: Manifest,
    bindings: Sequence[Binding],
    *,
    host_memory_bytes: int | None,
    block_bytes: int = BLOCK_BYTES,
    positions: Sequence[int] | None = None,
    scatter: bool = True,
    uploads: bool = False,
) -> LoadPlan:
    """Decide which blocks are read and where they go.

    Args:
        manifest: The tensors of the checkpoint.
        bindings: Variables to fill; several may share a tensor. All layouts share one mesh.
        host_memory_bytes: Budget for everything staged; by default `DEFAULT_HOST_MEMORY`, or what the largest chunk
            that decodes as a whole needs.
        block_bytes: Longest single read.
        positions: Mesh positions of this process; all by default.
        scatter: Whether bytes may go straight from files to shards; False if a verifier compares them in between.
            Never of remote and verifying stores.
        uploads: Whether shards are staged too, because devices have separate memory.

    Raises:
        LayoutError: When a layout does not divide its variable, or meshes differ.
        MismatchError: When a view exceeds its tensor, or a cast would lose more than float precision.
        BudgetError: When the budget cannot hold a single block.
    """
    bindings = tuple(bindings)
    _check_meshes(bindings)
    wanted = {binding.view.tensor: None for binding in bindings}
    # Names without a tensor are left to `Planner`, whose error names the variable.
    tensors = [manifest.tensors[name] for name in wanted if name in manifest.tensors]
    stores = {path.store for path in manifest.files}
    scatter = scatter and not any(store.is_remote or store.is_verifying for store in stores)
    budget = _budget(tensors, host_memory_bytes, through_units=not scatter, uploads=uploads)
    size = bindings[0].layout.mesh.size if bindings else 0
    local = tuple(range(size)) if positions is None else tuple(positions)
    planner = Planner(manifest, bindings, local, block_bytes=block_bytes, budget=budget, scatter=scatter)
    blocks = planner.blocks()
    read = dict.fromkeys(b.tensor for b in blocks)
    return LoadPlan(
        bindings=bindings,
        blocks=blocks,
        positions=local,
        files=tuple(dict.fromkeys(path for name in read for path in paths_of(manifest.tensors[name]))),
        needed_bytes=planner.needed_bytes(),
        read_bytes=sum(b.read_bytes for b in blocks),
        # Every split is even, so all positions store equally much.
        device_bytes=(sum(math.prod(t.layout.shard_shape(t.view.shape)) * t.dtype.itemsize for t in bindings),) * size,
        host_memory_bytes=budget,
        block_bytes=block_bytes,
        runs=tuple(runs(blocks, staged=planner.staged_bytes, limit_bytes=budget // BUDGET_PARTS)),
        budget_raised=host_memory_bytes is None and budget > DEFAULT_HOST_MEMORY,
    )


def _budget(tensors: Sequence[Tensor], asked: int | None, *, through_units: bool, uploads: bool) -> int:
    needs = {tensor.name: least_budget(tensor, through_units=through_units, uploads=uploads) for tensor in tensors}
    least = max(needs.values(), default=0)
    # A default may grow to what a chunk needs; a budget that the user stated is a promise, so too little is an error.
    if asked is None:
        return max(DEFAULT_HOST_MEMORY, least)
    if asked < BUDGET_PARTS * MIN_BLOCK_BYTES:
        raise BudgetError(
            f"Cannot load with a host-memory budget of {exact_bytes(asked)}: expected room for {BUDGET_PARTS} "
            f"blocks. Raise it to at least {BUDGET_PARTS * MIN_BLOCK_BYTES >> 10}KiB"
        )
    if asked < least:
        tensor = next(tensor for tensor in tensors if needs[tensor.name] == least)
        chunk = max(region.size for region in regions(tensor)) * tensor.dtype.itemsize
        raise BudgetError(
            f"Cannot load tensor {tensor.name!r} with a host-memory budget of {exact_bytes(asked)}: its chunks "
            f"decode as a whole, to {exact_bytes(chunk)} each. Raise the budget to at least {exact_bytes(least)}"
        )
    return asked


def _check_meshes(bindings: Sequence[Binding]) -> None:
    meshes = {t.layout.mesh for t in bindings}
    if len(meshes) > 1:
        raise LayoutError(
            f"Cannot load onto several meshes at once: found {', '.join(sorted(map(str, meshes)))}, expected one. Give "
            "all variables layouts on the same mesh"
        )
