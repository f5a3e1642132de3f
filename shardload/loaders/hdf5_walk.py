"""Find the datasets of an HDF5 file: by hard links only, every one of them, and no link into another file.

Keras reads a dataset under each of its names, so one with two links is found twice. Groups may be linked twice, too,
but not in a circle; what that can cost is limited by the size of the file. Objects are opened by address, so that
libhdf5 never looks up a name in a group of a kind that makes it crash where it is damaged.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import h5py
import numpy as np

from shardload.errors import SourceError, UnsafeSourceError
from shardload.loaders.hdf5_links import HARD, SOFT, Link, dense_links, has_dense_links
from shardload.loaders.hdf5_structures import Structures
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
_KINDS = {h5py.h5l.TYPE_HARD: HARD, h5py.h5l.TYPE_SOFT: SOFT}
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
