"""Horizontal bars as SVG: readable on a phone, in dark mode, in black and white, and by screen readers.

    Title
    conditions, in a smaller type
    Gemma 3 270M                       a group, a line of its own
    shardload   ▇▇▇▇▇  0.50 s          bars, each with its label and its number
    KerasHub    ▇▇▇▇▇▇▇▇▇▇▇▇▇  4.41 s

A page shows a chart with ``<img>``, where no style of the page applies: the chart has its own, for both colour schemes,
and its own background. Nothing is told by colour alone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.sax.saxutils import escape

WIDTH, SHOWN, MARGIN = 440, 600, 12
"""Of a chart: its width in its own units, in pixels of a page with room, and the margin. A phone shows 360 pixels."""
LINE, ROW, BAR = 17, 22, 15
LETTER = 6.7
"""About the width of a letter: texts are not measured, so labels get a little more room than they need."""

STYLE = """<style>
svg { font: 12px system-ui, sans-serif; }
.background { fill: #ffffff; }
text { fill: #1c2330; }
.title { font-size: 15px; font-weight: bold; }
.group { font-weight: bold; }
.soft { fill: #57606a; font-size: 11px; }
.ours { fill: #1f5fae; }
.peer { fill: #7d8793; }
.limit { fill: #ffffff; stroke: #7d8793; stroke-dasharray: 3 2; }
.later { fill: #b9d4f2; stroke: #1f5fae; }
.mark { stroke: #b03030; stroke-width: 1.5; }
.marked { fill: #b03030; font-size: 11px; }
@media (prefers-color-scheme: dark) {
  .background { fill: #1e2129; }
  text { fill: #e6e8eb; }
  .soft { fill: #a9b1bb; }
  .ours { fill: #6aa9f0; }
  .peer { fill: #8b95a1; }
  .limit { fill: #1e2129; stroke: #a9b1bb; }
  .later { fill: #2b4668; stroke: #6aa9f0; }
  .mark { stroke: #ff8a80; }
  .marked { fill: #ff8a80; }
}
</style>"""

Kind = Literal["ours", "peer", "limit"]
"""What a bar is: shardload's, another program's, or what the hardware allows."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar."""

    label: str
    parts: Sequence[float]
    """Lengths: one, or two of which the second is drawn lighter."""
    text: str
    """Written behind it."""
    kind: Kind = "ours"


@dataclass(frozen=True, slots=True)
class Group:
    """Bars under a line of text, which may be empty."""

    title: str
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: groups of bars on one scale."""

    title: str
    conditions: str
    groups: Sequence[Group]
    legend: Sequence[str] = ()
    """Names of the two parts of each bar."""
    mark: tuple[float, str] | None = None
    """A length and its name, drawn as a line across all bars."""

    @property
    def bars(self) -> list[Bar]:
        """All bars."""
        return [bar for group in self.groups for bar in group.bars]

    @property
    def description(self) -> str:
        """The chart in words, for those who do not see it."""
        groups = [
            (f"{group.title}: " if group.title else "") + ", ".join(f"{bar.label} {bar.text}" for bar in group.bars)
            for group in self.groups
        ]
        return ". ".join([self.conditions, *groups])


def wrapped(text: str, letter: float) -> list[str]:
    """Return the lines of a text across a chart."""
    return textwrap.wrap(text, int((WIDTH - 2 * MARGIN) / letter))


def document(
    height: float, title: str, description: str, parts: Iterable[str], *, width: float = WIDTH, style: str = STYLE
) -> str:
    """Return an SVG with its style and background, named and described for screen readers."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{SHOWN}" '
            f'height="{height * SHOWN / width:.0f}" role="img" aria-labelledby="title description">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(description)}</desc>',
            style,
            f'<rect class="background" width="{width:g}" height="{height:g}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, kind: str = "", *, anchor: str = "start") -> str:
    """Return a line of text."""
    given = f' class="{kind}"' if kind else ""
    given += f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{given}>{escape(words)}</text>'


def drawn(chart: Chart) -> str:
    """Return a chart as SVG."""
    parts, y = heading(chart)
    left = MARGIN + LETTER * max(len(bar.label) for bar in chart.bars) + 10
    room = WIDTH - MARGIN - left - LETTER * max(len(bar.text) for bar in chart.bars) - 6
    scale = room / max(*(sum(bar.parts) for bar in chart.bars), chart.mark[0] if chart.mark else 0)
    for group in chart.groups:
        y += 6
        for line in wrapped(group.title, LETTER * 1.06):
            parts.append(text(MARGIN, y + 12, line, "group"))
            y += LINE
        y += 2
        rows = [row(bar, left, y + ROW * place, scale) for place, bar in enumerate(group.bars)]
        parts += [part for drawing, _ in rows for part in drawing]
        if chart.mark:
            x, below = left + chart.mark[0] * scale, y + ROW * len(rows)
            parts.append(f'<line class="mark" x1="{x:.1f}" y1="{y - 3:g}" x2="{x:.1f}" y2="{below - 4:g}"/>')
        parts += [part for _, numbers in rows for part in numbers]
        y += ROW * len(rows)
    return document(y + 6, chart.title, chart.description, parts)


def heading(chart: Chart) -> tuple[list[str], float]:
    """Return title, conditions, legend and the name of the mark, and where they end."""
    parts, y = [], 4.0
    for line in wrapped(chart.title, LETTER * 1.3):
        y += LINE + 1
        parts.append(text(MARGIN, y, line, "title"))
    for line in wrapped(chart.conditions, LETTER * 0.88):
        y += LINE - 2
        parts.append(text(MARGIN, y, line, "soft"))
    if chart.legend:
        y += LINE + 1
        x = float(MARGIN)
        for name, kind in zip(chart.legend, ("ours", "later"), strict=True):
            parts.append(f'<rect class="{kind}" x="{x:.1f}" y="{y - 9:g}" width="10" height="10"/>')
            parts.append(text(x + 15, y, name, "soft"))
            x += 35 + LETTER * len(name)
    if chart.mark:
        y += LINE + 1
        parts.append(text(MARGIN, y, f"|  {chart.mark[1]}", "marked"))
    return parts, y + 4


def row(bar: Bar, left: float, y: float, scale: float) -> tuple[list[str], list[str]]:
    """Return a bar at a height with its label, and its number, which is drawn above a mark."""
    parts, x = [text(MARGIN, y + BAR - 3, bar.label)], left
    for length, kind in zip(bar.parts, (bar.kind, "later"), strict=False):
        parts.append(f'<rect class="{kind}" x="{x:.1f}" y="{y:g}" width="{length * scale:.1f}" height="{BAR}"/>')
        x += length * scale
    behind = (
        f'<rect class="background" x="{x + 3:.1f}" y="{y:g}" width="{LETTER * len(bar.text) + 3:.1f}" height="{BAR}"/>'
    )
    return parts, [behind, text(x + 6, y + BAR - 3, bar.text)]
