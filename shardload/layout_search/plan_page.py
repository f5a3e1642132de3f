"""A plan as a page of HTML: memory per device, collectives, and why each variable has its layout."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from shardload.layout_search.plan_parts import Decision, PlannedExchange, PlannedVariable
from shardload.layout_search.plan_pictures import MEMORY_PARTS, PlanPicture
from shardload.reports.facts import VariableUse
from shardload.reports.page import Bar, Chart, Page, merge_equal, mesh_positions
from shardload.reports.variables_table import Row, variables_table
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec
from shardload.units import format_bytes, plural


def plan_page(
    picture: PlanPicture,
    variables: Sequence[tuple[str, PlannedVariable]],
    decisions: Sequence[Decision],
    exchanges: Sequence[PlannedExchange],
    *,
    facts: Sequence[tuple[str, str]],
) -> Page:
    """Return the page of a plan; ``variables`` are (name, variable), ``facts`` (label, text) of its summary."""
    axes = dict(zip(picture.mesh.axes, picture.mesh.sizes, strict=True))
    why = _why(decisions, limited=picture.limit is not None)
    rows = tuple(_row(name, v, picture.mesh, why[name]) for name, v in variables)
    charts = [_devices(picture, axes)]
    if exchanges:
        charts.append(_exchanges(exchanges))
    return Page(
        f"Layout plan of {picture.title}",
        tuple(charts),
        (("Inputs", picture.inputs), *facts),
        variables_table(axes, rows),
    )


def _devices(picture: PlanPicture, axes: dict[str, int]) -> Chart:
    device, limit = picture.device, picture.limit
    sizes = {
        label: getattr(device, part) for part, label in MEMORY_PARTS.items() if part != "kv_cache" or device.kv_cache
    }
    parts = tuple(sizes.values())
    bars = (("device", f"device {i}  {at}", parts) for i, at in enumerate(mesh_positions(axes)))
    caption = "Estimated memory of each device, at the moment of a step at which it needs most"
    if limit is not None:
        caption += (
            f"; the mark is the limit, {format_bytes(limit)}, of which {100 * device.total / limit:.0f} % are used"
        )
    legend = tuple(f"{part} {format_bytes(nbytes)}" for part, nbytes in sizes.items())
    return Chart(
        "Devices",
        merge_equal(bars, lambda parts: format_bytes(int(sum(parts)))),
        max(device.total, limit or 0, 1),
        caption,
        legend,
        limit,
    )


def _exchanges(exchanges: Sequence[PlannedExchange]) -> Chart:
    bars = tuple(
        Bar(
            f"{plural(e.count, e.kind)} over {e.axis}",
            (e.seconds,),
            f"{e.seconds * 1e3:.3f} ms for {format_bytes(e.nbytes)}",
        )
        for e in exchanges
    )
    return Chart("Collectives of a step", bars, max(e.seconds for e in exchanges) or 1.0, "Estimated seconds")


def _why(decisions: Sequence[Decision], *, limited: bool) -> dict[str, list[str]]:
    """Return the decisions about the dims of each variable, as text, by its name."""
    found = defaultdict[str, list[str]](list)
    for decision in decisions:
        line = decision.line(limited=limited)
        # "dense/kernel[1]": a decision may be about several dims of one variable.
        for name in dict.fromkeys(dim.rpartition("[")[0] for dim in decision.dims):
            found[name].append(line)
    return found


def _row(name: str, v: PlannedVariable, mesh: MeshSpec, why: Sequence[str]) -> Row:
    layout = Layout(mesh, v.spec)
    used = VariableUse(
        name=name,
        tensor="",
        dtype="",
        shape=v.shape,
        shard_shape=layout.shard_shape(v.shape),
        spec=v.spec,
        bytes=v.nbytes,
        device_bytes=v.nbytes // math.prod(layout.parts),
        reason=v.reason,
    )
    gathered = f"stored split over {'+'.join(v.stored)}, and gathered for use"
    return Row(used, v.reason, (gathered,) if v.stored else (), tuple(why), v.stored)
