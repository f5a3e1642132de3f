"""Hugging Face safetensors: shards of limited size and the index that lists them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardload.errors import UnsupportedError
from shardload.loaders.file_pieces import FilePiece, TensorPlace, Wanted, grouped
from shardload.loaders.safetensors import DTYPES

SHARD_BYTES = 5_000_000_000
"""The long-time default of ``transformers``."""
PYTORCH = {"format": "pt"}
"""Tensors have the names and shapes of PyTorch's modules; transformers 4 refuses files without a format."""
_CODES = {dtype.name: code for code, dtype in DTYPES.items()}
"""Name of a dtype in NumPy → its name in safetensors."""


def write_skeleton(
    folder: Path,
    tensors: Sequence[Wanted],
    *,
    shard_bytes: int = SHARD_BYTES,
    metadata: Mapping[str, str] = PYTORCH,
) -> tuple[TensorPlace, ...]:
    """Make the shards with their headers, and an index for several; return where the values belong.

    Args:
        folder: The checkpoint folder.
        tensors: The tensors, in the order of the files.
        shard_bytes: Most bytes of tensors in one file; a larger tensor gets its own.
        metadata: What each header says about the file.

    Raises:
        UnsupportedError: When a dtype has no name in safetensors.
    """
    groups = grouped(tensors, shard_bytes)
    names = [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else ["model.safetensors"]
    places = [
        place for name, group in zip(names, groups, strict=True) for place in _write(folder, name, group, metadata)
    ]
    if len(groups) > 1:
        weight_map = {t.name: name for name, group in zip(names, groups, strict=True) for t in group}
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return tuple(places)


def _write(folder: Path, name: str, tensors: Sequence[Wanted], metadata: Mapping[str, str]) -> list[TensorPlace]:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    at, starts = 0, []
    for tensor in tensors:
        if tensor.dtype.name not in _CODES:
            raise UnsupportedError(
                f"Cannot write tensor {tensor.name!r} to safetensors, which has no {tensor.dtype}. Choose another "
                "--dtype, or --to orbax"
            )
        starts.append(at)
        code, end = _CODES[tensor.dtype.name], at + tensor.nbytes
        entries[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Padded as the safetensors library does, so that the data begins at a multiple of 8.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    with (folder / name).open("wb") as file:
        file.write(header)
        file.truncate(len(header) + at)  # sparse until the values are copied
    pairs = zip(tensors, starts, strict=True)
    return [TensorPlace(t.name, (FilePiece(name, len(header) + start, 0, t.size),)) for t, start in pairs]
