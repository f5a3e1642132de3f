"""Read stored tensors into host memory, whole or a few rows at a time, for code that computes with them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.errors import SourceError, SourceNotFoundError, TransferError
from shardload.manifest import Chunked, Decoded, EncodedRows, Extent, Manifest, Packed, Tensor, UnreadableRows
from shardload.stores.location import Location


def read_tensor(manifest: Manifest, name: str) -> NDArray[Any]:
    """Read the whole tensor called ``name`` into a new NumPy array."""
    tensor = manifest.tensors[name]
    return read_rows(tensor, 0, tensor.rows)


def read_rows(tensor: Tensor, start: int, stop: int) -> NDArray[Any]:
    """Read rows ``[start, stop)`` of a tensor; a rank-0 tensor counts as one row, and is returned with shape ``()``."""
    match tensor.storage:
        case Decoded(reader):
            return reader.read_rows(start, stop)
        case Packed() as packed:
            return _unpacked(packed)[start:stop] if tensor.shape else _unpacked(packed)
        case Extent(path, offset):
            value = np.empty((stop - start, *tensor.shape[1:]) if tensor.shape else (), tensor.dtype)
            row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
            _read(value, path, offset + start * row_bytes)
            return value
        case Chunked() as grid:
            return _join(tensor, grid, start, stop)


def row_ranges(tensor: Tensor, *, limit_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield consecutive row ranges of at most ``limit_bytes``; larger where rows are stored or decoded together."""
    row_bytes = max(1, tensor.nbytes // max(1, tensor.rows))
    match tensor.storage:
        case Decoded(reader):
            # Ranges are whole units, as a range that ends inside a unit decodes it twice.
            unit = max(1, reader.row_alignment)
        case Chunked(chunk_shape):
            unit = chunk_shape[0] if chunk_shape else 1
        case Packed():
            unit = max(1, tensor.rows)
        case Extent():
            unit = 1
    step = max(1, limit_bytes // (row_bytes * unit)) * unit
    for start in range(0, tensor.rows, step):
        yield start, min(start + step, tensor.rows)


def stored_of(packed: Packed) -> bytes | bytearray:
    """Read the encoded bytes of a chunk, without decoding them."""
    if not packed.n_bytes:
        return packed.kept
    found = bytearray(packed.n_bytes)
    _read(np.frombuffer(found, np.uint8), packed.path, packed.offset)
    return found


def stored_chunks(rows: EncodedRows, *, limit_bytes: int) -> Iterator[NDArray[np.uint8]]:
    """Yield the stored bytes of encoded rows, undecoded, in arrays of at most ``limit_bytes``: to compare files."""
    for path, offset, n_bytes in rows.ranges:
        for start in range(0, n_bytes, limit_bytes):
            value = np.empty(min(limit_bytes, n_bytes - start), np.uint8)
            try:
                _read(value, path, offset + start)
            except (SourceError, SourceNotFoundError) as error:
                raise TransferError(f"Cannot read {path} any longer: {error}") from error
            yield value


def require_decoders(tensors: Iterable[Tensor]) -> None:
    """Raise if one of the tensors cannot be decoded in this environment: unknown encoding, or a package missing."""
    # One of each encoding: to find a package searches the disk.
    readers: dict[Hashable, EncodedRows] = {}
    for tensor in tensors:
        match tensor.storage:
            case Decoded(UnreadableRows() as rows):
                raise rows.refusal(tensor.name)
            case Decoded(EncodedRows() as encoded):
                readers[encoded.encoding] = encoded
    for reader in readers.values():
        reader.require_decoder()


def _unpacked(packed: Packed) -> NDArray[Any]:
    return packed.codec.decode(stored_of(packed))


def _read(value: NDArray[Any], path: Location, offset: int) -> None:
    with closing(path.open()) as file:
        # As bytes: NumPy exports no buffer of an array of `ml_dtypes`.
        file.read_into(value.reshape(-1).view(np.uint8).data, offset)


def _join(tensor: Tensor, grid: Chunked, start: int, stop: int) -> NDArray[Any]:
    """Assemble rows ``[start, stop)`` of a tensor from its chunks; only encoded chunks are read as a whole."""
    value = np.empty((stop - start, *tensor.shape[1:]) if tensor.shape else (), tensor.dtype)
    shape = grid.chunk_shape
    row_bytes = math.prod(shape[1:]) * tensor.dtype.itemsize
    for index, extent in grid.extents.items():
        first = index[0] * shape[0] if shape else 0
        a, b = (max(start, first), min(stop, first + shape[0])) if shape else (0, 1)
        if a >= b:
            continue
        if isinstance(extent, Packed):
            part = _unpacked(extent)[a - first : b - first] if shape else _unpacked(extent)
        else:
            part = np.empty((b - a, *shape[1:]) if shape else (), tensor.dtype)
            _read(part, extent.path, extent.offset + (a - first) * row_bytes)
        columns = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index[1:], shape[1:], strict=True))
        # A chunk at the far edge is stored in full. NumPy ends the slice at the tensor's edge; the part is cut to it.
        inside = value[(slice(a - start, b - start), *columns)] if shape else value
        inside[...] = part[tuple(map(slice, inside.shape))]
    return value
