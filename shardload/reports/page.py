"""A page of HTML that needs no other file: devices as bars, and a tree of tensors to sort and search.

    title
    charts    Devices   cpu 0   model=0  ▇▇▇▇▇▇▇▇▇  1.2 GiB      many equal devices share one bar
    facts     Layout    190 variables sharded, 46 replicated
    table     name  dtype  dims and what splits them  bytes  on each device  reason ▸ details

The style and the script are in the page; its Content-Security-Policy allows these two by their hashes, and nothing
else, so a page opens no connection. Without the script, the tree is a list that cannot be sorted or searched. Every
text that comes from a checkpoint is escaped, with control characters as in the printed report.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from shardload.reports.markup import AXIS_COLOURS, PART_COLOURS, bar_svg, escaped, escaped_lines
from shardload.reports.name_table import NameTable
from shardload.reports.names import TIMES, shortened
from shardload.units import format_bytes

_MAX_BARS = 16
"""Most devices that have a bar each. If there are more, equal ones share one."""
MOST_LABEL = 48
"""Most characters of a name beside a bar."""

BarParts = tuple[float, ...]
"""Lengths of the parts of a bar, in the unit of its chart."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a chart."""

    label: str
    parts: BarParts
    text: str
    """The value of the bar, for people."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Bars below each other."""

    heading: str
    bars: tuple[Bar, ...]
    full: float
    """Value that a bar of the full width has."""
    caption: str = ""
    legend: tuple[str, ...] = ()
    """What the parts of the bars are, in their order; empty if bars have one part."""
    limit: float | None = None
    """Value at which all bars have a mark."""


@dataclass(frozen=True, slots=True)
class Page:
    """What a page shows."""

    title: str
    charts: tuple[Chart, ...]
    facts: tuple[tuple[str, str], ...]
    """(label, text) of what is no chart and no table."""
    table: NameTable | None

    def html(self) -> str:
        """Return the page as the text of an HTML file."""
        style, script = page_style(), page_script()
        policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
        parts = [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f"<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}; base-uri 'none'; form-action 'none'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escaped(self.title)}</title>\n<style>{style}</style>\n</head>\n<body>",
            f"<main>\n<h1>{escaped(self.title)}</h1>",
            *self.sections(),
            f"</main>\n<script>{script}</script>\n</body>\n</html>",
        ]
        return "\n".join(parts) + "\n"

    def sections(self) -> Iterator[str]:
        """Yield the HTML of charts, facts and the table, for pages that have `page_style` and `page_script`."""
        if self.charts:
            yield from ('<div class="charts">', *map(_chart, self.charts), "</div>")
        yield from _facts(self.facts)
        if self.table is not None:
            yield from self.table.html()


def merge_equal(bars: Iterable[tuple[str, str, BarParts]], text: Callable[[BarParts], str]) -> tuple[Bar, ...]:
    """Return bars, each given as (kind, label, parts); of more than 16, those of the same kind and parts become one."""
    found = tuple(bars)
    if len(found) <= _MAX_BARS:
        return tuple(Bar(label, parts, text(parts)) for _, label, parts in found)
    counts = Counter((kind, parts) for kind, _, parts in found)
    return tuple(
        Bar(f"{kind} {TIMES} {count:,}", parts, f"{text(parts)} each") for (kind, parts), count in counts.items()
    )


def largest_bars(sizes: Mapping[str, int]) -> tuple[Bar, ...]:
    """Return a bar for each number of bytes, the largest first; of more than 16, all after the first 15 share one."""
    ranked = sorted(sizes.items(), key=lambda item: item[1], reverse=True)
    most = _MAX_BARS if len(ranked) <= _MAX_BARS else _MAX_BARS - 1
    bars = [Bar(shortened(name, MOST_LABEL), (size,), format_bytes(size)) for name, size in ranked[:most]]
    if rest := [size for _, size in ranked[most:]]:
        bars.append(
            Bar(f"{len(rest):,} others", (sum(rest) / len(rest),), f"{format_bytes(sum(rest) // len(rest))} on average")
        )
    return tuple(bars)


def mesh_positions(axes: Mapping[str, int]) -> Iterator[str]:
    """Yield the positions of a mesh in row-major order: ``data=0, model=3``."""
    for indices in itertools.product(*map(range, axes.values())):
        yield ", ".join(f"{axis}={i}" for axis, i in zip(axes, indices, strict=True))


def _chart(chart: Chart) -> str:
    heading = escaped(chart.heading)
    lines = [f'<section>\n<h2>{heading}</h2>\n<table class="bars">']
    if chart.caption:
        lines.append(f"<caption>{escaped(chart.caption)}</caption>")
    for bar in chart.bars:
        drawn = bar_svg(bar.parts, chart.full, chart.limit)
        lines.append(
            f'<tr><th scope="row">{escaped(bar.label)}</th><td>{drawn}</td>'
            f'<td class="number">{escaped(bar.text)}</td></tr>'
        )
    lines.append("</table>")
    if chart.legend:
        swatches = (f'<li><span class="swatch p{i}"></span>{escaped(text)}</li>' for i, text in enumerate(chart.legend))
        lines.append(f'<ul class="legend">{"".join(swatches)}</ul>')
    return "\n".join([*lines, "</section>"])


def _facts(facts: Sequence[tuple[str, str]]) -> Iterator[str]:
    if facts:
        yield '<section>\n<h2>Summary</h2>\n<dl class="facts">'
        yield from (f"<dt>{escaped(label)}</dt><dd>{escaped_lines(text)}</dd>" for label, text in facts)
        yield "</dl>\n</section>"


def page_script() -> str:
    """Return the JavaScript that folds, sorts and searches the table of a page; it runs after the page is parsed."""
    return _file("page.js")


def page_style() -> str:
    """Return the CSS of a page."""
    parts = (f".p{i}{{fill:{colour};background:{colour}}}" for i, colour in enumerate(PART_COLOURS))
    axes = (f".a{i}{{background:{colour}}}" for i, colour in enumerate(AXIS_COLOURS))
    return _file("page.css") + "\n".join((*parts, *axes)) + "\n"


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    """Return the source of a Content-Security-Policy that allows an inline style or script with this content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
