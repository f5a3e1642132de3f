"""What lies in a checkpoint, read from its headers alone.

A loader turns files into a `Manifest`: for each tensor its name, shape, dtype and *storage*. Storage
is one of four things:

    Extent    raw little-endian bytes in a file            path ──[offset ............ offset+nbytes)──
    Packed    bytes in a file that decode as a whole       path ──[offset … offset+n_bytes)── codec.decode -> ndarray
    Decoded   rows that must be decoded on the way         reader.read_rows(start, stop) -> ndarray
    Chunked   a grid of chunks, each Extent or Packed      shape (5, 8) in chunks of (3, 4):
                                                                (0,0)──┬──(0,1)──┐   the last row of chunks sticks out
                                                                (1,0)  │  (1,1)  │   past the tensor, but is stored full

A `View` says which elements of a stored tensor make up a variable: an offset and one stride per
dim, in elements of the stored row-major order. Transposes, reshapes and slices of a stored tensor are
Views, so a converter's transpose costs no copy of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class RowReader(Protocol):
    """Reads ranges of rows (dim 0) of one stored tensor; must be safe to call from several threads."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Files this reader reads from."""
        ...

    @property
    def stored_bytes(self) -> int:
        """Bytes the tensor takes up on disk, encoded."""
        ...

    @property
    def row_alignment(self) -> int:
        """Rows per independently decodable unit; starts of ranges are best multiples of it."""
        ...

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Rows ``[start, stop)``, C-contiguous, in the tensor's dtype.

        A rank-0 tensor counts as one row and comes back with shape ``()``.

        Raises:
            TransferError: When the file no longer holds what its headers promised.
        """
        ...


@dataclass(frozen=True, slots=True)
class Extent:
    """A row-major run of raw little-endian bytes in a file."""

    path: str
    """The file, absolute."""
    offset: int
    """Byte offset of the first element."""


class Codec(Protocol):
    """Turns what is stored of a chunk into its elements; must be safe to call from several threads."""

    def decode(self, stored: bytes | bytearray) -> NDArray[Any]:
        """The chunk's elements, C-contiguous, in its shape and the tensor's dtype; of nothing, of one never written.

        Raises:
            TransferError: When the bytes are not what they should be.
        """
        ...


@dataclass(frozen=True, slots=True)
class Packed:
    """Elements that are stored in a form of their own and decode as a whole: a compressed chunk of zarr."""

    path: str
    """The file, absolute; of what is kept or was never written, the one that says so."""
    offset: int
    """First byte; 0 where there is none in the file."""
    n_bytes: int
    """Bytes in the file; 0 of what is kept or was never written."""
    codec: Codec
    kept: bytes = b""
    """What is stored, where headers hold it themselves."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A tensor whose rows must be decoded: chunked HDF5, quantised GGUF, the result of a computation."""

    reader: RowReader


@dataclass(frozen=True, slots=True)
class Chunked:
    """A tensor cut into a regular grid of chunks, each of them somewhere by itself (zarr).

    Chunk ``(i, j, …)`` holds the box that starts at ``(i * chunk_shape[0], j * chunk_shape[1], …)``. A chunk at
    the far edge may stick out past the tensor: it is stored in full ``chunk_shape`` all the same, and what lies
    outside has no meaning.
    """

    chunk_shape: tuple[int, ...]
    """Shape of every chunk, one positive number per dim of the tensor."""
    extents: Mapping[tuple[int, ...], Extent | Packed]
    """Grid index → where the chunk's ``prod(chunk_shape)`` elements lie, row-major; every cell of the grid is there."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Files the chunks lie in."""
        return tuple(dict.fromkeys(extent.path for extent in self.extents.values()))


Storage = Extent | Packed | Decoded | Chunked


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor."""

    name: str
    """Its key in the checkpoint (``layers/dense/vars/0``, ``model.norm.weight``)."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """What reading it yields; ``ml_dtypes`` types included."""
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
        """Bytes the tensor takes up on disk; for `Chunked`, with what sticks out at the edges."""
        match self.storage:
            case Extent():
                return self.nbytes
            case Packed(n_bytes=n_bytes, kept=kept):
                return n_bytes + len(kept)
            case Decoded(reader):
                return reader.stored_bytes
            case Chunked(chunk_shape, extents):
                raw = math.prod(chunk_shape) * self.dtype.itemsize
                return sum(e.n_bytes + len(e.kept) if isinstance(e, Packed) else raw for e in extents.values())


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything the headers of a checkpoint say."""

    source: str
    """What was opened: a path, absolute."""
    format: str
    """Name of its `shardload.loaders.FormatSpec`: ``gguf``."""
    tensors: Mapping[str, Tensor]
    """By name, in file order."""
    files: Mapping[str, int]
    """Each file that holds tensor data → its size in bytes when the headers were read."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The checkpoint's own description of the model (``config.json`` content), empty where it has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further header entries: safetensors ``__metadata__``, GGUF key-values, Keras versions."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as read (decoded)."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def parameters(self) -> int:
        """Number of elements in all tensors."""
        return sum(t.size for t in self.tensors.values())


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a C-ordered array, in elements."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


@dataclass(frozen=True, slots=True)
class View:
    """Which elements of a stored tensor make up a variable.

    Element ``(i, j, …)`` of the view is element ``offset + i * strides[0] + j * strides[1] + …`` of the
    tensor's row-major order. Strides are positive or zero; a dim of length 1 may have any stride.
    """

    tensor: str
    """Name of the stored tensor."""
    offset: int
    """First element, in elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Elements to step over per index, one per dim."""

    @classmethod
    def whole(cls, tensor: Tensor) -> View:
        """The view that is the tensor itself."""
        return cls(tensor.name, 0, tensor.shape, c_strides(tensor.shape))

    def is_whole(self, tensor: Tensor) -> bool:
        """Whether this is the tensor itself, in its own order and shape."""
        return self.shape == tensor.shape and self == View.whole(tensor)
