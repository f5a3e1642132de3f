"""Decide which bytes are read, in which order, and where they go: pure arithmetic, printable without reading data.

`plan_transfers` checks the request and the budget, and `Planner` plans one tensor after the other. All views of a
tensor are cut at the same rows (`shardload.transfer.geometry.cut`). Ranges that touch become one block, unless it gets
too long. If one variable needs scratch, all blocks of the tensor pass through it (see `shardload.transfer.load_plan`).

Views of one tensor whose byte ranges overlap (fused kernels, tied weights) share blocks, so that each byte is read
once. Columns that no local shard needs are skipped if that is faster; `LoadPlan.read_bytes` counts them otherwise.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardload.errors import BudgetError, LayoutError, MismatchError
from shardload.manifest import Decoded, Manifest, Tensor, UnreadableRows, View, c_strides
from shardload.sharding.layout import Bounds
from shardload.stores.location import Location
from shardload.stores.store import Store
from shardload.transfer import budgets
from shardload.transfer.budgets import MIN_BLOCK_BYTES, host_memory_budget, staged_whole
from shardload.transfer.casts import check_cast
from shardload.transfer.geometry import (
    SKIP_BYTES,
    Ordered,
    Region,
    RegionView,
    address,
    contiguous_run,
    cut,
    in_file_order,
    is_injective,
    largest_stride,
    paths_of,
    span,
    view_in_region,
)
from shardload.transfer.load_plan import (
    BUDGET_PARTS,
    SMALL_BLOCK_BYTES,
    Binding,
    Block,
    BlockPiece,
    How,
    LoadPlan,
    joined_runs,
    local_bounds,
)
from shardload.units import exact_bytes, plural

__all__ = ["BLOCK_BYTES", "Binding", "Block", "BlockPiece", "LoadPlan", "local_bounds", "plan_transfers"]


BLOCK_BYTES = 16 << 20
"""Most bytes that one block (a range of a file) reads; `shardload.transfer.load_plan` explains why."""
STAGED_BYTES = 2 << 20
"""Most bytes of a staged block in scratch memory at a time: about the size of an L2 cache. 1 MiB would take twice as
many Python calls; with 16 MiB, the copy out of scratch would read main memory and be a quarter slower."""
_DECODED_BYTES = 2 << 20
"""Most bytes of a block that the tensor's own reader decodes, unless the reader can only decode more rows at once."""
DIRECT_RUN_BYTES = 2 << 10
"""Shortest run of bytes that is read from a file straight into a shard. Shorter runs go through scratch memory: each
would be one more entry (35 ns) in the list of pieces that the system call takes."""
_BUFFERED_RUN_BYTES = 32 << 10
"""The same for files of the cache, and of a server nearby: Python makes a buffer of each run."""
_NEAR_BLOCK_BYTES = 1 << 20
"""Shortest block that is received from a server nearby straight into a shard, by a request of its own. Shorter ones are
requested together with their neighbours: a request costs client and server 1 ms of CPU time."""


def plan_transfers(
    manifest: Manifest,
    bindings: Sequence[Binding],
    *,
    host_memory_bytes: int | None,
    block_bytes: int = BLOCK_BYTES,
    positions: Sequence[int] | None = None,
    scatter: bool = True,
    uploads: bool = False,
    brief: bool = False,
) -> LoadPlan:
    """Decide which blocks of the checkpoint's files a load reads, and which parts of variables each block fills.

    Args:
        manifest: The tensors of the checkpoint.
        bindings: Variables to fill; several may share a tensor. All layouts share one mesh.
        host_memory_bytes: Budget for everything staged; by default `budgets.DEFAULT_HOST_MEMORY`, or what the
            largest chunk that decodes as a whole needs.
        block_bytes: Most bytes that one block reads.
        positions: Mesh positions of this process; all by default.
        scatter: Whether bytes may go straight from files to shards; not if they must be verified first.
        uploads: Whether shards are staged on the host too and count against the budget, as devices have own memory.
        brief: Whether to leave out blocks of repeated layers, as their number of bytes is all that is wanted: such a
            plan cannot be carried out.
    """
    bindings = tuple(bindings)
    if len(meshes := {t.layout.mesh for t in bindings}) > 1:
        raise LayoutError(
            f"Cannot load onto several meshes at once: found {', '.join(sorted(map(str, meshes)))}, expected one. Give "
            "all variables layouts on the same mesh"
        )
    # Bytes of verifying stores are compared before they go to shards, and those of most remote ones arrive in ranges.
    stores = {path.store for path in manifest.files}
    plan = functools.partial(
        _plan,
        *(manifest, bindings, host_memory_bytes),
        positions=positions,
        block_bytes=block_bytes,
        uploads=uploads,
        brief=brief,
    )
    if scatter and not brief and any(store.is_requested and _may_be_here(manifest, store) for store in stores):
        found = plan(scatter=True, is_cached=True)
        if _is_here(found):
            return found
    is_near = scatter and not brief and _is_near(manifest)
    scatter = is_near or (scatter and not any(store.is_requested or store.is_verifying for store in stores))
    return plan(scatter=scatter, is_near=is_near)


def _is_near(manifest: Manifest) -> bool:
    """Whether some files are requested, and a server nearby sends each of them."""
    requested = [path for path in manifest.files if path.store.is_requested]
    is_verifying = any(path.store.is_verifying for path in manifest.files)
    return bool(requested) and not is_verifying and all(path.store.is_near(path.key) for path in requested)


def _may_be_here(manifest: Manifest, store: Store) -> bool:
    return not store.is_verifying and any(store.is_here(path.key, ()) for path in manifest.files if path.store is store)


def _is_here(plan: LoadPlan) -> bool:
    """Whether local files and the cache have all that a plan reads."""
    ranges: dict[Location, list[tuple[int, int]]] = {path: [] for path in plan.files}
    for block in plan.blocks:
        if block.how != "decoded" and block.read_bytes:
            ranges[block.path].append((block.offset, block.offset + block.read_bytes))
    return all(path.store.is_here(path.key, found) and not path.store.is_verifying for path, found in ranges.items())


def _plan(
    manifest: Manifest,
    bindings: tuple[Binding, ...],
    host_memory_bytes: int | None,
    *,
    positions: Sequence[int] | None,
    block_bytes: int,
    scatter: bool,
    is_cached: bool = False,
    is_near: bool = False,
    uploads: bool,
    brief: bool,
) -> LoadPlan:
    wanted = {binding.view.tensor: None for binding in bindings}
    # Names without a tensor are left to `Planner`, whose error names the variable.
    tensors = [manifest.tensors[name] for name in wanted if name in manifest.tensors]
    size = bindings[0].layout.mesh.size if bindings else 0
    local = tuple(range(size)) if positions is None else tuple(positions)
    whole = staged_whole(manifest, bindings, local)
    through_units = is_near or not scatter
    budget = host_memory_budget(tensors, whole, host_memory_bytes, through_units=through_units, uploads=uploads)
    # Several bindings may fill one array, which then counts once.
    arrays = {i if binding.box is None else binding.name: binding for i, binding in enumerate(bindings)}.values()
    planner = Planner(
        manifest,
        bindings,
        local,
        block_bytes=block_bytes,
        budget=budget,
        scatter=scatter,
        is_cached=is_cached,
        is_near=is_near,
        brief=brief,
    )
    blocks = planner.blocks()
    read = dict.fromkeys(b.tensor for b in blocks)
    return LoadPlan(
        bindings=bindings,
        blocks=blocks,
        positions=local,
        files=tuple(dict.fromkeys(path for name in read for path in paths_of(manifest.tensors[name]))),
        needed_bytes=sum(planner.needed_by_tensor().values()),
        read_bytes=sum(b.read_bytes for b in blocks) + planner.left_out_bytes,
        # Every split is even, so all positions store equally much.
        device_bytes=(sum(o.device_bytes for binding in arrays for o in binding.outputs),) * size,
        host_memory_bytes=budget,
        block_bytes=block_bytes,
        runs=tuple(joined_runs(blocks, staged=planner.staged_bytes, limit_bytes=budget // BUDGET_PARTS)),
        budget_raised=host_memory_bytes is None and budget > budgets.DEFAULT_HOST_MEMORY,
        is_cached=is_cached,
    )


def needed_by_tensor(manifest: Manifest, bindings: Sequence[Binding], *, positions: Sequence[int]) -> dict[str, int]:
    """Return how many stored bytes of each tensor the devices at these mesh positions need, each byte counted once."""
    local, budget = tuple(positions), budgets.DEFAULT_HOST_MEMORY
    planner = Planner(manifest, tuple(bindings), local, block_bytes=BLOCK_BYTES, budget=budget, scatter=True)
    return planner.needed_by_tensor()


@dataclass(frozen=True)  # no slots: `cached_property` keeps its value in the instance's dict
class TensorPart:
    """A region of a tensor (one chunk, or all of it), and the parts of variables whose elements are in it."""

    tensor: Tensor
    region: Region
    views: Mapping[int, RegionView]
    """The part of each variable that is in this region. Keys are indices in the plan's list of variables, ``bindings``.
    Variables without elements in the region are left out."""

    def key(self, bindings: Sequence[Binding]) -> Hashable:
        """Return a key that is equal for parts that are cut alike, so that repeated layers are planned only once."""
        tensor, region = self.tensor, self.region
        views = (
            (seen.view.offset, seen.view.shape, seen.view.strides, seen.box, bindings[i].layout, bindings[i].dtype)
            for i, seen in self.views.items()
        )
        return (tensor.shape, tensor.dtype, region.size, region.origin, *views)

    @functools.cached_property
    def row_elements(self) -> int:
        """Number of elements in a row of the region, for blocks that are copied to shards row by row.

        It is the largest stride of the variables' views, because the dim with that stride steps from row to row. If two
        views have different largest strides, there are no common rows: the whole region counts as one row.
        """
        strides = {largest_stride(seen.view) for seen in self.views.values()}
        return max(1, strides.pop() if len(strides) == 1 else self.region.size)

    def ranges(self) -> list[tuple[int, int]]:
        """Return the range of the region's elements that each variable spans, sorted, to see which ones overlap."""
        starts = ((address(seen.view, seen.box.start), seen) for seen in self.views.values())
        return sorted((start, start + span(seen.box.shape, seen.view.strides)) for start, seen in starts)


class Planner:
    """Cuts the tensors of one `plan_transfers` call into blocks, which are ranges of files that are read in one go."""

    def __init__(
        self,
        manifest: Manifest,
        bindings: tuple[Binding, ...],
        positions: tuple[int, ...],
        *,
        block_bytes: int,
        budget: int,
        scatter: bool,
        is_cached: bool = False,
        is_near: bool = False,
        brief: bool = False,
    ) -> None:
        self.tensors = manifest.tensors
        self.bindings = bindings
        self.block_bytes = block_bytes
        self.budget = budget
        self.scatter = scatter
        self.is_cached = is_cached
        self.is_near = is_near
        self.brief = brief
        self.left_out_bytes = 0
        self._times = Counter[Hashable]()
        # Once for each layout and shape: to look up thousands of positions takes longer than the rest.
        kinds = dict.fromkeys((t.layout, t.view.shape) for t in bindings)
        boxes = {kind: local_bounds(*kind, positions) for kind in kinds}
        self.shards = [_within(boxes[t.layout, t.view.shape], t.box) for t in bindings]
        self.by_tensor: dict[str, list[int]] = {}
        self._planned: dict[Hashable, tuple[TensorPart, tuple[Block, ...]]] = {}
        # Every view is checked before any is cut: views come from converters and layer hooks, which may be wrong.
        for index, binding in enumerate(bindings):
            self._check_target(binding)
            self.by_tensor.setdefault(binding.view.tensor, []).append(index)

    def _check_target(self, binding: Binding) -> None:
        view, tensor = binding.view, self.tensors.get(binding.view.tensor)
        if tensor is None:
            raise MismatchError(f"Cannot load variable {binding.name!r}: the checkpoint has no tensor {view.tensor!r}")
        if isinstance(tensor.storage, Decoded) and isinstance(tensor.storage.reader, UnreadableRows):
            raise tensor.storage.reader.refusal(tensor.name)
        box = binding.filled
        is_inside = len(view.shape) == len(box.stop) and all(a <= b for a, b in zip(box.stop, view.shape, strict=True))
        if not is_inside or len(view.shape) != len(view.strides) or min(view.strides, default=0) < 0:
            raise LayoutError(
                f"Cannot load variable {binding.name!r}: found {view}, expected one stride per dim, and none < 0"
            )
        start = address(view, box.start)
        stop = start + span(box.shape, view.strides)
        if start < 0:
            raise LayoutError(f"Cannot load variable {binding.name!r}: found {view}, expected an offset >= 0")
        if 0 not in box.shape and stop > tensor.size:
            raise MismatchError(
                f"Cannot load variable {binding.name!r} of shape {view.shape}: its view needs "
                f"{plural(stop, 'element')} of tensor {view.tensor!r}, which has {tensor.size} (shape {tensor.shape})"
            )
        check_cast(tensor.dtype, binding.dtype, variable=binding.name, tensor=view.tensor)

    def blocks(self) -> tuple[Block, ...]:
        """Return the blocks to read of all tensors, ordered by offset within each file."""
        wanted = {name: tensor for name, tensor in self.tensors.items() if name in self.by_tensor}
        return tuple(block for place in self._in_order(wanted) for block in self._region_blocks(*place))

    def _in_order(self, wanted: dict[str, Tensor]) -> list[tuple[Tensor, Region]]:
        """Return all regions in file order, but those of a tensor that is encoded one after the other."""
        places = list(in_file_order(wanted))
        first: dict[str, int] = {}
        for number, (tensor, _) in enumerate(places):
            first.setdefault(tensor.name, number)
        encoded = {binding.view.tensor for binding in self.bindings if binding.encoding is not None}
        # It is in memory from its first element to its last one.
        order = {i: first[t.name] if t.name in encoded else i for i, (t, _) in enumerate(places)}
        return [places[i] for i in sorted(order, key=order.__getitem__)]

    def _region_blocks(self, tensor: Tensor, region: Region) -> Iterator[Block]:
        found = ((i, self.bindings[i]) for i in self.by_tensor[tensor.name])
        views = ((i, view_in_region(binding.view, tensor, region, binding.box)) for i, binding in found)
        part = TensorPart(tensor, region, {i: seen for i, seen in views if seen is not None})
        if not part.views:
            return
        if (packed := region.packed) is not None:
            boxes = ((i, seen.view, box) for i, seen in part.views.items() for box in self._boxes(i, seen))
            if pieces := tuple(BlockPiece(i, box, view) for i, view, box in boxes):
                yield Block(
                    tensor.name,
                    region.path,
                    region.offset,
                    start=0,
                    stop=region.size,
                    read_bytes=packed.n_bytes,
                    host_bytes=region.unpacking_bytes(tensor.dtype) + self._cast_bytes(tensor, region.size, pieces),
                    row_elements=0,
                    step=region.size,
                    how="packed",
                    pieces=pieces,
                    packed=packed,
                )
            return
        if isinstance(tensor.storage, Decoded):  # readers of equal shape may still differ, so never reuse a plan
            yield from self._part_blocks(part)
            return
        key = part.key(self.bindings)
        if (like := self._planned.get(key)) is None:
            self._planned[key] = part, tuple(self._part_blocks(part))
            yield from self._planned[key][1]
        elif self._is_left_out(key):
            self.left_out_bytes += sum(block.read_bytes for block in like[1])
        else:
            yield from _shifted(*like, part)

    def _is_left_out(self, key: Hashable) -> bool:
        """Whether a brief plan needs no more blocks of this kind, to tell how much memory the blocks in work take."""
        self._times[key] += 1
        is_repeated = self.brief and self._times[key] >= BUDGET_PARTS
        # Small blocks are read together with their neighbours, so each of them counts.
        return is_repeated and all(block.read_bytes > SMALL_BLOCK_BYTES for block in self._planned[key][1])

    def _part_blocks(self, part: TensorPart) -> Iterator[Block]:
        tensor = part.tensor
        if isinstance(tensor.storage, Decoded):
            how: How = "decoded"
        else:
            # A scatter read sends each byte to one address, so elements that two variables share need scratch.
            disjoint = self.scatter and all(a[1] <= b[0] for a, b in itertools.pairwise(part.ranges()))
            how = "direct" if disjoint and all(self._is_direct(part, i) for i in part.views) else "staged"
        limit = self._limit_bytes(part, how) // tensor.dtype.itemsize
        # Digests cover gaps, too, for which a direct block has too little memory.
        skip = 1 if self.is_cached and how == "direct" else max(1, SKIP_BYTES // tensor.dtype.itemsize)
        spans = []
        for i, seen in part.views.items():
            for whole in self._boxes(i, seen):
                for box in cut(Ordered.of(seen.view, whole), limit=limit, skip=skip):
                    start = address(seen.view, box.start)
                    spans.append((start, start + span(box.shape, seen.view.strides), BlockPiece(i, box, seen.view)))
        spans.sort(key=lambda s: s[:2])
        for start, stop, pieces in _merge(spans, limit):
            yield self._block(part, start, stop, how, pieces)

    def _boxes(self, index: int, seen: RegionView) -> list[Bounds]:
        """Return the boxes of a variable that this process's shards need, as far as the region contains them."""
        shards = self.shards[index]
        # Distinct shards never overlap, so equal sizes mean that they cover the variable: read it in one piece.
        if shards and sum(box.size for box in shards) == self.bindings[index].filled.size:
            return [seen.box]
        return [both for b in shards if (both := b.intersect(seen.box)) is not None]

    def _is_direct(self, part: TensorPart, index: int) -> bool:
        """Whether a variable's shards can be read without scratch: no cast, and each has long runs in the file."""
        binding, seen = self.bindings[index], part.views[index]
        if binding.dtype != part.tensor.dtype or not is_injective(binding.view, binding.filled):
            return False
        shard = binding.layout.shard_shape(binding.view.shape)
        strides = c_strides(shard)
        least_bytes = _BUFFERED_RUN_BYTES if self.is_cached or self.is_near else DIRECT_RUN_BYTES
        # Shards have one shape, so one stands for all; but the edges of a chunk cut each of them differently.
        if part.region.origin is None and binding.box is None:
            boxes = {Bounds.whole(shard)}
        else:
            common = (b.intersect(seen.box) for b in self.shards[index])
            boxes = {Bounds.whole(both.shape) for both in common if both is not None}
        for box in boxes:
            ordered = Ordered.of(seen.view, box)
            buffer = tuple(strides[d] for d in ordered.order)
            length, outer = contiguous_run(ordered.shape, ordered.strides, buffer)
            is_whole = length == box.size and outer == 0
            if not is_whole and length * part.tensor.dtype.itemsize < least_bytes:
                return False
        return True

    def _limit_bytes(self, part: TensorPart, how: How) -> int:
        """Return the most bytes that one block (a range of a file) of this region reads.

        If rows are decoded several at a time (a unit), it is a multiple of a unit, or of a row if a unit is too long.
        """
        tensor, sharing = part.tensor, len(part.views)
        # A block longer than scratch passes through it row by row, so at least two rows must fit.
        fits = how == "staged" and 2 * part.row_elements * tensor.dtype.itemsize <= STAGED_BYTES
        staged = self.block_bytes if fits else STAGED_BYTES
        wanted = {"direct": self.block_bytes, "staged": staged, "decoded": _DECODED_BYTES}[how]
        most = max(MIN_BLOCK_BYTES, self.budget // (BUDGET_PARTS * sharing))
        limit = max(min(wanted, self.block_bytes, most), tensor.dtype.itemsize)
        if not isinstance(tensor.storage, Decoded):
            return limit
        row = max(1, tensor.nbytes // max(1, tensor.rows))
        unit = row * max(1, min(tensor.storage.reader.row_alignment, tensor.rows))
        # Single rows where a unit is too long, although the reader may then decode that unit once per row.
        unit = unit if unit <= max(most, limit) else row
        if 2 * unit > self.budget:
            raise BudgetError(
                f"Cannot read tensor {tensor.name!r}: it decodes in units of {exact_bytes(unit)}, and two of them "
                f"exceed the host-memory budget of {exact_bytes(self.budget)}. Raise the budget to at least "
                f"{exact_bytes(2 * unit)}"
            )
        return max(limit // unit, 1) * unit

    def _block(self, part: TensorPart, start: int, stop: int, how: How, pieces: tuple[BlockPiece, ...]) -> Block:
        tensor, region, itemsize = part.tensor, part.region, part.tensor.dtype.itemsize
        offset, read_bytes = region.offset + start * itemsize, (stop - start) * itemsize
        if isinstance(tensor.storage, Decoded):
            # Readers decode whole rows. Stored rows may differ in length, so these count as their share of the tensor.
            row, stored = max(1, tensor.size // tensor.rows), tensor.stored_bytes
            first, last = start // row, -(-stop // row)
            start, stop, offset = first * row, last * row, 0
            read_bytes = stored * last // tensor.rows - stored * first // tensor.rows
        if self.is_near and how == "direct" and read_bytes < _NEAR_BLOCK_BYTES:
            how = "staged"
        step = stop - start
        row_elements = self._row_elements(part, start, pieces) if how == "staged" and step >= part.row_elements else 0
        if row_elements:
            # A fill is whole rows: a row copy moves rows, and each fill starts at row 0 of scratch.
            step = min(-(-step // row_elements), max(1, STAGED_BYTES // (row_elements * itemsize))) * row_elements
        host_bytes = 0
        if how != "direct":
            # The block as read, a cast copy, and spacing between its rows (see `scratch`): 64 bytes (`PAD_BYTES`) per
            # row of 1 KiB (`PITCH_ROW_BYTES`) or more, which is a sixteenth, rounded up.
            padding = step * itemsize // 16 + 64 if how == "staged" else 0
            host_bytes = step * itemsize + self._cast_bytes(tensor, step, pieces) + padding
        return Block(
            tensor.name, region.path, offset, start, stop, read_bytes, host_bytes, row_elements, step, how, pieces
        )

    def _row_elements(self, part: TensorPart, start: int, pieces: tuple[BlockPiece, ...]) -> int:
        """Return how many elements a row of the tensor has if a block of it can be copied to shards row by row, else 0.

        For that, two rows must fit into scratch, and a variable must need the same elements of each row, none past its
        end: the same copy is then repeated for all rows.
        """
        row_elements = part.row_elements
        if 2 * row_elements * part.tensor.dtype.itemsize > STAGED_BYTES:
            return 0
        for piece in pieces:
            view = piece.view
            inner = [(n, t) for n, t in zip(piece.box.shape, view.strides, strict=True) if t < row_elements]
            length = sum((n - 1) * t for n, t in inner) + 1
            # `RowCopy` walks along the one dim whose stride is a row.
            repeated = sum(t == row_elements and n > 1 for n, t in zip(view.shape, view.strides, strict=True)) != 1
            if repeated or (address(view, piece.box.start) - start) % row_elements + length > row_elements:
                return 0
        return row_elements

    def _cast_bytes(self, tensor: Tensor, elements: int, pieces: tuple[BlockPiece, ...]) -> int:
        wanted = {self.bindings[p.binding].dtype for p in pieces} - {tensor.dtype}
        # Casts run one after another on the worker, so the widest one is the peak.
        return elements * max((d.itemsize for d in wanted), default=0)

    def staged_bytes(self, block: Block) -> int:
        """Return the bytes of all shards of this process that a block writes to: each shard whole, with its padding."""
        used = ((self.shards[piece.binding], self.bindings[piece.binding].dtype) for piece in block.pieces)
        return sum(box.size * dtype.itemsize + 63 for shards, dtype in used for box in shards)

    def needed_by_tensor(self) -> dict[str, int]:
        """Return how many stored bytes of each tensor this process's shards need, at most the tensor's stored size."""
        found = {}
        alike: dict[Hashable, int] = {}
        for name, indices in self.by_tensor.items():
            tensor, first = self.tensors[name], self.bindings[indices[0]]
            if len(indices) == 1:
                key = (first.filled, first.view.shape, first.view.strides, first.layout)
                if (elements := alike.get(key, -1)) < 0:
                    elements = alike[key] = _needed_elements(first.view, first.filled, self.shards[indices[0]])
            else:
                seen: dict[tuple[View, Bounds], set[Bounds]] = {}
                for i in indices:
                    seen.setdefault((self.bindings[i].view, self.bindings[i].filled), set()).update(self.shards[i])
                elements = sum(_needed_elements(*part, boxes) for part, boxes in seen.items())
            found[name] = tensor.stored_bytes * min(elements, tensor.size) // max(1, tensor.size)
        return found


def _within(shards: tuple[Bounds, ...], box: Bounds | None) -> tuple[Bounds, ...]:
    """Return the parts of shards that lie in a box."""
    return shards if box is None else tuple(both for shard in shards if (both := shard.intersect(box)) is not None)


def _needed_elements(view: View, filled: Bounds, boxes: Collection[Bounds]) -> int:
    """Return how many elements of a tensor these boxes of a view need; a broadcast dim (stride 0) counts once."""
    real = [d for d, t in enumerate(view.strides) if t or not filled.shape[d]]
    needed = sum(math.prod(box.shape[d] for d in real) for box in boxes)
    return min(math.prod(filled.shape[d] for d in real), needed)


def _shifted(like: TensorPart, blocks: tuple[Block, ...], part: TensorPart) -> Iterator[Block]:
    """Yield the blocks of ``part`` by moving those of ``like``, for example the same weight of another layer."""
    other = dict(zip(like.views, part.views.items(), strict=True))
    by = part.region.offset - like.region.offset
    for b in blocks:
        pieces = tuple(BlockPiece(i, p.box, seen.view) for p in b.pieces for i, seen in (other[p.binding],))
        # Not `dataclasses.replace`: it takes three times as long, and most blocks of a model are made here.
        yield Block(
            *(part.tensor.name, part.region.path, b.offset + by, b.start, b.stop, b.read_bytes, b.host_bytes),
            *(b.row_elements, b.step, b.how, pieces),
        )


def _merge(spans: list[tuple[int, int, BlockPiece]], limit: int) -> Iterator[tuple[int, int, tuple[BlockPiece, ...]]]:
    """Join ranges of elements that touch or overlap into blocks; yield each block's start, stop and pieces.

    ``spans`` are sorted. A block has at most ``limit`` elements, unless a single range is longer.
    """
    held: list[BlockPiece] = []
    first = last = 0
    for start, stop, piece in spans:
        joint = max(last, stop) - first
        # One range may contain the other (a row longer than ``limit``): their union reads nothing more.
        if held and start <= last and (joint <= limit or joint in (last - first, stop - start)):
            last = max(last, stop)
        else:
            if held:
                yield first, last, tuple(held)
            first, last, held = start, stop, []
        held.append(piece)
    if held:
        yield first, last, tuple(held)
