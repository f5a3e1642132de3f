"""HDF5 datasets as tensors.

Keras writes each dataset contiguous and little-endian, so its bytes can be read raw: an `Extent`. Datasets of other
layouts (chunks, compression, big-endian, compact storage) are read through h5py, row by row.

    file       ├─ … ─┤ superblock, groups, headers ├─ dataset ─┤─ dataset ─┤
               0     start                         start + get_offset()

``start`` is not 0 if the HDF5 file is inside another file, such as a ``.keras`` archive. Datasets whose data is in
other files (external links, external storage, virtual datasets) are refused, as Keras refuses them. Datasets without
numbers are left out, and so are soft links, which Keras does not follow.

libhdf5 crashes when it looks up a name in some damaged groups, so objects are opened by address, and
`shardload.loaders.hdf5.structures` reads such groups.
"""

from __future__ import annotations

import io
import itertools
import math
import threading
from collections.abc import Container, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import h5py
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from shardload.errors import (
    LimitError,
    ShardloadError,
    SourceError,
    TransferError,
    TruncatedSourceError,
    UnsafeSourceError,
    UnsupportedError,
    public_name,
)
from shardload.loaders.extents import check_shape
from shardload.loaders.hdf5.structures import HARD, SOFT, Link, Strings, Structures, dense_links, has_dense_links
from shardload.manifest import Decoded, Extent, Storage, Tensor
from shardload.stores.event_loop import collector_off
from shardload.stores.location import Location
from shardload.stores.store import FileStream
from shardload.units import exact_bytes

_MAX_EXPANSION = 1100
"""Limit on decoded bytes per stored byte of a dataset. gzip reaches 1029 for zeros; trained weights stay below 10."""
_MAX_CHUNK_EXPANSION = 100
"""Limit on a chunk's decoded size, as a multiple of its dataset's stored size: only whole chunks can be decoded."""
_EXPANSION_FLOOR_BYTES = 64 << 20
"""Tensors up to this decoded size are exempt from limits on expansion: a dataset of zeros may store no bytes at all."""
_CACHE_BYTES = 1 << 20
"""Size of libhdf5's cache of object headers, by default 32 MiB. Each header is read only once, so less is enough."""
_OWN_GROUP = "vars"
_LEGACY_ATTRIBUTES = ("layer_names", "layer_names0", "model_config")
_MAX_COPIES = 16
"""Limit on the total size of tensors that repeat a dataset under a second name (a hard link), as a multiple of the
file's size."""
_FREE_HEADER_BYTES = 1 << 20
"""An object header may have this many bytes, or half of the file's size if that is more. libhdf5 reads as many bytes
as a header declares: with a damaged length, it would parse tensor data as header messages."""
_MAX_DEPTH = 256
"""Limit on the nesting depth of groups. Keras nests two groups for each level of nested layers."""
_BYTES_PER_COPY = 512
"""Estimate of the memory in bytes for a second name (a hard link) of a group or dataset, besides the name's text."""
_FREE_COPY_BYTES = 1 << 20
"""Limit on the memory for all second names (hard links) in a file: this, or the file's size if that is larger."""
_SHOWN = 20
"""Most notes that a report gets on links that are not followed, and most on datasets without numbers."""
_KINDS = {h5py.h5l.TYPE_HARD: HARD, h5py.h5l.TYPE_SOFT: SOFT}
_LOCK = threading.RLock()
"""Held while an HDF5 file is open: libhdf5 is not re-entrant, and h5py's own lock covers single calls only."""


@dataclass(frozen=True, slots=True)
class FileRegion:
    """The byte range of a file that is an HDF5 file: all of it, or a member of a ``.keras`` archive."""

    path: Location
    start: int
    """Byte offset in ``path`` at which the HDF5 file begins."""
    nbytes: int

    @classmethod
    def whole(cls, path: Location) -> FileRegion:
        """Return a region that is the whole file, for a file that is itself HDF5."""
        return cls(path, 0, path.size)


@dataclass(frozen=True, slots=True)
class H5Rows:
    """Reads rows of a dataset through h5py: it is chunked, compressed or big-endian. Each range reopens the file."""

    region: FileRegion
    name: str
    address: int
    """Address of the dataset's header. Opening by name instead would read groups, which may be damaged."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    stored_bytes: int
    row_alignment: int

    @property
    def paths(self) -> tuple[Location, ...]:
        """The file that contains the dataset."""
        return (self.region.path,)

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)``, decoded, as a `shardload.manifest.RowReader` does."""
        try:
            with _LOCK, _opened(self.region) as (file, _, _):
                dataset = h5py.Dataset(open_at(file.id, self.address))
                if dataset.shape != self.shape:
                    raise TransferError(f"{self._where()} had the shape {self.shape}, and now has {dataset.shape}")
                found = dataset[start:stop] if self.shape else dataset[()]
        except (TransferError, LimitError):
            raise
        except Exception as error:
            raise LimitError.explaining(error, f"read {self._where()}") or TransferError(
                f"{self._where()}: rows {start} to {stop} do not decode: {error}"
            ) from error
        # `ascontiguousarray` gives a scalar the shape (1,); the reshape takes that back.
        rows = np.ascontiguousarray(found).reshape(np.shape(found))
        # HDF5 has no bfloat16: h5py yields two opaque bytes.
        return rows.view(self.dtype) if rows.dtype.kind == "V" else rows.astype(self.dtype, copy=False)

    def _where(self) -> str:
        return f"{self.region.path}: dataset {self.name!r}"


@dataclass(frozen=True, slots=True)
class Content:
    """What `read_tensors` found in an HDF5 file."""

    tensors: tuple[Tensor, ...]
    """Every dataset with numbers, in no particular order; names are paths without leading slash."""
    notes: tuple[str, ...]
    """Descriptions of what is not in ``tensors``, for reports: soft links, and datasets without numbers."""
    is_whole: bool
    """Whether the root has the group ``vars``: all files of Keras 3 do, except a checkpoint's parts after the first."""


def read_tensors(region: FileRegion) -> Content:
    """Read the headers of an HDF5 file: its datasets with numbers, and what else it has. Raise for Keras 2's files."""
    with reading(region) as reader:
        if reader.is_legacy():
            raise UnsupportedError(
                f"Cannot read {region.path} as a part of another checkpoint: it is a file of Keras 2, whose weights "
                "have no stable names. Load it by itself with shardload.load_weights, and save it again"
            )
        return Content(tuple(reader.tensors()), reader.notes(), _OWN_GROUP in reader.groups)


@contextmanager
def reading(region: FileRegion) -> Iterator[Reader]:
    """Open an HDF5 file and yield its `Reader`; errors of libhdf5 in the with block become a `SourceError`."""
    try:
        with _LOCK, _opened(region, limit=True) as (file, stream, limit):
            yield Reader(file, stream, limit, region)
    except ShardloadError:
        raise
    # libhdf5's errors, a dozen builtins that all mean a damaged file.
    except Exception as error:
        if limited := LimitError.explaining(error, f"open {region.path}"):
            raise limited from error
        # libhdf5 has no error type for it, only the words "truncated file".
        kind = TruncatedSourceError if "truncated" in str(error) else SourceError
        reason = str(error) or public_name(error)
        raise kind(f"{region.path} is damaged HDF5: {reason}. Download or save it again") from error


class Reader:
    """An open HDF5 file: reads headers of its datasets, and Keras 2's lists of names. Get one from `reading`."""

    def __init__(self, file: Any, stream: FileStream, limit: HeaderLimit, region: FileRegion) -> None:
        self._file, self._stream, self._limit, self._region = file, stream, limit, region
        self._base = file.userblock_size
        structures = Structures(self._read, n_bytes=region.nbytes, path=region.path)
        self._walk = LinkWalk(file, structures, limit, region.path, n_bytes=region.nbytes)
        self._strings = Strings(structures)
        self._left_out: list[str] = []

    @property
    def groups(self) -> Container[str]:
        """Paths of all HDF5 groups in the file. Complete only after `tensors` has yielded its last tensor."""
        return self._walk.groups

    def is_legacy(self) -> bool:
        """Whether the file has the format of Keras 2, which Keras 3 can write, too."""
        return any(map(self._file.attrs.__contains__, _LEGACY_ATTRIBUTES)) or self._walk.has_in_root("model_weights")

    def tensors(self) -> Iterator[Tensor]:
        """Yield every dataset with numbers as a tensor; one with two paths becomes two, which share a ``storage``."""
        found: dict[int, Tensor | None] = {}
        copies = 0
        for name, address, node in self._walk.datasets():
            if address not in found:
                found[address] = self._tensor(node, name, address)
            elif (first := found[address]) is not None:
                copies += first.nbytes
                if copies > max(_EXPANSION_FLOOR_BYTES, _MAX_COPIES * self._region.nbytes):
                    raise UnsafeSourceError(
                        f"{self._region.path}: {name!r} is a second link to {first.name!r}, which would load that "
                        "dataset again. All datasets that are loaded again may together take at most "
                        f"{_MAX_COPIES} times the file's size, or {exact_bytes(_EXPANSION_FLOOR_BYTES)} if that is "
                        "more. If you trust the file, load and save it with Keras"
                    )
                found[address] = replace(first, name=name)
            if (tensor := found[address]) is not None:
                yield tensor

    def notes(self) -> tuple[str, ...]:
        """Return a note, for reports, on each object that `tensors` left out; call this once it has ended."""
        return tuple(f"left out {text}" for text in [*self._walk.left_out, *self._left_out])

    def _tensor(self, node: Any, name: str, address: int) -> Tensor | None:
        try:
            if node.get_space().get_simple_extent_type() == h5py.h5s.NULL:
                raise _NoNumbersError("a null dataset, which has a type but no shape")
            shape = tuple(int(n) for n in node.shape)
            check_shape(shape, name=name, path=self._region.path)
            dtype, is_raw = _dtype(node)
            rows = H5Rows(self._region, name, address, dtype, shape, int(node.get_storage_size()), 1)
            return Tensor(name, shape, dtype, _storage(node, rows, is_raw=is_raw))
        except _NoNumbersError as error:
            if len(self._left_out) < _SHOWN:
                self._left_out.append(f"{name!r}: {error}")
            return None

    def has_names(self, group: str, attribute: str) -> bool:
        """Whether a group has ``attribute``, a list of names. ``group`` is one of `groups`, or empty for the root."""
        return bool(h5py.h5a.exists(self._node(group), attribute.encode()))

    def names(self, group: str, attribute: str) -> Iterator[str]:
        """Yield the names that Keras 2 lists in a group's attribute; a long list is split (``layer_names0``, …)."""
        node = self._node(group)
        if h5py.h5a.exists(node, attribute.encode()):
            yield from self._texts(node, attribute, rank=1)
            return
        for chunk in itertools.count():
            if not h5py.h5a.exists(node, f"{attribute}{chunk}".encode()):
                return
            yield from self._texts(node, f"{attribute}{chunk}", rank=1)

    def text(self, attribute: str) -> str | None:
        """Return the text in an attribute of the root; ``None`` if there is no such attribute."""
        node = self._node("")
        return next(self._texts(node, attribute, rank=0)) if h5py.h5a.exists(node, attribute.encode()) else None

    def _node(self, group: str) -> Any:
        with self._limit.headers():
            node = self._walk.open(group)
            info = h5py.h5o.get_info(node)
        # As for dense links: many or large attributes are in a heap.
        if info.meta_size.attr.heap_size:
            raise _unsafe_attributes(self._region.path, group, "many attributes, stored densely")
        return node

    def _texts(self, node: Any, attribute: str, *, rank: int) -> Iterator[str]:
        found = h5py.h5a.open(node, attribute.encode())
        kind, shape = found.get_type(), found.shape
        # h5py writes an empty list as numbers.
        if shape == (0,):
            return
        if kind.get_class() != h5py.h5t.STRING or shape is None or len(shape) != rank:
            raise _unsafe_attributes(self._region.path, attribute, "no list of strings" if rank else "no text")
        # h5py 3 writes variable length. libhdf5 1.14 reads it through a heap, and loops or crashes where it is damaged.
        if kind.is_variable_str():
            header = int(h5py.h5o.get_info(node).addr)
            for text in self._strings.of_attribute(header, attribute, count=math.prod(shape)):
                yield decoded(text, self._region.path)
            return
        if math.prod(shape) * kind.get_size() > self._region.nbytes:
            raise TruncatedSourceError(f"{self._region.path} is truncated: attribute {attribute!r} is longer than it")
        texts = np.empty(shape, f"S{kind.get_size()}")
        found.read(texts)
        for text in texts.reshape(-1):
            yield decoded(bytes(text), self._region.path)

    def _read(self, address: int, count: int) -> bytes:
        region, start = self._region, self._base + address
        if start + count > region.nbytes:
            raise TruncatedSourceError(
                f"{region.path} is truncated: a structure should end at byte {start + count} of {region.nbytes}"
            )
        found = bytearray(count)
        self._stream.seek(start)
        self._stream.readinto(found)
        return bytes(found)


class _NoNumbersError(Exception):
    """Raised for a dataset that cannot be weights; the message says what it contains instead."""


def _unsafe_attributes(path: Location, where: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"Cannot read names from {path}: {where or 'the root'!r} has {found}, expected those of Keras 2; "
        "libhdf5 can crash on a damaged file of that kind. If you trust the file, load and save it with keras: "
        "model.load_weights(old); model.save_weights('new.weights.h5')"
    )


@contextmanager
def _opened(region: FileRegion, *, limit: bool = False) -> Iterator[tuple[Any, FileStream, HeaderLimit]]:
    """Open an HDF5 file in h5py; yield h5py's file, the Python stream below it, and the limit that guards its reads.

    With ``limit``, the limit on the length of headers already applies to the reads by which h5py opens the file.
    """
    headers = HeaderLimit(region.path, n_bytes=region.nbytes)
    stream = FileStream(region.path.open(), start=region.start, n_bytes=region.nbytes, before_read=headers)
    # h5py reads by the stream while it holds a lock without which none of its objects can be freed.
    with closing(stream), collector_off() if region.path.store.is_remote else nullcontext():
        with headers.headers() if limit else nullcontext():
            opened = h5py.File(stream, "r")
        with opened as file:
            cache = file.id.get_mdc_config()
            cache.set_initial_size = True
            cache.initial_size = cache.max_size = _CACHE_BYTES
            cache.min_size = min(cache.min_size, _CACHE_BYTES)
            file.id.set_mdc_config(cache)
            yield file, stream, headers


def _dtype(node: Any) -> tuple[np.dtype[Any], bool]:
    """Return the dtype to read a dataset as, and whether its stored bytes need no conversion to that dtype."""
    kind = node.get_type()
    if kind.get_class() in {h5py.h5t.STRING, h5py.h5t.COMPOUND, h5py.h5t.VLEN, h5py.h5t.REFERENCE, h5py.h5t.ARRAY}:
        raise _NoNumbersError(f"it does not contain numbers (HDF5 class {kind.get_class()})")
    found = node.dtype
    # Opaque bytes: Keras' form of bfloat16, marked by an attribute. Only its presence is checked: bfloat16 is the only
    # two-byte type that HDF5 lacks. Its value is not read, as libhdf5 1.14 reads string attributes through a heap, and
    # a damaged heap makes it loop forever or read past the end.
    if found.kind == "V":
        if found.itemsize == 2 and h5py.h5a.exists(node, b"dtype"):
            return np.dtype(ml_dtypes.bfloat16), True
        raise _NoNumbersError(
            f"it contains {found.itemsize}-byte elements of an unknown type; of such types only bfloat16 as Keras 3 "
            "writes it (2 bytes and an attribute 'dtype') can be read"
        )
    if found.kind not in "biufc":
        raise _NoNumbersError(f"it has the dtype {found}, which is not supported")
    little = found.newbyteorder("<") if found.itemsize > 1 else found
    # Equal only if byte order, precision and padding are NumPy's: HDF5 also has 12-bit integers in two bytes.
    return little, bool(kind.equal(h5py.h5t.py_create(little, logical=True)))


def _storage(node: Any, rows: H5Rows, *, is_raw: bool) -> Storage:
    """Return how to read a dataset: its bytes in place (`Extent`), or, if they need decoding, by ``rows`` (h5py)."""
    region, shape, dtype = rows.region, rows.shape, rows.dtype
    where = f"{region.path}: dataset {rows.name!r}"
    plist = node.get_create_plist()
    layout = plist.get_layout()
    if plist.get_external_count() or layout == h5py.h5d.VIRTUAL:
        raise UnsafeSourceError(f"{where} keeps its data in other files (external storage or a virtual dataset)")
    declared, stored = math.prod(shape) * node.get_type().get_size(), rows.stored_bytes
    if not declared:
        # Nothing is read, so any offset in the file is valid.
        return Extent(region.path, region.start)
    _refuse_expansion(where, declared=declared, stored=stored, file_bytes=region.nbytes)
    if layout == h5py.h5d.CONTIGUOUS and stored:
        if stored != declared:
            raise SourceError(
                f"{where} declares {exact_bytes(declared)}, shape {shape} of {dtype}, but stores "
                f"{exact_bytes(stored)}. Download or save it again"
            )
        offset = node.get_offset()
        if offset is None or not 0 <= offset <= region.nbytes - stored:
            raise TruncatedSourceError(f"{where} should end at byte {(offset or 0) + stored}, past the file's end")
        if is_raw:
            return Extent(region.path, region.start + offset)
    if layout != h5py.h5d.CHUNKED:
        # Compact (inside the object header) or not in NumPy's format: libhdf5 copies and converts the elements.
        return Decoded(rows)
    for index in range(plist.get_nfilters()):
        code, _, _, label = plist.get_filter(index)
        if not h5py.h5z.filter_avail(code):
            text = label.decode("utf-8", "replace")[:50]
            raise UnsupportedError(
                f"{where} is compressed by filter {code} ({text}), which this h5py lacks; save it again"
            )
    chunk = plist.get_chunk()
    # libhdf5 inflates whole chunks, so a small tensor in one huge chunk would cost as much as a huge tensor.
    n_bytes = math.prod(chunk) * dtype.itemsize
    _refuse_expansion(where, declared=n_bytes, stored=stored, file_bytes=stored, most=_MAX_CHUNK_EXPANSION)
    return Decoded(replace(rows, row_alignment=int(chunk[0]) if chunk else 1))


def _refuse_expansion(where: str, *, declared: int, stored: int, file_bytes: int, most: int = _MAX_EXPANSION) -> None:
    if not stored and declared > _EXPANSION_FLOOR_BYTES:
        raise UnsafeSourceError(
            f"{where} declares {exact_bytes(declared)}, but stores none of them. Save the file again"
        )
    if stored > file_bytes:
        raise TruncatedSourceError(f"{where} takes {exact_bytes(stored)}, but the file has {exact_bytes(file_bytes)}")
    if declared > _EXPANSION_FLOOR_BYTES and declared > most * stored:
        raise UnsafeSourceError(
            f"{where} declares {exact_bytes(declared)}, but stores only {exact_bytes(stored)}; data may expand "
            f"at most {most} times. The file is damaged or hostile; if you trust it, save it uncompressed"
        )


class HeaderLimit:
    """Limits the length of object headers: a damaged one may make libhdf5 parse tensor data as its messages."""

    def __init__(self, path: Location, *, n_bytes: int) -> None:
        self._path, self._n_bytes = path, n_bytes
        self._limit: int | None = None

    def __call__(self, at: int, n_bytes: int) -> None:
        """Raise if a read at byte ``at``, in a with block of `headers`, is too long for an object header."""
        if self._limit is not None and n_bytes > self._limit:
            raise UnsafeSourceError(
                f"{self._path}: the header of the object at byte {at} or before it should take "
                f"{exact_bytes(n_bytes)}, more than half of the file's {exact_bytes(self._n_bytes)}. It is damaged, so "
                "download or save it again; if it is not, store fewer attributes on that object"
            )

    @contextmanager
    def headers(self) -> Iterator[None]:
        """Limit reads in the with block, which must not iterate over links: libhdf5 may crash if a read then raises."""
        self._limit = max(_FREE_HEADER_BYTES, self._n_bytes // 2)
        try:
            yield
        finally:
            self._limit = None


class LinkWalk:
    """A walk along all hard links of an HDF5 file, depth first, which finds the file's groups and datasets."""

    def __init__(self, file: Any, structures: Structures, limit: HeaderLimit, path: Location, *, n_bytes: int) -> None:
        self._root, self._structures, self._limit, self._path = file.id, structures, limit, path
        self._copy_bytes = max(_FREE_COPY_BYTES, n_bytes)
        self.groups: dict[str, int] = {}
        """Path of each group visited so far → address of its header."""
        self.left_out: list[str] = []
        """Descriptions of links that were not followed, and of objects that are neither a group nor a dataset."""

    def open(self, group: str) -> Any:
        """Open a group that the walk has visited; an empty path is the root."""
        return open_at(self._root, self.groups[group]) if group else h5py.h5o.open(self._root, b"/")

    def has_in_root(self, name: str) -> bool:
        """Whether the root group has a link of this name. Does not open what the link leads to."""
        root = _address(self._root)
        # Of dense links, libhdf5 must not look up any.
        if has_dense_links(self._structures, root):
            return any(link.name == name.encode() for link in dense_links(self._structures, root))
        return bool(self._root.links.exists(name.encode()))

    def datasets(self) -> Iterator[tuple[str, int, Any]]:
        """Yield path, header address and h5py object of each dataset; a dataset with two paths is yielded twice."""
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
                if link.kind != SOFT:
                    raise UnsafeSourceError(f"{self._path}: {name!r} is an external link, expected data in this file")
                if len(self.left_out) < _SHOWN:
                    self.left_out.append(f"{name!r}: it is a soft link, which Keras does not follow")
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
            elif len(self.left_out) < _SHOWN:
                self.left_out.append(f"{name!r}: it is neither a group nor a dataset")

    def _check(self, name: str, link: Link, ancestors: Container[int], seen: Container[int]) -> None:
        if link.address in ancestors:
            raise UnsafeSourceError(f"{self._path}: {name!r} links to a group that contains it: a cycle of links")
        if name.count("/") > _MAX_DEPTH:
            raise UnsafeSourceError(
                f"{self._path} nests groups more than {_MAX_DEPTH} deep, deeper than the layers of any model"
            )
        if link.address in seen:
            self._copy_bytes -= _BYTES_PER_COPY + len(name)
        if self._copy_bytes < 0:
            raise UnsafeSourceError(
                f"{self._path}: {name[:200]!r} is one of too many second links to the same objects. If you trust the "
                "file, load and save it with Keras"
            )

    def _links(self, group: Any, address: int) -> tuple[Any, Iterator[Link]]:
        """Return (group, its links); (``None``, links) if looking up a name in the group may crash libhdf5."""
        if has_dense_links(self._structures, address):
            return None, dense_links(self._structures, address)
        return group, self._plain_links(group)

    def _plain_links(self, group: Any) -> Iterator[Link]:
        for member in iter(group):
            found = group.links.get_info(member)
            kind = _KINDS.get(found.type, -1)
            yield Link(member, kind, int(found.u) if kind == HARD else 0)


def _address(node: Any) -> int:
    """Return the address of an object's header. `h5py.h5o.get_info` is avoided: it visits what a group refers to."""
    dataset, buffer, offset = _reference()
    reference = np.empty(1, h5py.ref_dtype)
    reference[0] = h5py.h5r.create(node, b".", h5py.h5r.OBJECT)
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, reference)
    buffer.seek(offset)
    return int.from_bytes(buffer.read(8), "little")


def decoded(raw: bytes, path: Location) -> str:
    """Decode a text of an HDF5 file; raise a `SourceError` with the file's path if the text is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: the object name {raw[:100]!r} is not UTF-8. Save it again") from error


def open_at(file: Any, address: int) -> Any:
    """Open the object whose header is at ``address``. No name is looked up, which could crash in a damaged group."""
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
def _reference() -> tuple[Any, io.BytesIO, int]:
    """Return a dataset of one object reference, its HDF5 file in memory, and the reference's byte offset in the file.

    Writing a reference and reading its bytes, or the reverse, converts between objects and addresses.
    """
    buffer = io.BytesIO()
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    file = h5py.File(buffer, "w")
    dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.STD_REF_OBJ, h5py.h5s.create_simple((1,)), plist)
    file.flush()
    return dataset, buffer, dataset.get_offset()
