"""Flax's msgpack (``flax.serialization.to_bytes``): nested maps with arrays as extension values, read in place.

    map ─ "params" ─ map ─ "kernel" ─ ext 1 ─┬ array of 3 ─┬ shape (24, 16)
                                             │             ├ "float32"
                                             │             └ bytes ◄── Extent
                                             └ an array of more than 1 GiB: a map with its shape and flat chunks

The names of tensors are the keys, joined by slashes, as in Orbax. Only what lies between the values is read: a library
for msgpack would read them all to find where they are. The file is untrusted: lengths are compared with the file, keys
and nesting are limited, and no value is allocated before it is known to be there.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Hashable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from shardload.errors import SourceError, TruncatedSourceError
from shardload.loaders.contents import FileContent
from shardload.loaders.extents import check_shape, checked_tensors
from shardload.loaders.registry import FormatSpec
from shardload.manifest import Decoded, EncodedRows, Extent, Manifest, Packed, Storage, Tensor
from shardload.stores.location import Location
from shardload.stores.store import File, read_bytes
from shardload.units import exact_bytes

_CHUNKED = "__msgpack_chunked_array__"
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
"""Flax's numbers of extension types."""
_MAX_DEPTH = 64
_MAX_TEXT_BYTES = 4096
"""Limit on a key in bytes."""
_WINDOW_BYTES = 4096
"""Bytes read at once: a few headers. Values lie between them."""
_WAY_OUT = "Save it again with flax.serialization.to_bytes"
_FIXED = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
_FIXED |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
"""Type byte → format of the number that follows."""
_LENGTHS = {
    **{0xC4: ("bin", 1), 0xC5: ("bin", 2), 0xC6: ("bin", 4), 0xC7: ("ext", 1), 0xC8: ("ext", 2), 0xC9: ("ext", 4)},
    **{0xD9: ("str", 1), 0xDA: ("str", 2), 0xDB: ("str", 4), 0xDC: ("list", 2), 0xDD: ("list", 4)},
    **{0xDE: ("map", 2), 0xDF: ("map", 4)},
}
"""Type byte → kind of a value, and how many bytes its length takes."""
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


@dataclass(frozen=True, slots=True)
class _Array:
    """An array in the file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int


class _MsgpackReader:
    """Reads the headers of a msgpack file, and skips its values."""

    def __init__(self, path: Location, file: File) -> None:
        self.path, self.file, self.at = path, file, 0
        self._window, self._start = b"", 0

    def error(self, why: str) -> SourceError:
        return SourceError(f"Cannot read {self.path}: at byte {self.at}, {why}. {_WAY_OUT}")

    def take(self, count: int) -> bytes:
        inside = self.at - self._start
        if not 0 <= inside <= len(self._window) - count:
            wanted = max(count, min(_WINDOW_BYTES, self.file.n_bytes - self.at))
            self._window = read_bytes(self.file, wanted, offset=self.at, path=str(self.path), what="a header")
            self._start, inside = self.at, 0
        self.at += count
        return self._window[inside : inside + count]

    def skip(self, count: int) -> None:
        if count > self.file.n_bytes - self.at:
            raise TruncatedSourceError(
                f"{self.path} is truncated: a value at byte {self.at} should have {exact_bytes(count)}, but the file "
                f"has {exact_bytes(self.file.n_bytes)}. Download or save it again"
            )
        self.at += count

    def head(self) -> tuple[str, Any]:
        """Read the type of the next value, such as ``map``, ``str`` or ``ext``, and its length; or a number."""
        byte = self.take(1)[0]
        if byte in _LENGTHS:
            kind, width = _LENGTHS[byte]
            return kind, int.from_bytes(self.take(width), "big")
        if byte in _FIXED:
            return "number", struct.unpack(_FIXED[byte], self.take(struct.calcsize(_FIXED[byte])))[0]
        if byte in _CONSTANTS:
            return "number" if byte != 0xC0 else "nothing", _CONSTANTS[byte]
        if 0xD4 <= byte <= 0xD8:
            return "ext", 1 << (byte - 0xD4)
        for low, high, kind in ((0x00, 0x7F, "number"), (0x80, 0x8F, "map"), (0x90, 0x9F, "list"), (0xA0, 0xBF, "str")):
            if low <= byte <= high:
                return kind, byte - low
        if byte >= 0xE0:
            return "number", byte - 256
        raise self.error("a type is reserved")

    def text(self) -> str:
        kind, length = self.head()
        if kind not in ("str", "bin") or length > _MAX_TEXT_BYTES:
            raise self.error(f"found {kind} {length}, expected a text of at most {_MAX_TEXT_BYTES} bytes")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise self.error("a text is no UTF-8") from error

    def array(self, length: int, *, name: str) -> _Array | None:
        """Read the header of an extension value of ``length`` bytes, and skip the rest; ``None`` if it is no array."""
        code, end = self.take(1)[0], self.at + length
        if code not in (_ARRAY, _SCALAR):
            self.skip(length)
            return None
        if self.head() != ("list", 3):
            raise self.error(f"{name!r} is no array of Flax")
        kind, rank = self.head()
        if kind != "list" or rank > 64:
            raise self.error(f"the shape of {name!r} is {kind} {rank}, expected a list of at most 64 numbers")
        shape = tuple(self.dim(name) for _ in range(rank))
        check_shape(shape, name=name, path=self.path)
        dtype = self._dtype(name)
        kind, count = self.head()
        offset = self.at
        if kind != "bin" or count != math.prod(shape) * dtype.itemsize or offset + count != end:
            raise self.error(
                f"{name!r} has {exact_bytes(count)} of values ({kind}), expected "
                f"{math.prod(shape) * dtype.itemsize} for an array of {dtype} {shape}"
            )
        self.skip(count)
        return _Array(shape, dtype, offset)

    def dim(self, name: str) -> int:
        kind, value = self.head()
        if kind != "number" or not isinstance(value, int) or isinstance(value, bool):
            raise self.error(f"a dim of {name!r} is {kind} {value}, expected a whole number")
        return value

    def _dtype(self, name: str) -> np.dtype[Any]:
        text = self.text()
        try:
            found = np.dtype(getattr(ml_dtypes, text)) if hasattr(ml_dtypes, text) else np.dtype(text)
        except (TypeError, ValueError) as error:
            raise self.error(f"the dtype of {name!r} is {text!r}, expected that of an array of numbers") from error
        is_number = found.kind in "biufc" or hasattr(ml_dtypes, found.name)
        if not is_number or found.name != text:
            raise self.error(f"the dtype of {name!r} is {text!r}, expected that of an array of numbers")
        return found


@dataclass(frozen=True, slots=True)
class FlatChunks(EncodedRows):
    """The rows of an array whose elements are in several pieces of a file, one after the other."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stored: tuple[tuple[Location, int, int], ...]
    row_alignment: int = 1

    @property
    def ranges(self) -> tuple[tuple[Location, int, int], ...]:
        """(file, offset, number of bytes) of each piece."""
        return self.stored

    @property
    def encoding(self) -> Hashable:
        """The pieces are the elements themselves, in the order of the ranges."""
        return (self.dtype.name, self.shape)

    def require_decoder(self) -> None:
        """Do nothing: no package is needed."""

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Read rows ``[start, stop)``."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        value = np.empty((stop - start, *self.shape[1:]), self.dtype)
        out, at = memoryview(value.reshape(-1).view(np.uint8).data), start * row
        begin = 0
        for path, offset, count in self.stored:
            first, last = max(at, begin), min(stop * row, begin + count)
            if first < last:
                with closing(path.open()) as file:
                    file.read_into(out[first - at : last - at], offset + first - begin)
            begin += count
        return value


@dataclass(frozen=True, slots=True)
class _Number:
    """Decodes a number of Python, which is in the header."""

    value: bool | int | float

    def decode(self, stored: bytes | bytearray) -> NDArray[Any]:
        """Return the number as an array without dims."""
        return np.array(self.value, _dtype_of(self.value))


def _dtype_of(value: float) -> np.dtype[Any]:
    kinds = {bool: np.bool_, int: np.int64 if value < 1 << 63 else np.uint64, float: np.float64}
    return np.dtype(kinds[type(value)])


def is_saved_by_flax(content: FileContent) -> bool:
    """Whether a file begins with a map that has entries, the first of which has a text as its key."""
    head = content.head
    at = {0xDE: 3, 0xDF: 5}.get(head[0], 1)
    is_map = 0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF)
    return is_map and len(head) > at and (0xA0 <= head[at] <= 0xBF or head[at] in (0xD9, 0xDA, 0xDB))


def open_file(path: Location) -> Manifest:
    """Return the manifest of a file: a tensor for each array and number."""
    notes: list[str] = []
    with closing(path.open()) as file:
        parser = _MsgpackReader(path, file)
        tensors = list(_entries(parser, (), notes))
        if parser.at != file.n_bytes:
            raise parser.error(f"the value ends, but the file has {exact_bytes(file.n_bytes)}")
        files = {path: file.n_bytes}
    return Manifest(path, SPEC.name, checked_tensors(tensors, files=files), files, notes=tuple(notes))


def _entries(parser: _MsgpackReader, above: tuple[str, ...], notes: list[str]) -> Iterator[Tensor]:
    """Yield the tensors in the next value of the file."""
    name = "/".join(above)
    kind, value = parser.head()
    if kind in ("map", "list"):
        if len(above) >= _MAX_DEPTH:
            raise parser.error(f"maps are nested more than {_MAX_DEPTH} deep")
        for index in range(value):
            key = str(index) if kind == "list" else parser.text()
            if key == _CHUNKED and not index:
                yield _chunked(parser, name, value)
                return
            yield from _entries(parser, (*above, key), notes)
    elif kind == "ext":
        if (found := parser.array(value, name=name)) is None:
            notes.append(f"{name} in {parser.path.name} is no array, and is left out")
        else:
            yield Tensor(name, found.shape, found.dtype, Extent(parser.path, found.offset))
    elif kind == "number":
        yield Tensor(name, (), _dtype_of(value), Packed(parser.path, 0, 0, _Number(value), b"\0"))
    elif kind != "nothing":
        parser.skip(value)
        notes.append(f"{name} in {parser.path.name} contains no numbers, and is left out")


def _chunked(parser: _MsgpackReader, name: str, entries: int) -> Tensor:
    """Return an array of more than 1 GiB, whose map has the shape and the flat chunks; its first key has been read."""
    is_true = parser.head() == ("number", True)
    if not is_true or entries != 3 or parser.text() != "shape":
        raise parser.error(f"{name!r} is no array in chunks, expected its shape")
    shape = tuple(parser.dim(name) for _ in _keys(parser, name))
    check_shape(shape, name=name, path=parser.path)
    if parser.text() != "chunks":
        raise parser.error(f"{name!r} is no array in chunks, expected its chunks")
    chunks: list[_Array] = []
    for _ in _keys(parser, name):
        kind, length = parser.head()
        found = parser.array(length, name=name) if kind == "ext" else None
        if found is None or len(found.shape) != 1 or (chunks and found.dtype != chunks[0].dtype):
            raise parser.error(f"a chunk of {name!r} is {kind}, expected an array with one dim, of the same dtype")
        chunks.append(found)
    if not chunks or not shape or sum(chunk.shape[0] for chunk in chunks) != math.prod(shape):
        raise parser.error(f"the chunks of {name!r} do not have the elements of its shape {shape}")
    dtype = chunks[0].dtype
    stored = tuple((parser.path, chunk.offset, chunk.shape[0] * dtype.itemsize) for chunk in chunks)
    storage: Storage = (
        Extent(parser.path, chunks[0].offset) if len(chunks) == 1 else Decoded(FlatChunks(shape, dtype, stored))
    )
    return Tensor(name, shape, dtype, storage)


def _keys(parser: _MsgpackReader, name: str) -> Iterator[int]:
    """Yield 0, 1, 2, …, which a map of Flax has as its keys instead of a list; the caller reads the values."""
    kind, count = parser.head()
    if kind not in ("map", "list"):
        raise parser.error(f"{name!r} has {kind}, expected a map of numbers")
    for index in range(count):
        if kind == "map" and parser.text() != str(index):
            raise parser.error(f"the keys of {name!r} are not 0, 1, 2, …")
        yield index


SPEC = FormatSpec(
    name="flax-msgpack",
    description="a .msgpack file of Flax",
    endings=(".msgpack",),
    is_file=is_saved_by_flax,
    open_file=open_file,
)
