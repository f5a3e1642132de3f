"""Safetensors files by hand: the header first, the bytes streamed after it, one shard at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardload.synth.tensors import Spec

_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its name, its header, and which tensors follow it."""

    name: str
    header: bytes
    specs: tuple[Spec, ...]


def layout_shards(specs: Sequence[Spec], *, dtype: str, item_bytes: int, shard_bytes: int) -> list[Shard]:
    """Cut the tensors into files of at most ``shard_bytes``, as ``transformers`` does; a larger one stands alone."""
    groups: list[list[Spec]] = [[]]
    filled = 0
    for spec in specs:
        size = math.prod(spec.shape) * item_bytes
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += size
    if len(groups) == 1:
        return [Shard("model.safetensors", _header(groups[0], dtype, item_bytes), tuple(groups[0]))]
    return [
        Shard(f"model-{i:05}-of-{len(groups):05}.safetensors", _header(group, dtype, item_bytes), tuple(group))
        for i, group in enumerate(groups, 1)
    ]


def index(shards: Sequence[Shard], *, total_bytes: int) -> str:
    """Content of ``model.safetensors.index.json``."""
    weight_map = {spec.name: shard.name for shard in shards for spec in shard.specs}
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2)


def _header(specs: Sequence[Spec], dtype: str, item_bytes: int) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec in specs:
        end = at + math.prod(spec.shape) * item_bytes
        entries[spec.name] = {"dtype": _CODES[dtype], "shape": list(spec.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
