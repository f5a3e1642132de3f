"""Parts of HDF5 files that are read without libhdf5, because damaged ones can make it loop or crash.

An object's header is a list of messages. It has one of two versions::

    version 1    ─► prefix of 16 bytes ─► message, message, … ─► (continuation) ─► message, …
    version 2    ─► "OHDR" …           ─► message, message, … ─► "OCHK" message, …

Addresses and lengths have 8 bytes, as in every file that h5py writes. Nothing is read past the end of the file. The
work that a file can cause is limited by its size, even if its structures refer to the same bytes again and again.

If an attribute has strings of variable length, their text is in a heap::

    object header ─► message 0x0C, the attribute: one reference for each string
                        (length, collection, index) ─► collection "GCOL": objects of (index, size, bytes)

A group with many links stores them in a B-tree and a heap ("densely", since HDF5 1.8). Only the forms that libhdf5
writes for links are read: heaps without filters, and links that fit in a block::

    object header ─► link info ┬─► B-tree of version 2 "BTHD": (hash, heap id) of each link, by the hash of its name
                               └─► fractal heap "FRHP": blocks of doubling size ─► link: name, kind, address of object
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from shardload.errors import SourceError, UnsupportedError
from shardload.stores.location import Location
from shardload.units import exact_bytes, plural

_PREFIX = struct.Struct("<BxHII4x")
_MESSAGE = struct.Struct("<HHB3x")
_MESSAGE_2 = struct.Struct("<BHB")
_CONTINUATION = 0x10
_CHECKSUM_BYTES = 4
_MAX_BLOCK_BYTES = 16 << 20
"""Limit on the bytes of one structure, such as an object header; those that libhdf5 writes stay below 64 KiB."""
_FREE_STEPS = 1 << 20
"""Limit on the work of reading one file, in steps; a file that has more bytes may take one step per byte."""
_BYTES_PER_STEP = 8
"""Bytes of a read that count as one step of work, besides one step for the read itself; a file's steps are limited."""

_Read = Callable[[int, int], bytes]
"""Type of a function that reads bytes, given address and count; it raises a `SourceError` outside the file."""
_ATTRIBUTE = 0x0C
_REFERENCE = struct.Struct("<IQI")
_COLLECTION = struct.Struct("<4sB3xQ")
_OBJECT = struct.Struct("<HH4xQ")
_MAX_OBJECTS = 4096
"""Limit on the strings in one collection (a block of strings). libhdf5 begins a new collection after 64 KiB."""
_LINK_INFO = 2
_UNDEFINED = (1 << 64) - 1
_HEAP = struct.Struct("<4sBHHBI8x8x8x8x8x8x8x8x8x8x8x8xHQQHHQH")
_TREE = struct.Struct("<4sBBIHHBBQHQ")
_RECORD = struct.Struct("<4xB6s")
"""An entry in a group's B-tree of links: hash of the name (skipped), flags, and the link's place in the heap."""
_TREE_OVERHEAD = 10
"""Bytes of a B-tree node that are not records or pointers: signature, version, type and checksum."""
_LINKS_BY_NAME = 5
_MAX_DEPTH = 8
HARD: Final = 0
SOFT: Final = 1


class Structures:
    """Reads low-level structures of one HDF5 file, and limits the work that a damaged file can cause."""

    def __init__(self, read: _Read, *, n_bytes: int, path: Location) -> None:
        self._read, self._path = read, path
        self._steps = max(_FREE_STEPS, n_bytes)

    def messages(self, header: int) -> Iterator[tuple[int, bytes]]:
        """Yield type and content of each message (entry) in the object header at address ``header``."""
        prefix = self.read(header, _PREFIX.size)
        if prefix.startswith(b"OHDR"):
            yield from self._messages_2(header)
            return
        version, _, _, size = _PREFIX.unpack(prefix)
        if version != 1:
            raise self.unsupported(f"an object header of version {version}")
        blocks = [(header + _PREFIX.size, size)]
        for at, length in blocks:  # grows
            raw, place = self.read(at, length), 0
            while place + _MESSAGE.size <= length:
                kind, n_bytes, _ = _MESSAGE.unpack_from(raw, place)
                body = raw[place + _MESSAGE.size : place + _MESSAGE.size + n_bytes]
                place += _MESSAGE.size + n_bytes
                if kind == _CONTINUATION and len(body) >= 16:
                    blocks.append(struct.unpack_from("<QQ", body))
                yield kind, body

    def _messages_2(self, header: int) -> Iterator[tuple[int, bytes]]:
        version, flags = self.read(header + 4, 2)
        if version != 2:
            raise self.unsupported(f"an object header of version {version}")
        at = header + 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        width = 1 << (flags & 3)
        length = int.from_bytes(self.read(at, width), "little")
        blocks = [(at + width, length)]
        extra = 2 if flags & 4 else 0
        for start, n_bytes in blocks:  # grows
            raw, place = self.read(start, n_bytes), 0
            while place + _MESSAGE_2.size + extra <= n_bytes:
                kind, size, _ = _MESSAGE_2.unpack_from(raw, place)
                place += _MESSAGE_2.size + extra
                body = raw[place : place + size]
                place += size
                if kind == _CONTINUATION and len(body) >= 16:
                    where, count = struct.unpack_from("<QQ", body)
                    # Between the signature "OCHK" and the checksum.
                    blocks.append((where + 4, max(0, count - 4 - _CHECKSUM_BYTES)))
                yield kind, body

    def read(self, address: int, n_bytes: int) -> bytes:
        """Return ``n_bytes`` at an address, and count them as work; raise if they are too many for one structure."""
        if n_bytes > _MAX_BLOCK_BYTES:
            raise self.unsupported(f"a structure of {exact_bytes(n_bytes)} in one piece")
        self.spend(1 + n_bytes // _BYTES_PER_STEP)
        return self._read(address, n_bytes)

    def spend(self, steps: int) -> None:
        """Add ``steps`` to the work done for the file; raise if the sum is more than the file's size allows."""
        self._steps -= steps
        if self._steps < 0:
            raise self.unsupported("structures that refer to the same bytes again and again")

    def damaged(self, found: str) -> SourceError:
        """Return the error for a structure that contradicts itself; ``found`` says what is wrong."""
        return SourceError(f"{self._path} is damaged HDF5: {found}. Download or save it again")

    def unsupported(self, found: str) -> UnsupportedError:
        """Return the error for a structure that h5py does not write; ``found`` says what it is."""
        return UnsupportedError(
            f"Cannot read {self._path}: it has {found}, expected what h5py writes. If you trust the file, load and "
            "save it with keras: model.load_weights(old); model.save_weights('new.weights.h5')"
        )


class Strings:
    """Reads strings of variable length in one file's attributes, such as Keras 2's lists of names."""

    def __init__(self, file: Structures) -> None:
        self._file = file
        self._collection: tuple[int, dict[int, int], bytes] = (-1, {}, b"")

    def of_attribute(self, header: int, name: str, *, count: int) -> Iterator[bytes]:
        """Yield the ``count`` strings in the attribute ``name`` of the object whose header is at address ``header``."""
        body = self._find(header, name.encode())
        if len(body) < count * _REFERENCE.size:
            raise self._file.damaged(f"the attribute {name!r} is too short for {plural(count, 'string')}")
        for length, address, index in _REFERENCE.iter_unpack(body[: count * _REFERENCE.size]):
            yield self._string(address, index, length) if length else b""

    def _find(self, header: int, name: bytes) -> bytes:
        for kind, body in self._file.messages(header):
            if kind == _ATTRIBUTE and (found := self._body(body, name)) is not None:
                return found
        raise self._file.damaged(f"an object's header lacks the attribute {name.decode()!r}")

    def _body(self, body: bytes, name: bytes) -> bytes | None:
        """Return the value in ``body``, a header's message on an attribute; ``None`` if its name is not ``name``."""
        if len(body) < 9 or body[0] not in (1, 2, 3):
            raise self._file.unsupported("an attribute of an unknown version")
        unit = 8 if body[0] == 1 else 1
        place, parts = 9 if body[0] == 3 else 8, []
        for size in struct.unpack_from("<HHH", body, 2):
            parts.append(body[place : place + size])
            place += -(-size // unit) * unit
        if parts[0].rstrip(b"\0") != name:
            return None
        # Class 9, variable length, and of its two kinds the one for strings; not shared with other objects.
        if len(parts[1]) < 2 or parts[1][0] & 15 != 9 or parts[1][1] & 15 != 1 or (body[0] > 1 and body[1] & 3):
            raise self._file.unsupported("an attribute of another type")
        return body[place:]

    def _string(self, address: int, index: int, length: int) -> bytes:
        if self._collection[0] != address:
            self._collection = (address, *self._objects(address))
        _, places, raw = self._collection
        if (place := places.get(index)) is None or _OBJECT.unpack_from(raw, place)[2] < length:
            raise self._file.damaged(f"a name refers to nothing in the collection of strings at byte {address}")
        return raw[place + _OBJECT.size : place + _OBJECT.size + length]

    def _objects(self, address: int) -> tuple[dict[int, int], bytes]:
        magic, version, size = _COLLECTION.unpack(self._file.read(address, _COLLECTION.size))
        if magic != b"GCOL" or version != 1:
            raise self._file.damaged(f"there is no collection of strings at byte {address}")
        raw, place = self._file.read(address, size), _COLLECTION.size
        found: dict[int, int] = {}
        while place + _OBJECT.size <= size:
            index, _, n_bytes = _OBJECT.unpack_from(raw, place)
            # Index 0 is the free space at the end.
            if index == 0 or place + _OBJECT.size + n_bytes > size:
                break
            found[index] = place
            place += _OBJECT.size + -(-n_bytes // 8) * 8
            if len(found) > _MAX_OBJECTS:
                raise self._file.unsupported(f"more than {_MAX_OBJECTS} strings in one collection")
        self._file.spend(len(found) * _OBJECT.size)
        return found, raw


@dataclass(frozen=True, slots=True)
class Link:
    """A link in an HDF5 group: a name, and the object that it leads to."""

    name: bytes
    kind: int
    """`HARD`, `SOFT`, or another number for other links, such as one to another file."""
    address: int
    """Address of the object's header, if the link is hard."""


def dense_links(file: Structures, header: int) -> Iterator[Link]:
    """Yield the links of a group that stores many of them, in a heap and a B-tree; ``header``: its header's address."""
    heap_at, tree_at = _places(file, header)
    heap = _Heap.at(file, heap_at)
    for record in _records(file, tree_at):
        flags, place = _RECORD.unpack(record)
        if flags >> 4:  # not of version 0, or not in a block: libhdf5 writes longer names to a place of their own
            raise file.unsupported("a link with a very long name")
        yield _link(file, heap.object(file, place))


def has_dense_links(file: Structures, header: int) -> bool:
    """Whether an object is a group with links in a heap and a B-tree; ``header`` is the address of its header."""
    return _places(file, header)[0] != _UNDEFINED


def _places(file: Structures, header: int) -> tuple[int, int]:
    """Return the addresses of the heap and the B-tree with a group's links; `_UNDEFINED` if the group has neither."""
    info = next((body for kind, body in file.messages(header) if kind == _LINK_INFO), None)
    if info is None:
        return _UNDEFINED, _UNDEFINED
    start = 10 if info[1:2] and info[1] & 1 else 2
    if len(info) < start + 16:
        raise file.damaged("the message on a group's links is too short")
    heap, tree = struct.unpack_from("<QQ", info, start)
    return heap, tree


def _records(file: Structures, tree: int) -> Iterator[bytes]:
    """Yield the entries of the B-tree at address ``tree``, in its order; each says where in a heap a link is."""
    magic, version, kind, node_bytes, size, depth, _, _, root, count, _ = _TREE.unpack(file.read(tree, _TREE.size))
    if (magic, version, kind, size) != (b"BTHD", 0, _LINKS_BY_NAME, _RECORD.size) or depth > _MAX_DEPTH:
        raise file.damaged(f"there is no tree of links at byte {tree}")
    if node_bytes <= _TREE_OVERHEAD + size:
        raise file.damaged(f"the tree of links at byte {tree} has nodes that are too small for a link")
    if count:
        yield from _node(file, root, count, _Shape.of(node_bytes, depth), depth)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes needed to parse a B-tree of links: of its nodes, and of the fields in them that count records (entries)."""

    node_bytes: int
    count_bytes: int
    """Size in bytes of one field of a node, which counts the records in a child, but not in nodes below the child."""
    total_bytes: tuple[int, ...]
    """Size in bytes of another field of a node, which counts the records in a child and in all nodes below the child.
    Entry i is for children of height i. Leaves have height 0 and no nodes below, so entry 0 is 0: no such field."""

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
    """An HDF5 heap with a group's links: a table of blocks, which from row 3 on double in size with every row."""

    offset_bytes: int
    length_bytes: int
    columns: int
    first: int
    """Size of the smallest blocks in bytes."""
    direct_rows: int
    """Number of rows whose blocks contain objects. Blocks in later rows are themselves tables of smaller blocks."""
    root: int
    root_rows: int
    """Number of rows in the root's table; 0 if the root is not a table, but a block with objects."""

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
        """Return the bytes of a link in the heap; ``place``, from an entry of the B-tree, is its offset and length."""
        offset = _int(place[: self.offset_bytes])
        length = _int(place[self.offset_bytes : self.offset_bytes + self.length_bytes])
        block, rows, at = self.root, self.root_rows, offset
        while rows:
            # Row, column, first byte and size of the block with the byte.
            row = (at // (self.first * self.columns)).bit_length()
            size = self.first << max(0, row - 1)
            row_start = self.columns * size if row else 0
            column = (at - row_start) // size
            if row >= rows:
                raise file.damaged(f"a link at byte {offset} of its group's heap is past the end of that heap")
            number = row * self.columns + column
            entry = block + 5 + 8 + self.offset_bytes + 8 * number
            block, at = _int(file.read(entry, 8)), at - row_start - column * size
            rows = 0 if row < self.direct_rows else (size // (self.first * self.columns)).bit_length()
        if block == _UNDEFINED:
            raise file.damaged(f"a link at byte {offset} of its heap is in a block that does not exist")
        return file.read(block + at, length)


def _link(file: Structures, raw: bytes) -> Link:
    """Parse a link as it is stored in a group's heap; raise if it is damaged."""
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
        raise file.damaged("a group's heap contains something other than a link")
    return Link(name, kind, address)


def _width(number: int) -> int:
    """Return how many bytes libhdf5 uses for a field whose largest value is ``number``."""
    return (max(number, 1).bit_length() - 1) // 8 + 1


def _int(raw: bytes) -> int:
    return int.from_bytes(raw, "little")
