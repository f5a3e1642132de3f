"""What differs between two checkpoints as a page of HTML."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from shardload.reports.markup import escaped
from shardload.reports.name_table import Column, NameTable, TableCell, TableEntry, Total, rank
from shardload.reports.names import shortened
from shardload.reports.page import MOST_LABEL, Bar, Chart, Page
from shardload.units import plural

_MOST_BARS = 10
"""Most tensors with the largest differences that have a bar."""


class _Differing(Protocol):
    """A tensor that differs, as `shardload.comparing.TensorDifference` describes it."""

    @property
    def name(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def first(self) -> str: ...
    @property
    def second(self) -> str: ...
    @property
    def elements(self) -> int: ...
    @property
    def largest(self) -> float | None: ...
    @property
    def why(self) -> str: ...


def comparison_page(
    title: str, differences: Sequence[_Differing], *, equal: int, noun: str, facts: Sequence[tuple[str, str]]
) -> Page:
    """Return the page of a comparison; ``noun``: what is compared, ``facts``: (label, text) of its summary."""
    counts = {"equal": equal, **Counter(d.what for d in differences)}
    bars = tuple(Bar(what, (n,), plural(n, noun)) for what, n in counts.items())
    charts = [Chart("What differs", bars, max(*counts.values(), 1), f"{plural(sum(counts.values()), noun)} in all")]
    if sizes := [(d.name, d.largest) for d in differences if d.largest]:
        charts.append(_largest_differences(sizes))
    return Page(title, tuple(charts), tuple(facts), _table(differences) if differences else None)


def _largest_differences(sizes: Sequence[tuple[str, float]]) -> Chart:
    """Return the chart of the largest differences, given with the names of their tensors: NaN, then infinity first."""
    largest = sorted(sizes, key=lambda item: rank(item[1]), reverse=True)[:_MOST_BARS]
    finite = [size for _, size in largest if math.isfinite(size)]
    full, caption = max(finite, default=1.0), "Absolute difference between two values"
    if len(finite) < len(largest):
        caption += "; bars of nan and inf are full"
    parts = (size if math.isfinite(size) else full for _, size in largest)
    bars = (
        Bar(shortened(name, MOST_LABEL), (part,), f"{size:.4g}")
        for (name, size), part in zip(largest, parts, strict=True)
    )
    return Chart("Largest differences", tuple(bars), full, caption)


def _table(differences: Sequence[_Differing]) -> NameTable:
    has_why = any(d.why for d in differences)
    columns = [
        Column("What", "what", Total.SAME),
        Column("First", "first", Total.SAME),
        Column("Second", "second", Total.SAME),
        Column("Elements", "bar elements number", Total.SUM, lambda n: f"{int(n):,}"),
        Column("Largest difference", "largest number", Total.MOST, lambda n: f"{n:.4g}"),
        *([Column("Why", "why", is_numbered=True)] if has_why else []),
    ]
    entries = tuple(TableEntry(d.name, _cells(d, has_why=has_why)) for d in differences)
    return NameTable("Differences", "difference", tuple(columns), entries, sized=3, sum_text=None)


def _cells(d: _Differing, *, has_why: bool) -> tuple[TableCell, ...]:
    largest = "" if d.largest is None else f"{d.largest:.4g}"
    return (
        TableCell(escaped(d.what)),
        TableCell(escaped(d.first)),
        TableCell(escaped(d.second)),
        TableCell(f"{d.elements:,}", d.elements),
        TableCell(largest, d.largest),
        *([TableCell(escaped(d.why))] if has_why else []),
    )
