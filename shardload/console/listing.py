"""Lists for people and for `grep` and `cut`: one line per entry, nothing truncated, columns aligned.

On a terminal that is too narrow for the columns, an entry takes several lines, broken between cells.

name                        shape         dtype     bytes      file               storage
model.embed_tokens.weight   262144x640    bfloat16  320.0 MiB  model.safetensors  offset 4096
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from shardload.manifest import Chunked, Decoded, Extent, Manifest, Packed, Tensor, UnreadableRows
from shardload.reports import printable
from shardload.stores.location import Location
from shardload.units import format_bytes, format_count, plural


def _selected(manifest: Manifest, match: str | None) -> list[Tensor]:
    return [t for t in manifest.tensors.values() if match is None or fnmatchcase(t.name, match)]


def as_text(manifest: Manifest, *, match: str | None = None, width: int | None = None) -> str:
    """Return what `shardload inspect` prints: a summary, then a line per tensor. ``width``: the terminal's columns."""
    tensors = _selected(manifest, match)
    rows = [("name", "shape", "dtype", "bytes", "file", "storage"), *map(_row, tensors)]
    total = len(manifest.tensors)
    shown = plural(total, "tensor") if len(tensors) == total else f"{len(tensors):,} of {plural(total, 'tensor')}"
    elements, size = sum(t.size for t in tensors), sum(t.nbytes for t in tensors)
    sizes = f"{format_count(elements)} parameters, {format_bytes(size)}"
    left_out = f"; {partial(manifest.n_left_out)}" if manifest.n_left_out else ""
    why = f"\nNo model can be built from it: {printable(str(found))}" if (found := manifest.undescribed) else ""
    summary = f"{printable(manifest.source)} ({manifest.format}): {shown}, {sizes}{left_out}{why}"
    return f"{summary}\n\n" + aligned(rows, width=width)


def partial(left_out: int) -> str:
    """Return words for a training step saved without ``left_out`` of its weights: ``partial: without 3 weights``."""
    return f"partial: without {plural(left_out, 'weight')}"


def _stored(tensor: Tensor) -> tuple[Sequence[Location], str, dict[str, Any]]:
    """Return the files that store a tensor, and how they store it: once in words, once as an object for JSON."""
    match tensor.storage:
        case Extent(path, offset):
            return (path,), f"offset {offset}", {"storage": "extent", "offset": offset}
        case Packed(path):
            return (path,), f"decoded from {format_bytes(tensor.stored_bytes)}", {"storage": "decoded", "offset": None}
        case Decoded(UnreadableRows(stored_bytes=n, why=why, is_size_known=is_known) as reader):
            text = f"{'' if is_known else 'at most '}{format_bytes(n)}, unreadable: {why}"
            return reader.paths, text, {"storage": "unreadable", "offset": None, "why": why}
        case Decoded(reader):
            text = f"decoded from {format_bytes(reader.stored_bytes)}"
            return reader.paths, text, {"storage": "decoded", "offset": None}
        case Chunked(chunk_shape, extents) as grid:
            text = f"{plural(len(extents), 'chunk')} of {'x'.join(map(str, chunk_shape))}"
            chunks = {"chunk_shape": list(chunk_shape), "chunks": len(extents)}
            return grid.paths, text, {"storage": "chunked", "offset": None, **chunks}


def _row(tensor: Tensor) -> tuple[str, ...]:
    files, storage, _ = _stored(tensor)
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    file = printable(",".join(file.name for file in files))  # one that is decoded or in chunks may be in several
    return printable(tensor.name), shape, str(tensor.dtype), format_bytes(tensor.nbytes), file, storage


def aligned(table: Iterable[Iterable[str]], *, width: int | None = None) -> str:
    """Format rows as lines, with cells padded to the width of their column.

    ``width``: columns of the terminal; ``None`` for lines of any length, which `cut` and `grep` need.
    """
    rows = [tuple(row) for row in table]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    if width is not None and max(map(len, lines), default=0) > width:
        lines = [line for row in rows for line in _stacked(row, width)]
    return "".join(f"{line}\n" for line in lines)


def _stacked(row: tuple[str, ...], width: int) -> list[str]:
    """Return a row as lines for a narrow terminal of ``width`` columns: the first cell, then the others, indented."""
    lines = [row[0]]
    for cell in row[1:]:
        if len(lines) > 1 and len(lines[-1]) + 2 + len(cell) <= width:
            lines[-1] += f"  {cell}"
        else:
            lines.append(f"    {cell}")
    return lines


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
    tensors = _selected(manifest, match)
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
    files, _, storage = _stored(tensor)
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "bytes": tensor.nbytes,
        "stored_bytes": tensor.stored_bytes,
        "storage": storage.pop("storage"),
        "files": list(map(str, files)),
        **storage,
    }


def time_ago(seconds: float) -> str:
    """Return how long ago something was, in its largest unit: ``3 d``; 0 s if a clock is ahead."""
    whole = max(0, int(seconds))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if whole >= length:
            return f"{whole // length} {unit}"
    return f"{whole} s"
