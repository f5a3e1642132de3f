"""A page of HTML that needs no other file: devices as bars, variables as a table to sort and search, and reasons.

    title
    charts      Devices   cpu 0   model=0  ▇▇▇▇▇▇▇▇▇  1.2 GiB      many equal devices share one bar
    facts       Layout    190 variables sharded, 46 replicated
    variables   name  dtype  dims and what splits them  bytes  on each device  reason ▸ details

The style and the script are in the page; its Content-Security-Policy allows these two by their hashes, and nothing
else, so a page opens no connection. Without the script, the page lacks only sorting and searching. Every text that
comes from a checkpoint is escaped, with control characters as in the printed report.
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from shardload.reports.facts import VariableUse
from shardload.reports.names import TIMES, printable
from shardload.units import format_bytes, plural

PART_COLOURS = ("#6ea8fe", "#f4a582", "#c2a5cf", "#8fd19e", "#e3d26f")
"""Colours of the parts of a bar, in their order; in pictures too."""
AXIS_COLOURS = ("#7cc4e8", "#f6c971", "#d9a6d6", "#9fd8a8", "#f29e8e")
"""Colours of mesh axes, in their order, from the first again if there are more; dark text on them is readable."""
_MAX_BARS = 16
"""Most devices that have a bar each. If there are more, equal ones share one."""
_FULL = 1000
"""Length of a full bar, in the coordinates of its SVG."""


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


@dataclass(frozen=True, slots=True)
class Page:
    """What a page shows."""

    title: str
    axes: Mapping[str, int]
    """Mesh axis → number of devices along it, in the order of the mesh."""
    charts: tuple[Chart, ...]
    facts: tuple[tuple[str, str], ...]
    """(label, text) of what is no chart and no table."""
    rows: tuple[Row, ...]

    def html(self) -> str:
        """Return the page as the text of an HTML file."""
        style, script = page_style(), page_script()
        policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
        parts = [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f"<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}; base-uri 'none'; form-action 'none'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escaped(self.title)}</title>\n<style>{style}</style>\n</head>\n<body>",
            f"<h1>{escaped(self.title)}</h1>\n<main>",
            *self.sections(),
            f"</main>\n<script>{script}</script>\n</body>\n</html>",
        ]
        return "\n".join(parts) + "\n"

    def sections(self) -> Iterator[str]:
        """Yield the HTML of charts, facts and variables, for pages that have `page_style` and `page_script`."""
        yield from map(_chart, self.charts)
        yield from _facts(self.facts)
        yield from self._variables()

    def _variables(self) -> Iterator[str]:
        colours = {axis: i % len(AXIS_COLOURS) for i, axis in enumerate(self.axes)}
        most = max((row.variable.device_bytes for row in self.rows), default=0) or 1
        has_dtypes = any(row.variable.dtype for row in self.rows)
        yield '<section aria-labelledby="variables">\n<h2 id="variables">Variables</h2>'
        yield f"<p>{self._legend(colours)}</p>"
        # Shown by the script, as it is of no use without.
        yield '<p id="search" hidden><label>Search <input type="search" autocomplete="off" spellcheck="false"></label>'
        yield f'<span role="status">{plural(len(self.rows), "variable")}</span></p>'
        yield '<div class="scroll" role="region" aria-label="Table of variables" tabindex="0">'
        yield '<table class="variables">'
        heads = [("Variable", "name"), ("Dtype", "dtype"), ("Dims and splits", "dims")]
        heads += [("Bytes", "bytes number"), ("On each device", "each number"), ("Why", "why")]
        cells = (f'<th scope="col" class="{kind}">{head}</th>' for head, kind in heads if has_dtypes or kind != "dtype")
        yield f"<thead><tr>{''.join(cells)}</tr></thead>\n<tbody>"
        for row in self.rows:
            v = row.variable
            dtype = f"<td>{escaped(v.dtype)}</td>" if has_dtypes else ""
            yield (
                f'<tr><th scope="row">{escaped(v.name).replace("/", "/<wbr>")}</th>{dtype}'
                f'<td data-value="{math.prod(v.shape)}">{self._dims(row, colours)}</td>'
                f'<td class="number" data-value="{v.bytes}">{format_bytes(v.bytes)}</td>'
                f'<td class="each number" data-value="{v.device_bytes}">{format_bytes(v.device_bytes)}'
                f"{bar_svg((v.device_bytes,), most)}</td><td>{_why(row)}</td></tr>"
            )
        yield "</tbody>\n</table>\n</div>\n</section>"

    def _legend(self, colours: Mapping[str, int]) -> str:
        chips = (f'<span class="axis a{i}">{escaped(axis)} ÷{self.axes[axis]}</span>' for axis, i in colours.items())
        stored = ' <span class="axis plain stored">dashed</span> stored split, gathered for use'
        return f"Axes of the mesh: {' '.join(chips)}{stored if any(row.stored for row in self.rows) else ''}"

    def _dims(self, row: Row, colours: Mapping[str, int]) -> str:
        """Return the shape of a variable, with a chip in each dim for each axis that splits it."""
        if not row.variable.shape:
            return "scalar"
        dims = []
        for length, axes in zip(row.variable.shape, row.variable.spec, strict=True):
            chips = ""
            for axis in axes:
                stored = ' stored" title="stored split, gathered for use' if axis in row.stored else ""
                parts = f"÷{self.axes[axis]} " if axis in self.axes else ""
                chips += f' <span class="axis a{colours.get(axis, 0)}{stored}">{parts}{escaped(axis)}</span>'
            dims.append(f'<span class="dim">{length}{chips}</span>')
        return f" {TIMES} ".join(dims)


def merge_equal(bars: Iterable[tuple[str, str, BarParts]], text: Callable[[BarParts], str]) -> tuple[Bar, ...]:
    """Return bars, each given as (kind, label, parts); of more than 16, those of the same kind and parts become one."""
    found = tuple(bars)
    if len(found) <= _MAX_BARS:
        return tuple(Bar(label, parts, text(parts)) for _, label, parts in found)
    counts = Counter((kind, parts) for kind, _, parts in found)
    return tuple(
        Bar(f"{kind} {TIMES} {count:,}", parts, f"{text(parts)} each") for (kind, parts), count in counts.items()
    )


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


def bar_svg(parts: Sequence[float], full: float, limit: float | None = None) -> str:
    """Return a bar as SVG; its numbers are in the text beside it. The policy of the page allows no style attributes."""
    drawn, begun = "", 0.0
    for i, value in enumerate(parts):
        if value > 0:
            drawn += (
                f'<rect class="p{i}" x="{_FULL * begun / full:.1f}" width="{_FULL * value / full:.1f}" height="1"/>'
            )
        begun += value
    if limit is not None:
        drawn += f'<rect class="limit" x="{_FULL * limit / full - 6:.1f}" width="6" height="1"/>'
    return f'<svg viewBox="0 0 {_FULL} 1" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'


def _facts(facts: Sequence[tuple[str, str]]) -> Iterator[str]:
    if facts:
        yield '<section>\n<h2>Summary</h2>\n<dl class="facts">'
        yield from (f"<dt>{escaped(label)}</dt><dd>{escaped(text)}</dd>" for label, text in facts)
        yield "</dl>\n</section>"


def _why(row: Row) -> str:
    v = row.variable
    layout = ", ".join("+".join(axes) or "-" for axes in v.spec)
    whole = f"layout ({layout}): each device has the whole variable"
    part = f"layout ({layout}): each device has {_shape(v.shard_shape)} of {_shape(v.shape)}"
    details = (whole if v.shape == v.shard_shape else part, *row.details)
    lines = "".join(f"<li>{escaped(text)}</li>" for text in details)
    lines += "".join(f'<li class="decision">{escaped(text)}</li>' for text in row.decisions)
    return f"<details><summary>{escaped(row.reason) or 'layout'}</summary><ul>{lines}</ul></details>"


def _shape(shape: tuple[int, ...]) -> str:
    return f" {TIMES} ".join(map(str, shape)) or "scalar"


def escaped(text: str) -> str:
    """Return text, such as untrusted names, for HTML: with control characters as escapes, except ends of lines."""
    return html.escape(printable(text, keep="\n"))


def page_script() -> str:
    """Return the JavaScript that sorts and searches the variables of a page; it runs after the page is parsed."""
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
