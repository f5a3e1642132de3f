"""Collect variables in host buffers and place them as sharded `jax.Array`s, never through device 0.

If the buffers become device memory or fit the budget, a variable is placed as a whole, in one call (27 µs for eight
shards; `device_put` per shard takes 200 µs). Otherwise it is divided into boxes. Each box is filled from consecutive
blocks, uploaded and written into place (`IncrementalArray`), so that a device stores only its final shards and one box.

Imports JAX: import this module only when a transfer is about to start.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from numpy.typing import NDArray

from shardload.errors import MeshError, TransferError
from shardload.manifest import Tensor, View
from shardload.sharding.layout import Bounds, Layout, Spec
from shardload.sharding.mesh import MeshSpec
from shardload.transfer.encoded_variables import EncodedVariable
from shardload.transfer.encoding import divided_dim, parts_to_encode
from shardload.transfer.geometry import largest_stride
from shardload.transfer.host_memory import Allocate, UploadBuffer, arena, stacked_arrays
from shardload.transfer.load_plan import Binding, Block, BlockPiece
from shardload.transfer.scratch import CopyPart
from shardload.units import exact_bytes, plural


@functools.lru_cache(maxsize=64)
def jax_mesh(spec: MeshSpec, devices: tuple[Any, ...]) -> Mesh:
    """Return the JAX mesh with the axes of ``spec``; ``devices`` has one device per mesh position, in order."""
    return Mesh(np.array(devices, dtype=object).reshape(spec.sizes), spec.axes)


def check_devices(mesh: MeshSpec, devices: Sequence[Any]) -> None:
    """Raise `MeshError` unless there is one device per mesh position."""
    if len(devices) != mesh.size:
        raise MeshError(f"Cannot use mesh {mesh} with {plural(len(devices), 'device')}: expected {mesh.size}")


def named_sharding(layout: Layout, devices: Sequence[Any]) -> NamedSharding:
    """Convert a layout to JAX's `NamedSharding`; ``devices`` has one device per mesh position, in order."""
    check_devices(layout.mesh, devices)
    return NamedSharding(jax_mesh(layout.mesh, tuple(devices)), partition_spec(layout.spec))


def partition_spec(spec: Spec) -> PartitionSpec:
    """Convert the spec of a layout to JAX's `PartitionSpec`."""
    return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in spec))


def shard_bounds(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Any, Bounds]:
    """Return the box of a variable that each device of this process stores."""
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: _bounds(index, shape) for device, index in indices.items()}


def assemble(shape: tuple[int, ...], sharding: NamedSharding, buffers: Mapping[Bounds, NDArray[Any]]) -> Any:
    """Build a sharded array from one host buffer per distinct shard; CPU devices use aligned buffers without a copy."""
    only = next(iter(buffers.values())) if len(buffers) == 1 else None
    # JAX calls back once per device; replicas get the same buffer, and adopt it together.
    return jax.make_array_from_callback(
        shape, sharding, lambda index: buffers[_bounds(index, shape)] if only is None else only
    )


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    return _cached_bounds(tuple((s.start, s.stop) for s in index or ()), shape)


@functools.lru_cache(maxsize=4096)
def _cached_bounds(ranges: tuple[tuple[int | None, int | None], ...], shape: tuple[int, ...]) -> Bounds:
    found = [slice(*s).indices(n) for s, n in zip(ranges, shape, strict=True)]
    return Bounds(tuple(r[0] for r in found), tuple(r[1] for r in found))


def place(value: NDArray[Any], layout: Layout, devices: Sequence[Any]) -> Any:
    """Copy a host array into a sharded `jax.Array`; the host array may be changed afterwards."""
    value = np.asarray(value)
    layout.shard_shape(value.shape)  # clearer error than JAX's for an indivisible dim
    sharding = named_sharding(layout, devices)
    indices = sharding.addressable_devices_indices_map(value.shape).values()
    distinct = tuple(dict.fromkeys(_bounds(index, value.shape) for index in indices))
    # A copy in buffers of our own: a CPU device adopts aligned memory, also if the caller writes to it afterwards.
    buffers = dict(zip(distinct, arena([b.shape for b in distinct], value.dtype), strict=True))
    for bounds, buffer in buffers.items():
        buffer[...] = value[bounds.slices]
    return assemble(value.shape, sharding, buffers)


def widens_on_device(stored: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Whether a cast should run on the device: it widens the dtype, and gives the same bits there as on the host.

    Always false for float16 and float8: XLA quiets signalling NaNs, and accelerators may flush denormals.
    """
    exact = stored.kind in "iu" or (stored == jnp.bfloat16 and wanted == np.float32)
    return exact and stored.itemsize < wanted.itemsize


@functools.partial(jax.jit, static_argnames="dtype")
def _widened(array: Any, *, dtype: Any) -> Any:
    return array.astype(dtype)


def widen(array: Any, *, dtype: Any) -> Any:
    """Cast an array to a wider dtype on its devices: each shard on its own if other processes have some shards."""
    # Every process would have to start a program over all devices in the same order, and they finish variables in any.
    if array.is_fully_addressable:
        return _widened(array, dtype=dtype)
    shards = [_widened(shard.data, dtype=dtype) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


@functools.partial(jax.jit, donate_argnums=0)
def _update(whole: Any, piece: Any, start: Any) -> Any:
    floats = jnp.issubdtype(whole.dtype, jnp.floating) and jnp.finfo(whole.dtype).bits == 8 * whole.dtype.itemsize
    if piece.dtype != whole.dtype or not floats:
        return jax.lax.dynamic_update_slice(whole, piece.astype(whole.dtype), start)
    # As integers: XLA on CPU computes with short floats in float32, which quiets NaNs.
    bits = jnp.dtype(f"uint{8 * whole.dtype.itemsize}")
    as_bits = (jax.lax.bitcast_convert_type(x, bits) for x in (whole, piece))
    return jax.lax.bitcast_convert_type(jax.lax.dynamic_update_slice(*as_bits, start), whole.dtype)


@functools.lru_cache(maxsize=256)
def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any], device: Any) -> Any:
    """Return a compiled function that makes a shard of zeros on a device, to be filled by pieces; cached."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=SingleDeviceSharding(device))


@dataclass(frozen=True, slots=True, eq=False)
class UploadedPiece:
    """A piece of a shard that is on its device, or on its way there."""

    device: Any
    place: Bounds
    """The box of the shard that it covers."""
    array: Any


class IncrementalArray:
    """A variable that does not fit into the host-memory budget: allocated on its devices, and filled piece by piece."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], sharding: NamedSharding) -> None:
        self.shape = shape
        self.sharding = sharding
        # One by one: processes may come here in different orders, so a program for all devices would have to wait.
        self.shards: dict[Any, tuple[Bounds, Any]] = {
            device: (bounds, _zeros(bounds.shape, dtype, device)())
            for device, index in sharding.addressable_devices_indices_map(shape).items()
            for bounds in [_bounds(index, shape)]
        }

    def upload(self, pieces: Mapping[Bounds, tuple[Bounds, NDArray[Any]]]) -> list[UploadedPiece]:
        """Begin to upload one piece of each shard in ``pieces``; once all are ready, pass them to `write`.

        A key of ``pieces`` is the box of the variable that the shard stores. The value is the box of the variable that
        the piece covers, and the host buffer with its elements, which may be reused once the piece is ready.
        """
        return [
            UploadedPiece(
                device, pieces[bounds][0].relative_to(bounds.start), jax.device_put(pieces[bounds][1], device)
            )
            for device, (bounds, _) in self.shards.items()
            if bounds in pieces
        ]

    def write(self, pieces: Sequence[UploadedPiece]) -> None:
        """Write pieces into their places in the shards; if they were not ready yet, this would block until they are."""
        for piece in pieces:
            bounds, shard = self.shards[piece.device]
            start = tuple(np.int32(a) for a in piece.place.start)
            self.shards[piece.device] = (bounds, _update(shard, piece.array, start))

    def finish(self) -> Any:
        """Return the variable as one sharded array, once all pieces are uploaded."""
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, [s for _, s in self.shards.values()])


@dataclass(eq=False, slots=True)
class VariableTransfer:
    """A variable that a load is filling: its shards, and how many chunks (boxes of it, placed at once) are missing."""

    binding: Binding
    shards: tuple[Bounds, ...]
    staged: np.dtype[Any]
    """Dtype of the host buffers: the stored dtype if the device casts, else the variable's dtype."""
    incremental: IncrementalArray | None = None
    chunks_left: int = 0
    started: bool = False
    encoded: EncodedVariable | None = None
    """What is computed from the variable, if devices do not store the variable itself."""
    padded: bool = False
    """Whether a part of the array is not loaded, and so must be zero."""


@dataclass(frozen=True, slots=True)
class StackedShards:
    """Shards that follow each other along one dim and are equally spaced in memory, treated as one array.

    For example, if eight shards split the columns, a block of rows has a piece of every shard. Locating each of these
    pieces took 0.15 ms of Python, twice that with cold caches, for a block that moves in 3 ms. So the split dim is
    treated as two dims, shard and position in the shard, and all eight pieces are copied as one::

        variable (rows, 8 * w), strides (s, 1)  =  (8, rows, w), strides (w, s, 1)
    """

    dim: int
    """The dim of the variable that the shards split."""
    first: Bounds
    """The box of the variable that the first shard covers."""
    memory: NDArray[Any]
    """The memory of all shards as one array, whose first dim is the number of the shard."""
    shards: Sequence[tuple[Bounds, NDArray[Any]]]
    """Each shard's box of the variable, and its memory."""

    def overlapping(self, box: Bounds) -> Sequence[tuple[Bounds, NDArray[Any]]]:
        """Return the shards that a box of the variable overlaps along ``dim``."""
        width, begin = self.first.shape[self.dim], self.first.start[self.dim]
        first, last = (box.start[self.dim] - begin) // width, -(-(box.stop[self.dim] - begin) // width)
        return self.shards[max(0, first) : max(0, last)]

    def part(self, piece: BlockPiece, *, by_rows: bool) -> CopyPart | None:
        """Return one copy that moves a block's piece to all shards at once; None if several copies are needed."""
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
    """Return the dim along which the boxes follow each other without gaps, all with one shape; else ``None``."""
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
    """A part of a variable that is filled and placed on devices at once: usually all of it, else a box of it."""

    variable: VariableTransfer
    box: Bounds
    blocks_left: int = 0
    upload: UploadBuffer | None = None
    """The memory of all buffers of a chunk that is to be uploaded; other chunks use it after that."""
    buffers: dict[Bounds, tuple[Bounds, NDArray[Any]]] = field(default_factory=dict)
    """The host buffers of the chunk, one for each shard that overlaps it. A key is the box of the variable that the
    shard stores. The value is the part of this box that is in the chunk, and the buffer for its elements."""
    unmoved: int = 0
    """Blocks of a chunk to encode that no thread has moved yet. The thread that moves the last one encodes it."""
    results: list[dict[Bounds, tuple[Bounds, NDArray[Any]]]] = field(default_factory=list)
    """What was encoded and is to be uploaded: for each shard, a piece. Empty if the shards have host memory."""
    result_bytes: int = 0
    """Bytes of ``results``."""
    stack: StackedShards | None = None
    """All buffers as one array, if the buffers have one shape and follow each other along one dim."""

    @property
    def common(self) -> dict[Bounds, Bounds]:
        """For each shard that overlaps this chunk: its box of the variable → the part of this box in the chunk."""
        if self.box.shape == self.variable.binding.view.shape:
            return dict(zip(self.variable.shards, self.variable.shards, strict=True))
        pairs = ((shard, self.box.intersect(shard) if shard.size else shard) for shard in self.variable.shards)
        return {shard: box for shard, box in pairs if box is not None}

    def take_memory(self, allocate: Allocate | None = None) -> None:
        """Take a host buffer for the part of each shard that lies in this chunk, from ``allocate`` if it is given."""
        common, dtype = self.common, self.variable.staged
        boxes = tuple(common.values())
        dim = stacked_dim(boxes)
        try:
            if dim is None:
                held = list(zip(boxes, arena([box.shape for box in boxes], dtype, allocate), strict=True))
            else:
                # Regular shards, which nearly all are, get one array with a dim for the shard.
                whole = stacked_arrays(len(boxes), boxes[0].shape, dtype, allocate)
                held = list(zip(boxes, whole, strict=True))
                self.stack = StackedShards(dim, boxes[0], whole, held)
        except (OSError, MemoryError) as error:
            n_bytes = sum(box.size for box in boxes) * dtype.itemsize
            raise TransferError(
                f"Cannot allocate {exact_bytes(n_bytes)} for the shards of variable {self.variable.binding.name!r} "
                f"on this host: {error}. Use a mesh over more hosts, a smaller dtype, or a smaller model"
            ) from error

        self.buffers = dict(zip(common, held, strict=True))

    def encode(self) -> None:
        """Encode what the buffers contain."""
        assert self.variable.encoded is not None
        for box, values in self.buffers.values():
            self.results.extend(self.variable.encoded.encode(values, box))

    def parts(self, piece: BlockPiece, *, by_rows: bool = True) -> list[CopyPart]:
        """Return the copies that move the piece of this variable in a block from scratch to this chunk's host buffers.

        ``by_rows`` says that scratch holds only a few rows of the block at a time.
        """
        if self.stack is not None and (part := self.stack.part(piece, by_rows=by_rows)) is not None:
            return [part]
        found = []
        for held, buffer in self.buffers.values() if self.stack is None else self.stack.overlapping(piece.box):
            if (both := held.intersect(piece.box)) is not None:
                # The Ellipsis keeps rank 0 an array.
                place: tuple[Any, ...] = (*both.relative_to(held.start).slices, ...)
                found.append(CopyPart(piece.view, both, buffer if both == held else buffer[place]))
        return found


def encoded_chunks(
    blocks: Sequence[Block],
    variables: Sequence[VariableTransfer],
    tensors: Mapping[str, Tensor],
    *,
    free_bytes: int,
) -> dict[tuple[int, int], Chunk]:
    """Divide variables that are encoded into chunks; return the chunk of each piece, by (block index, piece index)."""
    pieces: dict[int, list[tuple[int, int, Bounds]]] = {}
    sharing = Counter(v.binding.view.tensor for v in variables)
    for b, block in enumerate(blocks):
        for p, piece in enumerate(block.pieces):
            if variables[piece.binding].encoded is not None:
                pieces.setdefault(piece.binding, []).append((b, p, piece.box))
    found: dict[tuple[int, int], Chunk] = {}
    for index, own in pieces.items():
        variable = variables[index]
        encoded, view = variable.encoded, variable.binding.view
        assert encoded is not None
        dim = divided_dim(encoded.encoding, view, tensors[view.tensor])
        parts = parts_to_encode(
            [box for _, _, box in own],
            dim=dim,
            multiple=1 if dim is None else encoded.encoding.multiples[dim],
            limit=free_bytes // (2 * _PIECES_UNDER_WAY * sharing[view.tensor] * variable.staged.itemsize),
            shape=view.shape,
        )
        variable.chunks_left = encoded.boxes_left = len(parts)
        for box, members in parts:
            chunk = Chunk(variable, box, blocks_left=len(members), unmoved=len(members))
            found.update({own[k][:2]: chunk for k in members})
    return found


def whole_chunks(blocks: Sequence[Block], variables: Sequence[VariableTransfer]) -> dict[tuple[int, int], Chunk]:
    """Make one chunk per variable, unless it is encoded; return the chunk of each piece (block index, piece index)."""
    chunks: dict[int, Chunk] = {}
    found: dict[tuple[int, int], Chunk] = {}
    for b, block in enumerate(blocks):
        for p, piece in enumerate(block.pieces):
            variable = variables[piece.binding]
            if variable.encoded is not None:
                continue
            if (chunk := chunks.get(id(variable))) is None:
                chunk = chunks[id(variable)] = Chunk(variable, Bounds.whole(variable.binding.view.shape))
                variable.chunks_left = 1
            chunk.blocks_left += 1
            found[b, p] = chunk
    return found


def limited_chunks(
    blocks: Sequence[Block],
    variables: Sequence[VariableTransfer],
    bindings: Sequence[Binding],
    *,
    free_bytes: int,
) -> dict[tuple[int, int], Chunk]:
    """Divide variables into chunks to upload; return the chunk of each piece, by (block index, piece index).

    Variables that are encoded are left out.

    Chunks that are being filled take at most half of ``free_bytes``: others may still be on their way to the devices.
    The parts of an array that consists of several tensors are chunks of their own: all tensors of the checkpoint would
    otherwise be in host memory until the last of them is read.
    """
    pieces: dict[int, list[tuple[int, int, Bounds]]] = {}
    sharing: dict[str, set[int]] = {}
    for b, block in enumerate(blocks):
        for p, piece in enumerate(block.pieces):
            sharing.setdefault(block.tensor, set()).add(piece.binding)
            if variables[piece.binding].encoded is None:
                pieces.setdefault(piece.binding, []).append((b, p, piece.box))
    found: dict[tuple[int, int], Chunk] = {}
    for t, of_target in pieces.items():
        variable = variables[t]
        # Divided among the variables of a tensor: all of them are open at once.
        limit = free_bytes // (2 * len(sharing[bindings[t].view.tensor]))
        for chunk, members in _grouped(variable, bindings[t].filled, of_target, limit):
            variable.chunks_left += 1
            chunk.blocks_left = len(members)
            found.update(dict.fromkeys(members, chunk))
    return found


_PIECES_UNDER_WAY = 4
"""How many pieces of a variable may be filled at a time. Others are uploaded meanwhile: one large piece would leave the
bus idle until it is full, and the threads until it is on the device."""


def _grouped(
    variable: VariableTransfer, filled: Bounds, pieces: list[tuple[int, int, Bounds]], limit: int
) -> list[tuple[Chunk, list[tuple[int, int]]]]:
    """Join pieces of a variable into chunks of at most ``limit`` bytes, which are placed on devices one by one.

    An item of ``pieces`` is (block index, piece index, box). Each chunk comes with both indices of all its pieces.
    ``filled`` is the box of the variable that the pieces come from.
    """
    itemsize = variable.staged.itemsize
    common = (shard.intersect(filled) for shard in variable.shards)
    if sum(box.size for box in common if box is not None) * itemsize <= limit:
        return [(Chunk(variable, filled), [(b, p) for b, p, _ in pieces])]
    limit //= _PIECES_UNDER_WAY
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
