"""Pieces of HTML that pages are made of: text that is escaped, bars, and the colours of both."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

from shardload.reports.names import printable

PART_COLOURS = ("#6ea8fe", "#f4a582", "#c2a5cf", "#8fd19e", "#e3d26f")
"""Colours of the parts of a bar, in their order; in pictures too."""
AXIS_COLOURS = ("#7cc4e8", "#f6c971", "#d9a6d6", "#9fd8a8", "#f29e8e")
"""Colours of mesh axes, in their order, from the first again if there are more; dark text on them is readable."""
_FULL = 1000
"""Length of a full bar, in the coordinates of its SVG."""


def escaped(text: str) -> str:
    r"""Return text, such as untrusted names, for HTML: with control characters as escapes (``\n``)."""
    return html.escape(printable(text))


def escaped_lines(text: str) -> str:
    """Return text of several lines for HTML: as `escaped`, but with its ends of lines."""
    return html.escape(printable(text, keep="\n"))


def picture_html(svg: str, alt: str) -> str:
    """Return an SVG as an image in HTML; ``alt`` is its text alternative."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escaped(alt)}" src="data:image/svg+xml;base64,{data}">'


def bar_svg(parts: Sequence[float], full: float, limit: float | None = None) -> str:
    """Return a bar as SVG; its numbers are in the text beside it. The policy of the page allows no style attributes."""
    drawn, begun = "", 0.0  # shares of the full bar first: 1,000 times a float64 may be infinite
    for i, value in enumerate(parts):
        if value > 0:
            drawn += (
                f'<rect class="p{i}" x="{_FULL * (begun / full):.1f}" width="{_FULL * (value / full):.1f}" height="1"/>'
            )
        begun += value
    if limit is not None:
        drawn += f'<rect class="limit" x="{_FULL * (limit / full) - 6:.1f}" width="6" height="1"/>'
    return f'<svg viewBox="0 0 {_FULL} 1" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'


class ShownAsText:
    """What notebooks show as its text: ``str(report)``, instead of its ``repr``."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return preformatted(str(self))


def preformatted(text: str) -> str:
    """Return text for people, such as a table, as HTML that keeps its lines: notebooks show it instead of an object."""
    return f"<pre>{escaped_lines(text)}</pre>"
