"""Fused experts (GPT-OSS): GGUF stores gate and up apart; Hugging Face interleaves them, and transposes all matrices.

ffn_gate_exps, ffn_up_exps   (experts, out, in)   ─►   gate_up_proj   (experts, in, g0 u0 g1 u1 …)
ffn_down_exps                (experts, out, in)   ─►   down_proj      (experts, in, out)
….bias                       (experts, out)       ─►   …_bias         (experts, out)
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.errors import SourceError
from shardload.families.parts.gguf import GgufArchitecture, Undo
from shardload.loaders.gguf_header import GgufHeader, TensorInfo
from shardload.loaders.gguf_rows import PLAIN, GgufRows, unreadable
from shardload.manifest import Decoded, EncodedRows, Tensor
from shardload.stores.location import Location
from shardload.units import plural


@dataclass(frozen=True, slots=True)
class Experts(EncodedRows):
    """Experts whose outputs interleave those of several tensors; a row is an expert."""

    parts: tuple[GgufRows, ...]

    @property
    def paths(self) -> tuple[Location, ...]:
        """The files."""
        return tuple(dict.fromkeys(path for part in self.parts for path in part.paths))

    @property
    def stored_bytes(self) -> int:
        """Bytes in the files."""
        return sum(part.stored_bytes for part in self.parts)

    @property
    def row_alignment(self) -> int:
        """One expert."""
        return 1

    @property
    def ranges(self) -> tuple[tuple[Location, int, int], ...]:
        """Those of the parts."""
        return tuple(found for part in self.parts for found in part.ranges)

    @property
    def encoding(self) -> Hashable:
        """Those of the parts."""
        return tuple(part.encoding for part in self.parts)

    def require_decoder(self) -> None:
        """Raise unless all parts can be decoded."""
        for part in self.parts:
            part.require_decoder()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of Hugging Face's tensor: (experts, in, outputs), or (experts, outputs) for a bias."""
        count, out, *rest = self.parts[0].info.shape
        return (count, *rest, len(self.parts) * out)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The stored dtype if all parts have the same unquantised one, else float32, to which blocks decode."""
        kinds = {part.info.kind.name for part in self.parts}
        return PLAIN.get(kinds.pop(), np.dtype(np.float32)) if len(kinds) == 1 else np.dtype(np.float32)

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Read experts ``[start, stop)``; see `shardload.manifest.RowReader`."""
        values = [part.read_rows(start, stop).astype(self.dtype, copy=False) for part in self.parts]
        # (experts, out, parts, in) ─► (experts, out * parts, in) ─► (experts, in, out * parts); a bias has no "in".
        stacked = np.stack(values, axis=2)
        merged = stacked.reshape(stop - start, self.shape[-1], *stacked.shape[3:])
        return np.ascontiguousarray(np.moveaxis(merged, 1, -1))


def fused(header: GgufHeader, architecture: GgufArchitecture) -> Iterator[Tensor]:
    """Yield the fused experts of every block under Hugging Face's names.

    Raises:
        SourceError: When the shapes of gate and up differ, or one of them is missing.
    """
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
                    yield Tensor(at, reader.shape, reader.dtype, Decoded(reader if is_known else unreadable(*infos)))


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
