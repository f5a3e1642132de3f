"""Lists for people and for `grep` and `cut`: one line per entry, nothing truncated, columns aligned.

On a terminal that is too narrow for the columns, an entry takes several lines, broken between cells.

name                        shape         dtype     bytes      file               storage
model.embed_tokens.weight   262144x640    bfloat16  320.0 MiB  model.safetensors  offset 4096
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardload.manifest import Chunked, Decoded, Extent, Manifest, Packed, Tensor, UnreadableRows, partial_text
from shardload.reports import printable
from shardload.reports.aligned import aligned
from shardload.units import format_bytes, format_parameters, plural


def as_text(manifest: Manifest, *, match: str | None = None, width: int | None = None) -> str:
    """Return what `shardload inspect` prints: a summary, then a line per tensor. ``width``: the terminal's columns."""
    tensors = manifest.matching(match)
    rows = [("name", "shape", "dtype", "bytes", "file", "storage"), *map(_row, tensors)]
    total = len(manifest.tensors)
    shown = plural(total, "tensor") if len(tensors) == total else f"{len(tensors):,} of {plural(total, 'tensor')}"
    elements, size = sum(t.size for t in tensors), sum(t.nbytes for t in tensors)
    sizes = f"{format_parameters(elements)}, {format_bytes(size)}"
    left_out = f"; {partial_text(manifest.n_left_out)}" if manifest.n_left_out else ""
    why = f"\nNo model can be built from it: {printable(str(found))}" if (found := manifest.undescribed) else ""
    summary = f"{printable(manifest.source)} ({manifest.format}): {shown}, {sizes}{left_out}{why}"
    return f"{summary}\n\n" + aligned(rows, width=width)


def _stored(tensor: Tensor) -> dict[str, Any]:
    """Return how the files store a tensor, as an object for JSON."""
    match tensor.storage:
        case Extent(_, offset):
            return {"storage": "extent", "offset": offset}
        case Decoded(UnreadableRows(why=why)):
            return {"storage": "unreadable", "offset": None, "why": why}
        case Packed() | Decoded():
            return {"storage": "decoded", "offset": None}
        case Chunked(chunk_shape, extents):
            return {"storage": "chunked", "offset": None, "chunk_shape": list(chunk_shape), "chunks": len(extents)}


def _row(tensor: Tensor) -> tuple[str, ...]:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    file = printable(",".join(file.name for file in tensor.files))  # one that is decoded or in chunks may be in several
    return printable(tensor.name), shape, str(tensor.dtype), format_bytes(tensor.nbytes), file, tensor.storage_text


def of_processes(shares: Sequence[Any]) -> str:
    """Return a table of what each process of a load read, in bytes and seconds; empty if one process loaded alone."""
    if not shares:
        return ""
    rows = [
        (str(s.process), format_bytes(s.bytes.needed), format_bytes(s.bytes.read), f"{s.total_s:.2f} s") for s in shares
    ]
    return "\n" + aligned([("process", "needed", "read", "time"), *rows])


def as_json(manifest: Manifest, *, match: str | None = None) -> dict[str, Any]:
    """Return what ``shardload inspect --json`` prints: facts about the checkpoint, and one dict per tensor."""
    tensors = manifest.matching(match)
    return {
        "source": manifest.source,
        "format": manifest.format,
        "files": {str(file): size for file, size in manifest.files.items()},
        "parameters": sum(t.size for t in tensors),
        "bytes": sum(t.nbytes for t in tensors),
        "left_out": manifest.n_left_out,
        "undescribed": None if manifest.undescribed is None else str(manifest.undescribed),
        "tensors": [_facts(t) for t in tensors],
    }


def _facts(tensor: Tensor) -> dict[str, Any]:
    storage = _stored(tensor)
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "bytes": tensor.nbytes,
        "stored_bytes": tensor.stored_bytes,
        "storage": storage.pop("storage"),
        "files": list(map(str, tensor.files)),
        **storage,
    }
