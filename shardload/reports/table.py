"""Format a report as a table for people.

    Source     /models/gemma3_270m.gguf (gguf)
    Mesh       batch=1,model=2 (2 cpu devices)
    Weights    268.1 M parameters in 236 variables, 511.4 MiB, bfloat16
    Devices    cpu 0  255.7 MiB  ████████████████████████
               cpu 1  255.7 MiB  ████████████████████████
    Time       build   120 ms  ███████
               …

One function per line of the left column; each returns the content on the right, or nothing. Names are folded
(`shardload.reports.names`), and a truncated list always ends with the number of omitted names.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardload.reports.names import TIMES, Folded, fold, printable
from shardload.units import format_bytes, format_count, format_rate, format_seconds, plural

if TYPE_CHECKING:
    from shardload.reports import Cast, DeviceUse, Fallback, Fit, Mismatched, Outside, Report

MAX_DEVICE_LINES = 16
"""More devices than this are shown as least, median and most: 256 bars are unreadable."""
MAX_NAME_LINES = 12
"""Folded names shown per list; ``to_json`` has them all."""
BAR_WIDTH = 24
LEAST_SHOWN = 0.01
"""The part of the total from which imports and other times are shown."""


def sections(report: Report, *, ascii_only: bool = False) -> Iterator[RenderableType]:
    """Yield the parts of the table, top to bottom; ``ascii_only`` for outputs that cannot encode block characters."""
    grid = Table.grid(padding=(0, 3))
    grid.add_column(style="bold cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, content in _rows(report, "#" if ascii_only else "█"):
        grid.add_row(label, content)
    yield grid


def _rows(report: Report, block: str) -> Iterator[tuple[str, RenderableType]]:
    yield "Source", Text(f"{printable(report.source)} ({report.format})")
    yield "Mesh", Text(f"{report.mesh} ({_kinds(report.devices)})")
    yield "Weights", Text(_weights(report))
    if report.devices:
        yield "Devices", _devices(report.devices, block)
    yield (
        "Layout",
        Text(f"{plural(report.layout.sharded, 'variable')} sharded, {report.layout.replicated:,} replicated"),
    )
    if report.layout.fallbacks:
        yield "Fallbacks", _fallbacks(report.layout.fallbacks)
    yield "Disk", Text(_disk(report))
    yield "Host memory", Text(_host_memory(report))
    yield "Time", _stages(report, block)
    yield from _lists(report)
    if (fits := getattr(report, "fits", None)) is not None:
        yield "Fits", _fit(fits)
    if report.notes:
        yield "Notes", Text("\n".join(printable(note) for note in report.notes))


def _kinds(devices: Sequence[DeviceUse]) -> str:
    counts = Counter(device.platform for device in devices)
    return ", ".join(plural(n, f"{platform} device") for platform, n in counts.items()) or "no device"


def _weights(report: Report) -> str:
    return (
        f"{format_count(report.parameters)} parameters in {plural(report.variables, 'variable')}, "
        f"{', '.join((format_bytes(report.weight_bytes), *report.dtypes))}"
    )


def _devices(devices: Sequence[DeviceUse], block: str) -> RenderableType:
    most = max(device.bytes for device in devices)
    table = _columns("left", "right", "left")
    if len(devices) <= MAX_DEVICE_LINES:
        shown = [(f"{d.platform} {d.id}", d.bytes) for d in devices]
    else:
        ranked = sorted(devices, key=lambda d: d.bytes)
        picked = (("least", ranked[0]), ("median", ranked[len(ranked) // 2]), ("most", ranked[-1]))
        shown = [(f"{word} ({d.platform} {d.id})", d.bytes) for word, d in picked]
    for label, n in shown:
        table.add_row(label, format_bytes(n), _bar(n, most, block))
    return table


def _bar(value: float, most: float, block: str) -> Text:
    # At least one cell, so that a short stage does not look as if it had not run.
    cells = round(BAR_WIDTH * value / most) if most > 0 else 0
    return Text(block * max(cells, 1 if value > 0 else 0), style="green")


def _disk(report: Report) -> str:
    needed, read = report.bytes.needed, report.bytes.read
    if read == needed:
        return f"{format_bytes(read)} read, each needed byte once"
    more = f" ({100 * (read - needed) / needed:+.1f} %)" if needed else ""
    return f"{format_bytes(read)} read for {format_bytes(needed)} needed{more}"


def _host_memory(report: Report) -> str:
    return f"{format_bytes(report.host_bytes.peak_staging)} peak staging of {format_bytes(report.host_bytes.budget)}"


def _stages(report: Report, block: str) -> RenderableType:
    seconds = report.seconds
    table = _columns("left", "right", "left")
    for label, value in seconds.named().items():
        # Each row's time is rounded: what would not be seen is left out.
        if label == "total" or (label in ("imports", "other") and (value or 0.0) < LEAST_SHOWN * seconds.total):
            continue
        bar = _bar(value or 0.0, seconds.total, block)
        if label == "transfer" and report.throughput_gb_s is not None:
            bar.append(f" {format_rate(report.throughput_gb_s)}", style="default")
        table.add_row(label, format_seconds(value), bar)
    table.add_row("total", format_seconds(seconds.total), "")
    return table


def _fallbacks(fallbacks: Sequence[Fallback]) -> RenderableType:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for f in fallbacks:
        groups.setdefault((f.wanted, f.got, f.why), []).append(f.variable)
    parts: list[RenderableType] = [Text(f"{plural(len(fallbacks), 'variable')} did not get the layout wanted", "dim")]
    for (wanted, got, why), names in list(groups.items())[:MAX_NAME_LINES]:
        parts += [_names(fold(names)), Text(f"    {wanted} → {got}  {printable(why)}", style="yellow")]
    return _with_rest(Group(*parts), [Folded("", len(names)) for names in list(groups.values())[MAX_NAME_LINES:]])


def _lists(report: Report) -> Iterator[tuple[str, RenderableType]]:
    for label, names, meaning in (
        ("Missing", report.missing, "the checkpoint has no tensor for"),
        ("Unused", report.unused, "the model has no variable for"),
        ("Computed", report.computed, "computed from stored tensors, not copied"),
        ("Initialised", report.initialised, "not in the checkpoint, given their initial value"),
    ):
        if names:
            yield label, Group(Text(f"{len(names):,}, {meaning}", style="dim"), _names(fold(names)))
    if report.outside:
        yield "Outside", _outside(report.outside)
    if report.cast:
        yield "Cast", _casts(report.cast)
    if report.mismatched:
        yield "Mismatched", _mismatched(report.mismatched)


def _outside(found: Sequence[Outside]) -> RenderableType:
    groups: dict[str, list[str]] = {}
    for each in found:
        groups.setdefault(each.reason, []).append(each.tensor)
    parts: list[RenderableType] = [Text(f"{len(found):,}, no part of the model", style="dim")]
    for reason, names in list(groups.items())[:MAX_NAME_LINES]:
        parts += [_names(fold(names)), Text(f"    {printable(reason)}", style="dim")]
    return _with_rest(Group(*parts), [Folded("", len(names)) for names in list(groups.values())[MAX_NAME_LINES:]])


def _names(folded: Sequence[Folded]) -> RenderableType:
    shown = Group(*(_name(name) for name in folded[:MAX_NAME_LINES]))
    return _with_rest(shown, folded[MAX_NAME_LINES:])


def _casts(casts: Sequence[Cast]) -> RenderableType:
    groups: dict[tuple[str, str], list[str]] = {}
    for cast in casts:
        groups.setdefault((cast.stored, cast.loaded), []).append(cast.variable)
    # That all of 236 variables were cast says more than their names: list names only for a few.
    return Group(*(_cast_line(names, *dtypes) for dtypes, names in groups.items()))


def _mismatched(found: Sequence[Mismatched]) -> RenderableType:
    head = Text(f"{len(found):,}, left alone: the checkpoint has another shape", style="dim")
    lines = (Text(f"{printable(m.variable)}  {_shape(m.expected)}, not {_shape(m.found)}") for m in found)
    shown = Group(head, *itertools.islice(lines, MAX_NAME_LINES))
    return _with_rest(shown, [Folded("", 1)] * (len(found) - MAX_NAME_LINES))


def _shape(shape: tuple[int, ...] | None) -> str:
    return "?" if shape is None else "x".join(map(str, shape)) or "scalar"


def _cast_line(names: Sequence[str], stored: str, loaded: str) -> Text:
    folded = fold(names)
    which = ", ".join(map(str, folded[:3])) + (f", … ({len(folded) - 3:,} more)" if len(folded) > 3 else "")
    return Text(f"{stored} → {loaded}  {plural(len(names), 'variable')}: {which}")


def _fit(fits: Fit) -> RenderableType:
    share = 100 * fits.per_device_max / fits.device_memory if fits.device_memory > 0 else 0.0
    verdict = ("yes", "bold green") if fits.fits else ("no", "bold red")
    sizes = f"{format_bytes(fits.per_device_max)} of {format_bytes(fits.device_memory)}"
    text = Text.assemble(verdict, f", weights take {sizes} on the fullest device ({share:.1f} %)")
    if fits.smallest_mesh:
        return Group(text, Text(f"Smallest mesh that fits: {fits.smallest_mesh}"))
    return text if fits.fits else Group(text, Text("No mesh was found that fits"))


def _name(name: Folded) -> Text:
    return Text.assemble(name.pattern, (f" {TIMES}{name.count}" if name.count > 1 else "", "dim"))


def _with_rest(shown: RenderableType, rest: Sequence[Folded]) -> RenderableType:
    if not rest:
        return shown
    return Group(shown, Text(f"… and {sum(name.count for name in rest):,} more (--json lists all)", style="dim"))


def _columns(*justify: str) -> Table:
    table = Table.grid(padding=(0, 2))
    # rich types ``justify`` as a Literal, which a plain str is not.
    add: Callable[..., None] = table.add_column
    for side in justify:
        add(justify=side, overflow="fold")
    return table
