"""Decide which process reads which rows when several processes load together; pure arithmetic, equal on all of them.

Devices of several processes may need the same bytes: replicas, and columns that lie in the same rows of the file. Such
a variable is first loaded in an *owner layout*, which stores each element on the devices of one process only, in whole
rows. Then the processes exchange what others need (`shardload.transfer.exchange`)::

    (8, 6) on batch=2,model=2       target (-, model)          owner (batch+model, -)
    processes 0 and 1 have          0 0 0 │ 1 1 1              0 0 0 0 0 0    rows 0:2 on device (0, 0)
    one row of the mesh each        0 0 0 │ 1 1 1     ◄──      0 0 0 0 0 0
                                    …                          1 1 1 1 1 1    rows 2:4 on device (0, 1)
                                    both times batch           …

From the target, an owner layout is made in two kinds of `Move`, which the exchange undoes, the last one first:

* **gather**: an axis of replicas that crosses processes splits a dim. Undone by an all-gather.
* **turn**: an axis that splits columns splits rows instead. Undone by an all-to-all.

All layouts here are on a *refined* mesh (`ProcessGrid`): each axis is divided into one over processes and one over the
devices of a process, so that copies on devices of one process cost neither reads nor an exchange.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from shardload.manifest import Chunked, Decoded, Extent, Manifest, Packed, Tensor, View, c_strides
from shardload.sharding.layout import Bounds, Layout
from shardload.sharding.mesh import MeshSpec
from shardload.transfer.geometry import SKIP_BYTES, Ordered, address, regions, span, view_in_region
from shardload.transfer.load_plan import SMALL_BLOCK_BYTES, Binding, local_bounds
from shardload.units import format_seconds, plural

Replicas = Literal["auto", "read", "broadcast"]
"""How processes that load together get bytes that several of them need. ``read``: each reads all that it needs.
``broadcast``: one reads them, and the others get them from it. ``auto``: as is expected to be faster."""
Strategy = Literal["alone", "read", "broadcast"]
"""How one variable is read. ``alone``: no byte is needed by two processes; else as in `Replicas`."""

_ALONE_SHARE = 1.02
"""A variable of which all processes together read at most this multiple of its bytes stays as it is."""
_REMOTE, _FILES = 0.6e9, 1e9
"""Bytes per second that a process is expected to read from an object store, and from files: the lower ends of what was
measured, as many processes share a store (0.6 to 1.5 GB/s from buckets, 0.8 to 2 GB/s from cold disks)."""
_CPU, _LINKS = 0.8e9, 10e9
"""Bytes per second that a process is expected to receive in an exchange: by Gloo between CPUs, where 0.6 to 1.8 GB/s
were measured, and between accelerators."""
_PROGRAM_S = 0.1
"""Seconds per program that an exchange compiles, several at a time."""
_SAMPLED = 16
"""Most processes whose reads of a chunked tensor are computed one by one; those of the others are like theirs."""


@dataclass(frozen=True, slots=True)
class ProcessGrid:
    """A mesh of which each process has an equal block, with each axis divided in two: over processes, and inside one.

    For example, of ``batch=2,model=4`` two processes have one row each, so the axis ``batch`` crosses processes::

        batch/processes=2, batch/devices=1, model/processes=1, model/devices=4
    """

    mesh: MeshSpec
    """The refined mesh; its positions are those of the original mesh, in the same order."""
    crossing: tuple[str, ...]
    """Axes of the refined mesh along which the process changes, in the order of the mesh."""
    process_of: tuple[int, ...]
    """The process of each position."""

    @classmethod
    def of(cls, mesh: MeshSpec, process_of: Sequence[int]) -> ProcessGrid | None:
        """Return the grid of a mesh by the process of each position; None if a process has no block of neighbours."""
        owners = np.asarray(process_of).reshape(mesh.sizes)
        first = np.nonzero(owners == owners.flat[0])
        local = [len(set(along.tolist())) for along in first]
        if any(size % n for size, n in zip(mesh.sizes, local, strict=True)):
            return None
        outer = [size // n for size, n in zip(mesh.sizes, local, strict=True)]
        sizes = tuple(itertools.chain.from_iterable(zip(outer, local, strict=True)))
        rank = len(outer)
        blocks = owners.reshape(sizes).transpose([*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)])
        by_block = blocks.reshape(math.prod(outer), -1)
        if (by_block != by_block[:, :1]).any() or len(set(by_block[:, 0].tolist())) != len(by_block):
            return None
        axes = tuple(itertools.chain.from_iterable(map(_divided, mesh.axes)))
        crossing = tuple(_divided(axis)[0] for axis, n in zip(mesh.axes, outer, strict=True) if n > 1)
        return cls(MeshSpec(axes, sizes), crossing, tuple(process_of))

    @property
    def processes(self) -> int:
        """Number of processes."""
        return math.prod(self.mesh.axis_size(axis) for axis in self.crossing)

    def refined(self, layout: Layout) -> Layout:
        """Return a layout of the original mesh on the refined one: each position keeps its box."""
        return Layout(self.mesh, tuple(tuple(self._kept(axes)) for axes in layout.spec))

    def _kept(self, axes: Sequence[str]) -> Iterator[str]:
        for axis in itertools.chain.from_iterable(map(_divided, axes)):
            if self.mesh.axis_size(axis) > 1:
                yield axis

    def positions(self, process: int) -> tuple[int, ...]:
        """Return the positions whose devices belong to a process."""
        return tuple(i for i, one in enumerate(self.process_of) if one == process)


def _divided(axis: str) -> tuple[str, str]:
    return f"{axis}/processes", f"{axis}/devices"


@dataclass(frozen=True, slots=True)
class Move:
    """One difference between an owner layout and the target, which an exchange undoes with one collective."""

    axes: tuple[str, ...]
    """Axes of the refined mesh that split `owner_dim`, after all axes that split it already."""
    owner_dim: int
    target_dim: int | None
    """The dim that the axes split in the target, as its last ones; ``None`` if the target has copies along them."""


@dataclass(frozen=True, slots=True)
class OwnerChoice:
    """How one variable is read by several processes, and why."""

    strategy: Strategy
    why: str
    target: Layout
    """The layout that the variable gets in the end, on the refined mesh."""
    layout: Layout
    """The layout to load, on the refined mesh: the owner layout for ``broadcast``, else the target."""
    moves: tuple[Move, ...] = ()
    """For ``broadcast``: how the owner layout was made from the target, in order."""
    flat: tuple[int, int] | None = None
    """The shape to load, if the variable's shards are loaded flattened, one after the other, to divide evenly."""
    read_bytes: int = field(default=0, compare=False)
    """Bytes that all processes read for the variable, together."""
    everyone_bytes: int = field(default=0, compare=False)
    """Bytes that all processes would read for the variable, together, if each read what its devices need."""
    once_bytes: int = field(default=0, compare=False)
    """Bytes in the checkpoint that the variable needs."""
    received_bytes: int = field(default=0, compare=False)
    """For ``broadcast``: bytes of the variable that each process gets from others, in the variable's dtype."""

    def seen(self, view: View) -> View:
        """Return the view of a tensor to load in `layout`, by the variable's own view of it."""
        return view if self.flat is None else View(view.tensor, view.offset, self.flat, (self.flat[1], 1))

    def as_needed(self, why: str) -> OwnerChoice:
        """Return this choice for a load in which each process reads what its devices need, because of ``why``."""
        read = self.everyone_bytes
        return replace(self, strategy="read", why=why, layout=self.target, moves=(), flat=None, read_bytes=read)


@dataclass(frozen=True, slots=True)
class OwnerPlan:
    """For each variable of a load by several processes: which process reads which part, and what is exchanged."""

    grid: ProcessGrid | None
    """The processes' parts of the mesh; ``None`` if they have no blocks of neighbours: then nothing is exchanged."""
    choices: tuple[OwnerChoice, ...]
    """One for each binding, in order."""

    @property
    def exchanges(self) -> bool:
        """Whether any variable is exchanged."""
        return any(choice.moves for choice in self.choices)

    def bindings(self, bindings: Sequence[Binding]) -> tuple[Binding, ...]:
        """Return the bindings with the layouts to load; unchanged if nothing is exchanged."""
        if not self.exchanges:
            return tuple(bindings)
        pairs = zip(bindings, self.choices, strict=True)
        return tuple(replace(b, view=c.seen(b.view), layout=c.layout) for b, c in pairs)


def plan_owners(
    manifest: Manifest,
    bindings: Sequence[Binding],
    *,
    process_of: Sequence[int],
    replicas: Replicas,
    on_cpu: bool = False,
) -> OwnerPlan:
    """Decide for each variable whether every process reads what it needs, or one reads and the others get it.

    ``process_of`` has the process of each mesh position; ``on_cpu`` says that the devices are CPUs.
    """
    grid = ProcessGrid.of(bindings[0].layout.mesh, process_of) if bindings else None
    if grid is None:
        why = "the devices of a process are not neighbours in the mesh"
        return OwnerPlan(None, tuple(OwnerChoice("read", why, b.layout, b.layout) for b in bindings))
    chosen: dict[Any, OwnerChoice] = {}
    choices = []
    for binding in bindings:
        tensor = manifest.tensors[binding.view.tensor]
        # Repeated layers are decided once; chunks may lie differently in each tensor.
        own = tensor.name if isinstance(tensor.storage, Chunked) else (type(tensor.storage), tensor.stored_bytes)
        view = binding.view
        key = (tensor.shape, tensor.dtype, own, view.shape, view.strides, binding.layout, binding.dtype, binding.box)
        encodes = binding.encoding is not None
        if (*key, encodes) not in chosen:
            chosen[*key, encodes] = _choice(tensor, binding, grid, replicas)
        choices.append(chosen[*key, encodes])
    if replicas == "auto":
        is_remote = any(path.store.is_requested for path in manifest.files)
        slower = _why_slower(choices, grid, read_rate=_REMOTE if is_remote else _FILES, rate=_CPU if on_cpu else _LINKS)
        if slower:
            choices = [choice.as_needed(slower) if choice.moves else choice for choice in choices]
    return OwnerPlan(grid, tuple(choices))


def _why_slower(choices: Sequence[OwnerChoice], grid: ProcessGrid, *, read_rate: float, rate: float) -> str:
    """Return why an exchange is expected to take longer than the reads that it saves; empty if it does not."""
    exchanged = [choice for choice in choices if choice.moves]
    saved = sum(choice.everyone_bytes - choice.read_bytes for choice in exchanged) // grid.processes
    received = sum(choice.received_bytes for choice in exchanged)
    read_s, exchange_s = saved / read_rate, received / rate + _PROGRAM_S * len(set(map(id, exchanged)))
    if not exchanged or exchange_s < read_s:
        return ""
    return (
        f"an exchange is expected to take {format_seconds(exchange_s)}, and to save each process "
        f"{format_seconds(read_s)} of reading"
    )


def _choice(tensor: Tensor, binding: Binding, grid: ProcessGrid, replicas: Replicas) -> OwnerChoice:
    target, view = grid.refined(binding.layout), binding.view
    if binding.box is not None:
        return OwnerChoice("read", "several tensors make up the array", target, target)
    once = tensor.stored_bytes * min(math.prod(view.shape), tensor.size) // max(1, tensor.size)
    read = _read_together(tensor, view, target, grid)

    def as_needed(strategy: Strategy, why: str) -> OwnerChoice:
        return OwnerChoice(strategy, why, target, target, read_bytes=read, everyone_bytes=read, once_bytes=once)

    if read <= once * _ALONE_SHARE:
        return as_needed("alone", "no two processes read the same bytes")
    if replicas == "read":
        return as_needed("read", "replicas='read'")
    if binding.encoding is not None:
        return as_needed("read", "it is quantised while it is loaded, by each process for its own devices")
    if once <= SMALL_BLOCK_BYTES:
        return as_needed("read", "it is small: it is read together with its neighbours in the file")
    if binding.dtype.itemsize not in (1, 2, 4, 8) or binding.dtype.kind == "c":
        return as_needed("read", f"{binding.dtype} has no integers of its width to exchange")
    found = list(_owners(view, target, grid, tensor))
    if not found:
        return as_needed("read", f"no dim of {view.shape} divides into parts for {plural(grid.processes, 'process')}")
    reads = [_read_together(tensor, one.seen(view), one.layout, grid) for one in found]
    least = min(reads)
    if least >= read:
        return as_needed("read", "an exchange would save no reads")
    best = found[reads.index(least)]
    received = _received_bytes(binding, target, best.moves, grid)
    return replace(best, read_bytes=least, everyone_bytes=read, once_bytes=once, received_bytes=received)


def _received_bytes(binding: Binding, target: Layout, moves: Sequence[Move], grid: ProcessGrid) -> int:
    needed = sum(box.size for box in local_bounds(target, binding.view.shape, grid.positions(0)))
    group = math.prod(grid.mesh.axis_size(a) for move in moves for a in move.axes if a in grid.crossing)
    return needed * binding.dtype.itemsize * (group - 1) // group


def _why(target: Layout, moves: Sequence[Move]) -> str:
    copies = math.prod(target.mesh.axis_size(a) for m in moves if m.target_dim is None for a in m.axes)
    parts = [f"{plural(copies, 'process')} need the same part"] if copies > 1 else []
    if any(m.target_dim is not None for m in moves):
        parts.append("the parts of several processes share rows of the file")
    return " and ".join(parts)


def _owners(view: View, target: Layout, grid: ProcessGrid, tensor: Tensor) -> Iterator[OwnerChoice]:
    """Yield owner layouts for a target with the moves that lead to them: copies divided, then columns turned too."""
    used = {axis for axes in target.spec for axis in axes}
    copies = tuple(axis for axis in grid.crossing if axis not in used)
    columns = {d: axes[k:] for d, axes in enumerate(target.spec) if (k := _first_crossing(axes, grid)) is not None}
    # The dims that go furthest in the file come first: a process then reads whole rows.
    order = Ordered.of(view, Bounds.whole(view.shape)).order
    for count in range(len(columns) + 1):
        for turned in itertools.combinations(columns, count):
            found = _Placing(target, view.shape, [d for d in order if d not in turned])
            placed = not copies or found.place(copies, None) or all(found.place((axis,), None) for axis in copies)
            if placed and all(found.place(columns[d], d) for d in turned) and found.moves:
                yield OwnerChoice("broadcast", _why(target, found.moves), target, found.layout, tuple(found.moves))
    if copies and isinstance(tensor.storage, Extent) and (flat := _flattened(view, target, order)) is not None:
        spec = (target.spec[_lead(view, order)], copies)
        layout, moves = Layout(grid.mesh, spec), (Move(copies, 1, None),)
        if layout.divides(flat):
            yield OwnerChoice("broadcast", _why(target, moves), target, layout, moves, flat)


def _lead(view: View, order: Sequence[int]) -> int:
    """Return the dim of a view that goes furthest in the file."""
    return next((d for d in order if view.shape[d] > 1), 0)


def _flattened(view: View, target: Layout, order: Sequence[int]) -> tuple[int, int] | None:
    """Return the shape of a view's shards flattened, if each of them is in one piece in the file; else ``None``."""
    lead, size = _lead(view, order), math.prod(view.shape)
    shape = [view.shape[d] for d in order]
    dense = all(n == 1 or view.strides[d] == t for d, n, t in zip(order, shape, c_strides(tuple(shape)), strict=True))
    if not dense or not view.shape or any(axes and d != lead for d, axes in enumerate(target.spec)):
        return None
    return target.parts[lead], size // target.parts[lead]


def _first_crossing(axes: Sequence[str], grid: ProcessGrid) -> int | None:
    # With the axes after it, as an all-to-all divides what is left of the dim along all of them at once.
    return next((k for k, axis in enumerate(axes) if axis in grid.crossing), None)


class _Placing:
    """Places axes on dims of a layout, as long as the dims divide evenly."""

    def __init__(self, target: Layout, shape: tuple[int, ...], dims: Sequence[int]) -> None:
        self.layout, self.shape, self.dims = target, shape, dims
        self.moves: list[Move] = []

    def place(self, axes: tuple[str, ...], source: int | None) -> bool:
        """Split the first dim that divides over ``axes``, which split the dim ``source`` so far; False if none does."""
        spec = list(self.layout.spec)
        if source is not None:
            spec[source] = spec[source][: -len(axes)]
        for dim in self.dims:
            wanted = Layout(self.layout.mesh, (*spec[:dim], (*spec[dim], *axes), *spec[dim + 1 :]))
            if wanted.divides(self.shape):
                self.layout = wanted
                self.moves.append(Move(axes, dim, source))
                return True
        return False


# ---- what processes read ----------------------------------------------------------------------------


def _read_together(tensor: Tensor, view: View, layout: Layout, grid: ProcessGrid) -> int:
    """Return how many bytes of a tensor all processes read, if each reads what its devices need of a view."""
    if not layout.divides(view.shape) or 0 in view.shape:
        return 0
    if isinstance(tensor.storage, Extent):
        # Every process has a box of the same shape, and in one piece of a file only the shape matters.
        return grid.processes * _read_by(0, tensor, view, layout, grid)
    sampled = range(0, grid.processes, max(1, grid.processes // _SAMPLED))
    read = sum(_read_by(process, tensor, view, layout, grid) for process in sampled)
    return read * grid.processes // len(sampled)


def _read_by(process: int, tensor: Tensor, view: View, layout: Layout, grid: ProcessGrid) -> int:
    """Return how many bytes of a tensor one process reads for what its devices need of a view."""
    boxes = local_bounds(layout, view.shape, grid.positions(process))
    start = tuple(min(along) for along in zip(*(b.start for b in boxes), strict=True))
    stop = tuple(max(along) for along in zip(*(b.stop for b in boxes), strict=True))
    hull = Bounds(start, stop)
    apart = _read_bytes(tensor, view, boxes)
    # Boxes side by side share rows, which are read once; boxes that lie apart in the file are read one by one.
    return min(apart, _read_bytes(tensor, view, [hull])) if sum(b.size for b in boxes) == hull.size else apart


def _read_bytes(tensor: Tensor, view: View, boxes: Sequence[Bounds]) -> int:
    itemsize = tensor.dtype.itemsize
    match tensor.storage:
        case Extent():
            return sum(_spanned(view, box, itemsize) for box in boxes)
        case Packed() as packed:
            return packed.n_bytes
        case Decoded(reader):
            row, unit = max(1, tensor.size // tensor.rows), max(1, reader.row_alignment)
            units = set[int]()
            for box in boxes:
                first = address(view, box.start)
                last = first + span(box.shape, view.strides) - 1
                units.update(range(first // row // unit, last // row // unit + 1))
            return min(tensor.stored_bytes, tensor.stored_bytes * len(units) * unit // tensor.rows)
    total = 0
    for region in regions(tensor):
        seen = view_in_region(view, tensor, region)
        common = [both for box in boxes if seen and (both := box.intersect(seen.box)) is not None]
        if not common or seen is None:
            continue
        if region.packed is not None:
            total += region.packed.n_bytes
        else:
            total += sum(_spanned(seen.view, box, itemsize) for box in common)
    return total


def _spanned(view: View, box: Bounds, itemsize: int) -> int:
    """Return how many bytes are read for a box that lies in one piece of a file; only long gaps are skipped."""
    ordered = Ordered.of(view, box)
    shape, strides = ordered.shape, ordered.strides
    skip = max(1, SKIP_BYTES // itemsize)
    inner = [span(shape[d + 1 :], strides[d + 1 :]) for d in range(len(shape))]
    gap = max((d for d in range(len(shape)) if shape[d] > 1 and strides[d] - inner[d] >= skip), default=-1)
    return math.prod(shape[: gap + 1]) * span(shape[gap + 1 :], strides[gap + 1 :]) * itemsize


def process_numbers(devices: Sequence[Any]) -> tuple[int, ...]:
    """Return the process of each device of a mesh."""
    return tuple(device.process_index for device in devices)


def hosts_of(mesh: MeshSpec, hosts: int) -> tuple[int, ...]:
    """Return the process of each position of a mesh that ``hosts`` processes share equally, in its order."""
    return tuple(position // (mesh.size // hosts) for position in range(mesh.size))
