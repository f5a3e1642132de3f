"""A table of things with names, such as tensors, for a page: a tree that folds, or a list, to sort and to search.

    Tensor                     Dtype      Shape          Bytes
    ▾ model.       290 tensors bfloat16   2.6 B          4.9 GiB  ▇▇▇▇▇▇▇▇
        embed_tokens.weight    bfloat16   256000 × 2304  1.1 GiB  ▇▇
      ▸ layers.    288 tensors bfloat16   2.0 B          3.8 GiB  ▇▇▇▇▇▇▇▇

Rows come in the order of the tree, each with its depth. Without the script, which folds, sorts and searches, rows of
groups are hidden, and all others have their full name. Of more than `MOST_ROWS` things, those that differ only in
numbers share a row, so that a page of any checkpoint can be opened; it says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from shardload.reports.markup import bar_svg, escaped
from shardload.reports.name_tree import Group, name_tree
from shardload.reports.names import TIMES, fold, without_numbers
from shardload.units import format_bytes, plural

MOST_ROWS = 4000
"""Most tensors, or variables, on one page: browsers take seconds for more."""


class Total(Enum):
    """What a group has in a column."""

    NONE = auto()
    """Nothing."""
    SUM = auto()
    """The sum of the values in it."""
    MOST = auto()
    """The largest value in it."""
    SAME = auto()
    """What all in it have; nothing if they differ."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column after that of the names."""

    head: str
    kind: str
    """Class of its cells, for the style."""
    total: Total = Total.NONE
    show: Callable[[float], str] = lambda value: format_bytes(int(value))
    """Function that returns the text of a sum, or of a largest value."""
    is_numbered: bool = False
    """Whether its text has numbers in which things that share a row may differ, such as names of files."""

    @property
    def is_number(self) -> bool:
        """Whether the column is sorted by values."""
        return self.total in (Total.SUM, Total.MOST)


@dataclass(frozen=True, slots=True)
class TableCell:
    """A cell of a row; ``value`` is what it is sorted by, if that is a number."""

    html: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class TableEntry:
    """One row: a name, and a cell for each column."""

    name: str
    cells: tuple[TableCell, ...]
    count: int = 1
    """Number of things that share the row; they differ only in numbers, for which the name has ``*``."""


@dataclass(frozen=True, slots=True)
class NameTable:
    """What a table shows."""

    heading: str
    """What the entries are, in the plural: ``Tensors``."""
    noun: str
    """The same in the singular: ``tensor``."""
    columns: tuple[Column, ...]
    entries: tuple[TableEntry, ...]
    sized: int
    """Index of the column that has bars, and that is added up for what a search finds."""
    sum_text: str | None = ""
    """What follows the sum: `` on each device``; ``None`` if nothing is to be added up."""
    legend: str = ""
    """HTML that explains the cells."""

    def html(self) -> Iterator[str]:
        """Yield the lines of the table as a section of a page that has `page_style` and `page_script`."""
        entries, note = self._shown()
        key, count = escaped(self.heading.lower()), sum(entry.count for entry in entries)
        yield f'<section aria-labelledby="{key}">\n<h2 id="{key}">{escaped(self.heading)}</h2>'
        yield from (f"<p>{text}</p>" for text in (self.legend, escaped(note)) if text)
        # Shown by the script, as it is of no use without.
        yield '<p id="search" hidden><label>Search <input type="search" autocomplete="off" spellcheck="false"></label>'
        yield '<label class="check"><input type="checkbox" checked> As a tree</label>'
        yield f'<button type="button">Open all</button> <span role="status">{plural(count, self.noun)}</span></p>'
        yield f'<div class="scroll" role="region" aria-label="Table of {key}" tabindex="0">'
        sums = "" if self.sum_text is None else f' data-sum="{escaped(self.sum_text)}"'
        yield f'<table class="names" data-noun="{key}"{sums}>'
        yield f"<thead><tr>{''.join(self._heads())}</tr></thead>\n<tbody>"
        tree = name_tree((entry.name, entry, 0) for entry in entries)
        most = max((self._size(entry) for entry in entries), default=0) or 1
        yield from self._rows(tree, 0, most)
        yield "</tbody>\n</table>\n</div>\n</section>"

    def _shown(self) -> tuple[Sequence[TableEntry], str]:
        """Return the rows to show, and a sentence on what they leave out."""
        if len(self.entries) <= MOST_ROWS:
            return self.entries, ""
        all_of = plural(len(self.entries), self.noun)
        rows = list(_folded(self.entries, self.columns))
        note = f"{all_of} in {plural(len(rows), 'row')}: those that differ only in numbers share a row."
        if len(rows) <= MOST_ROWS:
            return rows, note
        if len(rows) == len(self.entries):
            note = f"{all_of}."
        largest = sorted(range(len(rows)), key=lambda i: self._size(rows[i]), reverse=True)[:MOST_ROWS]
        cut = f"{note} Only the largest {MOST_ROWS:,} rows are listed; --json lists everything."
        return [rows[i] for i in sorted(largest)], cut

    def _size(self, entry: TableEntry) -> float:
        return entry.cells[self.sized].value or 0

    def _heads(self) -> Iterator[str]:
        yield f'<th scope="col" class="name">{escaped(self.noun.capitalize())}</th>'
        for column in self.columns:
            number = " data-number" if column.is_number else ""
            yield f'<th scope="col" class="{column.kind}"{number}>{escaped(column.head)}</th>'

    def _rows(self, group: Group[TableEntry], depth: int, most: float) -> Iterator[str]:
        for label, entry in group.items:
            yield self._row(entry, label, depth, most)
        for inner in (each.joined() for each in group.groups.values()):
            if inner.n_items == 1:
                ((label, entry),) = inner.items
                yield self._row(entry, inner.label + label, depth, most)
                continue
            within = list(_within(inner))
            cells = "".join(self._cells(self._totals(within), most))
            count = sum(entry.count for entry in within)
            yield (
                f'<tr class="group" data-depth="{depth}" hidden><th class="name" scope="row"><button type="button" '
                f'aria-expanded="false">{_name(inner.label)}</button> <span class="soft">'
                f"{plural(count, self.noun)}</span></th>{cells}</tr>"
            )
            yield from self._rows(inner, depth + 1, most)

    def _row(self, entry: TableEntry, label: str, depth: int, most: float) -> str:
        above = entry.name[: len(entry.name) - len(label)]
        name = f'<span class="above">{_name(above)}</span>{_name(label)}' if above else _name(label)
        counted = f' data-count="{entry.count}"' if entry.count > 1 else ""
        times = f' <span class="soft">{TIMES}{entry.count:,}</span>' if entry.count > 1 else ""
        cells = "".join(self._cells(entry.cells, most))
        return f'<tr data-depth="{depth}"{counted}><th scope="row">{name}{times}</th>{cells}</tr>'

    def _cells(self, cells: Iterable[TableCell], most: float) -> Iterator[str]:
        for i, (column, cell) in enumerate(zip(self.columns, cells, strict=True)):
            value = "" if cell.value is None else f' data-value="{_script_number(cell.value)}"'
            bar = bar_svg((cell.value or 0,), most) if i == self.sized else ""
            yield f'<td class="{column.kind}"{value}>{cell.html}{bar}</td>'

    def _totals(self, entries: Sequence[TableEntry]) -> Iterator[TableCell]:
        for i, column in enumerate(self.columns):
            cells = [entry.cells[i] for entry in entries]
            values = [cell.value for cell in cells if cell.value is not None]
            match column.total:
                case Total.SUM | Total.MOST if values:
                    total = sum(values) if column.total is Total.SUM else max(values, key=rank)
                    yield TableCell(escaped(column.show(total)), total)
                case Total.SAME if len({cell.html for cell in cells}) == 1:
                    yield TableCell(cells[0].html)
                case _:
                    yield TableCell("")


def rank(value: float) -> tuple[bool, float]:
    """Return what to sort numbers by: NaN is above infinity, as in the script."""
    return math.isnan(value), value


def _within(group: Group[TableEntry]) -> Iterator[TableEntry]:
    yield from (entry for _, entry in group.items)
    for inner in group.groups.values():
        yield from _within(inner)


def _folded(entries: Iterable[TableEntry], columns: Sequence[Column]) -> Iterator[TableEntry]:
    """Yield the entries; those that differ only in numbers of their names, and of numbered cells, become one."""
    groups: dict[tuple[str, ...], list[TableEntry]] = {}
    for entry in entries:
        cells = zip(columns, entry.cells, strict=True)
        texts = (without_numbers(cell.html) if column.is_numbered else cell.html for column, cell in cells)
        groups.setdefault((without_numbers(entry.name), *texts), []).append(entry)
    for same in groups.values():
        if len(same) == 1:
            yield same[0]
            continue
        columned = zip(columns, zip(*(entry.cells for entry in same), strict=True), strict=True)
        merged = tuple(_merged(column, cells) for column, cells in columned)
        yield replace(same[0], name=fold(entry.name for entry in same)[0].pattern, cells=merged, count=len(same))


def _merged(column: Column, cells: Sequence[TableCell]) -> TableCell:
    first = cells[0]
    if column.is_numbered:
        return replace(first, html=fold(cell.html for cell in cells)[0].pattern)
    if column.total is not Total.SUM or first.value is None:
        return first
    total = sum(cell.value or 0 for cell in cells)
    is_value = first.html == escaped(column.show(first.value))
    return TableCell(escaped(column.show(total)) if is_value else first.html, total)


def _script_number(value: float) -> str:
    """Return a number as JavaScript's ``Number`` reads it."""
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(str(value), str(value))


def _name(text: str) -> str:
    """Return part of a name, with places where a narrow screen may break it."""
    return re.sub(r"([./])", r"\1<wbr>", escaped(text))
