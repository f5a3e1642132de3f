"""What a load did, and what a load would do.

A `LoadReport` is the account of a load that ran, a `PlanReport` of one that was only planned; both carry the
same facts. ``str(report)`` is a table for people, ``report.to_json()`` an object for programs with these keys::

    source, format, mesh, devices[{id, platform, bytes}], variables, parameters, weight_bytes, bytes{needed, read},
    seconds{build, plan, transfer, total}, throughput_gb_s, host_bytes{budget, peak_staging},
    layout{sharded, replicated, fallbacks[{variable, wanted, got, why}]}, missing, unused,
    cast[{variable, stored, loaded}], mismatched[{variable, tensor, expected, found}], computed, initialised,
    outside[{tensor, reason}], notes
    fits{device_memory, per_device_max, fits, smallest_mesh}                                            plans only

What was not measured is ``null`` there, never ``NaN``, so that every JSON parser reads it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from shardload.sharding.layout import Fallback

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = [
    "ByteCounts",
    "Cast",
    "DeviceUse",
    "Fallback",
    "Fit",
    "HostBytes",
    "LayoutSummary",
    "LoadReport",
    "Mismatched",
    "Outside",
    "PlanReport",
    "Report",
    "Stages",
]

TEXT_WIDTH = 100
"""Columns of ``str(report)``, which cannot know how wide the reader's window is."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One device of the mesh."""

    id: int
    """The device's id in JAX; in a plan, its position in the mesh."""
    platform: str
    """``cpu``, ``gpu`` or ``tpu``; in a plan, ``planned``."""
    bytes: int
    """Bytes of weights it holds when the load is over."""


@dataclass(frozen=True, slots=True)
class ByteCounts:
    """How much of the checkpoint mattered, and how much was read."""

    needed: int
    """Bytes on disk that hold values the model needs."""
    read: int
    """Bytes that were read from disk; more than ``needed`` where skipping would have cost more than reading."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Wall-clock seconds per stage; ``None`` where a stage did not run."""

    build: float | None
    """Building the model without allocating it; ``None`` when it stood already."""
    plan: float | None
    """Reading headers, mapping names, choosing layouts, planning reads."""
    transfer: float | None
    """Reading tensor data and placing it on devices; ``None`` in a plan."""
    total: float
    """Everything, these stages and what lies between them."""


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Host memory of the load, without what CPU devices hold."""

    budget: int
    """What staging buffers may take."""
    peak_staging: int
    """The most they took at one time; in a plan, the most they will take."""


@dataclass(frozen=True, slots=True)
class LayoutSummary:
    """How variables are spread over the mesh."""

    sharded: int
    """Variables split over at least one axis."""
    replicated: int
    """Variables every device holds entirely."""
    fallbacks: tuple[Fallback, ...] = ()
    """Variables that did not get the layout their rule wanted."""


@dataclass(frozen=True, slots=True)
class Cast:
    """A variable whose dtype differs from what the checkpoint stores."""

    variable: str
    stored: str
    """Dtype in the checkpoint."""
    loaded: str
    """Dtype in the model."""


@dataclass(frozen=True, slots=True)
class Outside:
    """A tensor outside the architecture that the checkpoint's configuration describes."""

    tensor: str
    reason: str
    """Why the model computes the same without it."""


@dataclass(frozen=True, slots=True)
class Mismatched:
    """A variable that was left alone because its tensor has another shape."""

    variable: str
    tensor: str
    """Empty where a layer refused before it took any tensor."""
    expected: tuple[int, ...] | None
    """The variable's shape; ``None`` where a layer refused for another reason."""
    found: tuple[int, ...] | None
    """The shape the checkpoint offers."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a plan fits devices of a given size."""

    device_memory: int
    """Bytes one device has."""
    per_device_max: int
    """Bytes the fullest device would hold, weights only."""
    fits: bool
    smallest_mesh: str | None
    """The smallest mesh on which it fits, as text; ``None`` when none was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The facts a load and a plan have in common; never made itself, see `LoadReport` and `PlanReport`."""

    source: str
    """What was asked for and where it was found: a path, absolute."""
    format: str
    """The checkpoint's format, as in `shardload.manifest.Manifest`."""
    mesh: str
    """``batch=1,model=8``."""
    devices: tuple[DeviceUse, ...]
    """In mesh order."""
    variables: int
    """Variables filled from the checkpoint."""
    parameters: int
    """Elements in them."""
    weight_bytes: int
    """Bytes of one unsharded copy of them, in the model's dtypes."""
    bytes: ByteCounts
    seconds: Stages
    host_bytes: HostBytes
    layout: LayoutSummary
    missing: tuple[str, ...] = ()
    """Variables the checkpoint has no tensor for."""
    unused: tuple[str, ...] = ()
    """Tensors the model has no variable for."""
    cast: tuple[Cast, ...] = ()
    mismatched: tuple[Mismatched, ...] = ()
    """What the checkpoint holds in another shape; in a plan, what a strict load will refuse."""
    computed: tuple[str, ...] = ()
    """Variables whose value a layer or converter computed from stored tensors, not merely copied."""
    initialised: tuple[str, ...] = ()
    """Variables that got their initial value because the checkpoint does not hold them (seeds, metrics, heads)."""
    outside: tuple[Outside, ...] = ()
    """Tensors that do not belong to the model that was built: buffers, heads, poolers, copies of the embedding."""
    notes: tuple[str, ...] = ()
    """Anything else a person should know, one line each: ``gemma2_7b is not a released size; loaded gemma2_9b``."""

    @property
    def throughput_gb_s(self) -> float | None:
        """Needed bytes per second of transfer, in 1e9 bytes; over-reading earns nothing. ``None`` when not measured."""
        if not self.seconds.transfer or not math.isfinite(self.seconds.transfer):
            return None
        return self.bytes.needed / self.seconds.transfer / 1e9

    def to_json(self) -> dict[str, Any]:
        """The report as an object `json.dumps` takes, in the key order of the module docstring."""
        facts: dict[str, Any] = {}
        for key, value in asdict(self).items():
            facts[key] = _finite(value)
            if key == "seconds":
                facts["throughput_gb_s"] = _finite(self.throughput_gb_s)
        return facts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, for `rich.print` and notebooks."""
        from shardload.reports.table import sections

        yield from sections(self, ascii_only=options.ascii_only)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=TEXT_WIDTH, no_color=True, highlight=False, force_terminal=False).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(Report):
    """The account of a load that ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport(Report):
    """The account of a load that was only planned: sizes are exact, ``seconds.transfer`` is ``None``."""

    fits: Fit | None = field(default=None)
    """Whether it fits the devices asked about; ``None`` when no device memory was given."""


def _finite(value: Any) -> Any:
    """``value`` with tuples as lists, floats rounded to microseconds and non-finite ones as ``None``."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
