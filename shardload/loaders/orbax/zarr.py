"""Arrays of zarr: their metadata, the keys of their chunks, and how each chunk is read.

    zarr 3   name/zarr.json   name/c/0/1    Orbax wraps each chunk into a shard of one: ┌ raw bytes ┬ index, 20 bytes ┐
    zarr 2   name/.zarray     name/0.1      only the chunk's bytes                      └───────────┴─────────────────┘

A shard is a stored chunk that contains inner chunks and an index of their offsets. Chunks that reach beyond the array's
edge are stored in full. Raw chunks are plain little-endian row-major bytes. How the chunks are stored decides how the
array is read, its `Storage`::

    one raw chunk, rows as in the tensor   Extent
    raw chunks, all in files               Chunked of Extents
    raw chunks, some in nodes of OCDBT     Decoded(RawRows)       put together here
    anything else                          Packed, or Chunked of them: TensorStore decodes each chunk by itself
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from shardload.errors import LimitError, SourceError, TransferError, UnsafeSourceError, UnsupportedError
from shardload.loaders.extents import check_shape
from shardload.loaders.orbax.ocdbt import MAX_KEYS, OcdbtValue, said
from shardload.manifest import Chunked, Decoded, Extent, Packed, Storage
from shardload.stores.json_files import parse_object
from shardload.stores.location import Location
from shardload.units import exact_bytes

ZARR3 = "zarr.json"
ZARR2 = ".zarray"
MAX_METADATA_BYTES = 1 << 16
"""Limit on the bytes of one array's metadata; Orbax writes about 500."""
_PLAIN = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
_ML = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz")
_NIBBLES = ("int2", "int4", "uint2", "uint4")
"""Types of 2 or 4 bits. In memory, an element takes a byte; on disk, several elements may share one."""
_DTYPES: Mapping[str, np.dtype[Any]] = {name: np.dtype(name) for name in _PLAIN + _FLOATS} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in (*_ML, *_NIBBLES) if hasattr(ml_dtypes, name)
}
_ZARR2_DTYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")
"""Matches those type names of zarr 2 that NumPy may parse. NumPy accepts many others, or fails on them in many ways."""
_CRC_BYTES = 4
_MAX_DEPTH = 16
"""Limit on the nesting depth of an array's JSON metadata; codecs in nested shards reach 10."""
_NOT_PASSED_ON = ("attributes", "dimension_names")
"""Entries of zarr 3 metadata that are not passed to TensorStore, as it does not need them to decode a chunk."""
_INTEGERS = range(-(1 << 63), 1 << 64)
"""Integers that TensorStore's JSON can represent; metadata with others are refused."""
Cell = tuple[int, ...]
"""Index of a chunk along each dim of its array's grid of chunks."""
_MAX_GROWTH, _GROWTH_FLOOR_BYTES = 32, 1 << 16
"""Limit on a chunk's stored bytes: its decoded bytes times the first number, plus the second. Codecs add a little."""
_MISSING = (1 << 64) - 1
"""Value that a shard's index has as offset and as length of an inner chunk that was never written."""
_MEMORY = {"driver": "memory"}
_FAILURES = (ValueError, RuntimeError, OSError)


@dataclass(frozen=True, slots=True)
class Sharding:
    """Layout of zarr's shards: a shard is a stored chunk that consists of inner chunks and an index of their places."""

    inner_shape: tuple[int, ...]
    per_shard: Cell
    """Number of inner chunks in a shard, along each dim."""
    index_first: bool
    has_crc: bool
    codecs: tuple[Mapping[str, Any], ...]
    """Zarr's codecs that encode each inner chunk, in the order of encoding."""

    @property
    def index_bytes(self) -> int:
        """Size in bytes of a shard's index: offset and length of each inner chunk, and a checksum if there is one."""
        return 16 * math.prod(self.per_shard) + _CRC_BYTES * self.has_crc

    def index_codec(self, where: str) -> ZarrCodec:
        """Return a decoder that reads a shard's index as a zarr array, so that TensorStore checks its checksum."""
        shape = (*self.per_shard, 2)
        document = {
            "zarr_format": 3,
            "node_type": "array",
            "data_type": "uint64",
            "fill_value": 0,
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                *([{"name": "crc32c"}] if self.has_crc else []),
            ],
        }
        metadata = json.dumps(document | _grid(shape)).encode()
        return ZarrCodec("zarr3", metadata, _key_of(shape), shape, np.dtype(np.uint64), where)


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """A zarr array as its metadata describe it: shape, dtype, and how it is cut into chunks and stored."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_shape: tuple[int, ...]
    """Shape of a stored chunk, that is, of what is stored under one key."""
    prefix: str
    """First part of each chunk's key: ``c``, or empty."""
    separator: str
    is_raw: bool
    """Whether chunks (in a shard: inner chunks) are stored as plain little-endian bytes in row-major order."""
    sharding: Sharding | None
    driver: str
    """Name of TensorStore's driver that reads the format: ``zarr3`` or ``zarr``."""

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of stored chunks along each dim of the array."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk_shape, strict=True))

    def cell(self, key: str) -> tuple[int, ...] | None:
        """Return a chunk's index in the grid from its key, such as ``c/0/1``; ``None`` if it is no chunk's key."""
        rank = len(self.shape)
        if not rank:
            # The key of a scalar's only chunk: "c" in zarr 3, "0" in zarr 2.
            return () if key == (self.prefix or "0") else None
        text = key.split(self.separator)
        if self.prefix:
            if text[0] != self.prefix:
                return None
            text = text[1:]
        if len(text) != rank or not all(t.isascii() and t.isdecimal() and len(t) < 20 for t in text):
            return None
        cell = tuple(map(int, text))
        # One name for each cell: "01" would be a second one for the cell 1.
        plain = all(str(i) == t for i, t in zip(cell, text, strict=True))
        return cell if plain and all(i < n for i, n in zip(cell, self.grid, strict=True)) else None


def parse(raw: bytes, *, name: str, where: str) -> ZarrArray:
    """Parse and check the content of an array's ``zarr.json`` or ``.zarray``; errors name the array and ``where``."""
    document = parse_object(raw, path=where)
    try:
        _check_values({key: value for key, value in document.items() if key not in _NOT_PASSED_ON})
        found = _parse3(document) if document.get("zarr_format") == 3 else _parse2(document)
    except UnsupportedError as error:
        raise UnsupportedError(f"{where}: {error}") from error
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise SourceError(
            f"{where} does not describe an array: {_reason(error)}. Copy the checkpoint again, or use another step"
        ) from error
    check_shape(found.shape, name=name, path=where)
    check_shape(found.chunk_shape, name=name, path=where)
    if len(found.chunk_shape) != len(found.shape) or 0 in found.chunk_shape:
        raise SourceError(
            f"{where} cuts the shape {found.shape} into chunks of {found.chunk_shape}, expected one number per dim"
        )
    return found


def one_chunk(raw: bytes, *, shape: tuple[int, ...], inner: bool) -> tuple[bytes, str]:
    """Return metadata that describes one chunk as an array of its own, and the key of the chunk in this array.

    With it, TensorStore decodes a chunk by itself. ``raw`` is the whole array's metadata. With ``inner``, the chunk is
    inside a shard and has the inner chunks' codecs.
    """
    document = parse_object(raw, path="")
    if document.get("zarr_format") != 3:
        # With one chunk any separator does; "." makes the key easy to build.
        document |= {"shape": list(shape), "chunks": list(shape), "dimension_separator": "."}
        return json.dumps(document).encode(), ".".join("0" for _ in shape) or "0"
    for name in _NOT_PASSED_ON:
        document.pop(name, None)
    if inner:
        # `_parse3` made sure that sharding is the only outer codec.
        document["codecs"] = document["codecs"][0]["configuration"]["codecs"]
    return json.dumps(document | _grid(shape)).encode(), _key_of(shape)


def _key_of(shape: tuple[int, ...]) -> str:
    """Return the key of the only chunk in a zarr 3 array that consists of one chunk: ``c/0/0`` for a matrix."""
    return "/".join(("c", *("0" for _ in shape)))


def _grid(shape: Cell) -> dict[str, Any]:
    return {
        "shape": list(shape),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shape)}},
        "chunk_key_encoding": {"name": "default"},
    }


def _parse3(document: Mapping[str, Any]) -> ZarrArray:
    grid, encoding = document["chunk_grid"], document["chunk_key_encoding"]
    if document["node_type"] != "array" or grid["name"] != "regular" or encoding["name"] not in ("default", "v2"):
        raise ValueError("it is not an array with a regular grid of chunks")
    chunk_shape = _ints(grid["configuration"]["chunk_shape"])
    is_default = encoding["name"] == "default"
    separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
    name = document["data_type"]
    dtype = _dtype(name)
    codecs, sharding = _codecs(document["codecs"]), None
    if [codec["name"] for codec in codecs] == ["sharding_indexed"]:
        sharding, codecs = _sharding(codecs[0]["configuration"], chunk_shape)
    # A shard whose index is encoded cannot be taken apart here: its inner codecs do not make the shard raw.
    has_plain_index = sharding is not None or document["codecs"] is codecs
    is_raw = has_plain_index and _is_little(codecs, dtype) and name not in _NIBBLES
    is_raw = is_raw and not document.get("storage_transformers")
    prefix = "c" if is_default else ""
    return ZarrArray(
        _ints(document["shape"]), dtype, chunk_shape, prefix, _separator(separator), is_raw, sharding, "zarr3"
    )


def _sharding(configuration: Mapping[str, Any], shard: tuple[int, ...]) -> tuple[Sharding | None, list[Any]]:
    """Return (layout of shards of shape ``shard``, inner chunks' codecs); layout ``None``: the index is encoded."""
    inner = _ints(configuration["chunk_shape"])
    if len(inner) != len(shard) or min(inner, default=1) < 1 or any(n % i for n, i in zip(shard, inner, strict=True)):
        raise ValueError(f"shards of {shard} do not divide into chunks of {inner}")
    index = _codecs(configuration["index_codecs"])
    has_crc = [codec["name"] for codec in index[1:]] == ["crc32c"]
    is_plain = _is_little(index[:1], np.dtype("uint64")) and (has_crc or len(index) == 1)
    location = configuration.get("index_location", "end")
    if location not in ("start", "end"):
        raise ValueError(f"the index of a shard is at its {location!r}, expected 'start' or 'end'")
    codecs = _codecs(configuration["codecs"])
    per_shard = tuple(n // i for n, i in zip(shard, inner, strict=True))
    return (Sharding(inner, per_shard, location == "start", has_crc, tuple(codecs)) if is_plain else None), codecs


def _parse2(document: Mapping[str, Any]) -> ZarrArray:
    if document["zarr_format"] != 2:
        raise ValueError(f"zarr_format should be 2 or 3, but is {str(document['zarr_format'])[:100]}")
    name = document["dtype"]
    if not isinstance(name, str):
        raise ValueError(f"the entry 'dtype' should be the name of a type, but is {str(name)[:100]}")
    is_numpy = name not in _DTYPES and _ZARR2_DTYPE.fullmatch(name)
    dtype = np.dtype(name) if is_numpy and np.dtype(name).newbyteorder("=") in _DTYPES.values() else _dtype(name)
    for codec in itertools.chain((document.get("compressor"),), document.get("filters") or ()):
        if codec is not None and not (isinstance(codec, dict) and isinstance(codec.get("id"), str)):
            raise ValueError(f"{str(codec)[:200]} is not a compressor or filter")
    # "F" (column-major) order is left to TensorStore.
    plain = document.get("compressor") is None and not document.get("filters") and document.get("order", "C") == "C"
    is_raw = plain and not name.startswith(">") and name not in _NIBBLES
    separator = _separator(document.get("dimension_separator", "."))
    shape, chunks = _ints(document["shape"]), _ints(document["chunks"])
    return ZarrArray(shape, dtype.newbyteorder("="), chunks, "", separator, is_raw, None, "zarr")


def _dtype(name: object) -> np.dtype[Any]:
    if isinstance(name, str) and name in _DTYPES:
        return _DTYPES[name]
    raise UnsupportedError(f"the data type {str(name)[:100]!r} is not supported")


def _reason(error: Exception) -> str:
    match error:
        case KeyError():
            return f"{str(error.args[0])[:100]!r} is missing"
        case UnicodeError():
            return "some text is not valid Unicode"
        case ValueError():
            return str(error)
    return "an entry is of the wrong type"


def _check_values(document: object, depth: int = _MAX_DEPTH) -> None:
    """Raise if an array's metadata has values that are invalid in TensorStore's JSON: its error would name no file."""
    match document:
        case int() if document not in _INTEGERS:
            raise ValueError("an integer has more than 64 bits")
        case float() if not math.isfinite(document):
            raise ValueError(f"{document} is not a JSON number")
        case str():
            document.encode()
        case dict() | list() if not depth:
            raise ValueError(f"objects and lists are nested more than {_MAX_DEPTH} deep")
        case dict():
            for key, value in document.items():
                key.encode()
                _check_values(value, depth - 1)
        case list():
            for value in document:
                _check_values(value, depth - 1)


def _codecs(found: object) -> list[dict[str, Any]]:
    """Return zarr 3 codecs; raise unless all, nested ones too, are objects with a name and perhaps a configuration."""
    if not isinstance(found, list) or not found:
        raise ValueError(f"{str(found)[:200]} is not a list of codecs")
    for codec in found:
        configuration = codec.get("configuration", {})
        if not isinstance(codec["name"], str) or not isinstance(configuration, dict):
            raise ValueError(f"{str(codec)[:200]} is not a codec")
        for inside in ("codecs", "index_codecs"):
            if inside in configuration:
                _codecs(configuration[inside])
    return found


def _is_little(codecs: list[Any], dtype: np.dtype[Any]) -> bool:
    if [codec["name"] for codec in codecs] != ["bytes"]:
        return False
    endian = codecs[0].get("configuration", {}).get("endian")
    return endian == "little" or (endian is None and dtype.itemsize == 1)


def _ints(found: object) -> tuple[int, ...]:
    if not isinstance(found, list) or any(type(n) is not int for n in found):
        raise ValueError(f"{str(found)[:200]} is not a list of integers")
    return tuple(found)


def _separator(found: object) -> str:
    if found not in (".", "/"):
        raise ValueError(f"the separator in keys of chunks is {str(found)[:20]!r}, expected '.' or '/'")
    return str(found)


def array_storage(
    array: ZarrArray, chunks: Mapping[Cell, OcdbtValue], *, header: OcdbtValue, metadata: bytes
) -> Storage:
    """Return how to read an array that has the stored ``chunks``; others were never written and have the fill value.

    ``metadata`` is the content of its ``zarr.json`` or ``.zarray``, and ``header`` the place of that file.
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


def _raw(array: ZarrArray, chunks: Mapping[Cell, OcdbtValue]) -> tuple[Cell, dict[Cell, OcdbtValue]] | None:
    """Return (chunk shape, index → place) of raw chunks: in shards, of the inner ones; ``None`` if one is missing."""
    itemsize = array.dtype.itemsize
    if (sharding := array.sharding) is None:
        nbytes = math.prod(array.chunk_shape) * itemsize
        return array.chunk_shape, {cell: _exact(value, nbytes) for cell, value in chunks.items()}
    index_bytes, nbytes = sharding.index_bytes, math.prod(sharding.inner_shape) * itemsize
    # One inner chunk, as Orbax writes: its place follows from the shard's length, so no index has to be read.
    if sharding.inner_shape == array.chunk_shape:
        skip = index_bytes if sharding.index_first else 0
        whole = {cell: _exact(value, nbytes + index_bytes) for cell, value in chunks.items()}
        return array.chunk_shape, {cell: _part(value, skip, nbytes) for cell, value in whole.items()}
    inner = dict(_inner(array, sharding, chunks, nbytes=nbytes))
    return None if any(part is None for part in inner.values()) else (sharding.inner_shape, inner)  # type: ignore[return-value]


def _packed(array: ZarrArray, chunks: Mapping[Cell, OcdbtValue], header: OcdbtValue, metadata: bytes) -> Storage:
    """Return how to read an array whose chunks (in shards: inner chunks) TensorStore must decode, one by one."""
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
    """Return where and how to read a chunk that ``codec`` decodes; ``value`` is ``None`` if it was never written."""
    if value is None:
        return Packed(header.path, 0, 0, codec)
    nbytes = math.prod(codec.shape) * codec.dtype.itemsize
    if value.length > _GROWTH_FLOOR_BYTES + _MAX_GROWTH * nbytes:
        raise UnsafeSourceError(
            f"{value.path}: a chunk of {exact_bytes(nbytes)} is stored in {exact_bytes(value.length)} at byte "
            f"{value.offset}; no codec needs that many. Copy it again, or use another step"
        )
    if value.inline is not None:
        return Packed(value.path, 0, 0, codec, value.inline)
    return Packed(value.path, value.offset, value.length, codec)


def _inner(
    array: ZarrArray, sharding: Sharding, chunks: Mapping[Cell, OcdbtValue], *, nbytes: int | None
) -> Iterator[tuple[Cell, OcdbtValue | None]]:
    """Read the shards' indexes; yield (grid index, place) for each inner chunk that has elements of the tensor.

    The place is ``None`` if the chunk is not stored. ``nbytes`` is the size that each must have, if it is known.
    """
    index_bytes = sharding.index_bytes
    path = str(next(iter(chunks.values())).path) if chunks else ""
    # 16 bytes for each inner chunk; checked before any index is read.
    if index_bytes // 16 * len(chunks) > MAX_KEYS:
        raise UnsafeSourceError(f"{path} claims more than {MAX_KEYS} chunks for one array")
    codec = sharding.index_codec(path)
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
        for position, (offset, length) in zip(np.ndindex(sharding.per_shard), index, strict=True):
            cell = tuple(s * n + p for s, n, p in zip(shard, sharding.per_shard, position, strict=True))
            if any(i * c >= n for i, c, n in zip(cell, sharding.inner_shape, array.shape, strict=True)):
                # Wholly beyond the tensor's edge: of no use, and allowed to be missing.
                continue
            if offset == length == _MISSING:
                yield cell, None
                continue
            if (length != nbytes and nbytes is not None) or not length or offset + length > value.length:
                wanted = "some bytes" if nbytes is None else exact_bytes(nbytes)
                raise SourceError(
                    f"{value.path}: the shard at byte {value.offset} puts inner chunk {cell} at its byte {offset}, in "
                    f"{exact_bytes(length)}; expected {wanted} that end within the shard's {value.length}. Copy "
                    "it again, or use another step"
                )
            yield cell, _part(value, offset, length)


def _exact(value: OcdbtValue, nbytes: int) -> OcdbtValue:
    if value.length != nbytes:
        raise SourceError(
            f"{value.path}: the chunk at byte {value.offset} should have {exact_bytes(nbytes)}, but has "
            f"{exact_bytes(value.length)}. Copy it again, or use another step"
        )
    return value


def _part(value: OcdbtValue, start: int, length: int) -> OcdbtValue:
    if value.inline is not None:
        return OcdbtValue(value.path, 0, length, value.inline[start : start + length])
    return OcdbtValue(value.path, value.offset + start, length)


@dataclass(frozen=True, slots=True)
class RawRows:
    """Reads rows of an array from raw chunks, some of them in memory: OCDBT stores up to 1 KiB in its own nodes."""

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
        """Number of rows that must be read together: always 1."""
        return 1

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)``, joined from chunks, as a `shardload.manifest.RowReader` does."""
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
    """Name of TensorStore's driver that reads the format: ``zarr3`` or ``zarr``."""
    metadata: bytes
    """Metadata that describe one chunk as an array of its own: in this form, TensorStore can decode it."""
    key: str
    """Key of the chunk in the array that ``metadata`` describes."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    where: str
    """Path of the file with the array's metadata, which errors name."""

    def check(self) -> None:
        """Raise a `SourceError` unless TensorStore accepts the metadata: damage is found before any chunk is read."""
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
        """Return a chunk's elements as a `shardload.manifest.Codec` does; an empty ``stored`` gives fill values."""
        import tensorstore as ts

        n_bytes, context = len(stored), _context()
        try:
            self._refuse_expansion(stored)
            if stored:
                memory: Any = ts.KvStore.open(_MEMORY, context=context).result()
                memory[self.key] = stored
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
        """Return the codecs in the order of encoding, except checksums, which only append bytes to the data."""
        document = json.loads(self.metadata)
        if self.driver == "zarr3":
            return [codec for codec in document["codecs"] if codec.get("name") != "crc32c"]
        return [c for c in (*(document.get("filters") or ()), document.get("compressor")) if c is not None]

    def _refuse_expansion(self, stored: bytes | bytearray) -> None:
        """Raise if blosc's header declares more bytes than a chunk has: blosc would allocate them before any check."""
        if stored and _is_blosc(self._codecs()[-1:]):
            declared = int.from_bytes(stored[4:8], "little")
            if declared > (most := math.prod(self.shape) * self.dtype.itemsize):
                raise ValueError(
                    f"for the decoded chunk, blosc's header declares {exact_bytes(declared)}, but it should have "
                    f"{exact_bytes(most)}, as the chunk's shape and dtype say"
                )


def _is_blosc(codecs: Iterable[Any]) -> bool:
    return any("blosc" in (codec.get("name"), codec.get("id")) for codec in codecs if isinstance(codec, Mapping))


def _holds_blosc(codec: object) -> bool:
    """Whether a codec such as sharding has blosc inside, where blosc's header cannot be checked before decoding."""
    settings = codec.get("configuration") if isinstance(codec, Mapping) else None
    inside = settings.get("codecs") if isinstance(settings, Mapping) else None
    return isinstance(inside, list) and (_is_blosc(inside) or any(map(_holds_blosc, inside)))


def _context() -> Any:
    import tensorstore as ts  # 0.2 s to import

    # Each call gets its own context and so its own memory store, as threads decode chunks under the same key. No cache:
    # each chunk is decoded once.
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}})
