"""What a checkpoint contains, and where: known from its headers alone, before any tensor is read.

A loader turns files into a `Manifest`: for each tensor its name, shape, dtype and *storage*. Storage
is one of four things:

    Extent    raw little-endian bytes in a file            path ──[offset ............ offset+nbytes)──
    Packed    bytes in a file that decode as a whole       path ──[offset … offset+n_bytes)── codec.decode -> ndarray
    Decoded   rows that must be decoded while reading      reader.read_rows(start, stop) -> ndarray
    Chunked   a grid of chunks, each Extent or Packed      shape (5, 8) in chunks of (3, 4):
                                                                (0,0)──┬──(0,1)──┐   the last chunks extend past the
                                                                (1,0)  │  (1,1)  │   tensor, but are stored in full

A `View` says which elements of a stored tensor make up a variable. Transposes, reshapes and slices of a stored tensor
are Views, so a converter's transpose costs no copy of its own.
"""

from __future__ import annotations

import fnmatch
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardload.errors import ShardloadError, UnsupportedError
from shardload.stores.location import Location
from shardload.units import format_bytes, format_parameters, plural

if TYPE_CHECKING:
    from shardload.reports.checkpoint_page import TensorRow


class RowReader(Protocol):
    """Reads and decodes ranges of rows (along dim 0) of one stored tensor; several threads may use it at once."""

    @property
    def paths(self) -> tuple[Location, ...]:
        """Files this reader reads from."""

    @property
    def stored_bytes(self) -> int:
        """Bytes the tensor takes up on disk, encoded."""

    @property
    def row_alignment(self) -> int:
        """Number of rows that are decoded together: a range that does not start at a multiple of it decodes more."""

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Read rows ``[start, stop)``, C-contiguous, in the tensor's dtype.

        A rank-0 tensor counts as one row and is returned with shape ``()``. Raises a `TransferError` if the file no
        longer matches its headers.
        """


class EncodedRows(ABC):
    """A `RowReader` whose rows follow from stored bytes and encoding alone (GGUF): to compare, just read the bytes."""

    __slots__ = ()

    @property
    @abstractmethod
    def ranges(self) -> tuple[tuple[Location, int, int], ...]:
        """(file, offset, number of bytes) of each range of the tensor's stored bytes, to read them undecoded."""

    @property
    def paths(self) -> tuple[Location, ...]:
        """The files with the stored bytes."""
        # `dict.fromkeys` instead of a set: files stay in the order of their first range.
        return tuple(dict.fromkeys(path for path, _, _ in self.ranges))

    @property
    def stored_bytes(self) -> int:
        """Bytes the tensor takes up on disk, encoded."""
        return sum(n_bytes for _, _, n_bytes in self.ranges)

    @property
    @abstractmethod
    def encoding(self) -> Hashable:
        """How the bytes are encoded, as a value to compare: if it and the stored bytes are equal, so are the rows."""

    @abstractmethod
    def require_decoder(self) -> None:
        """Raise an error unless the packages that decode the rows are installed."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A row-major run of raw little-endian bytes in a file."""

    path: Location
    """The file."""
    offset: int
    """Position in the file of the first element, in bytes."""


class Codec(Protocol):
    """Decodes the stored bytes of a chunk (a box of a tensor) to its elements; several threads may use it at once."""

    def decode(self, stored: bytes | bytearray) -> NDArray[Any]:
        """Return a chunk's elements, C-contiguous, in the tensor's dtype; ``stored`` is empty for a chunk not written.

        Raises a `TransferError` if the bytes cannot be decoded.
        """


@dataclass(frozen=True, slots=True)
class Packed:
    """Encoded elements that decode as a whole, such as a compressed zarr chunk."""

    path: Location
    """The file with the bytes; for a chunk that is inside a header or was never written, the file with its header."""
    offset: int
    """Position of the first byte in the file; 0 for chunks inside a header or never written."""
    n_bytes: int
    """Number of encoded bytes in the file; 0 for chunks inside a header or never written."""
    codec: Codec
    kept: bytes = b""
    """The encoded bytes, if a header contains them, so that they are read already."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Storage of a tensor whose rows must be decoded or computed while reading: chunked HDF5, quantised GGUF."""

    reader: RowReader


@dataclass(frozen=True, slots=True)
class UnreadableRows(EncodedRows):
    """Rows of a tensor of an encoding that no package decodes: it can be listed and compared, but not loaded."""

    stored: tuple[tuple[Location, int, int], ...]
    """(file, offset, number of bytes) of each range of stored bytes; an upper limit if `is_size_known` is false."""
    why: str
    """Why the rows cannot be decoded: completes ``Cannot read tensor 'x': …``."""
    way_out: str = "Convert it with the library that wrote it"
    """How to fix it: the last sentence of the error."""
    is_size_known: bool = True
    row_alignment: int = 1

    @property
    def ranges(self) -> tuple[tuple[Location, int, int], ...]:
        """(file, offset, number of bytes) of each range of stored bytes."""
        return self.stored

    @property
    def encoding(self) -> Hashable:
        """How the bytes are encoded, as a value to compare. It is the text of `why`, which names the element type.

        Two tensors with equal bytes and equal encodings have equal elements, although nothing can decode these.
        """
        return self.why

    def refusal(self, tensor: str | None = None) -> UnsupportedError:
        """Return the error for an attempt to read the rows; it names the tensor if ``tensor`` is given."""
        what = "a tensor" if tensor is None else f"tensor {tensor!r}"
        return UnsupportedError(f"Cannot read {what} of {self.paths[0]}: {self.why}. {self.way_out}")

    def require_decoder(self) -> None:
        """Raise an error: no package can decode these rows."""
        raise self.refusal()

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Raise an error. A load does not come here: it refuses such tensors before it reads anything."""
        raise self.refusal()


@dataclass(frozen=True, slots=True)
class Chunked:
    """A tensor cut into a regular grid of separately stored chunks (zarr).

    Chunk ``(i, j, …)`` contains the box that starts at ``(i * chunk_shape[0], j * chunk_shape[1], …)``. A chunk at
    the far edge may extend past the tensor: it is still stored in full ``chunk_shape``, and the elements
    outside the tensor are undefined.
    """

    chunk_shape: tuple[int, ...]
    """Shape of every chunk, one positive number per dim of the tensor."""
    extents: Mapping[tuple[int, ...], Extent | Packed]
    """Index of a chunk in the grid → where its ``prod(chunk_shape)`` row-major elements are, for every chunk."""

    @property
    def paths(self) -> tuple[Location, ...]:
        """Files that contain the chunks."""
        # `dict.fromkeys` instead of a set: files stay in the order of their first chunk.
        return tuple(dict.fromkeys(extent.path for extent in self.extents.values()))


Storage = Extent | Packed | Decoded | Chunked


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor: its name, shape and dtype, and where its elements are."""

    name: str
    """Its key in the checkpoint (``layers/dense/vars/0``, ``model.norm.weight``)."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """Dtype of the elements once they are read (decoded), which may be one of ``ml_dtypes``, such as bfloat16."""
    storage: Storage

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor as read (decoded)."""
        return self.size * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Length of dim 0; 1 for rank 0."""
        return self.shape[0] if self.shape else 1

    @property
    def stored_bytes(self) -> int:
        """Bytes that the tensor takes up on disk, with chunks that extend past the tensor counted in full."""
        match self.storage:
            case Extent():
                return self.nbytes
            case Packed(n_bytes=n_bytes, kept=kept):
                return n_bytes + len(kept)
            case Decoded(reader):
                return reader.stored_bytes
            case Chunked(chunk_shape, extents):
                # Edge chunks are stored in full, so each raw chunk counts with the whole chunk shape.
                raw = math.prod(chunk_shape) * self.dtype.itemsize
                return sum(e.n_bytes + len(e.kept) if isinstance(e, Packed) else raw for e in extents.values())

    @property
    def files(self) -> tuple[Location, ...]:
        """The files that store the tensor: several if it is in chunks, or decoded from several."""
        match self.storage:
            case Extent(path) | Packed(path):
                return (path,)
            case Decoded(reader):
                return reader.paths
            case Chunked() as grid:
                return grid.paths

    @property
    def storage_text(self) -> str:
        """How the files store the tensor, in words: ``offset 4096``."""
        match self.storage:
            case Extent(_, offset):
                return f"offset {offset}"
            case Decoded(UnreadableRows(stored_bytes=n, why=why, is_size_known=is_known)):
                return f"{'' if is_known else 'at most '}{format_bytes(n)}, unreadable: {why}"
            case Packed() | Decoded():
                return f"decoded from {format_bytes(self.stored_bytes)}"
            case Chunked(chunk_shape, extents):
                return f"{plural(len(extents), 'chunk')} of {'x'.join(map(str, chunk_shape))}"


@dataclass(frozen=True, slots=True, repr=False)
class Manifest:
    """What the headers of a checkpoint say: its tensors, their files, and the model's configuration if there is one."""

    location: Location
    """The opened file or folder."""
    format: str
    """Name of the file format, as in its `shardload.loaders.FormatSpec`: ``gguf``."""
    tensors: Mapping[str, Tensor]
    """Name → tensor, in file order."""
    files: Mapping[Location, int]
    """Each file with tensor data → its size in bytes when the headers were read, to notice when it has changed."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The checkpoint's own description of the model (``config.json`` content); empty if it has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further header entries: safetensors ``__metadata__``, GGUF key-values, Keras versions."""
    notes: tuple[str, ...] = ()
    """Sentences for reports: what the files contain that a load leaves out."""
    undescribed: ShardloadError | None = None
    """Error to raise when a model is to be built, but this file, unlike others of its format, describes none."""

    def __repr__(self) -> str:
        return (
            f"<Manifest {self.source} ({self.format}): {plural(len(self.tensors), 'tensor')}, "
            f"{plural(self.parameters, 'parameter')}, {plural(self.nbytes, 'byte')}>"
        )

    def _repr_html_(self) -> str:
        """Return the tensors as HTML, which a notebook shows; those that differ only in numbers share a line."""
        from shardload.reports.checkpoint_page import checkpoint_lines
        from shardload.reports.markup import preformatted

        head = f"{self.source} ({self.format}): {self._counts(list(self.tensors.values()))}"
        return preformatted("\n".join((head, *self.notes, *checkpoint_lines(self._rows(self.matching(None))))))

    def to_html(self, *, match: str | None = None) -> str:
        """Return the tensors as a page of HTML that needs no other file and opens no connection.

        It shows bytes of each dtype and file as bars, and a tree of tensors to sort and search.

        Args:
            match: Glob that the names of the shown tensors match, such as ``*/attention/*``.
        """
        from shardload.reports.checkpoint_page import checkpoint_page

        found, total = self.matching(match), plural(len(self.tensors), "tensor")
        shown = f"{len(found):,} of {total} match {match}: " if match is not None else ""
        facts = [("Format", self.format), ("Tensors", shown + self._counts(found))]
        if self.n_left_out:
            facts.append(("Partial", f"without {plural(self.n_left_out, 'weight')}"))
        if self.undescribed is not None:
            facts.append(("Model", f"none can be built from it: {self.undescribed}"))
        facts += [("Note", note) for note in self.notes]
        sizes = {str(file.name): size for file, size in self.files.items()}
        return checkpoint_page(f"Tensors of {self.source}", self._rows(found), files=sizes, facts=facts).html()

    def matching(self, match: str | None) -> list[Tensor]:
        """Return the tensors whose name matches a glob; all for ``None``."""
        return [t for t in self.tensors.values() if match is None or fnmatch.fnmatchcase(t.name, match)]

    def _counts(self, tensors: Sequence[Tensor]) -> str:
        parameters, size = sum(t.size for t in tensors), sum(t.nbytes for t in tensors)
        return f"{plural(len(tensors), 'tensor')}, {format_parameters(parameters)}, {format_bytes(size)}"

    def _rows(self, tensors: Sequence[Tensor]) -> list[TensorRow]:
        from shardload.reports.checkpoint_page import TensorRow

        return [
            TensorRow(
                t.name,
                str(t.dtype),
                t.shape,
                t.nbytes,
                t.stored_bytes,
                ", ".join(file.name for file in t.files),
                t.storage_text,
            )
            for t in tensors
        ]

    def require_description(self) -> None:
        """Raise `undescribed` unless a model can be built from the checkpoint."""
        if self.undescribed is not None:
            raise type(self.undescribed)(str(self.undescribed))

    @property
    def source(self) -> str:
        """Absolute path or URL of the opened file or folder."""
        return str(self.location)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as read (decoded)."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def parameters(self) -> int:
        """Number of elements in all tensors."""
        return sum(t.size for t in self.tensors.values())

    @property
    def n_left_out(self) -> int:
        """Number of the model's weights that a partial training step leaves out; 0 for other checkpoints."""
        # `structure.json` is untrusted and not checked yet: every level may be of any type.
        structure = self.metadata.get("structure")
        found = structure.get("left_out") if isinstance(structure, Mapping) else None
        leaves = found if isinstance(found, list) else []
        return sum(isinstance(leaf, Mapping) and leaf.get("kind") == "weight" for leaf in leaves)


@functools.lru_cache(maxsize=4096)
def partial_text(left_out: int) -> str:
    """Return words for a training step saved without ``left_out`` of its weights: ``partial: without 3 weights``."""
    return f"partial: without {plural(left_out, 'weight')}"


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a C-ordered array of ``shape``, in elements instead of NumPy's bytes."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


@dataclass(frozen=True, slots=True)
class View:
    """Which elements of a stored tensor make up a variable, and in which order.

    Element ``(i, j, …)`` of the view is element ``offset + i * strides[0] + j * strides[1] + …`` of the
    tensor's row-major order. Strides are positive or zero; a dim of length 1 may have any stride.
    """

    tensor: str
    """Name of the stored tensor."""
    offset: int
    """Position of the view's first element in the stored tensor: how many elements come before it, row-major."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """For each dim of the view: by how many stored elements the position grows from one index to the next."""

    @classmethod
    def whole(cls, tensor: Tensor) -> View:
        """Return the view that is the whole tensor, in its own order and shape."""
        return cls(tensor.name, 0, tensor.shape, c_strides(tensor.shape))

    def is_whole(self, tensor: Tensor) -> bool:
        """Whether this is the whole tensor in its own order and shape, so that it can be read as it is."""
        return self == View.whole(tensor)
