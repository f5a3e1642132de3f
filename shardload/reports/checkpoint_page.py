"""The tensors of a checkpoint as a page of HTML, and as lines for notebooks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardload.reports.aligned import aligned
from shardload.reports.markup import escaped
from shardload.reports.name_table import Column, NameTable, TableCell, TableEntry, Total
from shardload.reports.names import fold, printable, without_numbers
from shardload.reports.page import Chart, Page, largest_bars
from shardload.reports.variables_table import shape_text
from shardload.units import format_bytes, format_parameters, plural

_MOST_LINES = 40
"""Most lines of tensors that a notebook shows."""


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of a checkpoint, as a page shows it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    """Bytes of the tensor as read (decoded)."""
    stored_bytes: int
    """Bytes that it takes up in the files."""
    file: str
    """Names of the files that store it."""
    storage: str
    """How they store it, in words: ``offset 4096``."""


def checkpoint_page(
    title: str, tensors: Sequence[TensorRow], *, files: Mapping[str, int], facts: Sequence[tuple[str, str]]
) -> Page:
    """Return the page of a checkpoint; ``files`` are name → size in bytes, ``facts`` (label, text) of its summary."""
    dtypes = defaultdict[str, int](int)
    for tensor in tensors:
        dtypes[tensor.dtype] += tensor.bytes
    charts = [_sizes("Dtypes", dtypes, "Bytes of tensors, as read")] if dtypes else []
    if files:
        charts.append(_sizes("Files", files, f"{plural(len(files), 'file')}, {format_bytes(sum(files.values()))}"))
    return Page(title, tuple(charts), tuple(facts), _table(tensors, has_files=len(files) > 1))


def _sizes(heading: str, sizes: Mapping[str, int], caption: str) -> Chart:
    return Chart(heading, largest_bars(sizes), max(*sizes.values(), 1), caption)


def _table(tensors: Sequence[TensorRow], *, has_files: bool) -> NameTable:
    is_encoded = any(t.stored_bytes != t.bytes for t in tensors)
    columns = [
        Column("Dtype", "dtype", Total.SAME),
        Column("Shape", "shape", Total.SUM, lambda n: format_parameters(int(n))),
        Column("Bytes", "bar number", Total.SUM),
        *([Column("In files", "bytes stored-bytes number", Total.SUM)] if is_encoded else []),
        *([Column("File", "file", Total.SAME, is_numbered=True)] if has_files else []),
        Column("Stored", "storage", is_numbered=True),
    ]
    entries = []
    for t in tensors:
        cells = [
            TableCell(escaped(t.dtype)),
            TableCell(shape_text(t.shape), math.prod(t.shape)),
            TableCell(format_bytes(t.bytes), t.bytes),
            *([TableCell(format_bytes(t.stored_bytes), t.stored_bytes)] if is_encoded else []),
            *([TableCell(escaped(t.file))] if has_files else []),
            TableCell(escaped(t.storage)),
        ]
        entries.append(TableEntry(t.name, tuple(cells)))
    return NameTable("Tensors", "tensor", tuple(columns), tuple(entries), sized=2)


def checkpoint_lines(tensors: Sequence[TensorRow]) -> Iterator[str]:
    """Yield a line for tensors that differ only in the numbers of their names, with their dtype, shape and bytes."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[TensorRow]] = {}
    for t in tensors:
        groups.setdefault((without_numbers(t.name), t.dtype, t.shape), []).append(t)
    shown = list(groups.values())[:_MOST_LINES]
    rows = []
    for same in shown:
        first, n_bytes = same[0], sum(t.bytes for t in same)
        name = str(fold(t.name for t in same)[0])
        rows.append((name, printable(first.dtype), shape_text(first.shape), format_bytes(n_bytes)))
    yield from aligned(rows).splitlines()
    if (rest := len(tensors) - sum(map(len, shown))) > 0:
        yield f"… and {plural(rest, 'tensor')} more"
