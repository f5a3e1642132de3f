"""A plan for people, in the terminal: memory per device against the limit, collectives, and what is split where."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardload.sharding.layout import Layout, Spec
from shardload.units import format_bytes, plural

if TYPE_CHECKING:
    from shardload.layout_search.layout_plan import LayoutPlan, PlannedVariable

WIDTH = 40
"""Characters of a full bar."""
NAME_WIDTH = 56
"""Width of the column of names; a longer name moves the columns behind it."""
PARTS = ("weights", "gradients", "slots", "activations")
"""Parts of the memory of a device, as fields of `DeviceBytes`."""


@dataclass(frozen=True, slots=True)
class Group:
    """Variables of one layout, whose paths differ only in numbers."""

    name: str
    """Their path, with ``*`` in the place of numbers."""
    count: int
    shape: tuple[int, ...]
    layout: Layout
    stored: tuple[str, ...]
    """Axes that split only their storage."""
    device_bytes: int
    """Bytes of all of them on each device."""


def groups(plan: LayoutPlan) -> list[Group]:
    """Return the variables of a plan, repeated blocks merged, in the order of the model."""
    found: dict[tuple[str, tuple[int, ...], Spec, tuple[str, ...]], list[tuple[str, PlannedVariable]]]
    found = defaultdict(list)
    for variable, own in zip(plan.variables, plan.names, strict=True):
        # `decoder_block_7/…` of every block becomes one row, if shape and layout agree.
        name = re.sub(r"\d+", "*", variable.path)
        found[name, variable.shape, variable.spec, variable.stored].append((own, variable))
    made = []
    for (name, shape, spec, stored), members in found.items():
        layout = Layout(plan.mesh, spec)
        device_bytes = sum(v.nbytes for _, v in members) // math.prod(layout.parts)
        # A variable on its own keeps its name, with its numbers.
        shown = members[0][0] if len(members) == 1 else name
        made.append(Group(shown, len(members), shape, layout, stored, device_bytes))
    return made


def plan_text(plan: LayoutPlan, *, ascii_only: bool = False) -> str:
    """Return the plan as lines of text."""
    kind = "training" if plan.training else "inference"
    lines = [f"{plan.model} on {plan.mesh}, {kind}, inputs {plan.inputs}", *_memory(plan, "#" if ascii_only else "█")]
    lines += [*_exchanges(plan), *_layouts(plan)]
    rates = ", ".join(f"{name} {value:g}" for name, value in plan.constants.items() if isinstance(value, float | int))
    return "\n".join([*lines, f"cost constants: {rates}", *(f"note: {note}" for note in plan.notes), *_checks(plan)])


def _checks(plan: LayoutPlan) -> Iterator[str]:
    """One line for each check beyond the estimate."""
    if plan.compiled is not None:
        yield plan.compiled.line(plan.device_memory_bytes)
    if plan.numbers is not None:
        yield plan.numbers.line()


def _memory(plan: LayoutPlan, block: str) -> Iterator[str]:
    """Bars below each other, each starting where the one above ends; the right border is the limit."""
    device, limit = plan.device, plan.device_memory_bytes
    full = max(limit or 0, device.total, 1)
    share = f" of {format_bytes(limit)} ({100 * device.total / limit:.0f} %)" if limit else ""
    yield f"per device: {format_bytes(device.total)}{share}"
    rows = [(name, getattr(device, name), block) for name in PARTS]
    rows.append(("free", max((limit or 0) - device.total, 0), "."))
    begun = 0
    for name, nbytes, mark in rows:
        if not nbytes:
            continue
        first, last = (round(WIDTH * n / full) for n in (begun, begun + nbytes))
        bar = " " * min(first, WIDTH - 1) + mark * max(last - first, 1)
        yield f"  {name:<12}{bar[:WIDTH]:<{WIDTH}}| {format_bytes(nbytes)}"
        begun += nbytes


def _exchanges(plan: LayoutPlan) -> Iterator[str]:
    milliseconds = float(f"{plan.step_s * 1e3:.4g}")  # an estimate: four digits, and no exponent
    yield f"a step: about {milliseconds:g} ms, {format_bytes(plan.exchanged_bytes)} of collective results"
    for e in plan.exchanges:
        yield f"  {plural(e.count, e.kind)} over {e.axis}: {format_bytes(e.nbytes)}, {e.seconds * 1e3:.3f} ms"


def _layouts(plan: LayoutPlan) -> Iterator[str]:
    """One line for each different layout: name, dims with the axes that split them, bytes on each device."""
    found = groups(plan)
    names = [f"{g.name} x{g.count}" if g.count > 1 else g.name for g in found]
    dims = [_dims(g) for g in found]
    wide = min(max(map(len, names), default=0), NAME_WIDTH)
    wider = max(map(len, dims), default=0)
    yield "layouts (dim/axes that split it), and bytes on each device:"
    for name, shape, group in zip(names, dims, found, strict=True):
        stored = f"  gathered over {'+'.join(group.stored)} for use" if group.stored else ""
        yield f"  {name:<{wide}}  {shape:<{wider}}  {format_bytes(group.device_bytes):>9}{stored}"


def _dims(group: Group) -> str:
    """Write a shape with the axes that split each dim: ``(4608, 36864/model)``."""
    cells = [
        f"{n}/{'+'.join(axes)}" if axes else f"{n}" for n, axes in zip(group.shape, group.layout.spec, strict=True)
    ]
    return f"({', '.join(cells)})"
