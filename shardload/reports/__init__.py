"""Reports of loads and of planned loads.

A `LoadReport` describes a load that ran, a `PlanReport` a load that was only planned. ``str(report)`` is a table for
people, ``report.to_json()`` an object for programs; its keys, with the keys of nested objects in brackets, are::

    source, format, mesh, devices[{id, platform, bytes}], variables, parameters, weight_bytes, bytes{needed, read},
    seconds{imports, build, plan, transfer, warm_up, other, total, ready}, throughput_gb_s,
    host_bytes{budget, peak_staging},
    layout{sharded, replicated, fallbacks[{variable, wanted, got, why}],
           variables[{name, tensor, dtype, shape, shard_shape, spec, bytes, device_bytes, reason}]},
    missing, unused, cast[{variable, stored, loaded}], mismatched[{variable, tensor, expected, found}], computed,
    initialised, outside[{tensor, reason}], dtypes, notes
    cluster{needed, total_read, ratio, read, received, exchanged}                                       loads only
    cache{read, fetched, stored, left_out}                                                              loads only
    fits{device_memory, per_device_max, fits, smallest_mesh},                                           plans only
    kv_cache{rows, tokens, bytes, per_device},                                                          plans only
    hosts{hosts, devices, needed, read, total_read, kinds, planned,
          shared{read, total_read, received, exchanged, is_chosen, reasons[{variable, strategy, why}]}} plans only

Missing measurements are ``null``, never ``NaN``, so that every JSON parser reads them. The table::

    Source     /models/gemma3_270m.gguf (gguf)
    Mesh       batch=1,model=2 (2 cpu devices)
    Weights    268.1 M parameters in 236 variables, 511.4 MiB, bfloat16
    Devices    cpu 0  255.7 MiB  ████████████████████████
               cpu 1  255.7 MiB  ████████████████████████
    Time       build   120 ms  ███████
               …
"""

from __future__ import annotations

import io
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from shardload.reports.facts import (
    ByteCounts,
    CacheBytes,
    CacheUse,
    Cast,
    ClusterBytes,
    DeviceUse,
    Fit,
    HostBytes,
    HostReads,
    LayoutSummary,
    Mismatched,
    Outside,
    ReadReason,
    SharedReads,
    Stages,
    VariableUse,
)
from shardload.reports.names import TIMES, Folded, fold, printable
from shardload.reports.report_page import report_page
from shardload.sharding.layout import Fallback
from shardload.units import format_bytes, format_parameters, format_rate, format_seconds, plural

_TEXT_WIDTH = 100
"""Columns of ``str(report)``, which does not know the width of the reader's window."""
_MAX_DEVICE_LINES = 16
"""Most devices shown one by one; of more devices, only those with the least, median and most bytes are shown."""
_MAX_NAME_LINES = 12
"""Most folded names (``layer_*``) shown per list; ``to_json`` has all names."""
_BAR_WIDTH = 24
_LEAST_SHOWN = 0.01
"""Least share of the total time at which imports and other times are shown in the table."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """The fields that a load and a plan have in common; never instantiated, see `LoadReport` and `PlanReport`."""

    kind: ClassVar[str]
    """What the report is about, as the first word of a title."""
    source: str
    """Absolute path of the resolved source."""
    format: str
    """Name of the checkpoint's format, such as ``gguf`` or ``hf-safetensors``."""
    mesh: str
    """The mesh as text: ``batch=1,model=8``."""
    devices: tuple[DeviceUse, ...]
    """The devices in the order of the mesh, with the bytes on each."""
    variables: int
    """Number of variables filled from the checkpoint."""
    parameters: int
    """Number of elements in the variables filled from the checkpoint."""
    weight_bytes: int
    """Bytes of one unsharded copy of the variables filled from the checkpoint, in the model's dtypes."""
    bytes: ByteCounts
    seconds: Stages
    host_bytes: HostBytes
    layout: LayoutSummary
    missing: tuple[str, ...] = ()
    """Names of the variables that the checkpoint has no tensor for."""
    unused: tuple[str, ...] = ()
    """Names of the checkpoint's tensors that the model has no variable for."""
    cast: tuple[Cast, ...] = ()
    mismatched: tuple[Mismatched, ...] = ()
    """Variables whose tensor has another shape. If a plan lists any, a strict load will refuse the checkpoint."""
    computed: tuple[str, ...] = ()
    """Names of variables whose value a layer or converter computed from stored tensors instead of copying it."""
    initialised: tuple[str, ...] = ()
    """Names of variables that got their initial value because the checkpoint lacks them (seeds, metrics, heads)."""
    outside: tuple[Outside, ...] = ()
    """Tensors that do not belong to the model that was built: buffers, heads, poolers, copies of the embedding."""
    dtypes: tuple[str, ...] = ()
    """Dtypes of the variables; the one with most bytes comes first."""
    notes: tuple[str, ...] = ()
    """Anything else a person should know, one line each: ``gemma2_7b is not a released size; loaded gemma2_9b``."""

    @property
    def throughput_gb_s(self) -> float | None:
        """Gigabytes (1e9 bytes) that the model needed, per second of transfer; ``None`` if not measured."""
        if not self.seconds.transfer or not math.isfinite(self.seconds.transfer):
            return None
        return self.bytes.needed / self.seconds.transfer / 1e9

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dict for `json.dumps`; the docstring of this module lists its keys."""
        # A property is no field, so the throughput is put where a reader looks for it: after the seconds.
        facts: dict[str, Any] = {}
        for key, value in asdict(self).items():
            facts[key] = _finite(value)
            if key == "seconds":
                facts[key] = _finite(self.seconds.named())
                facts["throughput_gb_s"] = _finite(self.throughput_gb_s)
        return facts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the report's table, which `rich.print` shows instead of the report."""
        yield from sections(self, ascii_only=options.ascii_only)

    def __repr__(self) -> str:
        counts = {"missing": self.missing, "unused": self.unused, "mismatched": self.mismatched}
        more = "".join(f", {len(found):,} {name}" for name, found in counts.items() if found)
        more += f", {plural(len(self.notes), 'note')}" if self.notes else ""
        return (
            f"<{type(self).__name__} {self.source} ({self.format}) on {self.mesh}: "
            f"{plural(self.variables, 'variable')}, {plural(self.weight_bytes, 'byte')}{more}; print it for the table>"
        )

    def _repr_html_(self) -> str:
        """Return the report's table as HTML, which a notebook shows instead of the report."""
        # Without force_jupyter=False, rich shows the table itself, and the notebook shows it again.
        console = Console(file=io.StringIO(), width=_TEXT_WIDTH, record=True, force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def to_html(self) -> str:
        """Return the report as a page of HTML that needs no other file and opens no connection.

        It shows bytes per device and seconds per stage as bars, and a tree of all variables to sort and search: how
        each is split, and why.
        """
        hosts, drawn = getattr(self, "hosts", None), ("Devices", "Time", "Source")
        page = report_page(
            f"{self.kind} of {self.source} on {self.mesh}",
            mesh=self.mesh,
            devices=self.devices,
            fits=getattr(self, "fits", None),
            cluster=getattr(self, "cluster", None),
            seconds=self.seconds,
            layout=self.layout,
            casts=self.cast,
            reads=() if hosts is None or hosts.shared is None else hosts.shared.reasons,
            facts=[(label, _plain(content)) for label, content in _rows(self, "█") if label not in drawn],
        )
        return page.html()

    def __str__(self) -> str:
        return _plain(self, width=_TEXT_WIDTH)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LoadReport(Report):
    """The report of a load that ran."""

    kind = "Load"
    cluster: ClusterBytes | None = None
    """What all processes read and exchanged; ``None`` if one process loaded alone."""
    cache: CacheBytes | None = None
    """What came from the cache and from remote stores; ``None`` if no cache was used."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanReport(Report):
    """The report of a load that was only planned: sizes are exact, the time of the transfer is ``None``."""

    kind = "Plan"
    fits: Fit | None = field(default=None)
    """Whether the weights fit devices of the given memory; ``None`` if no device memory was given."""
    hosts: HostReads | None = None
    """What each host reads; ``None`` if no number of hosts was given."""
    kv_cache: CacheUse | None = None
    """The KV cache that was asked for; ``None`` if none was, or if it cannot be told: then a note says why."""


def _plain(shown: RenderableType, *, width: int = 10_000) -> str:
    """Return what rich renders as text without colours, the same under any FORCE_COLOR and COLUMNS."""
    text = io.StringIO()
    # In a notebook, rich would display the report there and write nothing to the file.
    plain = Console(file=text, width=width, no_color=True, highlight=False, force_terminal=False, force_jupyter=False)
    plain.print(shown)
    # rich pads each line with spaces.
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _finite(value: Any) -> Any:
    """Return ``value`` as JSON can store it: tuples become lists, floats get six decimals, infinity and NaN None."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


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
    counts = Counter(device.platform for device in report.devices)
    kinds = ", ".join(plural(n, f"{platform} device") for platform, n in counts.items()) or "no device"
    yield "Mesh", Text(f"{report.mesh} ({kinds})")
    parameters = f"{format_parameters(report.parameters)} in {plural(report.variables, 'variable')}"
    yield "Weights", Text(", ".join((parameters, format_bytes(report.weight_bytes), *report.dtypes)))
    if report.devices:
        yield "Devices", _devices(report.devices, block)
    yield (
        "Layout",
        Text(f"{plural(report.layout.sharded, 'variable')} sharded, {report.layout.replicated:,} replicated"),
    )
    if fallbacks := report.layout.fallbacks:
        reasons = ((f.variable, f"{f.wanted} → {f.got}  {printable(f.why)}") for f in fallbacks)
        head = f"{plural(len(fallbacks), 'variable')} did not get the layout wanted"
        yield "Fallbacks", _by_reason(head, reasons, style="yellow")
    if (hosts := getattr(report, "hosts", None)) is not None:
        yield "Hosts", Text(_hosts(hosts, needed=report.bytes.needed))
    else:
        yield "Disk", Text(_disk(report))
    if (cluster := getattr(report, "cluster", None)) is not None:
        yield "Processes", Text(_cluster(cluster))
    if (cached := getattr(report, "cache", None)) is not None:
        yield "Cache", Text(_cached(cached))
    staged, budget = format_bytes(report.host_bytes.peak_staging), format_bytes(report.host_bytes.budget)
    yield "Host memory", Text(f"{staged} peak staging of {budget}")
    yield "Time", _stages(report, block)
    yield from _lists(report)
    kept: CacheUse | None = getattr(report, "kv_cache", None)
    if kept is not None:
        rows = f"{plural(kept.rows, 'row')} of {plural(kept.tokens, 'token')}"
        total, share = format_bytes(kept.bytes), format_bytes(kept.per_device)
        yield "KV cache", Text(f"{rows}: {total}, {share} on each device")
    if (fits := getattr(report, "fits", None)) is not None:
        yield "Fits", _fit(fits, kept)
    if report.notes:
        yield "Notes", Text("\n".join(printable(note) for note in report.notes))


def _devices(devices: Sequence[DeviceUse], block: str) -> RenderableType:
    most = max(device.bytes for device in devices)
    table = _columns("left", "right", "left")
    if len(devices) <= _MAX_DEVICE_LINES:
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
    cells = round(_BAR_WIDTH * value / most) if most > 0 else 0
    return Text(block * max(cells, 1 if value > 0 else 0), style="green")


def _disk(report: Report) -> str:
    needed, read = report.bytes.needed, report.bytes.read
    if getattr(report, "cluster", None) is not None:  # its own line compares them with what the mesh needs
        return f"{format_bytes(read)} read"
    if read == needed:
        return f"{format_bytes(read)} read, each needed byte once"
    more = f" ({100 * (read - needed) / needed:+.1f} %)" if needed else ""
    return f"{format_bytes(read)} read for {format_bytes(needed)} needed{more}"


def _stages(report: Report, block: str) -> RenderableType:
    seconds = report.seconds
    table = _columns("left", "right", "left")
    for label, value in seconds.named().items():
        # Each row's time is rounded: what would not be seen is left out.
        if label in ("total", "ready") or (label == "warm_up" and value is None):
            continue
        if label in ("imports", "other") and (value or 0.0) < _LEAST_SHOWN * seconds.total:
            continue
        bar = _bar(value or 0.0, seconds.total, block)
        if label == "transfer" and report.throughput_gb_s is not None:
            bar.append(f" {format_rate(report.throughput_gb_s)}", style="default")
        table.add_row(label.replace("_", " "), format_seconds(value), bar)
    table.add_row("total", format_seconds(seconds.total), "")
    if seconds.ready is not None:
        table.add_row("ready", format_seconds(seconds.ready), "")
    return table


def _by_reason(head: str, named: Iterable[tuple[str, str]], *, style: str) -> RenderableType:
    """Return text for (name, reason) pairs: ``head``, then names that share a reason, and this reason below them."""
    groups: dict[str, list[str]] = {}
    for name, reason in named:
        groups.setdefault(reason, []).append(name)
    parts: list[RenderableType] = [Text(head, style="dim")]
    for reason, names in list(groups.items())[:_MAX_NAME_LINES]:
        parts += [_names(fold(names)), Text(f"    {reason}", style=style)]
    return _with_rest(Group(*parts), [Folded("", len(names)) for names in list(groups.values())[_MAX_NAME_LINES:]])


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
        outside = ((one.tensor, printable(one.reason)) for one in report.outside)
        yield "Outside", _by_reason(f"{len(report.outside):,}, no part of the model", outside, style="dim")
    if report.cast:
        yield "Cast", _casts(report.cast)
    if found := report.mismatched:
        head = Text(f"{len(found):,}, left alone: the checkpoint has another shape", style="dim")
        lines = (Text(f"{printable(m.variable)}  {_shape(m.expected)}, not {_shape(m.found)}") for m in found)
        shown = Group(head, *itertools.islice(lines, _MAX_NAME_LINES))
        yield "Mismatched", _with_rest(shown, [Folded("", 1)] * (len(found) - _MAX_NAME_LINES))


def _names(folded: Sequence[Folded]) -> RenderableType:
    shown = folded[:_MAX_NAME_LINES]
    times = ((f" {TIMES}{name.count}" if name.count > 1 else "", "dim") for name in shown)
    lines = (Text.assemble(name.pattern, count) for name, count in zip(shown, times, strict=True))
    return _with_rest(Group(*lines), folded[_MAX_NAME_LINES:])


def _casts(casts: Sequence[Cast]) -> RenderableType:
    groups: dict[tuple[str, str], list[str]] = {}
    for cast in casts:
        groups.setdefault((cast.stored, cast.loaded), []).append(cast.variable)
    lines = []
    for (stored, loaded), names in groups.items():
        # That all of 236 variables were cast says more than their names: list names only for a few.
        folded = fold(names)
        which = ", ".join(map(str, folded[:3])) + (f", … ({len(folded) - 3:,} more)" if len(folded) > 3 else "")
        lines.append(Text(f"{stored} → {loaded}  {plural(len(names), 'variable')}: {which}"))
    return Group(*lines)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "?" if shape is None else "x".join(map(str, shape)) or "scalar"


def _hosts(found: HostReads, *, needed: int) -> str:
    estimated = found.planned < found.kinds
    share = f"{'about ' if estimated else 'at most ' if found.kinds > 1 else ''}{format_bytes(found.read)}"
    quotient = found.total_read / needed if needed else 1.0
    times = f"{quotient:.3g}" if quotient < 1000 else f"{quotient:,.0f}"
    return (
        f"{plural(found.hosts, 'host')} of {plural(found.devices, 'device')}: each reads {share} for "
        f"{format_bytes(found.needed)} needed; together {format_bytes(found.total_read)}, "
        f"{'no more than' if times == '1' else f'{times} times'} what the mesh needs"
        f"{f' (estimated from {found.planned} of {found.kinds} kinds of hosts)' if estimated else ''}"
        f"{'' if found.shared is None else _shared(found.shared, needed=needed)}"
    )


def _cluster(found: ClusterBytes) -> str:
    ratio = f"{found.ratio:.3g}"
    received = f", and received at most {format_bytes(max(found.received))} from others" if found.exchanged else ""
    return (
        f"{plural(len(found.read), 'process')} read {format_bytes(found.total_read)} together, "
        f"{'no more than' if ratio == '1' else f'{ratio} times'} the {format_bytes(found.needed)} that the mesh needs; "
        f"each read at most {format_bytes(max(found.read))}{received}"
    )


def _cached(found: CacheBytes) -> str:
    left_out = f", {format_bytes(found.left_out)} left out" if found.left_out else ""
    stored = f"; {format_bytes(found.stored)} stored{left_out}" if found.fetched else ""
    return f"{format_bytes(found.read)} from the cache, {format_bytes(found.fetched)} from the network{stored}"


def _shared(found: SharedReads, *, needed: int) -> str:
    if not found.exchanged:
        return ""
    quotient = f"{found.total_read / needed if needed else 1.0:.3g}"
    return (
        f"\nIf each byte is read by one host: each reads {format_bytes(found.read)} and receives "
        f"{format_bytes(found.received)} from others; together {format_bytes(found.total_read)}, "
        f"{'no more than' if quotient == '1' else f'{quotient} times'} what the mesh needs. "
        f"{'The load does so' if found.is_chosen else 'The load does so with replicas=broadcast'}"
    )


def _fit(fits: Fit, cache: CacheUse | None) -> RenderableType:
    share = 100 * fits.per_device_max / fits.device_memory if fits.device_memory > 0 else 0.0
    verdict = ("yes", "bold green") if fits.fits else ("no", "bold red")
    sizes = f"{format_bytes(fits.per_device_max)} of {format_bytes(fits.device_memory)}"
    what = "weights take" if cache is None else "weights and KV cache take"
    text = Text.assemble(verdict, f", {what} {sizes} on the fullest device ({share:.1f} %)")
    if fits.smallest_mesh:
        return Group(text, Text(f"Smallest mesh that fits: {fits.smallest_mesh}"))
    return text if fits.fits else Group(text, Text("No mesh was found that fits"))


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


__all__ = [
    "TIMES",
    "ByteCounts",
    "CacheUse",
    "Cast",
    "ClusterBytes",
    "DeviceUse",
    "Fallback",
    "Fit",
    "HostBytes",
    "HostReads",
    "LayoutSummary",
    "LoadReport",
    "Mismatched",
    "Outside",
    "PlanReport",
    "ReadReason",
    "Report",
    "SharedReads",
    "Stages",
    "VariableUse",
    "fold",
    "printable",
]
