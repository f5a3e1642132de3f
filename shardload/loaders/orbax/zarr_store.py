"""The arrays of one Orbax item, stored in OCDBT or in one folder per array.

An array's metadata and the locations of its chunks become a `Storage`::

    one raw chunk, rows as in the tensor   Extent
    raw chunks, all in files               Chunked of Extents
    raw chunks, some inline                Decoded(RawRows)       put together here
    anything else                          Packed, or Chunked of them: TensorStore decodes each chunk by itself
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.errors import LimitError, SourceError, TransferError, UnsafeSourceError, UnsupportedError
from shardload.loaders.contents import descendant
from shardload.loaders.orbax import ocdbt, zarr_metadata
from shardload.loaders.orbax.ocdbt import MAX_KEYS, OcdbtValue, said
from shardload.loaders.orbax.zarr_metadata import Array, Sharding, key_of, one_chunk
from shardload.manifest import Chunked, Decoded, Extent, Packed, Storage, Tensor
from shardload.stores.location import Location
from shardload.stores.remote_failures import COPY_FIRST
from shardload.units import exact_bytes, plural

_HEADERS = frozenset({zarr_metadata.ZARR2, zarr_metadata.ZARR3})
MAX_EXPANSION = 40_000
"""Declared bytes per stored byte: zstd shrinks zeros, as in fresh optimizer slots, to 1/32 768."""
EXPANSION_FLOOR_BYTES = 1 << 26
MAX_OVERHANG = 16
"""Bytes of chunks per byte of their tensor: in each dim, an edge chunk overhangs by less than the chunk's length."""


class Arrays:
    """The stored values of an item's folder, by array.

    Args:
        folder: The item.
        is_complete: Whether Orbax wrote every chunk, including chunks of zeros.

    Raises:
        SourceError: When the store is damaged.
        UnsafeSourceError: When it reaches outside the folder.
    """

    def __init__(self, folder: Location, *, is_complete: bool) -> None:
        self._folder = folder
        self._is_complete = is_complete
        is_ocdbt = ocdbt.MANIFEST in folder.names()
        if not is_ocdbt and folder.store.is_remote:  # each chunk would be a file to fetch
            raise UnsupportedError(
                f"{folder} has a folder for each array, which can only be read on this machine. {COPY_FIRST}"
            )
        values = ocdbt.read_values(folder) if is_ocdbt else _files(folder)
        self._total = sum(value.length for value in values.values())
        # An array named "" is the root of the store: a tree may have an empty text as key.
        self._headers = {key.rpartition("/")[0]: key for key in values if key.rpartition("/")[2] in _HEADERS}
        self._values: dict[str, dict[str, OcdbtValue]] = {name: {} for name in self._headers}
        for key, value in values.items():
            self._file_away(key, value)
        self._sizes: dict[Location, int] = {}

    def _file_away(self, key: str, value: OcdbtValue) -> None:
        name = key
        # Find the longest prefix that is an array: keys of chunks contain slashes, and so may names of arrays.
        while "/" in name:
            name = name.rpartition("/")[0]
            if name in self._headers:
                self._values[name][key[len(name) + 1 :]] = value
                return
        if "" in self._headers:
            self._values[""][key] = value

    @property
    def files(self) -> dict[Location, int]:
        """Size of each file with data of the requested tensors."""
        return dict(sorted(self._sizes.items()))

    def contains(self, name: str) -> bool:
        """Whether the item stores an array of this name."""
        return name in self._headers

    def tensor(self, stored_name: str, *, name: str) -> Tensor:
        """Return the array ``stored_name`` as the tensor ``name``.

        Raises:
            SourceError: When the array is missing, lacks chunks or contradicts itself.
            UnsafeSourceError: When it declares far more than the item stores.
        """
        if stored_name not in self._headers:
            raise SourceError(
                f"{self._folder} lists the array {stored_name!r}, but does not contain it. The save did not finish, or "
                "files are missing; use another step"
            )
        key = self._headers[stored_name]
        where = f"{self._folder}: {key}"
        values = self._values[stored_name]
        header = values[key.rpartition("/")[2]]
        metadata = header.read(zarr_metadata.MAX_METADATA_BYTES, what=key)
        array = zarr_metadata.parse(metadata, name=name, where=where)
        chunks = self._chunks(array, values, where)
        self._refuse_expansion(array, where)
        # The header's file counts too: chunks that were never written name it as theirs.
        for value in (header, *chunks.values()):
            if value.path not in self._sizes:
                self._sizes[value.path] = value.path.size
        # Nothing to read, so any offset is valid.
        if not math.prod(array.shape):
            return Tensor(name, array.shape, array.dtype, Extent(header.path, 0))
        return Tensor(name, array.shape, array.dtype, storage(array, chunks, header=header, metadata=metadata))

    def _chunks(self, array: zarr_metadata.Array, values: dict[str, OcdbtValue], where: str) -> dict[Cell, OcdbtValue]:
        found: dict[Cell, OcdbtValue] = {}
        for key, value in values.items():
            if key in (zarr_metadata.ZARR3, zarr_metadata.ZARR2, ".zattrs"):
                continue
            cell = array.cell(key)
            if cell is None:
                raise SourceError(
                    f"{where} has shape {array.shape} in chunks of {array.chunk_shape}, but also a chunk {key!r}, "
                    "which is outside that grid"
                )
            found[cell] = value
        cells = math.prod(array.grid)
        # Otherwise a missing chunk contains the fill value: Orbax skips chunks that are all zeros.
        if self._is_complete and len(found) != cells:
            raise SourceError(
                f"{where} should have {plural(cells, 'chunk')}, but has {len(found)}. Copy the step again, or use "
                "another one"
            )
        return found

    def _refuse_expansion(self, array: zarr_metadata.Array, where: str) -> None:
        size, chunk = (math.prod(shape) * array.dtype.itemsize for shape in (array.shape, array.chunk_shape))
        if chunk > max(EXPANSION_FLOOR_BYTES, MAX_OVERHANG * size):
            raise UnsafeSourceError(f"{where} declares chunks of {exact_bytes(chunk)} for a tensor of {size}")
        most = max(EXPANSION_FLOOR_BYTES, MAX_EXPANSION * self._total)
        for what, shape in (("tensor", array.shape), ("chunk", array.chunk_shape)):
            declared = math.prod(shape) * array.dtype.itemsize
            if declared > most:
                raise UnsafeSourceError(
                    f"{where} declares a {what} of {exact_bytes(declared)}, but all arrays together store "
                    f"{self._total}; at most {MAX_EXPANSION} times as many are possible. Copy the step again, or use "
                    "another one"
                )


def _files(folder: Location) -> dict[str, OcdbtValue]:
    """Return every file of a store without OCDBT, by its path relative to ``folder``; links count as files."""
    found: dict[str, OcdbtValue] = {}
    # Files next to the arrays' folders are Orbax' own metadata.
    waiting = [name for name in folder.names() if (folder / name).is_folder() and not (folder / name).is_link()]
    while waiting:
        inside = waiting.pop()
        for name in (folder / inside).names():
            key = f"{inside}/{name}"
            path = descendant(folder, key, named_by=str(folder))
            if path.is_folder() and not path.is_link():
                waiting.append(key)
                continue
            try:
                found[key] = OcdbtValue(path, 0, path.store.identity(path.key).size)
            except OSError as error:
                raise SourceError(f"Cannot read {path}: {error}") from error
            if len(found) > MAX_KEYS:
                raise UnsafeSourceError(f"{folder} contains more than {MAX_KEYS} files")
    return found


Cell = tuple[int, ...]
MAX_GROWTH, GROWTH_FLOOR_BYTES = 32, 1 << 16
"""Stored bytes per byte of a chunk: codecs add a little, and a shard's index adds 16 bytes per inner chunk."""
_MISSING = (1 << 64) - 1
"""Offset and length of an inner chunk that was never written."""


def storage(array: Array, chunks: Mapping[Cell, OcdbtValue], *, header: OcdbtValue, metadata: bytes) -> Storage:
    """Return how the tensor of ``array`` is stored.

    Args:
        array: Its metadata.
        chunks: Grid index → stored value; cells may be missing.
        header: Location of its metadata.
        metadata: The metadata itself.

    Raises:
        SourceError: When a raw chunk has the wrong number of bytes, or a shard contradicts itself.
        UnsafeSourceError: When there are more than `MAX_KEYS` chunks, or a chunk is stored in far too many bytes.
    """
    # A chunk that was never written reads as the fill value, which only TensorStore knows how to supply.
    found = _raw(array, chunks) if array.is_raw and chunks and len(chunks) == math.prod(array.grid) else None
    if found is None:
        return _packed(array, chunks, header, metadata)
    chunk_shape, cells = found
    if any(value.inline is not None for value in cells.values()):
        # Inline bytes are inside an encoded node, where a transfer cannot read them: one reader assembles all chunks.
        stored = sum(value.length for value in chunks.values())
        return Decoded(RawRows(array.dtype, array.shape, chunk_shape, cells, stored))
    if len(cells) == 1 and chunk_shape[1:] == array.shape[1:]:
        # A chunk as wide as the tensor starts with the tensor's rows; an overhang only adds rows after them.
        only = next(iter(cells.values()))
        return Extent(only.path, only.offset)
    return Chunked(chunk_shape, {cell: Extent(value.path, value.offset) for cell, value in cells.items()})


def _raw(array: Array, chunks: Mapping[Cell, OcdbtValue]) -> tuple[Cell, dict[Cell, OcdbtValue]] | None:
    """Return the chunk shape and the location of each raw chunk; ``None`` when an inner chunk is missing."""
    itemsize = array.dtype.itemsize
    if (sharding := array.sharding) is None:
        nbytes = math.prod(array.chunk_shape) * itemsize
        return array.chunk_shape, {cell: _exact(value, nbytes) for cell, value in chunks.items()}
    index_bytes, nbytes = sharding.index_bytes(array.chunk_shape), math.prod(sharding.inner_shape) * itemsize
    # One inner chunk, as Orbax writes: its place follows from the shard's length, so no index has to be read.
    if sharding.inner_shape == array.chunk_shape:
        skip = index_bytes if sharding.index_first else 0
        whole = {cell: _exact(value, nbytes + index_bytes) for cell, value in chunks.items()}
        return array.chunk_shape, {cell: _part(value, skip, nbytes) for cell, value in whole.items()}
    inner = dict(_inner(array, sharding, chunks, nbytes=nbytes))
    return None if any(part is None for part in inner.values()) else (sharding.inner_shape, inner)  # type: ignore[return-value]


def _packed(array: Array, chunks: Mapping[Cell, OcdbtValue], header: OcdbtValue, metadata: bytes) -> Storage:
    """Store each chunk, or each inner chunk of a shard, as `Packed`: it decodes independently of the others."""
    shape, cells = array.chunk_shape, dict[Cell, OcdbtValue | None](chunks)
    sharding = array.sharding
    # Blosc is decoded on its own even where it fills a shard, so that its header can be checked first.
    inside = sharding is not None and (sharding.inner_shape != shape or _is_blosc(sharding.codecs))
    if sharding is not None and inside:
        shape, cells = sharding.inner_shape, dict(_inner(array, sharding, chunks, nbytes=None))
    grid = tuple(-(-n // c) for n, c in zip(array.shape, shape, strict=True))
    if math.prod(grid) > MAX_KEYS:
        raise UnsafeSourceError(f"{header.path} claims more than {MAX_KEYS} chunks for one array")
    document, key = one_chunk(metadata, shape=shape, inner=inside)
    # One codec for all chunks: they have one shape, as edge chunks are stored in full.
    codec = ZarrCodec(array.driver, document, key, shape, array.dtype, str(header.path))
    codec.check()
    found = {cell: _pack(cells.get(cell), codec, header) for cell in itertools.product(*map(range, grid))}
    return found[(0,) * len(shape)] if shape == array.shape else Chunked(shape, found)


def _pack(value: OcdbtValue | None, codec: ZarrCodec, header: OcdbtValue) -> Packed:
    """Describe a chunk that decodes as a whole; refuse one stored in far more bytes than it decodes to."""
    if value is None:
        return Packed(header.path, 0, 0, codec)
    nbytes = math.prod(codec.shape) * codec.dtype.itemsize
    if value.length > GROWTH_FLOOR_BYTES + MAX_GROWTH * nbytes:
        raise UnsafeSourceError(
            f"{value.path}: a chunk of {exact_bytes(nbytes)} is stored in {value.length} at byte {value.offset}; no "
            "codec needs that many. Copy it again, or use another step"
        )
    if value.inline is not None:
        return Packed(value.path, 0, 0, codec, value.inline)
    return Packed(value.path, value.offset, value.length, codec)


def _inner(
    array: Array, sharding: Sharding, chunks: Mapping[Cell, OcdbtValue], *, nbytes: int | None
) -> Iterator[tuple[Cell, OcdbtValue | None]]:
    """Yield the inner chunks that overlap the tensor, by their index in the inner grid; each of ``nbytes``."""
    index_bytes = sharding.index_bytes(array.chunk_shape)
    # 16 bytes for each inner chunk; checked before any index is read.
    if index_bytes // 16 * len(chunks) > MAX_KEYS:
        raise UnsafeSourceError(f"{_path(chunks)} claims more than {MAX_KEYS} chunks for one array")
    per_shard, metadata = sharding.per_shard(array.chunk_shape), sharding.index_metadata(array.chunk_shape)
    shape = (*per_shard, 2)
    codec = ZarrCodec("zarr3", metadata, key_of(shape), shape, np.dtype(np.uint64), _path(chunks) if chunks else "")
    for shard, value in sorted(chunks.items()):
        if value.length < index_bytes:
            raise SourceError(f"{value.path}: a shard has {exact_bytes(value.length)}, its index alone {index_bytes}")
        at = 0 if sharding.index_first else value.length - index_bytes
        raw = _part(value, at, index_bytes).read(index_bytes, what="the index of a shard")
        try:
            index = codec.decode(raw).reshape(-1, 2).tolist()
        except TransferError as error:
            raise SourceError(
                f"{value.path}: the index of the shard at byte {value.offset} is damaged: "
                f"{said(error.__cause__)}. Copy it again, or use another step"
            ) from error
        yield from _of_shard(array, sharding, shard=shard, value=value, index=index, nbytes=nbytes)


def _of_shard(
    array: Array, sharding: Sharding, *, shard: Cell, value: OcdbtValue, index: list[list[int]], nbytes: int | None
) -> Iterator[tuple[Cell, OcdbtValue | None]]:
    per_shard = sharding.per_shard(array.chunk_shape)
    for position, (offset, length) in zip(itertools.product(*map(range, per_shard)), index, strict=True):
        cell = tuple(s * n + p for s, n, p in zip(shard, per_shard, position, strict=True))
        if any(i * c >= n for i, c, n in zip(cell, sharding.inner_shape, array.shape, strict=True)):
            # Wholly beyond the tensor's edge: of no use, and allowed to be missing.
            continue
        if offset == length == _MISSING:
            yield cell, None
            continue
        if (length != nbytes and nbytes is not None) or not length or offset + length > value.length:
            wanted = "some" if nbytes is None else nbytes
            raise SourceError(
                f"{value.path}: the shard at byte {value.offset} puts inner chunk {cell} at {offset}, "
                f"{exact_bytes(length)}; it should have {wanted} within {value.length}. Copy it again, or use "
                "another step"
            )
        yield cell, _part(value, offset, length)


def _exact(value: OcdbtValue, nbytes: int) -> OcdbtValue:
    if value.length != nbytes:
        raise SourceError(
            f"{value.path}: the chunk at byte {value.offset} should have {exact_bytes(nbytes)}, but has "
            f"{value.length}. Copy it again, or use another step"
        )
    return value


def _part(value: OcdbtValue, start: int, length: int) -> OcdbtValue:
    if value.inline is not None:
        return OcdbtValue(value.path, 0, length, value.inline[start : start + length])
    return OcdbtValue(value.path, value.offset + start, length)


def _path(chunks: Mapping[Cell, OcdbtValue]) -> str:
    return str(next(iter(chunks.values())).path)


@dataclass(frozen=True, slots=True)
class RawRows:
    """Rows assembled from raw chunks, some of them in memory: Orbax inlines values of at most 1 KiB."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    chunks: Mapping[Cell, OcdbtValue]
    stored_bytes: int

    @property
    def paths(self) -> tuple[Location, ...]:
        """Files that contain the chunks."""
        return tuple(dict.fromkeys(value.path for value in self.chunks.values()))

    @property
    def row_alignment(self) -> int:
        """Always 1: any row can be read by itself."""
        return 1

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Read rows ``[start, stop)``; see `shardload.manifest.RowReader`.

        Raises:
            TransferError: When a file became shorter.
        """
        # A rank-0 array has one chunk, with the empty index.
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
            # NumPy clips the slices at the tensor's end, so this shape is the valid part of an edge chunk.
            inside = found[(slice(first - start, last - start), *columns)]
            inside[...] = part[tuple(map(slice, inside.shape))]
        return found

    def _chunk_rows(self, value: OcdbtValue, start: int, stop: int) -> NDArray[Any]:
        row = math.prod(self.chunk_shape[1:]) * self.dtype.itemsize
        raw: bytes | bytearray
        if value.inline is not None:
            raw = bytearray(value.inline[start * row : stop * row])
        else:
            raw = bytearray((stop - start) * row)
            with closing(value.path.open()) as file:
                file.read_into(memoryview(raw), value.offset + start * row)
        return np.frombuffer(raw, self.dtype).reshape(stop - start, *self.chunk_shape[1:])


@dataclass(frozen=True, slots=True)
class ZarrCodec:
    """Decoder for chunks that only TensorStore can read: compressed, big-endian or never written."""

    driver: str
    """TensorStore's name of the format."""
    metadata: bytes
    """Metadata of an array that consists of one such chunk."""
    key: str
    """The chunk's key in that array."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    where: str
    """Location, for messages."""

    def check(self) -> None:
        """Check that TensorStore accepts the metadata.

        Raises:
            SourceError: When it does not, or compressors are stacked so that sizes cannot be checked.
        """
        # Only the header of the outermost codec can be checked before decoding; blosc further inside would escape.
        *inside, last = self._codecs() or [None]
        if _is_blosc(inside) or (not _is_blosc([last]) and _holds_blosc(last)):
            raise SourceError(
                f"{self.where} compresses again what blosc compressed, which is not supported. Save it again"
            )
        try:
            self._open(_context())
        except _FAILURES as error:
            raise LimitError.explaining(error, f"open {self.where}") or SourceError(
                f"{self.where} does not describe an array that can be decoded: {said(error)}"
            ) from error

    def decode(self, stored: bytes | bytearray) -> NDArray[Any]:
        """Return the chunk's elements; see `shardload.manifest.Codec`.

        Raises:
            TransferError: When the bytes do not decode.
        """
        n_bytes, context = len(stored), _context()
        try:
            self._refuse_expansion(stored)
            if stored:
                _memory(context)[self.key] = stored
            del stored  # TensorStore has its own copy now
            found = self._open(context).read().result()
        except _FAILURES as error:
            raise LimitError.explaining(error, f"read {self.where}") or TransferError(
                f"{self.where}: a chunk of shape {self.shape}, stored in {exact_bytes(n_bytes)}, does not decode: "
                f"{said(error)}. Copy the checkpoint again, or use another step"
            ) from error
        return np.ascontiguousarray(found).reshape(self.shape).astype(self.dtype, copy=False)

    def _open(self, context: Any) -> Any:
        import tensorstore as ts

        spec = {"driver": self.driver, "kvstore": _MEMORY, "metadata": json.loads(self.metadata)}
        return ts.open(spec, open=True, assume_metadata=True, context=context).result()

    def _codecs(self) -> list[Any]:
        """Return the codecs, innermost first, without checksums, which follow the bytes they cover."""
        document = json.loads(self.metadata)
        if self.driver == "zarr3":
            return [codec for codec in document["codecs"] if codec.get("name") != "crc32c"]
        return [c for c in (*(document.get("filters") or ()), document.get("compressor")) if c is not None]

    def _refuse_expansion(self, stored: bytes | bytearray) -> None:
        """Check blosc's header: only blosc allocates what its header declares before any check."""
        if stored and _is_blosc(self._codecs()[-1:]):
            declared = int.from_bytes(stored[4:8], "little")
            if declared > (most := math.prod(self.shape) * self.dtype.itemsize):
                raise ValueError(f"its header declares {exact_bytes(declared)}, but it should have {most}")


_MEMORY = {"driver": "memory"}
_FAILURES = (ValueError, RuntimeError, OSError)


def _is_blosc(codecs: Iterable[Any]) -> bool:
    return any("blosc" in (codec.get("name"), codec.get("id")) for codec in codecs if isinstance(codec, Mapping))


def _holds_blosc(codec: object) -> bool:
    """Whether a codec with nested codecs, such as sharding, contains blosc."""
    settings = codec.get("configuration") if isinstance(codec, Mapping) else None
    inside = settings.get("codecs") if isinstance(settings, Mapping) else None
    return isinstance(inside, list) and (_is_blosc(inside) or any(map(_holds_blosc, inside)))


def _context() -> Any:
    import tensorstore as ts  # 0.2 s to import

    # Each call gets its own context and so its own memory store, as threads decode chunks under the same key. No cache:
    # each chunk is decoded once.
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}})


def _memory(context: Any) -> Any:
    import tensorstore as ts

    return ts.KvStore.open(_MEMORY, context=context).result()
