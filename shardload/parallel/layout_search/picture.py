"""A plan for people: bars of per-device memory, collectives, and the layouts, in the terminal."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from shardload.sharding.layout import Layout
from shardload.units import format_bytes, plural

if TYPE_CHECKING:
    from shardload.parallel.layout_search.layout_plan import LayoutPlan

WIDTH = 40
"""Characters of a full bar."""


def plan_text(plan: LayoutPlan) -> str:
    """Return the plan as lines of text."""
    kind = "training" if plan.training else "inference"
    lines = [f"{plan.model} on {plan.mesh}, {kind}, inputs {plan.inputs}", *_memory(plan), *_exchanges(plan)]
    lines += _layouts(plan)
    rates = ", ".join(f"{name} {value:g}" for name, value in plan.constants.items() if isinstance(value, float | int))
    return "\n".join([*lines, f"cost constants: {rates}", *plan.notes])


def _memory(plan: LayoutPlan) -> list[str]:
    device = plan.device
    full = max(plan.device_memory_bytes or 0, device.total, 1)
    limit = f" of {format_bytes(plan.device_memory_bytes)}" if plan.device_memory_bytes else ""
    lines = [f"per device: {format_bytes(device.total)}{limit}"]
    for name in ("weights", "gradients", "slots", "activations"):
        nbytes = getattr(device, name)
        if nbytes:
            lines.append(f"  {name:<12}{'█' * round(WIDTH * nbytes / full):<{WIDTH}} {format_bytes(nbytes)}")
    return lines


def _exchanges(plan: LayoutPlan) -> list[str]:
    lines = [f"a step: about {plan.step_s * 1e3:.3f} ms, {format_bytes(plan.exchanged_bytes)} of collective results"]
    for e in plan.exchanges:
        lines.append(f"  {plural(e.count, e.kind)} over {e.axis}: {format_bytes(e.nbytes)}, {e.seconds * 1e3:.3f} ms")
    return lines


def _layouts(plan: LayoutPlan) -> list[str]:
    """One line for each different layout, with the names of repeated blocks merged."""
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for variable, layout in plan.layouts():
        name = re.sub(r"\d+", "*", variable.path)
        groups[name, f"{variable.shape}", _with_storage(layout, variable.stored)].append(variable.nbytes)
    lines = ["layouts:"]
    for (name, shape, how), sizes in groups.items():
        times = f" x{len(sizes)}" if len(sizes) > 1 else ""
        lines.append(f"  {name}{times} {shape}: {how}")
    return lines


def _with_storage(layout: Layout, stored: tuple[str, ...]) -> str:
    return f"{layout}" + (f", gathered over {'+'.join(stored)} for use" if stored else "")
