"""Draw the charts of docs/performance.md, as SVG, from the JSON files of measurements beside it.

    python -m benchmarks.charts [--folder docs]

A test draws them again and compares, so that a chart never shows other numbers than its JSON file.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LABEL, NUMBER = 720, 250, 110
"""Of a chart: its width, of which the labels and the numbers behind the bars have so much, in pixels."""
ROW, BAR = 26, 16
COLOURS = "#2f6db5", "#a9c6e8", "#c9c9c9"


@dataclass(frozen=True, slots=True)
class Row:
    """A bar: its label, the lengths of its parts, and what is written behind it."""

    label: str
    parts: Sequence[float]
    text: str


def chart(title: str, rows: Sequence[Row], *, legend: Sequence[str] = (), line: tuple[float, str] | None = None) -> str:
    """Return horizontal bars as SVG; ``line``, a length and its name, is drawn across them."""
    most = max([sum(row.parts) for row in rows] + ([line[0]] if line else []))
    scale = (WIDTH - LABEL - NUMBER) / most
    top = 34 + (20 if legend or line else 0)
    height = top + ROW * len(rows) + 10
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    numbers = []  # drawn last, above the line
    at = LABEL
    for name, colour in zip(legend, COLOURS, strict=False):
        made.append(f'<rect x="{at}" y="33" width="10" height="10" fill="{colour}"/>')
        made.append(f'<text x="{at + 14}" y="42">{escape(name)}</text>')
        at += 24 + 7 * len(name)
    for index, row in enumerate(rows):
        y = top + ROW * index
        made.append(f'<text x="{LABEL - 8}" y="{y + BAR - 3}" text-anchor="end">{escape(row.label)}</text>')
        x = float(LABEL)
        for length, colour in zip(row.parts, COLOURS, strict=False):
            made.append(f'<rect x="{x:.1f}" y="{y}" width="{length * scale:.1f}" height="{BAR}" fill="{colour}"/>')
            x += length * scale
        numbers.append(f'<rect x="{x + 4:.1f}" y="{y}" width="{7 * len(row.text)}" height="{BAR}" fill="white"/>')
        numbers.append(f'<text x="{x + 6:.1f}" y="{y + BAR - 3}">{escape(row.text)}</text>')
    if line:
        x = LABEL + line[0] * scale
        made.append(f'<line x1="{x:.1f}" y1="{top - 6}" x2="{x:.1f}" y2="{height - 6}" stroke="#b03030"/>')
        made.append(f'<text x="{x:.1f}" y="42" text-anchor="middle" fill="#b03030">{escape(line[1])}</text>')
    return "\n".join([*made, *numbers, "</svg>"]) + "\n"


def addresses(found: dict[str, Any]) -> str:
    """Rates of loads from an address, as a part of the rate of a plain download."""
    rows = []
    for one in found["stores"]:
        if one["arguments"]["what"] != "load":
            continue
        limit, late = one["arguments"]["mb_s"], one["arguments"]["latency_ms"]
        label = f"{limit:.0f} MB/s" if limit else "no limit"
        load = one["results"]["load"]
        rows.append(
            Row(
                label + (f", {late:.0f} ms late" if late else ""),
                [load["rate_over_floor"]],
                f"{load['rate_over_floor']:.2f}  ({load['gb_s']:.2f} GB/s)",
            )
        )
    return chart("Load from an address: part of a plain download's rate", rows, line=(1.0, "plain download"))


def cluster(found: dict[str, Any]) -> str:
    """Bytes that processes read together, over the bytes of the checkpoint, both ways."""
    rows = []
    for one in found["replicas"]:
        if one["store"] == "disk":
            continue
        for way, words in (("read", "each reads what it needs"), ("broadcast", "each byte is read once")):
            ratio, wall_s = one[way]["sent_ratio"], one[way]["wall_s"]
            rows.append(Row(f"{one['shape']}, {words}", [ratio], f"{ratio:.3f}  ({wall_s:.1f} s)"))
    return chart("Bytes from storage over bytes of the checkpoint", rows, line=(1.0, "each byte once"))


def ready(found: dict[str, Any]) -> str:
    """Seconds from the call of ``load`` to the first result on eight CPU devices."""
    rows = [
        Row(f"{row['call']}, {row['way']}", [row["load_s"], row["first_s"]], f"{row['ready_s']:.1f} s")
        for rows in found["ready"]
        for row in rows
    ]
    return chart("Gemma 3 270M on 1x8 CPU devices: time to the first result", rows, legend=("load", "first call"))


def gpu_ready(found: dict[str, Any]) -> str:
    """Seconds from the call of ``load`` to the first result on a GPU."""
    rows = []
    for way, runs in found["ready"].items():
        load, whole = (statistics.median(run[key] for run in runs) for key in ("load_s", "ready_s"))
        rows.append(Row(way, [load, whole - load], f"{whole:.1f} s"))
    return chart("Gemma 2 2B on one GPU: time to the first result", rows, legend=("load", "first call"))


def gpu_saving(found: dict[str, Any]) -> str:
    """Seconds for which a save blocks, and until its step is complete, on a GPU."""
    rows = []
    for part, words in (("saving", "pinned memory"), ("saving, not pinned", "copies by Orbax")):
        blocked, whole = (statistics.median(found[part][key]) for key in ("blocked_s", "published_s"))
        rows.append(Row(words, [blocked, whole - blocked], f"{blocked:.2f} s of {whole:.1f} s"))
    return chart("Saving 5.2 GB from one GPU", rows, legend=("training waits", "in the background"))


CHARTS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "addresses": ("performance-remote-2026-11-27.json", addresses),
    "cluster": ("performance-remote-2026-11-27.json", cluster),
    "ready": ("performance-remote-2026-11-27.json", ready),
    "gpu-ready": ("performance-gpu-2026-11-27.json", gpu_ready),
    "gpu-saving": ("performance-gpu-2026-11-27.json", gpu_saving),
}
"""Name of a chart → the file with its numbers, and the function that draws it."""


def drawn(folder: Path, name: str) -> str:
    """Return a chart as SVG, from the JSON file in ``folder``."""
    source, draw = CHARTS[name]
    return draw(json.loads((folder / source).read_text(encoding="utf-8")))


def main() -> None:
    """Draw all charts."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    folder = parser.parse_args().folder
    (folder / "charts").mkdir(exist_ok=True)
    for name in CHARTS:
        (folder / "charts" / f"{name}.svg").write_text(drawn(folder, name), encoding="utf-8")


if __name__ == "__main__":
    main()
