"""Copy elements of a source to a target in bounded memory, where each side has its own order (strides).

    source   ──[ contiguous read ]──► block ─ transpose ─► runs ──[ positional writes ]──► pieces of the target

Boxes of the index space are cut only along the slowest dims of the source, so each box is one contiguous read. In
memory, the elements are transposed to the target's order; each contiguous run of the target is one write.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from shardload.errors import LayoutError
from shardload.loaders.file_pieces import FilePiece, TensorPlace
from shardload.manifest import Chunked, Extent, Packed, Tensor, View
from shardload.transfer.geometry import address, regions, view_in_region
from shardload.transfer.read_tensor import read_rows

_Array = NDArray[Any]
Read = Callable[[int, int], _Array]
"""Function that returns elements ``[start, stop)`` of the source, counted in row-major order, as a 1-d array."""
Write = Callable[[int, _Array], None]
"""Function that writes a 1-d array of elements to the target; its first argument is the number of the first element,
counted in row-major order."""


@dataclass(frozen=True, slots=True)
class CopyDim:
    """One dim of an array whose elements are copied: its length, and its strides in the source and in the target."""

    length: int
    source: int
    """Stride in the source, in elements."""
    target: int
    """Stride in the target, in elements."""


def copy_view(read: Read, write: Write, source: View, target: View, *, block_elements: int) -> None:
    """Copy each element of the view ``source`` to the same index in ``target``, at most ``block_elements`` at once.

    A view selects elements of a tensor by an offset, a shape and strides. Both have the same shape. Strides of
    ``source`` are positive or zero; ``target`` repeats no element.
    """
    if 0 in source.shape:
        return
    dims = copy_dims(source.shape, source.strides, target.strides)
    for box in boxes(dims, block_elements):
        cut = [*zip(box, dims, strict=True)]
        start = source.offset + sum(a * d.source for (a, _), d in cut)
        at = target.offset + sum(a * d.target for (a, _), d in cut)
        _copy_box(read, write, [CopyDim(b - a, d.source, d.target) for (a, b), d in cut], start, at)


def copy_dims(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> list[CopyDim]:
    """Return the dims of a copy, largest source stride first; those contiguous on both sides become one longer run."""
    found: list[CopyDim] = []
    for n, a, b in sorted(zip(shape, source, target, strict=True), key=lambda d: -d[1]):
        # A dim of length 1 may have any stride, which would keep its neighbours from being merged.
        if n == 1:
            continue
        if found and found[-1].source == n * a and found[-1].target == n * b:
            found[-1] = CopyDim(found[-1].length * n, a, b)
        else:
            found.append(CopyDim(n, a, b))
    return found or [CopyDim(1, 1, 1)]


def boxes(dims: Sequence[CopyDim], limit: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Cut a copy into boxes (index ranges) along its slowest dims; each spans at most ``limit`` source elements."""
    # dims[k:] fit into one read; dims[k - 1] is cut into ranges; of the dims before it, a box has one index.
    k = len(dims)
    while k and _span(dims[k - 1 :]) <= limit:
        k -= 1
    whole = tuple((0, d.length) for d in dims[k:])
    if not k:
        yield whole
        return
    cut = dims[k - 1]
    # A stride of 0 repeats elements, so any number of rows spans the same read.
    step = max(1, (limit - _span(dims[k:])) // max(1, cut.source) + 1)
    for outer in itertools.product(*(range(d.length) for d in dims[: k - 1])):
        for i in range(0, cut.length, step):
            yield (*((o, o + 1) for o in outer), (i, min(cut.length, i + step)), *whole)


def _span(dims: Sequence[CopyDim]) -> int:
    return 1 + sum((d.length - 1) * d.source for d in dims)


def _copy_box(read: Read, write: Write, dims: Sequence[CopyDim], start: int, at: int) -> None:
    # 1. Read the box with one contiguous read, including gaps between its elements.
    block = read(start, start + _span(dims))
    size = block.itemsize
    view = as_strided(block, [d.length for d in dims], [d.source * size for d in dims], writeable=False)
    # 2. Transpose it in memory to the target's order, slowest dim first.
    order = sorted((i for i, d in enumerate(dims) if d.length > 1), key=lambda i: -dims[i].target)
    ones = [i for i, d in enumerate(dims) if d.length == 1]
    view = np.ascontiguousarray(view.transpose(ones + order)).reshape([dims[i].length for i in order])
    # 3. Find the longest runs that are contiguous in the target: the fastest dims, as far as they are dense.
    run, k = 1, len(order)
    while k and dims[order[k - 1]].target == run:
        run *= dims[order[k - 1]].length
        k -= 1
    # 4. Write one run per index of the other dims.
    outer = [dims[i] for i in order[:k]]
    for row, index in zip(view.reshape(-1, run), itertools.product(*(range(d.length) for d in outer)), strict=True):
        write(at + sum(i * d.target for i, d in zip(index, outer, strict=True)), row)


def parts_of(tensor: Tensor, source: View, target: View) -> Iterator[tuple[Tensor, View, View]]:
    """Split the copy of a tensor by its chunks; yield each as a tensor, the view to read, and the view to write."""
    if not isinstance(tensor.storage, Chunked):
        yield tensor, source, target
        return
    try:
        parts = [(region, view_in_region(source, tensor, region)) for region in regions(tensor)]
    except LayoutError:  # the view does not split along chunks; `reader_of` joins them instead
        yield tensor, source, target
        return
    for region, part in parts:
        if part is not None:
            storage = region.packed or Extent(region.path, region.offset)
            chunk = Tensor(tensor.name, region.shape, tensor.dtype, storage)
            start, shape = part.box.start, part.box.shape
            at = target.offset + sum(i * t for i, t in zip(start, target.strides, strict=True))
            inside = View(tensor.name, address(part.view, start), shape, part.view.strides)
            yield chunk, inside, View(target.tensor, at, shape, target.strides)


def reader_of(tensor: Tensor, dtype: np.dtype[Any]) -> Read:
    """Return a function that reads elements of a tensor, casts them to ``dtype`` and returns their bits as integers."""
    # Encoded elements decode as a whole: once, not for every block that is read.
    if isinstance(tensor.storage, Packed):
        return reader_of_value(read_rows(tensor, 0, tensor.rows), dtype)
    row = max(1, tensor.size // max(1, tensor.rows))

    def read(start: int, stop: int) -> _Array:
        if isinstance(tensor.storage, Extent):
            value = np.empty(stop - start, tensor.dtype)
            with closing(tensor.storage.path.open()) as file:
                file.read_into(value.view(np.uint8).data, tensor.storage.offset + start * tensor.dtype.itemsize)
        else:
            # Other storage is read by rows: take those that contain the elements, then cut.
            first, last = start // row, -(-stop // row)
            value = read_rows(tensor, first, last).reshape(-1)[start - first * row : stop - first * row]
        return bits(value if tensor.dtype == dtype else value.astype(dtype))

    return read


def reader_of_value(value: _Array, dtype: np.dtype[Any]) -> Read:
    """Return a function that takes elements of an array, casts them to ``dtype`` and returns their bits as integers."""
    flat = bits(np.ascontiguousarray(value, dtype).reshape(-1))
    return lambda start, stop: flat[start:stop]


def bits(value: _Array) -> _Array:
    """View an array as unsigned integers with the same bits, because `PieceWriter` cannot write bfloat16 or float8."""
    # Arrays of ml_dtypes (bfloat16, float8) support no memoryview, which `PieceWriter` writes from.
    size = value.dtype.itemsize
    return np.ascontiguousarray(value).view(f"u{size}") if size in (1, 2, 4, 8) else value


class PieceWriter:
    """Writes elements of one tensor to its pieces (byte ranges of files); a context manager, which closes the files."""

    def __init__(self, root: Path, place: TensorPlace, *, written: Callable[[int], None]) -> None:
        self._pieces = place.pieces
        self._starts = [piece.start for piece in place.pieces]
        self._root = root
        # Kept open: a transposed copy makes many short writes to each file.
        self._files: dict[str, int] = {}
        self._written = written

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._files.values():
            os.close(fd)

    def write(self, at: int, values: _Array) -> None:
        """Write consecutive elements of the tensor; ``at`` is the index of the first, in row-major order."""
        # Pieces follow each other without gaps, so a run may go on in the next one.
        done = 0
        while done < len(values):
            piece = self._pieces[bisect.bisect_right(self._starts, at + done) - 1]
            inside = at + done - piece.start
            count = min(len(values) - done, piece.count - inside)
            part = values[done : done + count]
            self._write(piece, piece.offset + inside * values.itemsize, part)
            done += count

    def _write(self, piece: FilePiece, offset: int, part: _Array) -> None:
        if piece.path not in self._files:
            self._files[piece.path] = os.open(self._root / piece.path, os.O_WRONLY | os.O_CLOEXEC)
        rest = part.data.cast("B")
        while rest:  # a write may be partial
            count = os.pwrite(self._files[piece.path], rest, offset)
            rest, offset = rest[count:], offset + count
        self._written(part.nbytes)
