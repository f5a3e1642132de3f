"""Quantised weights as they are stored: codes, scales and zero points, each as a tensor that is read by itself.

    x.weight (Decoded, floats)   ─►   x.weight (Decoded, uint8 codes), x.scales, x.qzeros (Decoded, uint8)

All methods that can be kept have the same form: ``w[row, column] = (code - zero) * scale``, where a zero and a scale
are those of the row and of the column's group. Codes and zeros are unsigned here; signed ones have 128 added.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.errors import UnsupportedError
from shardload.loaders.quantised.columns import PackedColumns
from shardload.loaders.quantised.float4 import Float4Blocks, Float4Rows
from shardload.loaders.quantised.rows import Dequantised, PackedRows, Scaled, read
from shardload.loaders.quantised.schemes import DequantisedNote
from shardload.manifest import Decoded, EncodedRows, Extent, Manifest, Tensor, c_strides
from shardload.stores.location import Location
from shardload.units import plural

WAY_OUT = (
    "Leave out quantized='keep' (--quantized keep) to load it dequantised, or pass quantize= (--quantize) instead to "
    "quantise it as Keras does"
)
_SIGN = 0x80
_Keepable = PackedRows | PackedColumns | Scaled


@dataclass(frozen=True, slots=True)
class PerGroup:
    """A number for each row and each group of columns, and where it is in a tensor."""

    tensor: Tensor
    strides: tuple[int, int]
    """By how many elements of the tensor the position grows from one row to the next, and from one group."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptWeight:
    """A weight whose codes are kept."""

    name: str
    codes: Tensor
    """uint8 ``(rows, columns)``."""
    scales: PerGroup
    zeros: PerGroup | int
    """The zero points, or the one of all groups."""
    bits: int
    group_size: int
    n_groups: int
    order: NDArray[Any]
    """The group of each column."""

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors to read."""
        parts = (self.codes, self.scales.tensor, *([self.zeros.tensor] if isinstance(self.zeros, PerGroup) else []))
        return tuple({part.name: part for part in parts}.values())


def quantised_names(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of a manifest's tensors that are dequantised while they are read."""
    readers = ((name, getattr(tensor.storage, "reader", None)) for name, tensor in manifest.tensors.items())
    return tuple(name for name, reader in readers if isinstance(reader, Dequantised))


def kept_weight(tensor: Tensor) -> KeptWeight:
    """Return how a tensor that is dequantised while it is read is stored.

    Raises:
        UnsupportedError: When Keras has no arithmetic for its codes.
    """
    reader = tensor.storage.reader if isinstance(tensor.storage, Decoded) else None
    if (why := _refusal(reader)) is not None:
        raise UnsupportedError(f"Cannot keep {tensor.name!r} packed: it has {why}. {WAY_OUT}")
    assert isinstance(reader, _Keepable)
    rows, columns = reader.shape
    size = reader.block[1] if isinstance(reader, Scaled) else reader.group_size
    groups = None if isinstance(reader, Scaled) else reader.groups
    order = np.arange(columns) // size if groups is None else read(groups)
    n_groups = -(-columns // size)
    codes = Tensor(tensor.name, (rows, columns), np.dtype(np.uint8), Decoded(_Codes(reader)))
    bits = 8 if isinstance(reader, Scaled) else reader.bits
    return KeptWeight(
        tensor.name, codes, _scales(reader, n_groups), _zeros(reader, n_groups), bits, size, n_groups, order
    )


def kept(manifest: Manifest, weights: Iterable[KeptWeight]) -> Manifest:
    """Return a manifest in which the tensors of these weights are what is stored of them."""
    tensors = dict(manifest.tensors)
    for weight in weights:
        tensors |= {part.name: part for part in weight.stored}
    return replace(manifest, tensors=tensors, notes=without_dequantised(manifest.notes))


def without_dequantised(notes: Iterable[str]) -> tuple[str, ...]:
    """Return notes without the one that says which weights are dequantised."""
    return tuple(note for note in notes if not isinstance(note, DequantisedNote))


def _refusal(reader: Any) -> str | None:
    """Return what a weight has that Keras' layers do not compute with; ``None`` if it can be kept."""
    match reader:
        case Float4Rows():
            return "float4 codes (NVFP4 or MXFP4), and Keras' quantised layers have integers"
        case Float4Blocks():
            return "codes of NF4 or FP4, and Keras' quantised layers have integers"
        case PackedRows(bits=bits) | PackedColumns(bits=bits) if bits not in (4, 8):
            return f"codes of {plural(bits, 'bit')}, and Keras packs 4 bits only: each would take a byte"
        case PackedRows() | PackedColumns():
            return None
        case Scaled(codes=codes) if codes.dtype != np.int8:
            return f"{codes.dtype} codes, and Keras' quantised layers have integers"
        case Scaled(rows_of_each=None, block=(1, _)):
            return None
        case Scaled(scales=scales, rows_of_each=None) if scales.rows == 1:
            return None
        case Scaled():
            return "scales for blocks of several rows, and Keras has them for each output"
    return "several matrices (experts), and Keras quantises single kernels"


@dataclass(frozen=True, slots=True)
class _StoredPart(EncodedRows):
    """Reads one part of a quantised weight as stored."""

    reader: _Keepable

    @property
    def tensor(self) -> Tensor:
        """The stored tensor."""
        raise NotImplementedError

    @property
    def ranges(self) -> tuple[tuple[Location, int, int], ...]:
        """Place of the stored data: path of the file, byte offset, length in bytes."""
        return _range(self.tensor)

    @property
    def row_alignment(self) -> int:
        """Number of rows that are decoded together."""
        return self.reader.row_alignment

    @property
    def encoding(self) -> Hashable:
        """All that determines the values, except the stored bytes."""
        return type(self).__name__, self.reader.encoding

    def require_decoder(self) -> None:
        """Do nothing: NumPy alone decodes these rows."""


def _range(stored: Tensor) -> tuple[tuple[Location, int, int], ...]:
    assert isinstance(stored.storage, Extent)
    return ((stored.storage.path, stored.storage.offset, stored.nbytes),)


class _Codes(_StoredPart):
    """Reads rows of codes, a byte for each; the groups of columns, which are read first, count too."""

    __slots__ = ()

    @property
    def ranges(self) -> tuple[tuple[Location, int, int], ...]:
        groups = None if isinstance(self.reader, Scaled) else self.reader.groups
        return (*_range(self.tensor), *(() if groups is None else _range(groups)))

    @property
    def tensor(self) -> Tensor:
        return self.reader.codes

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        if isinstance(self.reader, Scaled):
            return read(self.reader.codes, start, stop).view(np.uint8) ^ np.uint8(_SIGN)
        return np.ascontiguousarray(self.reader.code_rows(start, stop))


class _Zeros(_StoredPart):
    """Reads the zero points of rows, one for each group."""

    __slots__ = ()

    @property
    def tensor(self) -> Tensor:
        assert self.reader.zeros is not None
        return self.reader.zeros

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        if isinstance(self.reader, Scaled):
            return read(self.tensor, start, stop).view(np.uint8).reshape(stop - start, -1) ^ np.uint8(_SIGN)
        return np.ascontiguousarray(self.reader.zero_rows(start, stop))


class _ScaledScales(_StoredPart):
    """Reads scales, multiplied by a factor that is the same for all."""

    __slots__ = ()

    @property
    def tensor(self) -> Tensor:
        return self.reader.scales

    @property
    def row_alignment(self) -> int:
        return 1

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        assert isinstance(self.reader, Scaled)
        return read(self.tensor, start, stop) * np.float32(self.reader.factor)


def _scales(reader: _Keepable, n_groups: int) -> PerGroup:
    stored = reader.scales
    if isinstance(reader, PackedColumns):  # (groups, rows)
        return PerGroup(stored, (1, reader.shape[0]))
    if isinstance(reader, Scaled) and reader.factor != 1.0:
        stored = replace(stored, storage=Decoded(_ScaledScales(reader)))
    return PerGroup(stored, _strides(stored, n_groups))


def _zeros(reader: _Keepable, n_groups: int) -> PerGroup | int:
    if reader.zeros is None:
        return _SIGN if isinstance(reader, Scaled) else 1 << (reader.bits - 1)
    # Of a tensor with one row, `Scaled` has one for all rows.
    shape = reader.zeros.shape if isinstance(reader, Scaled) else (reader.shape[0], n_groups)
    rows, columns = c_rows(shape)
    decoded = Tensor(reader.zeros.name, (rows, columns), np.dtype(np.uint8), Decoded(_Zeros(reader)))
    return PerGroup(decoded, _strides(decoded, n_groups))


def c_rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a shape as that of a matrix with the same rows."""
    rows = shape[0] if shape else 1
    return rows, c_strides(shape)[0] if shape else 1


def _strides(tensor: Tensor, n_groups: int) -> tuple[int, int]:
    """Return the strides of rows and groups in a tensor with a row for each row of the weight, or one for all."""
    rows, columns = c_rows(tensor.shape)
    return columns if rows > 1 else 0, 1 if columns == n_groups else 0
