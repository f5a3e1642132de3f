"""Plan layouts of a model from its description alone: search, find the smallest mesh, compile the plan to check it.

source ─► model without values ─► search ─► LayoutPlan ─► compile (optional) ─► LayoutReport
                                    ▲            over the limit: search again │
                                    └─────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardload.errors import DoesNotFitError
from shardload.keras_bridge.variables import stored_dtype
from shardload.manifest import Manifest
from shardload.parallel import CompiledStep, LayoutPlan, choose, compile_step, search, search_smallest_mesh
from shardload.parallel.layout_search.searching import BATCH_PER_POSITION
from shardload.parallel.layout_search.tracing import input_specs
from shardload.parallel.memory_fit import MAX_DEVICES
from shardload.pipeline.load import build, open_requested
from shardload.pipeline.reporting import Clock
from shardload.pipeline.request import LoadRequest
from shardload.progress import as_progress
from shardload.sharding.devices import available, mesh_spec
from shardload.sharding.mesh import MeshSpec
from shardload.units import format_bytes

ATTEMPTS = 4
"""How often a plan is searched and compiled before the limit is given up."""
HEADROOM = 0.99
"""What a limit is lowered to, on top of the ratio, so that rounding does not cost one more attempt."""


@dataclass(frozen=True, slots=True)
class StepSpec:
    """The step to plan for."""

    train: str | None = None
    """Name of an optimizer; ``None`` plans inference."""
    batch: int | None = None
    """Rows of the inputs over all devices; 8 for each position of the batch axis by default."""
    sequence: int | None = None
    """Length of dims that the model leaves open."""
    compile: bool = False
    """Whether to compile the planned step."""


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """A searched plan for a source, and what checked it."""

    source: str
    plan: LayoutPlan
    smallest: LayoutPlan | None
    """The plan on the smallest mesh that fits, if a device memory was given."""
    compiled: CompiledStep | None
    seconds: Mapping[str, float]
    """Wall-clock seconds of ``build``, ``search``, ``smallest`` and ``compile``."""
    notes: tuple[str, ...]

    def summary(self, *, ascii_only: bool = False) -> str:
        """Return the report for people."""
        lines = [f"source: {self.source}", self.plan.summary(ascii_only=ascii_only)]
        if self.smallest is not None:
            lines.append(f"smallest mesh that fits: {_sizes(self.smallest.mesh)} ({self.smallest.mesh})")
        if self.compiled is not None:
            lines += ["compiled, without weights: " + self.compiled.summary(), _compared(self.plan, self.compiled)]
        lines += [f"note: {note}" for note in self.notes]
        spent = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self.seconds.items())
        return "\n".join([*lines, f"time: {spent}"])

    def to_json(self) -> dict[str, Any]:
        """Return an object for programs."""
        return {
            "source": self.source,
            "plan": self.plan.to_json(),
            "smallest_mesh": None if self.smallest is None else _sizes(self.smallest.mesh),
            "compiled": None if self.compiled is None else self.compiled.to_json(),
            "seconds": {stage: round(seconds, 6) for stage, seconds in self.seconds.items()},
            "notes": list(self.notes),
        }


def plan_layouts(request: LoadRequest, step: StepSpec) -> LayoutReport:
    """Search layouts for the model that a source describes.

    Args:
        request: Source, mesh, dtype and device memory, as for `shardload.plan`.
        step: The step to plan for.

    Raises:
        DoesNotFitError: When no layout on the mesh keeps the device memory; the message names the smallest mesh.
        MeshError: When a plan is to be compiled, and there are too few devices.
        LayoutError: When the model cannot be traced.
    """
    return _Planning(request.checked(), step).run()


class _Planning:
    """One call of `plan_layouts`."""

    def __init__(self, request: LoadRequest, step: StepSpec) -> None:
        available()  # building needs JAX to compute shapes; its own error would not name the cause
        self.request, self.step = request, step
        self.mesh = mesh_spec("1x1" if request.mesh is None else request.mesh, axes=request.axes)
        self.rows = step.batch or BATCH_PER_POSITION * self.mesh.axis_size(self.mesh.batch_axis)
        self.clock, self.progress = Clock(), as_progress(request.progress)
        self.notes: list[str] = []

    def run(self) -> LayoutReport:
        source = open_requested(self.request)
        manifest = source.manifest
        with self._stage("build", f"Building {manifest.source}"):
            model = self._build(manifest, self.request.dtype)
        self._check_batch()
        plan = self._search(model, self.request.device_memory)
        smallest, compiled = self._smallest(model, plan), None
        if self.step.compile:
            plan, compiled = self._compile(model, manifest, plan)
        notes = (*source.notes, *self.notes)
        return LayoutReport(manifest.source, plan, smallest, compiled, dict(self.clock.stages), notes)

    def _stage(self, name: str, text: str) -> Any:
        self.progress.start(0, text)
        return self.clock(name)

    def _build(self, manifest: Manifest, dtype: Any) -> Any:
        request = self.request
        return build(manifest, dtype=dtype, task=request.task, ignore_config=request.ignore_config)

    def _check_batch(self) -> None:
        axis = self.mesh.batch_axis
        if self.rows % (size := self.mesh.axis_size(axis)):
            self.notes.append(
                f"a batch of {self.rows} does not divide over axis {axis!r}: its {size} devices all do the same work"
            )

    def _options(self) -> dict[str, Any]:
        return {"batch": self.rows, "sequence": self.step.sequence, "optimizer": self.step.train}

    def _search(self, model: Any, limit: int | None) -> LayoutPlan:
        try:
            with self._stage("search", f"Searching layouts on {self.mesh}"):
                return search(model, self.mesh, device_memory_bytes=limit, **self._options())
        except DoesNotFitError as error:
            smallest = self._smallest(model, None)
            where = (
                f"It fits on no mesh of up to {MAX_DEVICES} devices"
                if smallest is None
                else f"It fits on {_sizes(smallest.mesh)}"
            )
            raise DoesNotFitError(f"{error}. {where}", least_bytes=error.least_bytes) from error

    def _smallest(self, model: Any, plan: LayoutPlan | None) -> LayoutPlan | None:
        """Return the plan on the smallest mesh, which is ``plan`` itself where its mesh has no more devices."""
        limit = self.request.device_memory
        if limit is None:
            return None
        with self._stage("smallest", "Looking for the smallest mesh"):
            most = MAX_DEVICES if plan is None else plan.mesh.size - 1
            return search_smallest_mesh(model, limit, max_devices=most, **self._options()) or plan

    def _compile(self, model: Any, manifest: Manifest, plan: LayoutPlan) -> tuple[LayoutPlan, CompiledStep]:
        """Compile a plan; as long as it needs more than the limit, take the next one."""
        limit = self.request.device_memory
        halved = next((d for d in map(stored_dtype, model.variables) if d.itemsize == 2), None)
        with self.clock("build"):  # on CPU, XLA computes 16-bit floats in 32 bits: compile those, and scale
            compilable = model if halved is None else self._build(manifest, "float32")
        for _ in range(ATTEMPTS):
            with self._stage("compile", f"Compiling for {plan.mesh}"):
                compiled = self._compiled(compilable, plan)
            compiled = compiled if halved is None else compiled.scaled(str(halved))
            if limit is None or compiled.fits(limit):
                return plan, compiled
            following = self._next(model, plan, compiled, limit)
            if following is None:
                break
            plan = following
        self.notes.append(
            f"compiled, the plan needs {format_bytes(compiled.total_bytes)}, more than {format_bytes(limit or 0)}, and "
            "no plan that needs less was found. Use a larger mesh or a smaller batch"
        )
        return plan, compiled

    def _next(self, model: Any, plan: LayoutPlan, compiled: CompiledStep, limit: int) -> LayoutPlan | None:
        """Search with the limit lowered by the ratio of what was estimated to what was compiled."""
        allowed = int(plan.device.total * limit / compiled.total_bytes * HEADROOM)
        self.notes.append(
            f"the plan for {format_bytes(plan.device.total)} per device compiled to "
            f"{format_bytes(compiled.total_bytes)}, more than {format_bytes(limit)}: searched again for "
            f"{format_bytes(allowed)}"
        )
        try:
            with self._stage("search", f"Searching layouts on {plan.mesh} again"):
                found = search(model, self.mesh, device_memory_bytes=allowed, **self._options())
        except DoesNotFitError:
            return None
        return replace(found, device_memory_bytes=limit)

    def _compiled(self, model: Any, plan: LayoutPlan) -> CompiledStep:
        inputs = input_specs(model, batch=self.rows, sequence=self.step.sequence)
        return compile_step(model, choose(model, plan.mesh, plan), inputs, training=self.step.train)


def _sizes(mesh: MeshSpec) -> str:
    return "x".join(map(str, mesh.sizes))


def _compared(plan: LayoutPlan, compiled: CompiledStep) -> str:
    """Return the estimates with the compiled numbers beside them."""
    estimated, found = plan.device.total, compiled.total_bytes
    counted = sum(e.count for e in plan.exchanges)
    return (
        f"estimated {format_bytes(estimated)} per device, compiled {format_bytes(found)} "
        f"({found / max(estimated, 1):.2f} times); estimated {counted} collectives of "
        f"{format_bytes(plan.exchanged_bytes)}, compiled {sum(c.count for c in compiled.collectives)} of "
        f"{format_bytes(compiled.collective_bytes)}"
    )
