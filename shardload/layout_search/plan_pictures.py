"""Pictures of a plan, as text and as SVG: how much of the memory limit a device uses, and which axes split which dims.

    ┌ weights ┬ gradients ┬ slots ────┬ activations ┬ free ┊ limit
    decoder_block_*/ffw_gating/kernel x46   [ 4608 ] [ 36864 ÷8 ]   1.2 GiB ▇▇▇▇

The SVG follows the reader's light or dark theme; only coloured boxes, with dark text in them, look the same in both.
Widths of text are estimated from the number of characters.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from shardload.layout_search.plan_parts import DeviceBytes, PlannedVariable
from shardload.reports.markup import AXIS_COLOURS, PART_COLOURS
from shardload.reports.names import shortened
from shardload.sharding.layout import Layout, Spec
from shardload.sharding.mesh import MeshSpec
from shardload.units import format_bytes

_WIDTH = 40
"""Width of a full bar in the text picture, in characters."""
_NAME_WIDTH = 56
"""Width of the column of names, in characters. A longer name moves the rest of its line to the right."""
MEMORY_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "slots": "slots",
    "activations": "activations",
    "kv_cache": "KV cache",
}
"""The fields of `DeviceBytes` that a picture shows as parts of a device's memory, in this order, and their labels."""

SVG_WIDTH, MARGIN = 960, 24
BAR_TOP, BAR_HEIGHT = 96, 36
ROWS_TOP, ROW_HEIGHT = 240, 30
DIMS_LEFT, DIM_WIDTH, DIM_GAP = 392, 92, 6
BYTES_RIGHT, SPARK_WIDTH = 856, 72
_NAME_CHARACTERS = 46
_SUBTITLE_CHARACTERS = 130
_MOST_MARKS = 16
"""A picture marks the parts of a split dim, but at most so many of them: more marks would look like a grey area."""
_STYLE = """\
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:#1f2328}
.back{fill:#ffffff}.title{font-size:18px;font-weight:600}.soft{fill:#59636e;font-size:12px}
.mono{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}.dark{fill:#16191d}
.plain{fill:#eef1f4;stroke:#afb8c1}.split{stroke:#59636e}.free{fill:none;stroke:#afb8c1;stroke-dasharray:4 3}
.mark{stroke:#16191d;stroke-opacity:.45}.limit{stroke:#cf222e;stroke-width:2}.over{fill:#cf222e}
@media(prefers-color-scheme:dark){
text{fill:#e6edf3}.back{fill:#0d1117}.soft{fill:#9198a1}.dark{fill:#16191d}
.plain{fill:#21262d;stroke:#59636e}.split{stroke:#9198a1}.free{stroke:#59636e}.limit{stroke:#ff7b72}.over{fill:#ff7b72}}
"""


@dataclass(frozen=True, slots=True)
class VariableRow:
    """One row of a picture: variables of equal shape and layout whose paths differ only in numbers."""

    name: str
    """Path of the variables, with ``*`` in place of the numbers."""
    count: int
    shape: tuple[int, ...]
    layout: Layout
    stored: tuple[str, ...]
    """Axes that split the variables only in storage; they are gathered before use."""
    device_bytes: int
    """Bytes of all variables of the row on each device."""

    @property
    def dims(self) -> str:
        """The shape as text, with the axes that split each dim: ``(4608, 36864/model)``."""
        dims = zip(self.shape, self.layout.spec, strict=True)
        return f"({', '.join(f'{n}/' + '+'.join(axes) if axes else f'{n}' for n, axes in dims)})"


def variable_rows(
    variables: Sequence[PlannedVariable], names: Sequence[str], mesh: MeshSpec
) -> tuple[VariableRow, ...]:
    """Merge variables of repeated layers (``block_0``, ``block_1`` …) into one row each, in the order of the model."""
    found: dict[tuple[str, tuple[int, ...], Spec, tuple[str, ...]], list[tuple[str, PlannedVariable]]]
    found = defaultdict(list)
    for variable, own in zip(variables, names, strict=True):
        # `decoder_block_7/…` of every block becomes one row, if shape and layout agree.
        name = re.sub(r"\d+", "*", variable.path)
        found[name, variable.shape, variable.spec, variable.stored].append((own, variable))
    made = []
    for (name, shape, spec, stored), members in found.items():
        layout = Layout(mesh, spec)
        device_bytes = sum(v.nbytes for _, v in members) // math.prod(layout.parts)
        # A variable on its own keeps its name, with its numbers.
        shown = members[0][0] if len(members) == 1 else name
        made.append(VariableRow(shown, len(members), shape, layout, stored, device_bytes))
    return tuple(made)


@dataclass(frozen=True, slots=True)
class PlanPicture:
    """The numbers that a picture of a plan shows: memory per device and its limit, and rows of variables."""

    title: str
    inputs: str
    mesh: MeshSpec
    device: DeviceBytes
    limit: int | None
    """Bytes of memory that a device may use under the plan; ``None`` if there is no limit."""
    rows: tuple[VariableRow, ...]

    def memory_lines(self, block: str) -> Iterator[str]:
        """Yield a line for each part of memory: a bar of ``block``s, from where the last one ends; "|" is the limit."""
        device, limit = self.device, self.limit
        full = max(limit or 0, device.total, 1)
        share = f" of {format_bytes(limit)} ({100 * device.total / limit:.0f} %)" if limit else ""
        yield f"per device: {format_bytes(device.total)}{share}"
        rows = [(label, getattr(device, name), block) for name, label in MEMORY_PARTS.items()]
        rows.append(("free", max((limit or 0) - device.total, 0), "."))
        begun = 0
        for name, nbytes, mark in rows:
            if not nbytes:
                continue
            first, last = (round(_WIDTH * n / full) for n in (begun, begun + nbytes))
            bar = " " * min(first, _WIDTH - 1) + mark * max(last - first, 1)
            yield f"  {name:<12}{bar[:_WIDTH]:<{_WIDTH}}| {format_bytes(nbytes)}"
            begun += nbytes

    def layout_lines(self) -> Iterator[str]:
        """Yield a line for each row of variables: name, dims with the axes that split them, bytes on each device."""
        names = [f"{g.name} x{g.count}" if g.count > 1 else g.name for g in self.rows]
        dims = [g.dims for g in self.rows]
        wide = min(max(map(len, names), default=0), _NAME_WIDTH)
        wider = max(map(len, dims), default=0)
        yield "layouts (dim/axes that split it), and bytes on each device:"
        for name, shape, row in zip(names, dims, self.rows, strict=True):
            stored = f"  gathered over {'+'.join(row.stored)} for use" if row.stored else ""
            yield f"  {name:<{wide}}  {shape:<{wider}}  {format_bytes(row.device_bytes):>9}{stored}"

    def svg(self) -> str:
        """Return the picture as the text of an SVG file."""
        height = ROWS_TOP + ROW_HEIGHT * len(self.rows) + MARGIN
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SVG_WIDTH} {height}" width="{SVG_WIDTH}" '
            f'height="{height}" role="img" aria-label={quoteattr(f"Layout plan of {self.title}")}>',
            f"<style>{_STYLE}</style>",
            f'<rect class="back" width="{SVG_WIDTH}" height="{height}"/>',
            _text(MARGIN, 36, self.title, "title"),
            _text(MARGIN, 58, shortened(f"inputs {self.inputs}", _SUBTITLE_CHARACTERS), "soft"),
            *_svg_memory(self),
            *_axes(self.mesh),
            *_rows(self.rows, self.mesh.axes),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"


def _text(x: float, y: float, text: str, style: str = "", *, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'


def _box(x: float, y: float, size: tuple[float, float], attributes: str, title: str = "") -> str:
    width, height = size
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:g}" {attributes}>{inside}</rect>'


def _svg_memory(picture: PlanPicture) -> Iterator[str]:
    """Yield the SVG of memory per device: a stacked bar, with the limit as a line, and a legend below."""
    device, limit = picture.device, picture.limit
    # A plan over its limit is drawn to its own total, with the limit as a line inside.
    full, wide = max(limit or 0, device.total, 1), SVG_WIDTH - 2 * MARGIN
    of = f" of {format_bytes(limit)} ({100 * device.total / limit:.0f} %)" if limit else ""
    yield _text(MARGIN, BAR_TOP - 12, f"Memory per device: {format_bytes(device.total)}{of}")
    x, legend = float(MARGIN), float(MARGIN)
    for (name, part), colour in zip(MEMORY_PARTS.items(), PART_COLOURS, strict=True):
        nbytes = getattr(device, name)
        if not nbytes and name == "kv_cache":
            continue
        label = f"{part} {format_bytes(nbytes)}"
        fill = f'fill="{colour}"'
        yield _box(x, BAR_TOP, (wide * nbytes / full, BAR_HEIGHT), fill, label)
        yield _box(legend, BAR_TOP + BAR_HEIGHT + 14, (12, 12), fill)
        yield _text(legend + 18, BAR_TOP + BAR_HEIGHT + 25, label)
        x, legend = x + wide * nbytes / full, legend + 182
    if limit:
        at = MARGIN + wide * limit / full
        yield _box(
            x, BAR_TOP, (at - x, BAR_HEIGHT), 'class="free"', f"free {format_bytes(max(limit - device.total, 0))}"
        )
        yield f'<line x1="{at:.1f}" y1="{BAR_TOP - 6}" x2="{at:.1f}" y2="{BAR_TOP + BAR_HEIGHT + 6}" class="limit"/>'
        yield _text(SVG_WIDTH - MARGIN, BAR_TOP - 12, f"limit {format_bytes(limit)}", "over", anchor="end")


def _axes(mesh: MeshSpec) -> Iterator[str]:
    """Yield the SVG of the heading above the rows, which shows the colour of each axis."""
    y = ROWS_TOP - 20
    yield _text(MARGIN, y, "What is split where")
    yield _text(BYTES_RIGHT, y, "each device", "soft", anchor="end")
    for i, (axis, size) in enumerate(zip(mesh.axes, mesh.sizes, strict=True)):
        x = DIMS_LEFT + 110 * i
        yield _box(x, y - 11, (12, 12), f'fill="{AXIS_COLOURS[i % len(AXIS_COLOURS)]}"')
        yield _text(x + 18, y, f"{axis} ÷{size}")


def _rows(rows: Sequence[VariableRow], axes: Sequence[str]) -> Iterator[str]:
    most = max((row.device_bytes for row in rows), default=1) or 1
    for i, row in enumerate(rows):
        y = ROWS_TOP + ROW_HEIGHT * i
        name = f"{row.name} x{row.count}" if row.count > 1 else row.name
        yield f"<g><title>{escape(name)}: {escape(str(row.layout))}</title>"
        yield _text(MARGIN, y + 15, shortened(name, _NAME_CHARACTERS), "mono")
        for d in range(len(row.shape)):
            yield from _dim(row, d, y, axes)
        yield _text(BYTES_RIGHT, y + 15, format_bytes(row.device_bytes), anchor="end")
        yield _box(BYTES_RIGHT + 8, y + 4, (SPARK_WIDTH * row.device_bytes / most, 14), 'fill="#6ea8fe"')
        yield "</g>"


def _dim(row: VariableRow, d: int, y: float, axes: Sequence[str]) -> Iterator[str]:
    """Yield the SVG of a dim: a box with a band of colour for each axis that splits it, and marks between its parts."""
    x = DIMS_LEFT + (DIM_WIDTH + DIM_GAP) * d
    split, parts = row.layout.spec[d], row.layout.parts[d]
    # 64: room for the number of bytes, which is right-aligned.
    if x + DIM_WIDTH > BYTES_RIGHT - 64:
        return  # the tooltip has all dims
    yield _box(x, y, (DIM_WIDTH, 22), 'class="plain"')
    for i, axis in enumerate(split):
        band = 22 / len(split)
        dashed = ' stroke-dasharray="3 2"' if axis in row.stored else ""
        colour = AXIS_COLOURS[axes.index(axis) % len(AXIS_COLOURS)]
        style = f'fill="{colour}" class="split"{dashed}'
        title = f"stored split over {axis}, gathered for use" if axis in row.stored else f"split over {axis}"
        yield _box(x, y + band * i, (DIM_WIDTH, band), style, title)
    marks = min(parts, _MOST_MARKS)
    for k in range(1, marks):
        at = x + DIM_WIDTH * k / marks
        yield f'<line x1="{at:.1f}" y1="{y + 17:g}" x2="{at:.1f}" y2="{y + 22:g}" class="mark"/>'
    label = f"{row.shape[d]} ÷{parts}" if split else f"{row.shape[d]}"
    yield _text(x + DIM_WIDTH / 2, y + 14, label, "mono dark" if split else "mono", anchor="middle")
