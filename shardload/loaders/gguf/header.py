"""Parse the header of a GGUF file (versions 2 and 3) in one pass, with limits on what a header may contain.

    "GGUF" u32 version u64 tensors u64 pairs │ key-value pairs │ tensor infos │ padding │ tensor data
                                          starts at a multiple of ``general.alignment`` ┘

The gguf package's reader makes a NumPy array of every token, which takes ten seconds for a vocabulary of 262,144
tokens. This parser skips long arrays, and `read_array` reads those that are needed. Specification:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.errors import SourceError, TruncatedSourceError, UnsafeSourceError, UnsupportedError
from shardload.stores.location import Location
from shardload.stores.store import File, read_bytes
from shardload.units import exact_bytes, plural

_MAGIC = b"GGUF"
_MAX_DIMS = 4
_MAX_NAME_BYTES = 65535
"""Limit on the bytes of a key or of a tensor's name. The specification of GGUF has this limit for keys."""
INLINE_ITEMS = 1024
"""Number of items up to which an array is parsed with the header, not skipped. A vocabulary has many more."""
_INLINE_TEXT_BYTES = 1 << 16
"""Number of bytes up to which a text, such as a licence, is parsed with the header. Longer texts are skipped."""
_MAX_DEPTH, _MAX_NESTED = 8, 1 << 16
"""Limits on arrays of arrays: levels of nesting, and inner arrays in a whole file. Small files may have fewer."""
_NESTED_SHARE = 32
_INLINE_SHARE = 8
"""Limit on the memory for parsed array items, of up to 36 bytes each: a file may have `INLINE_ITEMS` of them, and one
more for each 8 bytes of its size. Further arrays are skipped like long ones."""
_MAX_ELEMENTS_PER_BYTE = 64
"""Most elements that one stored byte of an unknown element type is taken to contain. The densest known type has 5."""
_WINDOW_BYTES = 1 << 20

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's number of a value type → code of the `struct` module; type 8 is a string, type 9 an array."""
_BYTE, _STRING, _ARRAY = 0, 8, 9


@dataclass(frozen=True, slots=True)
class GgmlType:
    """An element type of GGML, such as ``Q4_K``: ``block_elements`` elements are stored together in ``block_bytes``."""

    id: int
    name: str
    block_elements: int
    block_bytes: int

    @property
    def is_known(self) -> bool:
        """Whether shardload knows the size of the type's blocks; otherwise, its tensors cannot be decoded."""
        return self.block_bytes > 0


# Sizes are GGML's. Missing ids below 40 were withdrawn (4, 5, 31 to 33, 36 to 38) or serve dot products only (9, 15).
TYPES = {
    kind.id: kind
    for kind in (
        GgmlType(0, "F32", 1, 4),
        GgmlType(1, "F16", 1, 2),
        GgmlType(2, "Q4_0", 32, 18),
        GgmlType(3, "Q4_1", 32, 20),
        GgmlType(6, "Q5_0", 32, 22),
        GgmlType(7, "Q5_1", 32, 24),
        GgmlType(8, "Q8_0", 32, 34),
        GgmlType(10, "Q2_K", 256, 84),
        GgmlType(11, "Q3_K", 256, 110),
        GgmlType(12, "Q4_K", 256, 144),
        GgmlType(13, "Q5_K", 256, 176),
        GgmlType(14, "Q6_K", 256, 210),
        GgmlType(16, "IQ2_XXS", 256, 66),
        GgmlType(17, "IQ2_XS", 256, 74),
        GgmlType(18, "IQ3_XXS", 256, 98),
        GgmlType(19, "IQ1_S", 256, 50),
        GgmlType(20, "IQ4_NL", 32, 18),
        GgmlType(21, "IQ3_S", 256, 110),
        GgmlType(22, "IQ2_S", 256, 82),
        GgmlType(23, "IQ4_XS", 256, 136),
        GgmlType(24, "I8", 1, 1),
        GgmlType(25, "I16", 1, 2),
        GgmlType(26, "I32", 1, 4),
        GgmlType(27, "I64", 1, 8),
        GgmlType(28, "F64", 1, 8),
        GgmlType(29, "IQ1_M", 256, 56),
        GgmlType(30, "BF16", 1, 2),
        GgmlType(34, "TQ1_0", 256, 54),
        GgmlType(35, "TQ2_0", 256, 66),
        GgmlType(39, "MXFP4", 32, 17),
        GgmlType(40, "NVFP4", 64, 36),
    )
}


@dataclass(frozen=True, slots=True)
class LongArray:
    """The place in a file of a long array or text: the header parser skipped its items, `read_array` reads them."""

    path: Location
    kind: int
    """GGUF's number for the type of the array's items."""
    count: int
    offset: int
    """Offset of the array's first item in the file, in bytes."""
    nbytes: int

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Entry of a tensor in a GGUF header. ``name`` is GGUF's name; ``shape`` has NumPy's order, outermost dim first."""

    path: Location
    name: str
    shape: tuple[int, ...]
    kind: GgmlType
    offset: int
    """Offset of the tensor's data in the file, in bytes."""
    span: int = 0
    """Bytes up to the next tensor or the file's end: serves as the size if the element type is unknown."""

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in the file; for an unknown element type, the largest possible size."""
        if not self.kind.is_known:
            return self.span
        return math.prod(self.shape) // self.kind.block_elements * self.kind.block_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The parsed header of a GGUF file, or the joined headers of all files of a split model."""

    values: dict[str, Any]
    """The file's key-value pairs. Short arrays are lists; a long one is a `LongArray`, even as an item of a list."""
    tensors: tuple[TensorInfo, ...]
    """All tensors, in the order of their data in the files."""
    files: dict[Location, int]
    """Each file of the model → its size in bytes."""


def read_gguf_header(path: Location) -> GgufHeader:
    """Parse the header of one GGUF file, and check that its tensors are in the file and do not overlap."""
    with closing(path.open()) as file:
        size, cursor = file.n_bytes, _Cursor(file, path)
        tensor_count, pair_count = _preamble(cursor)
        values: dict[str, Any] = {}
        for _ in range(pair_count):
            key = cursor.string("a key", limit=_MAX_NAME_BYTES)
            if key in values:
                raise SourceError(f"{path} contains the key {key!r} twice. Convert the model again")
            (kind,) = cursor.unpack("<I", f"the type of {key!r}")
            values[key] = _value(cursor, kind, key)
        alignment = values.get("general.alignment", 32)
        # Not `isinstance`: a bool is an int, too.
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise SourceError(f"{path}: general.alignment should be a power of two, but is {alignment!r}")
        raw = [_tensor_info(cursor) for _ in range(tensor_count)]
    # Offsets in tensor infos count from the tensor data, which begins at the next multiple of the alignment.
    start = -(-cursor.position // alignment) * alignment
    for info in raw:
        if info.offset % alignment:
            raise SourceError(
                f"{path}: tensor {info.name!r} starts at byte {info.offset}, expected a multiple of {alignment}"
            )
    infos = [replace(info, offset=start + info.offset) for info in raw]
    return GgufHeader(values, _in_file_order(infos, path, size), {path: size})


def read_array(array: LongArray | list[Any]) -> NDArray[Any] | list[Any]:
    """Return the items of an array in a header; a `LongArray` is read from the file, to a NumPy array if of numbers."""
    if isinstance(array, list):
        return array
    raw = array.path.read_header(array.nbytes, offset=array.offset, what="an array")
    if array.kind != _STRING:
        return np.frombuffer(raw, np.dtype("<" + _SCALARS[array.kind]))
    found, at, unpack = [], 0, struct.Struct("<Q").unpack_from
    try:
        for _ in range(array.count):
            end = at + 8 + unpack(raw, at)[0]
            found.append(raw[at + 8 : end].decode("utf-8"))
            at = end
    except (UnicodeDecodeError, struct.error) as error:
        raise SourceError(f"{array.path}: the array at byte {array.offset} contains damaged strings") from error
    return found


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    magic, version = cursor.unpack("<4sI", "the magic and version")
    if magic != _MAGIC:
        raise SourceError(
            f"{cursor.path} should begin with {_MAGIC!r}, but begins with {magic!r}; it is not a GGUF file"
        )
    # Version 3 in big-endian order reads as 0x03000000.
    if version & 0xFFFF == 0 and version:
        raise UnsupportedError(f"{cursor.path} is a big-endian GGUF file; convert it with gguf-convert-endian")
    if version not in (2, 3):
        raise UnsupportedError(
            f"{cursor.path} is GGUF version {version}; versions 2 and 3 can be read. Convert the model again"
        )
    tensors, pairs = cursor.unpack("<QQ", "the counts")
    # The fewest bytes of an entry: lengths, types and offsets without any text.
    for count, least, what in ((tensors, 24, "tensors"), (pairs, 13, "key-values")):
        if count * least > cursor.size:
            raise UnsafeSourceError(
                f"{cursor.path} declares {count} {what}, more than fit into its {exact_bytes(cursor.size)}"
            )
    return tensors, pairs


def _value(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind == _STRING:
        return _text(cursor, f"the value of {key!r}")
    if kind == _ARRAY:
        return _array(cursor, key)
    if kind not in _SCALARS:
        raise SourceError(f"{cursor.path}: {key!r} has the value type {kind}, which does not exist. Download it again")
    return cursor.unpack("<" + _SCALARS[kind], f"the value of {key!r}")[0]


def _text(cursor: _Cursor, what: str) -> str | LongArray:
    # Peek, because `string` below reads the length itself.
    (count,) = cursor.peek("<Q", what)
    if count <= _INLINE_TEXT_BYTES:
        return cursor.string(what)
    start = cursor.position + 8
    cursor.skip(8 + count, what)
    return LongArray(cursor.path, _BYTE, count, start, count)


def _array(cursor: _Cursor, key: str, depth: int = 1) -> list[Any] | LongArray:
    kind, count = cursor.unpack("<IQ", f"the array {key!r}")
    if kind == _ARRAY:
        return _arrays(cursor, key, count, depth)
    if kind != _STRING and kind not in _SCALARS:
        raise SourceError(f"{cursor.path}: {key!r} is an array of type {kind}, which does not exist")
    item_bytes = 8 if kind == _STRING else struct.calcsize("<" + _SCALARS[kind])
    # Before anything is allocated: `count` may be any 64-bit number.
    cursor.require(count * item_bytes, f"the array {key!r} of {plural(count, 'item')}")
    # All arrays share one budget, as many short ones could take as much memory as a long one.
    if count <= min(INLINE_ITEMS, cursor.inline_items):
        cursor.inline_items -= count
        if kind == _STRING:
            what = f"an item of the array {key!r}"
            return [cursor.string(what, limit=_INLINE_TEXT_BYTES) for _ in range(count)]
        return [_value(cursor, kind, key) for _ in range(count)]
    start = cursor.position
    if kind == _STRING:
        cursor.skip_strings(count, f"the array {key!r}")
    else:
        cursor.skip(count * item_bytes, f"the array {key!r}")
    return LongArray(cursor.path, kind, count, start, cursor.position - start)


def _arrays(cursor: _Cursor, key: str, count: int, depth: int) -> list[Any]:
    """Read the items of an array of arrays, long ones as `LongArray`; ``depth`` is its level of nesting, from 1."""
    if depth == _MAX_DEPTH:
        raise UnsupportedError(f"{cursor.path}: {key!r} has arrays in more than {_MAX_DEPTH} levels")
    # An inner array has at least its type and its count. Checked before any of them is read.
    cursor.require(count * 12, f"the array {key!r} of {plural(count, 'array')}")
    if count > cursor.nested:
        raise UnsupportedError(
            f"{cursor.path}: {key!r} is an array of {plural(count, 'array')}, expected at most {cursor.nested}. "
            "Convert the model again without this key"
        )
    cursor.nested -= count
    return [_array(cursor, key, depth + 1) for _ in range(count)]


def _tensor_info(cursor: _Cursor) -> TensorInfo:
    name = cursor.string("a tensor name", limit=_MAX_NAME_BYTES)
    what = f"the entry of tensor {name!r}"
    (rank,) = cursor.unpack("<I", what)
    if not 1 <= rank <= _MAX_DIMS:
        raise SourceError(f"{cursor.path}: tensor {name!r} has {plural(rank, 'dim')}; GGUF has 1 to {_MAX_DIMS}")
    *dims, kind_id, offset = cursor.unpack(f"<{rank}QIQ", what)
    # Rows of a type of which only the number is known may have any length.
    kind = TYPES.get(kind_id) or GgmlType(kind_id, f"GGML type {kind_id}", 1, 0)
    # GGML lists the innermost dim first.
    shape = tuple(reversed(dims))
    if any(n >= 1 << 63 for n in shape) or shape[-1] % kind.block_elements:
        raise SourceError(
            f"{cursor.path}: tensor {name!r} has the shape {shape}, but {kind.name} rows are whole blocks "
            f"of {plural(kind.block_elements, 'element')}. Convert the model again"
        )
    return TensorInfo(cursor.path, name, shape, kind, offset)


def _in_file_order(infos: Iterable[TensorInfo], path: Location, size: int) -> tuple[TensorInfo, ...]:
    # An empty tensor comes before the one that starts at the same byte, so that the two do not overlap.
    ordered = sorted(infos, key=lambda info: (info.offset, 0 not in info.shape))
    for i, info in enumerate(ordered):
        elements = math.prod(info.shape)
        if not info.kind.is_known and elements:
            # It extends to the next tensor, or further if it must have more bytes.
            stop = ordered[i + 1].offset if i + 1 < len(ordered) else size
            ordered[i] = replace(info, span=max(stop - info.offset, -(-elements // _MAX_ELEMENTS_PER_BYTE)))
    if len({info.name for info in ordered}) < len(ordered):
        names = sorted(info.name for info in ordered)
        twice = next(a for a, b in itertools.pairwise(names) if a == b)
        raise SourceError(f"{path} contains the tensor {twice!r} twice. Convert the model again")
    end, before = 0, ""
    for info in ordered:
        if info.offset + info.nbytes > size:
            raise TruncatedSourceError(
                f"{path} is truncated: tensor {info.name!r} should end at byte {info.offset + info.nbytes}, "
                f"but the file has {exact_bytes(size)}. Download it again"
            )
        if info.offset < end:
            raise SourceError(f"{path}: tensors {before!r} and {info.name!r} overlap at byte {info.offset}")
        end, before = info.offset + info.nbytes, info.name
    return tuple(ordered)


class _Cursor:
    """A reading position in a GGUF file, which only moves forward. The bytes after it are buffered (the window)."""

    def __init__(self, file: File, path: Location) -> None:
        self._file = file
        self.size = file.n_bytes
        self.path = path
        self.position = self._start = 0
        self.inline_items = INLINE_ITEMS + self.size // _INLINE_SHARE
        self.nested = min(_MAX_NESTED, self.size // _NESTED_SHARE)
        self._window = b""

    def require(self, count: int, what: str) -> None:
        """Raise unless ``count`` more bytes follow the current position; ``what`` names them in the error."""
        if self.position + count > self.size:
            raise TruncatedSourceError(
                f"{self.path} is truncated: {what} should take {exact_bytes(count)} at offset {self.position}, "
                f"but the file has {exact_bytes(self.size)}. Download it again"
            )

    def unpack(self, code: str, what: str) -> tuple[Any, ...]:
        found = self.peek(code, what)
        self.position += struct.calcsize(code)
        return found

    def peek(self, code: str, what: str) -> tuple[Any, ...]:
        """Return the values that follow the position, in the `struct` format ``code``; the position does not move."""
        at = self._load(struct.calcsize(code), what)
        return struct.unpack_from(code, self._window, at)

    def string(self, what: str, *, limit: int | None = None) -> str:
        (count,) = self.unpack("<Q", what)
        if limit is not None and count > limit:
            raise SourceError(
                f"{self.path}: {what} has {exact_bytes(count)}; at most {limit} are allowed. Convert the model again"
            )
        at = self._load(count, what)
        self.position += count
        try:
            return self._window[at : at + count].decode("utf-8")
        except UnicodeDecodeError as error:
            raise SourceError(f"{self.path}: {what} at byte {self.position - count} is not UTF-8") from error

    def skip(self, count: int, what: str) -> None:
        self.require(count, what)
        self.position += count

    def skip_strings(self, count: int, what: str) -> None:
        """Move past ``count`` strings without decoding them, which is fast: a vocabulary has hundreds of thousands."""
        unpack = struct.Struct("<Q").unpack_from
        while count:
            at = self._load(8, what)
            # Walk from length to length inside the window; a string that ends outside of it moves the window.
            window, last = self._window, len(self._window) - 8
            while count and at <= last:
                at += 8 + unpack(window, at)[0]
                count -= 1
            self.position = self._start + at
            self.require(0, what)

    def _load(self, count: int, what: str) -> int:
        """Ensure that the window (buffer) contains the next ``count`` bytes; return where in it they begin."""
        self.require(count, what)
        at = self.position - self._start
        # Skipping may have moved the position past the window; the next window starts at the position.
        if at + count > len(self._window):
            wanted = min(max(count, _WINDOW_BYTES), self.size - self.position)
            self._window = read_bytes(self._file, wanted, offset=self.position, path=str(self.path), what=what)
            self._start, at = self.position, 0
        return at
