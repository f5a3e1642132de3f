"""The variables of a model as a table of a page: the dims of each, what splits them, bytes, and why ▸ details."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardload.reports.facts import VariableUse
from shardload.reports.markup import AXIS_COLOURS, escaped
from shardload.reports.name_table import Column, NameTable, TableCell, TableEntry, Total
from shardload.reports.names import TIMES
from shardload.units import format_bytes, format_parameters


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: a variable, the reason for its layout, and what this opens to."""

    variable: VariableUse
    reason: str
    """Why the variable has its layout, in a line."""
    details: tuple[str, ...] = ()
    """Sentences on the variable, one per line."""
    decisions: tuple[str, ...] = ()
    """Sentences on decisions that the variable has in common with others; a search leaves them out."""
    stored: tuple[str, ...] = ()
    """Axes that split the variable in storage only: it is gathered for use."""


def variables_table(axes: Mapping[str, int], rows: Sequence[Row]) -> NameTable:
    """Return the table of variables; ``axes`` are mesh axis → number of devices along it, in the order of the mesh."""
    colours = {axis: i % len(AXIS_COLOURS) for i, axis in enumerate(axes)}
    has_dtypes = any(row.variable.dtype for row in rows)
    columns = [
        Column("Dtype", "dtype", Total.SAME),
        Column("Dims and splits", "dims", Total.SUM, lambda n: format_parameters(int(n))),
        Column("Bytes", "bytes number", Total.SUM),
        Column("On each device", "each number", Total.SUM),
        Column("Why", "why", is_numbered=True),
    ]
    entries = (TableEntry(row.variable.name, tuple(_cells(row, axes, colours))[not has_dtypes :]) for row in rows)
    return NameTable(
        "Variables",
        "variable",
        tuple(columns[not has_dtypes :]),
        tuple(entries),
        sized=3 if has_dtypes else 2,
        sum_text=" on each device",
        legend=_legend(axes, colours, has_stored=any(row.stored for row in rows)),
    )


def _cells(row: Row, axes: Mapping[str, int], colours: Mapping[str, int]) -> Iterator[TableCell]:
    v = row.variable
    yield TableCell(escaped(v.dtype))
    yield TableCell(_dims(row, axes, colours), math.prod(v.shape))
    yield TableCell(format_bytes(v.bytes), v.bytes)
    yield TableCell(format_bytes(v.device_bytes), v.device_bytes)
    yield TableCell(_why(row))


def _legend(axes: Mapping[str, int], colours: Mapping[str, int], *, has_stored: bool) -> str:
    chips = (f'<span class="axis a{i}">{escaped(axis)} ÷{axes[axis]}</span>' for axis, i in colours.items())
    stored = ' <span class="axis plain stored">dashed</span> stored split, gathered for use'
    return f"Axes of the mesh: {' '.join(chips)}{stored if has_stored else ''}"


def _dims(row: Row, axes: Mapping[str, int], colours: Mapping[str, int]) -> str:
    """Return the shape of a variable, with a chip in each dim for each axis that splits it."""
    if not row.variable.shape:
        return "scalar"
    dims = []
    for length, splits in zip(row.variable.shape, row.variable.spec, strict=True):
        chips = ""
        for axis in splits:
            stored = ' stored" title="stored split, gathered for use' if axis in row.stored else ""
            parts = f"÷{axes[axis]} " if axis in axes else ""
            chips += f' <span class="axis a{colours.get(axis, 0)}{stored}">{parts}{escaped(axis)}</span>'
        dims.append(f'<span class="dim">{length}{chips}</span>')
    return f" {TIMES} ".join(dims)


def _why(row: Row) -> str:
    v = row.variable
    layout = ", ".join("+".join(axes) or "-" for axes in v.spec)
    whole = f"layout ({layout}): each device has the whole variable"
    part = f"layout ({layout}): each device has {shape_text(v.shard_shape)} of {shape_text(v.shape)}"
    details = (whole if v.shape == v.shard_shape else part, *row.details)
    lines = "".join(f"<li>{escaped(text)}</li>" for text in details)
    lines += "".join(f'<li class="decision">{escaped(text)}</li>' for text in row.decisions)
    return f"<details><summary>{escaped(row.reason) or 'layout'}</summary><ul>{lines}</ul></details>"


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape for people, with multiplication signs; ``scalar`` for that without dims."""
    return f" {TIMES} ".join(map(str, shape)) or "scalar"
