"""Links of groups in the HDF5 1.8 format that have many, which are stored densely; read without libhdf5.

    object header ─► link info ┬─► B-tree of version 2 "BTHD": (hash, heap id) of each link, by the hash of its name
                               └─► fractal heap "FRHP": blocks of doubling size ─► link: name, kind, address of object

libhdf5 1.14 can crash on damaged ones. Only what libhdf5 writes for links is read: heaps without filters, and links
that fit in a block.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shardload.loaders.hdf5_structures import Structures

_LINK_INFO = 2
_UNDEFINED = (1 << 64) - 1
_HEAP = struct.Struct("<4sBHHBI8x8x8x8x8x8x8x8x8x8x8x8xHQQHHQH")
_TREE = struct.Struct("<4sBBIHHBBQHQ")
_RECORD = struct.Struct("<4xB6s")
"""A hash of the name, and a heap id: a byte of flags, then offset and length."""
_TREE_OVERHEAD = 10
"""Bytes of a node besides records and pointers: signature, version, type, checksum."""
_LINKS_BY_NAME = 5
_MAX_DEPTH = 8
HARD: Final = 0
SOFT: Final = 1


@dataclass(frozen=True, slots=True)
class Link:
    """A link of a group."""

    name: bytes
    kind: int
    """`HARD`, `SOFT` or something else, such as a link to another file."""
    address: int
    """Of the object's header, if the link is hard."""


def dense_links(file: Structures, header: int) -> Iterator[Link]:
    """Yield the links of a group that stores them densely.

    Args:
        file: The file's structures.
        header: Address of the group's object header.

    Raises:
        SourceError: When a structure contradicts itself.
        UnsupportedError: When it is none that libhdf5 writes for links.
    """
    heap_at, tree_at = _places(file, header)
    heap = _Heap.at(file, heap_at)
    for record in _records(file, tree_at):
        flags, place = _RECORD.unpack(record)
        if flags >> 4:  # not of version 0, or not in a block: libhdf5 writes longer names to a place of their own
            raise file.unsupported("a link with a very long name")
        yield _link(file, heap.object(file, place))


def has_dense_links(file: Structures, header: int) -> bool:
    """Whether the object with this header is a group that stores its links densely; see `dense_links`."""
    return _places(file, header)[0] != _UNDEFINED


def _places(file: Structures, header: int) -> tuple[int, int]:
    """Return the addresses of a group's heap and tree."""
    info = next((body for kind, body in file.messages(header) if kind == _LINK_INFO), None)
    if info is None:
        return _UNDEFINED, _UNDEFINED
    start = 10 if info[1:2] and info[1] & 1 else 2
    if len(info) < start + 16:
        raise file.damaged("the message on a group's links is too short")
    heap, tree = struct.unpack_from("<QQ", info, start)
    return heap, tree


def _records(file: Structures, tree: int) -> Iterator[bytes]:
    """Yield the records of a B-tree, in order."""
    magic, version, kind, node_bytes, size, depth, _, _, root, count, _ = _TREE.unpack(file.read(tree, _TREE.size))
    if (magic, version, kind, size) != (b"BTHD", 0, _LINKS_BY_NAME, _RECORD.size) or depth > _MAX_DEPTH:
        raise file.damaged(f"there is no tree of links at byte {tree}")
    if node_bytes <= _TREE_OVERHEAD + size:
        raise file.damaged(f"the tree of links at byte {tree} has no room for any")
    if count:
        yield from _node(file, root, count, _Shape.of(node_bytes, depth), depth)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Widths of the numbers in a B-tree's nodes, which follow from how many records they can have."""

    node_bytes: int
    count_bytes: int
    """Of a child's number of records."""
    total_bytes: tuple[int, ...]
    """Of the number of records below a child, by the depth of the child."""

    @classmethod
    def of(cls, node_bytes: int, depth: int) -> _Shape:
        most = total = (node_bytes - _TREE_OVERHEAD) // _RECORD.size
        count_bytes, widths = _width(most), [0]
        for _ in range(depth):
            pointer = 8 + count_bytes + widths[-1]
            most = max(0, node_bytes - _TREE_OVERHEAD - pointer) // (_RECORD.size + pointer)
            total = (most + 1) * total + most
            widths.append(_width(total))
        return cls(node_bytes, count_bytes, tuple(widths))


def _node(file: Structures, at: int, count: int, shape: _Shape, depth: int) -> Iterator[bytes]:
    raw = file.read(at, shape.node_bytes)
    pointer = 8 + shape.count_bytes + shape.total_bytes[depth - 1] if depth else 0
    start, pointers = 6, 6 + count * _RECORD.size
    if raw[:4] != (b"BTIN" if depth else b"BTLF") or pointers + (count + 1) * pointer > len(raw):
        raise file.damaged(f"there is no node of a tree of links at byte {at}")
    for number in range(count + 1 if depth else count):
        if depth:
            place = pointers + number * pointer
            child, records = raw[place : place + 8], raw[place + 8 : place + 8 + shape.count_bytes]
            yield from _node(file, _int(child), _int(records), shape, depth - 1)
        if number < count:
            yield raw[start + number * _RECORD.size : start + (number + 1) * _RECORD.size]


@dataclass(frozen=True, slots=True)
class _Heap:
    """A fractal heap: rows of blocks, of which each row from the third has blocks twice as large."""

    offset_bytes: int
    length_bytes: int
    columns: int
    first: int
    """Size of the smallest blocks."""
    direct_rows: int
    """Rows of blocks with objects; later ones have blocks of blocks."""
    root: int
    root_rows: int
    """Rows of the root; 0 if the root is a block with objects."""

    @classmethod
    def at(cls, file: Structures, address: int) -> _Heap:
        magic, version, _, filters, _, most, columns, first, largest, bits, _, root, rows = _HEAP.unpack(
            file.read(address, _HEAP.size)
        )
        powers = all(n > 0 and n & (n - 1) == 0 for n in (columns, first, largest))
        if (magic, version) != (b"FRHP", 0) or not powers or not first <= largest < 1 << 32 or not 0 < bits <= 48:
            raise file.damaged(f"there is no heap of links at byte {address}")
        if filters:
            raise file.unsupported("compressed links")
        length_bytes = min((largest.bit_length() + 6) // 8, _width(most))
        direct_rows = largest.bit_length() - first.bit_length() + 2
        return cls((bits + 7) // 8, length_bytes, columns, first, direct_rows, root, rows)

    def object(self, file: Structures, place: bytes) -> bytes:
        """Return an object's bytes, by the rest of its id after the flags."""
        offset = _int(place[: self.offset_bytes])
        length = _int(place[self.offset_bytes : self.offset_bytes + self.length_bytes])
        block, rows, at = self.root, self.root_rows, offset
        while rows:
            row, column, start, size = self._cell(at)
            if row >= rows:
                raise file.damaged(f"a link at byte {offset} of its heap is outside of it")
            number = row * self.columns + column
            entry = block + 5 + 8 + self.offset_bytes + 8 * number
            block, at = _int(file.read(entry, 8)), at - start
            rows = 0 if row < self.direct_rows else (size // (self.first * self.columns)).bit_length()
        if block == _UNDEFINED:
            raise file.damaged(f"a link at byte {offset} of its heap is in a block that does not exist")
        return file.read(block + at, length)

    def _cell(self, offset: int) -> tuple[int, int, int, int]:
        """Return row, column, first byte and size of the block with a byte."""
        row = (offset // (self.first * self.columns)).bit_length()
        size = self.first << max(0, row - 1)
        row_start = self.columns * size if row else 0
        column = (offset - row_start) // size
        return row, column, row_start + column * size, size


def _link(file: Structures, raw: bytes) -> Link:
    """Return the link that a link message describes."""
    name = b""
    try:
        version, flags, at, kind = raw[0], raw[1], 2, HARD
        if flags & 8:
            kind, at = raw[at], at + 1
        at += (8 if flags & 4 else 0) + (1 if flags & 16 else 0)
        width = 1 << (flags & 3)
        stop = at + width + _int(raw[at : at + width])
        name = raw[at + width : stop]
        address = struct.unpack_from("<Q", raw, stop)[0] if kind == HARD else _UNDEFINED
    except (IndexError, struct.error):
        version = -1
    if version != 1 or not name or b"\0" in name or b"/" in name:
        raise file.damaged("a link in a group's heap is none")
    return Link(name, kind, address)


def _width(number: int) -> int:
    """Return the bytes that libhdf5 uses for numbers up to this one."""
    return (max(number, 1).bit_length() - 1) // 8 + 1


def _int(raw: bytes) -> int:
    return int.from_bytes(raw, "little")
