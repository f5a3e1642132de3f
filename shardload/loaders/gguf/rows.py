"""Read and decode rows of GGUF tensors; the only module that imports the gguf package.

Each row of a quantised tensor is stored in whole blocks, so any range of rows can be decoded by itself. This module
also reverses what llama.cpp's converter did to some tensors. Each such change is a member of `Undo`:

    MINUS_ONE   Gemma's norms are stored as w + 1
    DROP_TWO    RoBERTa's first two positions (padding) are not stored; they are read as zeros
    TRANSPOSE   GPT-2's matrices are stored as (out, in), but Hugging Face has (in, out)
    UNPERMUTE   Llama's query and key rows are stored in another order within each head, for rotary embeddings::

        Hugging Face   a0 a1 a2 … b0 b1 b2 …        (two halves of a head)
        GGUF           a0 b0 a1 b1 a2 b2 …

    UNFUSE      BLOOM's query, key and value rows alternate by head in Hugging Face (q0: query rows of head 0)::

        Hugging Face   q0 k0 v0 q1 k1 v1 …
        GGUF           q0 q1 … k0 k1 … v0 v1 …

GPT-OSS's experts have separate gate and up matrices in GGUF. Hugging Face joins the two, column by column, and
transposes all matrices::

    ffn_gate_exps, ffn_up_exps   (experts, out, in)   ─►   gate_up_proj   (experts, in, g0 u0 g1 u1 …)
    ffn_down_exps                (experts, out, in)   ─►   down_proj      (experts, in, out)
    ….bias                       (experts, out)       ─►   …_bias         (experts, out)
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Hashable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from shardload.errors import MissingExtraError, SourceError, SourceNotFoundError, TransferError
from shardload.families.parts.gguf import GgufArchitecture, Undo
from shardload.loaders.gguf.header import GgufHeader, TensorInfo
from shardload.manifest import Decoded, EncodedRows, Extent, Storage, Tensor, UnreadableRows
from shardload.stores.location import Location
from shardload.stores.store import fill_exactly
from shardload.units import plural

PLAIN: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
"""GGML types that store plain numbers → their dtype; all other types are quantised and decode to float32."""


@dataclass(frozen=True, slots=True)
class GgufRows(EncodedRows):
    """Reads rows of one tensor of a GGUF file, decoded and in Hugging Face's order."""

    info: TensorInfo
    undo: Undo
    heads: int = 1
    """Number of attention heads whose rows the tensor has; used only if GGUF stores these rows in another order."""

    @property
    def row_alignment(self) -> int:
        """Number of rows that must be read together, 1 for most tensors.

        It is all rows of a transposed matrix, and the rows of one attention head if GGUF reordered the rows of heads.
        Rows of a quantised vector are single elements, encoded in blocks: it is the number of elements in a block.
        """
        if self.undo is Undo.TRANSPOSE:
            return self.info.shape[1]
        if self.undo in (Undo.UNPERMUTE, Undo.UNFUSE):
            return self.info.shape[0] // self.heads
        return self.info.kind.block_elements if len(self.info.shape) == 1 else 1

    @property
    def ranges(self) -> tuple[tuple[Location, int, int], ...]:
        """Place of the tensor's data: path of the file, byte offset, length in bytes."""
        return ((self.info.path, self.info.offset, self.info.nbytes),)

    @property
    def encoding(self) -> Hashable:
        """All that determines the values besides the stored bytes: element type, shape, `undo` and number of heads."""
        return self.info.kind.name, self.info.shape, self.undo, self.heads

    def require_decoder(self) -> None:
        """Raise if the tensor is quantised and the gguf package, which decodes it, is not installed."""
        if self.info.kind.name not in PLAIN and importlib.util.find_spec("gguf") is None:
            raise MissingExtraError("gguf", extra="gguf", needed_for=self._decoding)

    @property
    def _decoding(self) -> str:
        return f"Decoding {self.info.kind.name} tensors of {self.info.path}"

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)``, decoded, as a `shardload.manifest.RowReader` does."""
        if self.undo is Undo.TRANSPOSE:
            # Any row of the transpose needs every stored row, so `row_alignment` asks for the whole matrix at once.
            whole = self._decode(self._read(0, self.info.shape[0])).reshape(self.info.shape)
            return np.ascontiguousarray(whole.T[start:stop])
        if self.undo is Undo.DROP_TWO:
            stored = replace(self, undo=Undo.NOTHING).read_rows(max(start - 2, 0), max(stop - 2, 0))
            return np.concatenate([np.zeros((stop - start - len(stored), *stored.shape[1:]), stored.dtype), stored])
        if self.undo is Undo.UNFUSE:
            # A range of rows is up to three runs of the stored rows for each head; each is read at once.
            rows = fused_rows(np.arange(start, stop), self.info.shape[0], self.heads)
            runs = [run for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if run.size]
            raws = [self._read(int(run[0]), int(run[-1]) + 1) for run in runs] or [self._read(0, 0)]
            return self._decode(np.concatenate(raws)).reshape(len(rows), *self.info.shape[1:])
        align = self.row_alignment
        # Widen the range to whole heads or blocks, and cut the requested rows out of it.
        first, last = start // align * align, min(-(-stop // align) * align, self.info.shape[0])
        raw = self._read(first, last)
        if self.undo is Undo.UNPERMUTE:
            # Reorder encoded rows: they are smaller than decoded ones, and only the requested ones are decoded.
            raw = raw[stored_rows(np.arange(start, stop), self.row_alignment) - first]
            return self._decode(raw).reshape(stop - start, *self.info.shape[1:])
        values = self._decode(raw).reshape(last - first, *self.info.shape[1:])[start - first : stop - first]
        return minus_one(values) if self.undo is Undo.MINUS_ONE else np.ascontiguousarray(values)

    def _read(self, first: int, last: int) -> NDArray[np.uint8]:
        """Return the encoded bytes of rows ``[first, last)``: a matrix with a line per row (vectors: per block)."""
        kind, shape = self.info.kind, self.info.shape
        # A row of a matrix is whole blocks; an element of a quantised vector is a part of one.
        unit = kind.block_elements if len(shape) == 1 else 1
        unit_bytes = math.prod(shape[1:]) * unit // kind.block_elements * kind.block_bytes
        raw = np.empty((-(-(last - first) // unit), unit_bytes), np.uint8)
        try:
            with closing(self.info.path.open()) as file:
                fill_exactly(file, raw.reshape(-1).data, self.info.offset + first // unit * unit_bytes)
        except (SourceError, SourceNotFoundError) as error:
            raise TransferError(f"Tensor {self.info.name!r} can no longer be read: {error}") from error
        return raw

    def _decode(self, raw: NDArray[np.uint8]) -> NDArray[Any]:
        name = self.info.kind.name
        if name in PLAIN:
            return raw.view(PLAIN[name])
        try:
            from gguf import GGMLQuantizationType, dequantize
        except ImportError as error:
            raise MissingExtraError.explaining(error, needed_for=self._decoding, extra="gguf") from error
        # `dequantize` raises for an empty array.
        if not raw.size:
            return np.empty(0, np.float32)
        # A scale may be infinite or NaN, and so may its weights.
        with np.errstate(all="ignore"):
            found: NDArray[np.float32] = dequantize(raw, GGMLQuantizationType(self.info.kind.id))
        return found


def storage(info: TensorInfo, *, undo: Undo, heads: int = 1) -> tuple[Storage, np.dtype[Any]]:
    """Return how to read a tensor, and as which dtype. Reading reverses ``undo``, a change by llama.cpp's converter."""
    if not info.kind.is_known:
        return Decoded(_unreadable(info)), np.dtype(np.float32)
    name = info.kind.name
    if name in PLAIN and undo is Undo.NOTHING:
        return Extent(info.path, info.offset), PLAIN[name]
    # `minus_one` computes in float32.
    dtype = PLAIN[name] if name in PLAIN and undo is not Undo.MINUS_ONE else np.dtype(np.float32)
    return Decoded(GgufRows(info, undo, heads)), dtype


def _unreadable(*parts: TensorInfo) -> UnreadableRows:
    """Return a reader for ``parts`` of unknown type that raises only when used, so that other tensors can be loaded."""
    kind = next(info.kind for info in parts if not info.kind.is_known)
    return UnreadableRows(
        tuple((info.path, info.offset, info.nbytes) for info in parts),
        f"its {kind.name} is unknown",
        way_out="Quantise the model again to another type, such as Q8_0, or load its safetensors",
        is_size_known=False,
    )


def original_shape(info: TensorInfo, undo: Undo) -> tuple[int, ...]:
    """Return a tensor's shape in Hugging Face's checkpoint, before llama.cpp's converter made the change ``undo``."""
    match undo:
        case Undo.TRANSPOSE:
            return info.shape[::-1]
        case Undo.DROP_TWO:
            return (info.shape[0] + 2, *info.shape[1:])
    return info.shape


def stored_rows(rows: NDArray[np.int64], head_rows: int) -> NDArray[np.int64]:
    """Return the GGUF row numbers of ``rows`` of Hugging Face's query or key matrix: GGUF reorders each head's rows."""
    head, within = np.divmod(rows, head_rows)
    half, index = np.divmod(within, head_rows // 2)
    found: NDArray[np.int64] = head * head_rows + index * 2 + half
    return found


def fused_rows(rows: NDArray[np.int64], count: int, heads: int) -> NDArray[np.int64]:
    """Return the GGUF row numbers of ``rows`` of Hugging Face's query-key-value matrix, which alternates by head."""
    width = count // (3 * heads)
    head, within = np.divmod(rows, 3 * width)
    part, index = np.divmod(within, width)
    found: NDArray[np.int64] = part * (count // 3) + head * width + index
    return found


def minus_one(stored: NDArray[Any]) -> NDArray[np.float32]:
    """Recover the weights w from w + 1, which GGUF stores in float32 for Gemma's norms.

    The addition rounded small values of w. Gemma's weights are bfloat16, so w is the bfloat16 nearest to
    ``stored - 1``. If adding 1 to it does not give the stored value, as in a fine-tune saved in float32, w is
    ``stored - 1`` itself.
    """
    with np.errstate(all="ignore"):  # infinities and NaNs stay unchanged
        values = stored.astype(np.float32)
        plain = values - np.float32(1)
        rounded = plain.astype(ml_dtypes.bfloat16).astype(np.float32)
        explains = rounded + np.float32(1) == values
    return np.where(explains, rounded, plain)


@dataclass(frozen=True, slots=True)
class Experts(EncodedRows):
    """Reads GPT-OSS's experts of one block in Hugging Face's layout. A row (index of dim 0) is an expert."""

    parts: tuple[GgufRows, ...]

    @property
    def row_alignment(self) -> int:
        """Number of rows, here experts, that must be read together: always 1."""
        return 1

    @property
    def ranges(self) -> tuple[tuple[Location, int, int], ...]:
        """Place of each stored tensor's data: path of the file, byte offset, length in bytes."""
        return tuple(found for part in self.parts for found in part.ranges)

    @property
    def encoding(self) -> Hashable:
        """All that determines the values besides the stored bytes: the `encoding` of each stored tensor."""
        return tuple(part.encoding for part in self.parts)

    def require_decoder(self) -> None:
        """Raise if a stored tensor is quantised and the gguf package, which decodes it, is not installed."""
        for part in self.parts:
            part.require_decoder()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of Hugging Face's tensor: (experts, in, outputs), or (experts, outputs) for a bias."""
        count, out, *rest = self.parts[0].info.shape
        return (count, *rest, len(self.parts) * out)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the elements when read: float32, unless all stored tensors have one unquantised dtype."""
        kinds = {part.info.kind.name for part in self.parts}
        return PLAIN.get(kinds.pop(), np.dtype(np.float32)) if len(kinds) == 1 else np.dtype(np.float32)

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return experts ``[start, stop)``, decoded, as a `shardload.manifest.RowReader` does."""
        values = [part.read_rows(start, stop).astype(self.dtype, copy=False) for part in self.parts]
        # (experts, out, parts, in) ─► (experts, out * parts, in) ─► (experts, in, out * parts); a bias has no "in".
        stacked = np.stack(values, axis=2)
        merged = stacked.reshape(stop - start, self.shape[-1], *stacked.shape[3:])
        return np.ascontiguousarray(np.moveaxis(merged, 1, -1))


def fused(header: GgufHeader, architecture: GgufArchitecture) -> Iterator[Tensor]:
    """Yield GPT-OSS's experts as in Hugging Face, a tensor per block and matrix; nothing for other architectures."""
    if not architecture.fused_experts:
        return
    stored = {info.name: info for info in header.tensors}
    blocks = sorted({int(found[1]) for name in stored if (found := re.match(r"blk\.(\d{1,6})\.ffn_\w+_exps\.", name))})
    for block in blocks:
        for name, parts in architecture.fused_experts.items():
            for suffix, ending in (("weight", ""), ("bias", "_bias")):
                names = [f"blk.{block}.{part}.{suffix}" for part in parts]
                if any(each in stored for each in names):
                    infos = _alike(names, stored)
                    reader = Experts(tuple(GgufRows(info, Undo.NOTHING) for info in infos))
                    is_known = all(info.kind.is_known for info in infos)
                    at = f"{architecture.block}.{block}.mlp.experts.{name}{ending}"
                    yield Tensor(at, reader.shape, reader.dtype, Decoded(reader if is_known else _unreadable(*infos)))


def _alike(names: list[str], stored: Mapping[str, TensorInfo]) -> list[TensorInfo]:
    found = [stored[name] for name in names if name in stored]
    shapes = {info.shape for info in found}
    rank = 3 if names[0].endswith(".weight") else 2
    if len(found) < len(names) or len(shapes) > 1 or len(found[0].shape) != rank:
        there = ", ".join(f"{info.name} {info.shape}" for info in found)
        raise SourceError(
            f"{found[0].path}: {' and '.join(names)} should have one shape of {plural(rank, 'dim')}, found {there}"
        )
    return found
