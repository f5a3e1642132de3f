"""Checks shared by all loaders: tensors have unique names, and byte ranges that fit in their files without overlap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

from shardload.errors import SourceError, TruncatedSourceError
from shardload.manifest import Chunked, Decoded, Extent, Packed, Tensor
from shardload.stores.location import Location
from shardload.units import exact_bytes, plural

_MAX_RANK = 32
"""Limit on the number of dims of a tensor. HDF5 has the same limit; no real weight comes near it."""
# NumPy and JAX index with signed 64-bit integers.
_MAX_DIM = (1 << 63) - 1


def checked_tensors(tensors: Iterable[Tensor], *, files: Mapping[Location, int]) -> dict[str, Tensor]:
    """Check tensors' names and byte ranges; return name → tensor, sorted by file and by byte offset in it.

    ``files`` maps each file to its size in bytes. Tensors that must be decoded have no offset: they are a file's last.
    """
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        # JSON escapes can smuggle in lone surrogates, which can be neither printed nor written.
        if not tensor.name.isascii() and any("\ud800" <= char <= "\udfff" for char in tensor.name):
            raise SourceError(f"The tensor name {tensor.name[:200]!r}, {_place(tensor)}, is not valid Unicode")
        if (other := found.get(tensor.name)) is not None:
            raise SourceError(f"Two tensors are named {tensor.name!r}: {_place(other)} and {_place(tensor)}")
        _check(tensor, files)
        found[tensor.name] = tensor
    order = {path: rank for rank, path in enumerate(files)}
    ordered = sorted(found.values(), key=lambda t: _position(t, order))
    _refuse_overlap(ordered, order)
    return {tensor.name: tensor for tensor in ordered}


def check_shape(shape: tuple[int, ...], *, name: str, path: object) -> None:
    """Raise for a shape that no array can have: too many dims, or a dim that is negative or too large."""
    if len(shape) > _MAX_RANK:
        raise SourceError(f"{path}: tensor {name!r} has {plural(len(shape), 'dim')}; at most {_MAX_RANK} are possible")
    if any(not 0 <= n <= _MAX_DIM for n in shape):
        raise SourceError(f"{path}: tensor {name!r} has the shape {shape}; each dim must be from 0 to 2**63 - 1")


def _check(tensor: Tensor, files: Mapping[Location, int]) -> None:
    if isinstance(tensor.storage, Extent):
        check_shape(tensor.shape, name=tensor.name, path=tensor.storage.path)
    for path, start, stop in _runs(tensor, with_packed=True):
        if start < 0 or stop > files[path]:
            raise TruncatedSourceError(
                f"{path} is truncated: tensor {tensor.name!r} should end at byte {stop}, "
                f"but the file has {exact_bytes(files[path])}. Download or save it again"
            )


def _runs(tensor: Tensor, *, with_packed: bool) -> Iterator[tuple[Location, int, int]]:
    """Yield (file, first byte, end) of each byte range with a tensor's data; the end is exclusive.

    Compressed chunks (`Packed`) are left out unless ``with_packed``: two of them may share bytes if they are equal.
    """
    cells, length = [tensor.storage], tensor.nbytes
    if isinstance(tensor.storage, Chunked):
        cells, length = [*tensor.storage.extents.values()], math.prod(tensor.storage.chunk_shape)
        length *= tensor.dtype.itemsize
    for cell in cells:
        if isinstance(cell, Extent):
            yield cell.path, cell.offset, cell.offset + length
        elif with_packed and isinstance(cell, Packed):
            yield cell.path, cell.offset, cell.offset + cell.n_bytes


def _position(tensor: Tensor, order: Mapping[Location, int]) -> tuple[int, int, int]:
    match tensor.storage:
        case Extent(path, offset) | Packed(path, offset):
            return order[path], 0, offset
        case Decoded(reader):
            # A reader has no offset. The sort is stable, so decoded tensors keep the order of the header.
            return order[reader.paths[0]], 1, 0
        case Chunked(extents=extents):
            return min((order[e.path], 0, e.offset) for e in extents.values())


def _refuse_overlap(tensors: Iterable[Tensor], order: Mapping[Location, int]) -> None:
    # Empty runs may start anywhere, also inside another tensor. Among the others, sorted by start, any overlap
    # shows between two neighbours.
    # Two names of one stored tensor have the same storage, as an object; a header that says the same twice has not.
    stored = {id(t.storage): t for t in tensors}.values()
    runs = [(*run, t.name) for t in stored for run in _runs(t, with_packed=False) if run[1] < run[2]]
    runs.sort(key=lambda run: (order[run[0]], run[1]))
    for (path, _, end, previous), (other, start, _, name) in itertools.pairwise(runs):
        if path == other and start < end:
            raise SourceError(
                f"{path}: tensors {previous!r} and {name!r} overlap: "
                f"the first ends at byte {end}, the second starts at byte {start}. Download or save it again"
            )


def _place(tensor: Tensor) -> str:
    match tensor.storage:
        case Extent(path, offset) | Packed(path, offset):
            return f"at byte {offset} of {path}"
        case Decoded(reader):
            return f"in {reader.paths[0]}"
        case Chunked() as grid:
            return f"in {grid.paths[0]}"
