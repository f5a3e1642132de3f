"""A plan of a load as the body of a page: the devices of a mesh, what is on each, and what it costs.

    Mesh [2x4] (Plan)      1x1  1x4  1x8  …
                model=0          model=1          …
    batch=0     ▇▇▇▇▁ 1.2 GiB    ▇▇▇▇▁ 1.2 GiB         split variables and whole ones; the part of one variable
    batch=1     …
    variables   as in the page that `shardload plan --html` writes

It is made from what `shardload plan --json` prints.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlencode

from shardload.errors import UsageError
from shardload.reports import TIMES
from shardload.reports.facts import Cast, DeviceUse, LayoutSummary, ReadReason, Stages, VariableUse
from shardload.reports.markup import AXIS_COLOURS, bar_svg, escaped, escaped_lines
from shardload.reports.name_table import MOST_ROWS
from shardload.reports.page import Chart, Page, merge_equal
from shardload.reports.report_page import report_page
from shardload.sharding.layout import Fallback
from shardload.sharding.mesh import MeshSpec
from shardload.units import format_bytes, plural

MOST_DEVICES = 4096
"""Most devices that a plan is made for."""
_MOST_TEXT = 64
_SHOWN = 16
"""Most rows and columns of devices in a picture."""
_USUAL = ("1x1", "1x2", "1x4", "1x8", "2x4", "4x4", "8x8")


def asked_mesh(text: str) -> MeshSpec:
    """Return the mesh that a viewer asked for.

    Raises:
        UsageError: When it is none, or one with too many devices.
    """
    if len(text) > _MOST_TEXT:
        raise UsageError(
            f"Cannot plan for this mesh: it has {plural(len(text), 'character')}, expected one such as 2x4"
        )
    found = MeshSpec.parse(text)
    if found.size > MOST_DEVICES:
        raise UsageError(
            f"Cannot plan for the mesh {found}: it has {plural(found.size, 'device')}, expected at most "
            f"{MOST_DEVICES:,}. shardload plan takes a mesh of any size"
        )
    return found


def command_of(mesh: MeshSpec) -> tuple[str, ...]:
    """Return the command that plans for a mesh. Each device has a host, so that it says what one device reads."""
    named = ",".join(f"{axis}={size}" for axis, size in zip(mesh.axes, mesh.sizes, strict=True))
    return ("plan", f"--mesh={named}", f"--hosts={mesh.size}")


def mesh_form(mesh: str, hidden: Mapping[str, str]) -> Iterator[str]:
    """Yield the form that asks for a mesh; ``hidden`` are other parts of the page's address."""
    kept = "".join(f'<input type="hidden" name="{name}" value="{escaped(text)}">' for name, text in hidden.items())
    links = (
        f'<li><a href="?{"".join(f"{name}={escaped(text)}&amp;" for name, text in hidden.items())}mesh={each}"'
        f"{' aria-current=true' if each == mesh else ''}>{each}</a></li>"
        for each in _USUAL
    )
    yield (
        f'<form class="filter" method="get">{kept}<label>Mesh, such as 2x4 or data=2,model=4 <input name="mesh" '
        f'required maxlength="{_MOST_TEXT}" value="{escaped(mesh)}" autocomplete="off" spellcheck="false"></label> '
        f'<button>Plan</button></form>\n<ul class="choices" aria-label="Usual meshes">{"".join(links)}</ul>'
    )


def plan_lines(plan: Mapping[str, Any], mesh: MeshSpec, *, chosen: str, hidden: Mapping[str, str]) -> Iterator[str]:
    """Yield the HTML of a plan, with the parts of the variable ``chosen`` on each device.

    ``hidden`` are the other parts of the page's address.
    """
    variables = [_variable(each) for each in plan["layout"]["variables"]]
    variable = next((each for each in variables if each.name == chosen), None)
    yield from _costs(plan, variables, mesh)
    yield '<h2 id="devices">Devices</h2>'
    shown = variables[:MOST_ROWS]
    yield from _choice(shown if variable is None or variable in shown else [*shown, variable], chosen, hidden)
    yield from _picture(plan, mesh, variable, whole=_whole_bytes(variables))
    yield from replace(_page(plan, mesh, shown), charts=_charts(plan, mesh, whole=_whole_bytes(variables))).sections()
    if len(shown) < len(variables):
        path = f"/api/v1/checkpoints/{quote(plan['source'])}/plan?{urlencode({'mesh': plan['mesh']})}"
        first = f"Only the first {len(shown):,} of {plural(len(variables), 'variable')} are shown, searched and offered"
        yield (
            f'<p class="soft">{first} above. <a href="{escaped(path)}">The plan as JSON</a> has all; so has the '
            "page that <code>shardload plan --html FILE</code> writes, in which similar ones share a row.</p>"
        )


def _variable(facts: Mapping[str, Any]) -> VariableUse:
    spec = tuple(map(tuple, facts["spec"]))
    shapes = {name: tuple(facts[name]) for name in ("shape", "shard_shape")}
    return VariableUse(**{**facts, **shapes, "spec": spec})


def _whole_bytes(variables: list[VariableUse]) -> int:
    """Return the bytes of the variables that every device has completely."""
    return sum(v.bytes for v in variables if v.device_bytes == v.bytes)


def _costs(plan: Mapping[str, Any], variables: list[VariableUse], mesh: MeshSpec) -> Iterator[str]:
    whole, most = _whole_bytes(variables), max((device["bytes"] for device in plan["devices"]), default=0)
    n_whole = sum(v.device_bytes == v.bytes for v in variables)
    rows = [
        ("Each device has", f"{format_bytes(most)} of {format_bytes(plan['weight_bytes'])}"),
        ("Split", f"{plural(len(variables) - n_whole, 'variable')}, {format_bytes(most - whole)} on each device"),
        ("Whole", f"{plural(n_whole, 'variable')}, {format_bytes(whole)} on each device"),
    ]
    if mesh.size > 1:
        extra = sum(device["bytes"] for device in plan["devices"]) - plan["weight_bytes"]
        rows.append(
            ("Copies", f"{format_bytes(extra)} on {plural(mesh.size, 'device')} together, of what is on several")
        )
    if (hosts := plan["hosts"]) is not None:
        alone = f"{format_bytes(hosts['read'])} by each device on a host of its own"
        rows.append(("To read", f"{alone}; {format_bytes(plan['bytes']['read'])} by one host for all devices"))
    else:
        rows.append(("To read", format_bytes(plan["bytes"]["read"])))
    rows += [("Note", escaped_lines(note)) for note in plan["notes"]]
    yield '<dl class="facts">'
    yield from (f"<dt>{label}</dt><dd>{text}</dd>" for label, text in rows)
    yield "</dl>"


def _choice(variables: list[VariableUse], chosen: str, hidden: Mapping[str, str]) -> Iterator[str]:
    kept = "".join(f'<input type="hidden" name="{name}" value="{escaped(text)}">' for name, text in hidden.items())
    options = "".join(
        f"<option{' selected' if each.name == chosen else ''}>{escaped(each.name)}</option>" for each in variables
    )
    yield (
        f'<form class="filter" method="get" action="#devices">{kept}<label>Show where a variable goes '
        f'<select name="variable"><option value="">none</option>{options}</select></label> '
        "<button>Show</button></form>"
    )


def _picture(plan: Mapping[str, Any], mesh: MeshSpec, variable: VariableUse | None, *, whole: int) -> Iterator[str]:
    """Yield a table of devices: a row for each position along all axes but the last, which has the columns."""
    *above, last = mesh.sizes
    n_rows, full = math.prod(above), max((device["bytes"] for device in plan["devices"]), default=1) or 1
    yield '<div class="sideways" role="region" aria-labelledby="devices" tabindex="0"><table class="mesh"><thead><tr>'
    yield "<td></td>" + "".join(f'<th scope="col">{escaped(mesh.axes[-1])}={i}</th>' for i in range(min(last, _SHOWN)))
    yield "</tr></thead><tbody>"
    for at in itertools.islice(itertools.product(*map(range, above)), _SHOWN):
        row = sum(i * math.prod(above[d + 1 :]) for d, i in enumerate(at))
        label = ", ".join(f"{axis}={i}" for axis, i in zip(mesh.axes, at, strict=False)) or "devices"
        yield f'<tr><th scope="row">{escaped(label)}</th>'
        for column in range(min(last, _SHOWN)):
            device = plan["devices"][row * last + column]
            drawn = bar_svg((device["bytes"] - whole, whole), full)
            part = "" if variable is None else _part(variable, mesh, (*at, column))
            yield f"<td>{drawn}<span>device {device['id']}</span> {format_bytes(device['bytes'])}{part}</td>"
        yield "</tr>"
    yield "</tbody></table></div>"
    if n_rows > _SHOWN or last > _SHOWN:
        yield f'<p class="soft">Only the first of {plural(mesh.size, "device")} are shown: the chart below has all.</p>'
    yield (
        '<ul class="legend"><li><span class="swatch p0"></span>parts of split variables</li>'
        '<li><span class="swatch p1"></span>whole variables</li></ul>'
    )


def _part(variable: VariableUse, mesh: MeshSpec, at: tuple[int, ...]) -> str:
    """Return which part of a variable the device at a position has: ``part 2 of 4``, and its bounds."""
    number, n_parts, bounds = 0, 1, []
    for length, shard, axes in zip(variable.shape, variable.shard_shape, variable.spec, strict=True):
        index = 0
        for axis in axes:
            index = index * mesh.axis_size(axis) + at[mesh.axes.index(axis)]
        parts = math.prod(map(mesh.axis_size, axes))
        number, n_parts = number * parts + index, n_parts * parts
        bounds.append(f"{index * shard}:{min((index + 1) * shard, length)}" if axes else "all")
    text = f" {TIMES} ".join(bounds) or "scalar"
    which = "whole" if n_parts == 1 else f"part {number + 1} of {n_parts}"
    return f'<br><span class="axis a{number % len(AXIS_COLOURS)}">{which}</span><br>{text}'


def _page(plan: Mapping[str, Any], mesh: MeshSpec, variables: list[VariableUse]) -> Page:
    """Return the page of the report, of which only the table remains, and a chart of devices if they are many."""
    shared = (plan["hosts"] or {}).get("shared") or {}
    return report_page(
        "",
        mesh=plan["mesh"],
        devices=[],
        fits=None,
        cluster=None,
        seconds=Stages(build=None, plan=None, transfer=None, total=0.0),
        layout=LayoutSummary(
            plan["layout"]["sharded"],
            plan["layout"]["replicated"],
            tuple(Fallback(**each) for each in plan["layout"]["fallbacks"]),
            tuple(variables),
        ),
        casts=[Cast(**each) for each in plan["cast"]],
        reads=[ReadReason(**each) for each in shared.get("reasons", ())],
        facts=[],
    )


def _charts(plan: Mapping[str, Any], mesh: MeshSpec, *, whole: int) -> tuple[Chart, ...]:
    devices = [DeviceUse(**each) for each in plan["devices"]]
    if max(mesh.sizes[-1], mesh.size // mesh.sizes[-1]) <= _SHOWN:
        return ()
    bars = (("device", f"device {d.id}", (float(d.bytes - whole), float(whole))) for d in devices)
    full = max(*(d.bytes for d in devices), 1)
    merged = merge_equal(bars, lambda parts: format_bytes(int(sum(parts))))
    return (Chart("All devices", merged, full, legend=("parts of split variables", "whole variables")),)
