"""From an array's metadata and the places of its chunks to a `Storage`.

one raw chunk, rows as in the tensor   Extent
raw chunks, all in files               Chunked
raw chunks, some inline                Decoded(RawRows)     put together here
anything else                          Decoded(ZarrRows)    through TensorStore
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.errors import SourceError, TransferError, UnsafeSourceError
from shardload.loaders._ocdbt import MAX_KEYS, Value
from shardload.loaders._zarr import Array, Sharding
from shardload.manifest import Chunked, Decoded, Extent, Storage
from shardload.stores import places

Cell = tuple[int, ...]
_MISSING = (1 << 64) - 1
"""Offset and length of an inner chunk that was never written."""


def storage(array: Array, chunks: Mapping[Cell, Value], rows: ZarrRows) -> Storage:
    """How the tensor of ``array`` is stored.

    Args:
        array: Its metadata.
        chunks: Grid index → what is stored there; may lack cells.
        rows: The way to read it when it is not raw.

    Raises:
        SourceError: When a raw chunk has not as many bytes as it should.
        UnsafeSourceError: When a shard's index claims absurdly many chunks.
    """
    if not array.is_raw or len(chunks) < math.prod(array.grid) or not chunks:
        return Decoded(rows)
    found = _raw(array, chunks)
    if found is None:
        return Decoded(rows)
    chunk_shape, cells = found
    if any(value.inline is not None for value in cells.values()):
        return Decoded(RawRows(array.dtype, array.shape, chunk_shape, cells, rows.stored_bytes))
    if len(cells) == 1 and chunk_shape[1:] == array.shape[1:]:
        only = next(iter(cells.values()))
        return Extent(only.path, only.offset)
    return Chunked(chunk_shape, {cell: Extent(value.path, value.offset) for cell, value in cells.items()})


def _raw(array: Array, chunks: Mapping[Cell, Value]) -> tuple[Cell, dict[Cell, Value]] | None:
    """Chunk shape and the raw bytes of each chunk; ``None`` when an inner chunk is missing."""
    itemsize = array.dtype.itemsize
    if (sharding := array.sharding) is None:
        nbytes = math.prod(array.chunk_shape) * itemsize
        return array.chunk_shape, {cell: _exact(value, nbytes) for cell, value in chunks.items()}
    index_bytes, nbytes = sharding.index_bytes(array.chunk_shape), math.prod(sharding.inner_shape) * itemsize
    if sharding.inner_shape == array.chunk_shape:  # the length alone tells: nothing else fits
        skip = index_bytes if sharding.index_first else 0
        whole = {cell: _exact(value, nbytes + index_bytes) for cell, value in chunks.items()}
        return array.chunk_shape, {cell: _part(value, skip, nbytes) for cell, value in whole.items()}
    if index_bytes // 16 * len(chunks) > MAX_KEYS:
        raise UnsafeSourceError(f"{_path(chunks)} claims more than {MAX_KEYS} chunks for one array")
    inner = {
        cell: part
        for shard, value in sorted(chunks.items())
        for cell, part in _inner(array, sharding, shard=shard, value=value, index_bytes=index_bytes, nbytes=nbytes)
    }
    return None if any(part is None for part in inner.values()) else (sharding.inner_shape, inner)  # type: ignore[return-value]


def _inner(
    array: Array, sharding: Sharding, *, shard: Cell, value: Value, index_bytes: int, nbytes: int
) -> Iterator[tuple[Cell, Value | None]]:
    """The inner chunks of one shard that meet the tensor, by their index in the grid of inner chunks."""
    if value.length < index_bytes:
        raise SourceError(f"{value.path}: a shard has {value.length} bytes, its index alone {index_bytes}")
    at = 0 if sharding.index_first else value.length - index_bytes
    raw = _part(value, at, index_bytes).read(index_bytes, what="the index of a shard")
    places = np.frombuffer(raw, "<u8", count=index_bytes // 16 * 2).reshape(-1, 2).tolist()
    per_shard = tuple(n // i for n, i in zip(array.chunk_shape, sharding.inner_shape, strict=True))
    for position, (offset, length) in zip(itertools.product(*map(range, per_shard)), places, strict=True):
        cell = tuple(s * n + p for s, n, p in zip(shard, per_shard, position, strict=True))
        if any(i * c >= n for i, c, n in zip(cell, sharding.inner_shape, array.shape, strict=True)):
            continue  # beyond the edge: may be missing
        if offset == length == _MISSING:
            yield cell, None
            continue
        if length != nbytes or offset + length > value.length:
            raise SourceError(
                f"{value.path}: the shard at byte {value.offset} puts inner chunk {cell} at {offset}, {length} bytes; "
                f"it should have {nbytes} within {value.length}. Copy it again, or use another step"
            )
        yield cell, _part(value, offset, nbytes)


def _exact(value: Value, nbytes: int) -> Value:
    if value.length != nbytes:
        raise SourceError(
            f"{value.path}: the chunk at byte {value.offset} should have {nbytes} bytes, but has {value.length}. "
            "Copy it again, or use another step"
        )
    return value


def _part(value: Value, start: int, length: int) -> Value:
    if value.inline is not None:
        return Value(value.path, 0, length, value.inline[start : start + length])
    return Value(value.path, value.offset + start, length)


def _path(chunks: Mapping[Cell, Value]) -> str:
    return next(iter(chunks.values())).path


@dataclass(frozen=True, slots=True)
class RawRows:
    """Rows put together from raw chunks, of which some are kept in memory: Orbax inlines what has at most 1 KiB."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    chunks: Mapping[Cell, Value]
    stored_bytes: int

    @property
    def paths(self) -> tuple[str, ...]:
        """Files the chunks lie in."""
        return tuple(dict.fromkeys(value.path for value in self.chunks.values()))

    @property
    def row_alignment(self) -> int:
        """Any row can be read by itself."""
        return 1

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Rows ``[start, stop)``; see `shardload.manifest.RowReader`.

        Raises:
            TransferError: When a file is shorter than it was.
        """
        if not self.shape:
            return self._chunk_rows(self.chunks[()], 0, 1).reshape(())
        found = np.empty((stop - start, *self.shape[1:]), self.dtype)
        height = self.chunk_shape[0]
        for cell, value in self.chunks.items():
            first, last = max(start, cell[0] * height), min(stop, (cell[0] + 1) * height)
            if first >= last:
                continue
            part = self._chunk_rows(value, first - cell[0] * height, last - cell[0] * height)
            columns = tuple(slice(i * n, (i + 1) * n) for i, n in zip(cell[1:], self.chunk_shape[1:], strict=True))
            inside = found[(slice(first - start, last - start), *columns)]
            inside[...] = part[tuple(map(slice, inside.shape))]
        return found

    def _chunk_rows(self, value: Value, start: int, stop: int) -> NDArray[Any]:
        row = math.prod(self.chunk_shape[1:]) * self.dtype.itemsize
        raw: bytes | bytearray
        if value.inline is not None:
            raw = bytearray(value.inline[start * row : stop * row])
        else:
            raw = bytearray((stop - start) * row)
            with places.opened(value.path) as file:
                file.read_into(memoryview(raw), value.offset + start * row)
        return np.frombuffer(raw, self.dtype).reshape(stop - start, *self.chunk_shape[1:])


@dataclass(frozen=True, slots=True)
class ZarrRows:
    """Rows of an array that only TensorStore can decode: compressed, big-endian or with chunks never written."""

    name: str
    """The array's name in its store."""
    folder: str
    """Where the store lies, absolute."""
    is_ocdbt: bool
    array: Array
    paths: tuple[str, ...]
    stored_bytes: int
    context: Any
    """A `tensorstore.Context` shared by the arrays of a store, or ``None``."""

    @property
    def row_alignment(self) -> int:
        """Rows per chunk: a chunk is decoded whole."""
        return self.array.chunk_shape[0] if self.array.chunk_shape else 1

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Rows ``[start, stop)``; see `shardload.manifest.RowReader`.

        Raises:
            TransferError: When the array is no longer what its metadata said, or does not decode.
        """
        array = self.array
        try:
            store = self._open()
            if tuple(store.shape) != array.shape:
                raise TransferError(f"{self._where()} had the shape {array.shape}, and now has {tuple(store.shape)}")
            found = (store[start:stop] if array.shape else store).read().result()
        except (ValueError, RuntimeError, OSError) as error:
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"{self._where()}: rows {start} to {stop} do not decode: {error}") from error
        shape = np.shape(found)
        return np.ascontiguousarray(found).reshape(shape).astype(array.dtype, copy=False)

    def sharing(self, context: Any) -> ZarrRows:
        """The same rows, read within a `tensorstore.Context`."""
        return replace(self, context=context)

    def _open(self) -> Any:
        import tensorstore as ts  # 0.2 s to import

        base = {"driver": "file", "path": f"{self.folder}/" if self.is_ocdbt else f"{self.folder}/{self.name}/"}
        ocdbt = {"driver": "ocdbt", "base": base, "path": f"{self.name}/", "cache_pool": "cache_pool#nodes"}
        spec = {"driver": self.array.driver, "kvstore": ocdbt if self.is_ocdbt else base}
        return ts.open(spec, open=True, read=True, context=self.context).result()

    def _where(self) -> str:
        return f"{self.folder}: array {self.name!r}"


def decoding_context() -> Any:
    """What the arrays of one store share: B-tree nodes are kept, decoded chunks are not."""
    import tensorstore as ts

    return ts.Context(
        {"cache_pool": {"total_bytes_limit": 0}, "cache_pool#nodes": {"total_bytes_limit": 1 << 26}},
    )
