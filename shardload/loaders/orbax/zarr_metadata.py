"""Parse zarr's metadata of one array, and derive the keys of its chunks.

    zarr 3   name/zarr.json   name/c/0/1    Orbax wraps each chunk into a shard of one: ┌ raw bytes ┬ index, 20 bytes ┐
    zarr 2   name/.zarray     name/0.1      only the chunk's bytes                      └───────────┴─────────────────┘

A shard may contain several inner chunks; its index then gives the offset of each. Chunks at the far edge are stored in
full in both versions. TensorStore decodes chunks that are not plain little-endian row-major bytes, one at a time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from shardload.errors import SourceError, UnsupportedError
from shardload.loaders.extents import check_shape
from shardload.stores.json_files import parse_object

ZARR3 = "zarr.json"
ZARR2 = ".zarray"
MAX_METADATA_BYTES = 1 << 16
"""Limit for one array; real metadata has about 500 bytes."""
_PLAIN = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
_ML = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz")
_NIBBLES = ("int2", "int4", "uint2", "uint4")
"""One byte per element in memory, but not necessarily on disk."""
_DTYPES: Mapping[str, np.dtype[Any]] = {name: np.dtype(name) for name in _PLAIN + _FLOATS} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in (*_ML, *_NIBBLES) if hasattr(ml_dtypes, name)
}
_ZARR2_DTYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")
"""Type names passed to NumPy, which accepts many more and raises many kinds of errors."""
_CRC_BYTES = 4
_MAX_DEPTH = 16
"""Nesting depth of the JSON; codecs in nested shards reach 10."""
_NOT_PASSED_ON = ("attributes", "dimension_names")
"""Entries that TensorStore does not need to decode a chunk of zarr 3."""
_INTEGERS = range(-(1 << 63), 1 << 64)
"""Integers that TensorStore's JSON can represent."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """Chunks inside each stored value."""

    inner_shape: tuple[int, ...]
    index_first: bool
    has_crc: bool
    codecs: tuple[Mapping[str, Any], ...]
    """Codecs of the inner chunks."""

    def per_shard(self, chunk_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of inner chunks of a shard in each dim."""
        return tuple(n // i for n, i in zip(chunk_shape, self.inner_shape, strict=True))

    def index_bytes(self, chunk_shape: tuple[int, ...]) -> int:
        """Return the bytes of a shard's index: offset and length of each inner chunk, and a checksum."""
        return 16 * math.prod(self.per_shard(chunk_shape)) + _CRC_BYTES * self.has_crc

    def index_metadata(self, chunk_shape: tuple[int, ...]) -> bytes:
        """Return metadata that describes a shard's index as an array, so that TensorStore verifies its checksum."""
        shape = (*self.per_shard(chunk_shape), 2)
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
        return json.dumps(document | _grid(shape)).encode()


@dataclass(frozen=True, slots=True)
class Array:
    """One array's metadata."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_shape: tuple[int, ...]
    """Shape of the chunk stored under one key."""
    prefix: str
    """Prefix of a chunk's key: ``c`` or empty."""
    separator: str
    is_raw: bool
    """Whether chunks are little-endian row-major bytes."""
    sharding: Sharding | None
    driver: str
    """TensorStore's name of the format."""

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks in each dim."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk_shape, strict=True))

    def cell(self, key: str) -> tuple[int, ...] | None:
        """Return the grid index for a chunk's key (without the array's name); ``None`` for other keys."""
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


def parse(raw: bytes, *, name: str, where: str) -> Array:
    """Parse an array's ``zarr.json`` or ``.zarray``.

    Raises:
        SourceError: When the metadata contradicts itself or its format.
        UnsupportedError: When the data type is not numeric.
    """
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
    """Return metadata that describes one chunk of an array as an array of its own, and the key of its only chunk.

    Args:
        raw: The original array's ``zarr.json`` or ``.zarray``.
        shape: The chunk's shape.
        inner: Whether the chunk is inside a shard, where other codecs apply.
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
    return json.dumps(document | _grid(shape)).encode(), key_of(shape)


def key_of(shape: tuple[int, ...]) -> str:
    """Return the key of the only chunk of a zarr 3 array, without the array's name."""
    return "/".join(("c", *("0" for _ in shape)))


def _grid(shape: tuple[int, ...]) -> dict[str, Any]:
    return {
        "shape": list(shape),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shape)}},
        "chunk_key_encoding": {"name": "default"},
    }


def _parse3(document: Mapping[str, Any]) -> Array:
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
    return Array(_ints(document["shape"]), dtype, chunk_shape, prefix, _separator(separator), is_raw, sharding, "zarr3")


def _sharding(configuration: Mapping[str, Any], shard: tuple[int, ...]) -> tuple[Sharding | None, list[Any]]:
    """Return the sharding (``None`` if its index is not plain) and the codecs of the inner chunks."""
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
    return (Sharding(inner, location == "start", has_crc, tuple(codecs)) if is_plain else None), codecs


def _parse2(document: Mapping[str, Any]) -> Array:
    if document["zarr_format"] != 2:
        raise ValueError(f"zarr_format should be 2 or 3, but is {str(document['zarr_format'])[:100]}")
    name = document["dtype"]
    dtype = _dtype2(name)
    _check_codec2(document.get("compressor"))
    for codec in document.get("filters") or ():
        _check_codec2(codec)
    # "F" (column-major) order is left to TensorStore.
    plain = document.get("compressor") is None and not document.get("filters") and document.get("order", "C") == "C"
    is_raw = plain and not (isinstance(name, str) and name.startswith(">")) and name not in _NIBBLES
    separator = _separator(document.get("dimension_separator", "."))
    shape, chunks = _ints(document["shape"]), _ints(document["chunks"])
    return Array(shape, dtype.newbyteorder("="), chunks, "", separator, is_raw, None, "zarr")


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


def _dtype2(name: object) -> np.dtype[Any]:
    if not isinstance(name, str):
        raise ValueError(f"the type {str(name)[:100]!r} is not a name")
    if name not in _DTYPES and _ZARR2_DTYPE.fullmatch(name):
        dtype = np.dtype(name)
        return dtype if dtype.newbyteorder("=") in _DTYPES.values() else _dtype(name)
    return _dtype(name)


def _check_values(document: object, depth: int = _MAX_DEPTH) -> None:
    """Refuse values that TensorStore's JSON cannot represent: TensorStore would fail without naming the file.

    Raises:
        ValueError: When a number is too large or not finite, text is not Unicode, or nesting is too deep.
    """
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
    """Return zarr 3 codecs, checked at any depth: objects with a name and an optional configuration object."""
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


def _check_codec2(found: object) -> None:
    if found is not None and not (isinstance(found, dict) and isinstance(found.get("id"), str)):
        raise ValueError(f"{str(found)[:200]} is not a compressor or filter")


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
