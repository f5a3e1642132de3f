"""Reports of loads and of planned loads.

A `LoadReport` describes a load that ran, a `PlanReport` a load that was only planned; both have the
same fields. ``str(report)`` is a table for people, ``report.to_json()`` an object for programs with these keys::

    source, format, mesh, devices[{id, platform, bytes}], variables, parameters, weight_bytes, bytes{needed, read},
    seconds{imports, build, plan, transfer, other, total}, throughput_gb_s, host_bytes{budget, peak_staging},
    layout{sharded, replicated, fallbacks[{variable, wanted, got, why}]}, missing, unused,
    cast[{variable, stored, loaded}], mismatched[{variable, tensor, expected, found}], computed, initialised,
    outside[{tensor, reason}], dtypes, notes
    fits{device_memory, per_device_max, fits, smallest_mesh}                                            plans only

Missing measurements are ``null``, never ``NaN``, so that every JSON parser reads them.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from shardload.sharding.layout import Fallback
from shardload.units import plural

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
"""Columns of ``str(report)``, which does not know the width of the reader's window."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One device of the mesh."""

    id: int
    """The device's id in JAX; in a plan, its position in the mesh."""
    platform: str
    """``cpu``, ``gpu`` or ``tpu``; in a plan, ``planned``."""
    bytes: int
    """Bytes of weights on the device after the load."""


@dataclass(frozen=True, slots=True)
class ByteCounts:
    """Bytes of the checkpoint that were needed, and that were read."""

    needed: int
    """Bytes on disk with values that the model needs."""
    read: int
    """Bytes read from disk; more than ``needed`` if skipping would have taken longer than reading, or if tensors were
    compared to find copies (`LoadReport.outside`)."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Wall-clock seconds per stage; ``None`` if a stage did not run."""

    build: float | None
    """Building the model without allocating it; ``None`` if it existed already."""
    plan: float | None
    """Reading headers, mapping names, choosing layouts, planning reads."""
    transfer: float | None
    """Reading tensor data and placing it on devices; ``None`` in a plan."""
    total: float
    """The whole load: these stages and `other`."""
    imports: float | None = None
    """Importing KerasHub, which also imports TensorFlow where that is installed, and starting JAX's devices; the first
    load of a process only. Keras and JAX are imported before a load, with shardload's own modules."""

    @property
    def other(self) -> float:
        """What the stages leave of the total: opening the source, and what comes between the stages."""
        counted = (self.imports, self.build, self.plan, self.transfer)
        return max(0.0, self.total - math.fsum(s for s in counted if s is not None and math.isfinite(s)))

    def named(self) -> dict[str, float | None]:
        """Return all of them in order; all before the last one add up to it."""
        stages = {"imports": self.imports, "build": self.build, "plan": self.plan, "transfer": self.transfer}
        return {**stages, "other": self.other, "total": self.total}


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Host memory of the load, without the shards of CPU devices."""

    budget: int
    """Limit on the bytes of staging buffers."""
    peak_staging: int
    """Highest number of bytes in staging buffers; in a plan, the predicted one."""


@dataclass(frozen=True, slots=True)
class LayoutSummary:
    """How variables are spread over the mesh."""

    sharded: int
    """Variables split over at least one axis."""
    replicated: int
    """Variables that are complete on every device."""
    fallbacks: tuple[Fallback, ...] = ()
    """Variables that did not get the layout requested by their rule."""


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
    """Name of the tensor; empty if a layer raised before it read any tensor."""
    expected: tuple[int, ...] | None
    """The variable's shape; ``None`` if a layer raised for another reason."""
    found: tuple[int, ...] | None
    """The shape in the checkpoint."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a plan fits devices of a given size."""

    device_memory: int
    """Memory of one device in bytes."""
    per_device_max: int
    """Bytes of weights on the fullest device."""
    fits: bool
    smallest_mesh: str | None
    """The smallest mesh on which the weights fit, as text; ``None`` if none was found."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """The fields that a load and a plan have in common; never instantiated, see `LoadReport` and `PlanReport`."""

    source: str
    """Absolute path of the resolved source."""
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
    """Variables stored in another shape; in a plan, a strict load will refuse them."""
    computed: tuple[str, ...] = ()
    """Variables whose value a layer or converter computed from stored tensors instead of copying it."""
    initialised: tuple[str, ...] = ()
    """Variables that got their initial value because the checkpoint lacks them (seeds, metrics, heads)."""
    outside: tuple[Outside, ...] = ()
    """Tensors that do not belong to the model that was built: buffers, heads, poolers, copies of the embedding."""
    dtypes: tuple[str, ...] = ()
    """Dtypes of the variables, the one of most bytes first."""
    notes: tuple[str, ...] = ()
    """Anything else a person should know, one line each: ``gemma2_7b is not a released size; loaded gemma2_9b``."""

    @property
    def throughput_gb_s(self) -> float | None:
        """Needed bytes per second of transfer, in 1e9 bytes; over-read bytes do not count. ``None`` if not measured."""
        if not self.seconds.transfer or not math.isfinite(self.seconds.transfer):
            return None
        return self.bytes.needed / self.seconds.transfer / 1e9

    def to_json(self) -> dict[str, Any]:
        """Return an object for `json.dumps`, in the key order of the module docstring."""
        # A property is no field, so the throughput is put where a reader looks for it: after the seconds.
        facts: dict[str, Any] = {}
        for key, value in asdict(self).items():
            facts[key] = _finite(value)
            if key == "seconds":
                facts[key] = _finite(self.seconds.named())
                facts["throughput_gb_s"] = _finite(self.throughput_gb_s)
        return facts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, for `rich.print` and notebooks."""
        from shardload.reports.table import sections

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
        """The table, for notebooks."""
        from rich.console import Console

        # Without force_jupyter=False, rich shows the table itself, and the notebook shows it again.
        console = Console(file=io.StringIO(), width=TEXT_WIDTH, record=True, force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def __str__(self) -> str:
        from rich.console import Console

        # The same text under any FORCE_COLOR and COLUMNS. rich pads each line with spaces, hence rstrip.
        text = io.StringIO()
        # In a notebook, rich would display the report there and write nothing to the file.
        plain = Console(
            file=text, width=TEXT_WIDTH, no_color=True, highlight=False, force_terminal=False, force_jupyter=False
        )
        plain.print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LoadReport(Report):
    """The report of a load that ran."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanReport(Report):
    """The report of a load that was only planned: sizes are exact, ``seconds.transfer`` is ``None``."""

    fits: Fit | None = field(default=None)
    """Whether the weights fit devices of the given memory; ``None`` if no device memory was given."""


def _finite(value: Any) -> Any:
    """Return ``value`` with tuples as lists, floats rounded to microseconds and non-finite ones as ``None``."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
