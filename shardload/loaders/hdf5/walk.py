"""Find the datasets of an HDF5 file: by hard links only, every one of them, and no link into another file.

Keras reads a dataset under each of its names, so one with two links is found twice. Groups may be linked twice, too,
but not in a circle; what that can cost is limited by the size of the file. Objects are opened by address, so that
libhdf5 never looks up a name in a group of a kind that makes it crash where it is damaged.

Groups with many links store them densely in the HDF5 1.8 format, and libhdf5 1.14 can crash on damaged ones, so
`dense_links` reads them without libhdf5::

    object header ─► link info ┬─► B-tree of version 2 "BTHD": (hash, heap id) of each link, by the hash of its name
                               └─► fractal heap "FRHP": blocks of doubling size ─► link: name, kind, address of object

Only what libhdf5 writes for links is read: heaps without filters, and links that fit in a block.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import h5py
import numpy as np

from shardload.errors import SourceError, UnsafeSourceError
from shardload.loaders.hdf5.structures import Structures
from shardload.stores.file_reading import MemoryStream
from shardload.stores.location import Location
from shardload.units import exact_bytes

FREE_HEADER_BYTES = 1 << 20
"""Longest object header that is always allowed; longer ones up to half of the file. libhdf5 allocates and reads the
length that a header declares: a damaged length makes it parse tensor data as header messages."""
MAX_DEPTH = 256
"""Nesting depth of groups; Keras writes two per level of nested layers."""
BYTES_PER_COPY = 512
"""Taken by one more name of an object, besides the name."""
FREE_COPY_BYTES = 1 << 20
"""What names of objects that have others may always take; larger files may have as much as their size."""
SHOWN = 20
"""Objects of a kind that are named when they are left out."""


class HeaderLimit:
    """Limits the length of the headers that libhdf5 reads."""

    def __init__(self, path: Location, *, n_bytes: int) -> None:
        self._path, self._n_bytes = path, n_bytes
        self._limit: int | None = None

    def __call__(self, at: int, n_bytes: int) -> None:
        """Refuse a read that is too long for a header.

        Raises:
            UnsafeSourceError: When it is.
        """
        if self._limit is not None and n_bytes > self._limit:
            raise UnsafeSourceError(
                f"{self._path}: the header of the object at byte {at} or before it should take "
                f"{exact_bytes(n_bytes)}, more than half of the {self._n_bytes} there are. The file is damaged, so "
                "download or save it again; if it is not, store fewer attributes on that object"
            )

    @contextmanager
    def headers(self) -> Iterator[None]:
        """Limit reads in the block. Do not use around iteration: libhdf5 must not fail there."""
        self._limit = max(FREE_HEADER_BYTES, self._n_bytes // 2)
        try:
            yield
        finally:
            self._limit = None


class LinkWalk:
    """A walk over all hard links of a file, depth first.

    Args:
        file: The open `h5py.File`.
        structures: The same file's.
        limit: Limits headers.
        path: The file's name, for messages.
        n_bytes: Its size.
    """

    def __init__(self, file: Any, structures: Structures, limit: HeaderLimit, path: Location, *, n_bytes: int) -> None:
        self._root, self._structures, self._limit, self._path = file.id, structures, limit, path
        self._copy_bytes = max(FREE_COPY_BYTES, n_bytes)
        self.groups: dict[str, int] = {}
        """Path → address of every group that was visited."""
        self.left_out: list[str] = []
        """What is neither a group nor a dataset."""

    def open(self, group: str) -> Any:
        """Open a group that was visited, or the root, ``""``."""
        return open_at(self._root, self.groups[group]) if group else h5py.h5o.open(self._root, b"/")

    def has_in_root(self, name: str) -> bool:
        """Whether the root has a hard link of this name, without visiting what it links to."""
        root = _address(self._root)
        # Of dense links, libhdf5 must not look up any.
        if has_dense_links(self._structures, root):
            return any(link.name == name.encode() for link in dense_links(self._structures, root))
        return bool(self._root.links.exists(name.encode()))

    def datasets(self) -> Iterator[tuple[str, int, Any]]:
        """Yield name, address and node of every dataset, once for each of its names.

        Raises:
            UnsafeSourceError: When links form a circle, lead to other files, or are too deep or too many.
        """
        root = _address(self._root)
        seen = {root}
        # An explicit stack: recursion as deep as a hostile file nests would exhaust Python's. Only a group and its
        # ancestors stay open, as each takes libhdf5 2 KB.
        stack = [("", root, *self._links(self._root, root))]
        while stack:
            parent, _, group, links = stack[-1]
            if (link := next(links, None)) is None:
                stack.pop()
                continue
            name = decoded(link.name, self._path)
            if parent:
                name = f"{parent}/{name}"
            if link.kind != HARD:
                self._leave_out(name, link)
                continue
            self._check(name, link, [address for _, address, _, _ in stack], seen)
            seen.add(link.address)
            with self._limit.headers():
                node = open_at(self._root, link.address) if group is None else h5py.h5o.open(group, link.name)
            if isinstance(node, h5py.h5g.GroupID):
                self.groups[name] = link.address
                stack.append((name, link.address, *self._links(node, link.address)))
            elif isinstance(node, h5py.h5d.DatasetID):
                yield name, link.address, node
            elif len(self.left_out) < SHOWN:
                self.left_out.append(f"{name!r}: it is neither a group nor a dataset")

    def _check(self, name: str, link: Link, ancestors: Container[int], seen: Container[int]) -> None:
        if link.address in ancestors:
            raise UnsafeSourceError(f"{self._path}: {name!r} links to a group that contains it: a cycle of links")
        if name.count("/") > MAX_DEPTH:
            raise UnsafeSourceError(
                f"{self._path} nests groups more than {MAX_DEPTH} deep, deeper than the layers of any model"
            )
        if link.address in seen:
            self._copy_bytes -= BYTES_PER_COPY + len(name)
        if self._copy_bytes < 0:
            raise UnsafeSourceError(
                f"{self._path}: {name[:200]!r} is one of too many second links to the same objects. If you trust the "
                "file, load and save it with Keras"
            )

    def _leave_out(self, name: str, link: Link) -> None:
        if link.kind != SOFT:
            raise UnsafeSourceError(f"{self._path}: {name!r} is an external link; weights may not be linked in")
        if len(self.left_out) < SHOWN:
            self.left_out.append(f"{name!r}: it is a soft link, which Keras does not follow")

    def _links(self, group: Any, address: int) -> tuple[Any, Iterator[Link]]:
        """Return a group's links; before them, the group if libhdf5 may look them up by name, which is faster."""
        if has_dense_links(self._structures, address):
            return None, dense_links(self._structures, address)
        return group, self._plain_links(group)

    def _plain_links(self, group: Any) -> Iterator[Link]:
        for member in iter(group):
            found = group.links.get_info(member)
            kind = _KINDS.get(found.type, -1)
            yield Link(member, kind, int(found.u) if kind == HARD else 0)


def _address(node: Any) -> int:
    """Return the address of an object's header; `h5py.h5o.get_info` would visit all that a group refers to."""
    dataset, buffer, offset = _reference()
    reference = np.empty(1, h5py.ref_dtype)
    reference[0] = h5py.h5r.create(node, b".", h5py.h5r.OBJECT)
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, reference)
    buffer.seek(offset)
    return int.from_bytes(buffer.read(8), "little")


def decoded(raw: bytes, path: Location) -> str:
    """Return a text of the file.

    Raises:
        SourceError: When it is not UTF-8.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: the object name {raw[:100]!r} is not UTF-8") from error


def open_at(file: Any, address: int) -> Any:
    """Open the object whose header is at an address.

    Raises:
        KeyError: When there is none.
    """
    # HDF5 has a call for it, which h5py lacks; references are addresses, and h5py opens those.
    dataset, buffer, offset = _reference()
    buffer.seek(offset)
    buffer.write(address.to_bytes(8, "little"))
    found = np.empty(1, h5py.ref_dtype)
    dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, found)
    if (node := h5py.h5r.dereference(found[0], file)) is None:
        raise KeyError(f"no object at address {address}")
    return node


@cache
def _reference() -> tuple[Any, MemoryStream, int]:
    """Return a dataset of one reference, in a file in memory, the file, and where the reference is in it."""
    buffer = MemoryStream()
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    file = h5py.File(buffer, "w")
    dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.STD_REF_OBJ, h5py.h5s.create_simple((1,)), plist)
    file.flush()
    return dataset, buffer, dataset.get_offset()


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
_KINDS = {h5py.h5l.TYPE_HARD: HARD, h5py.h5l.TYPE_SOFT: SOFT}


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
