"""A report as a page of HTML: what the table of a report has, and for each variable, why it is as it is."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence

from shardload.reports.facts import Cast, ClusterBytes, DeviceUse, Fit, LayoutSummary, ReadReason, Stages
from shardload.reports.page import Bar, BarParts, Chart, Page, merge_equal, mesh_positions
from shardload.reports.variables_table import Row, variables_table
from shardload.units import format_bytes, format_seconds

_ROLES = {
    "column": "best split along its outputs, and the next kernel along its inputs (row): one all-reduce for both",
    "row": "best split along its inputs, and the kernel before along its outputs (column): one all-reduce for both",
    "heads out": "best split by attention heads, so that each device computes its own",
    "heads in": "best split by attention heads, whose results one all-reduce adds up",
    "vocabulary": "best split along the longer of the vocabulary and the features",
    "channels": "best split along its output channels",
    "positions": "whole on every device: a split would spread through the sums and norms of every block",
    "gates": "whole on every device: its gates lie side by side, so a split would separate them",
    "vector": "whole on every device: a vector of less than 1 MiB",
    "small": "whole on every device: less than 1 KiB, so a split costs more than it saves",
    "shape": "of a layer without a rule, so the longest dim that divides is split",
}
"""Meaning of the roles that ``layout="auto"`` gives to variables, which reports name in a word."""
_READS = {
    "alone": "no byte is needed by two hosts",
    "read": "each host reads what it needs",
    "broadcast": "each byte is read by one host, and others get it from there",
}
"""Meaning of each strategy of `ReadReason`."""


def report_page(
    title: str,
    *,
    mesh: str,
    devices: Sequence[DeviceUse],
    fits: Fit | None,
    cluster: ClusterBytes | None,
    seconds: Stages,
    layout: LayoutSummary,
    casts: Sequence[Cast],
    reads: Sequence[ReadReason],
    facts: Sequence[tuple[str, str]],
) -> Page:
    """Return the page of a report; the arguments are parts of the report, and ``facts`` lines of its table."""
    axes = {axis: int(size) for axis, size in re.findall(r"([^,=]+)=(\d+)", mesh)}
    charts = [_devices(devices, axes, fits)] if devices else []
    if cluster is not None:
        charts.append(_processes(cluster))
    charts.append(_stages(seconds))
    why, details = {f.variable: f.why for f in layout.fallbacks}, _details(layout, casts, reads)
    rows = (
        Row(v, f"{v.reason}: {why[v.name]}" if v.name in why else v.reason, tuple(details[v.name]))
        for v in layout.variables
    )
    return Page(title, tuple(charts), tuple(facts), variables_table(axes, tuple(rows)))


def _devices(devices: Sequence[DeviceUse], axes: dict[str, int], fits: Fit | None) -> Chart:
    kinds = ["device" if d.platform == "planned" else d.platform for d in devices]
    names = [f"{kind} {d.id}" for kind, d in zip(kinds, devices, strict=True)]
    if math.prod(axes.values()) == len(devices):
        names = [f"{name}  {position}" for name, position in zip(names, mesh_positions(axes), strict=True)]
    bars = zip(kinds, names, ((d.bytes,) for d in devices), strict=True)
    full, limit = max(d.bytes for d in devices), None if fits is None else fits.device_memory
    caption = "Bytes of weights on each device"
    if limit is not None:
        caption += f"; the mark is the memory of a device, {format_bytes(limit)}"
    return Chart(
        "Devices",
        merge_equal(bars, lambda parts: format_bytes(int(parts[0]))),
        max(full, limit or 0, 1),
        caption,
        limit=limit,
    )


def _processes(cluster: ClusterBytes) -> Chart:
    pairs = list(zip(cluster.read, cluster.received, strict=True))
    bars = (("processes", f"process {i}", pair) for i, pair in enumerate(pairs))

    def text(parts: BarParts) -> str:
        read, received = map(int, parts)
        return f"{format_bytes(read)} read, {format_bytes(received)} received"

    return Chart(
        "Processes", merge_equal(bars, text), max(*map(sum, pairs), 1), legend=("read", "received from others")
    )


def _stages(seconds: Stages) -> Chart:
    stages = {name: s for name, s in seconds.named().items() if s is not None}
    total, ready = stages.pop("total"), stages.pop("ready", None)
    after = "" if ready is None else f"; the first result {format_seconds(ready)} after the start"
    bars = tuple(Bar(name.replace("_", " "), (s,), format_seconds(s)) for name, s in stages.items() if s)
    return Chart("Time", bars, total or 1.0, f"{format_seconds(total)} in total{after}")


def _details(layout: LayoutSummary, casts: Sequence[Cast], reads: Sequence[ReadReason]) -> dict[str, list[str]]:
    """Return sentences on each variable, by its name."""
    found = defaultdict[str, list[str]](list)
    for v in layout.variables:
        if v.reason in _ROLES:
            found[v.name].append(f"{v.reason}: {_ROLES[v.reason]}")
    for f in layout.fallbacks:
        found[f.variable].append(f"its rule asks for the layout {f.wanted}")
    for v in layout.variables:
        origin = f"copied from the tensor {v.tensor}" if v.tensor else "computed from stored tensors, not copied"
        found[v.name].append(origin)
    for c in casts:
        found[c.variable].append(f"stored as {c.stored}, loaded as {c.loaded}")
    for r in reads:
        found[r.variable].append(f"{_READS[r.strategy]}: {r.why}")
    return found
