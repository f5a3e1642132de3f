"""Plan layouts of a model from its description alone: search, find the smallest mesh, compile the plan to check it.

source ─► model without values ─► search ─► LayoutPlan ─► compile (optional) ─► LayoutReport
                                    ▲            over the limit: search again │
                                    └─────────────────────────────────────────┘
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardload.errors import DoesNotFitError, UsageError
from shardload.hub.built import dense_experts_note
from shardload.keras_bridge.variables import stored_dtype
from shardload.layout_search.hardware import Hardware
from shardload.layout_search.optimizer_memory import checked_optimizer
from shardload.layout_search.search_arguments import Remat, Saving, SequenceParallel, check_positive
from shardload.layout_search.searching import BATCH_PER_POSITION, LayoutSearch, TriedMesh
from shardload.layout_search.smallest_mesh import MAX_DEVICES, mesh_shapes, smallest_mesh_plan
from shardload.layout_search.tracing import check_rows, input_specs, rows_of
from shardload.manifest import Manifest
from shardload.parallel import CompiledStep, LayoutPlan, choose, compile_step
from shardload.parallel.choosing import CheckedPlan, first_that_fits
from shardload.pipeline.load import build, open_planned
from shardload.pipeline.reporting import Clock
from shardload.pipeline.request import PlanRequest
from shardload.sharding.devices import available, mesh_spec
from shardload.sharding.mesh import MeshSpec
from shardload.units import format_bytes, format_bytes_down, format_bytes_up, format_count, plural


@dataclass(frozen=True, slots=True)
class StepSpec:
    """The training or inference step of a model to plan layouts for."""

    train: str | None = None
    """Name of an optimizer of Keras, or ``rekls``, which is shardload's own; ``None`` plans inference."""
    batch: int | None = None
    """Number of rows (samples) of the inputs on all devices together; by default 8 for each part of the batch."""
    sequence: int | None = None
    """Size of input dims that are ``None`` in the model, except the batch: for text, the number of tokens in a row."""
    compile: bool = False
    """Whether to compile the planned step, to check the estimates of its memory and collectives."""
    remat: Remat = "auto"
    """What blocks of the model compute again in the backward pass, instead of keeping it."""
    microbatches: int = 1
    """Into how many parts the batch is divided, one after the other, before the weights are updated."""
    sequence_parallel: SequenceParallel = "auto"
    """Whether axes for weights split activations along their sequence, between products with weights."""

    fused_attention: bool = False
    """Whether attention runs in a kernel that stores no scores, as on GPU."""
    devices: int | None = None
    """Number of devices, to search on all meshes ``batch`` x ``model`` of so many instead of the given mesh."""

    @property
    def saving(self) -> Saving:
        """What the search may do to save memory."""
        return Saving(self.remat, self.sequence_parallel)


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """The layout plan that a search found for a model and, if it was checked by compiling, the compiled step."""

    source: str
    plan: LayoutPlan
    smallest: LayoutPlan | None
    """The plan for the smallest mesh whose devices have enough memory; ``None`` without a given memory limit."""
    compiled: CompiledStep | None
    seconds: Mapping[str, float]
    """Wall-clock seconds of each stage: ``build``, ``trace``, ``search``, ``smallest``, ``compile``, ``imports``."""
    notes: tuple[str, ...]
    parameters: int = 0
    """Number of elements of all weights; a replicated weight counts once."""
    dtypes: tuple[str, ...] = ()
    """Dtypes of the planned weights, the one with most elements first."""
    tried: tuple[TriedMesh, ...] = ()
    """What was found on each mesh, if a mesh was looked for."""

    def summary(self, *, ascii_only: bool = False) -> str:
        """Return the report as text for people."""
        weights = f"{format_count(self.parameters)} parameters, {', '.join(self.dtypes)}"
        lines = [f"source: {self.source} ({weights})", self.plan.summary(ascii_only=ascii_only)]
        for one in self.tried:
            outcome = "does not fit: at least" if one.step_s is None else f"{one.step_s * 1e3:.4g} ms a step,"
            chosen = ", chosen" if _sizes(one.mesh) == _sizes(self.plan.mesh) else ""
            lines.append(f"mesh {_sizes(one.mesh)}: {outcome} {format_bytes(one.device_bytes)} per device{chosen}")
        if self.smallest is not None:
            lines.append(f"smallest mesh that fits: {_sizes(self.smallest.mesh)} ({self.smallest.mesh})")
        if self.compiled is not None:
            estimated, found = self.plan.device.total, self.compiled
            lines += [
                f"compiled, without weights: {found.summary()}",
                f"estimated {format_bytes(estimated)} per device, compiled {format_bytes(found.total_bytes)} "
                f"({found.total_bytes / max(estimated, 1):.2f} times); estimated "
                f"{plural(sum(e.count for e in self.plan.exchanges), 'collective')} of "
                f"{format_bytes(self.plan.exchanged_bytes)}, compiled {sum(c.count for c in found.collectives)} of "
                f"{format_bytes(found.collective_bytes)}",
            ]
        lines += [f"note: {note}" for note in self.notes]
        spent = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self.seconds.items())
        return "\n".join([*lines, f"time: {spent}"])

    def to_json(self) -> dict[str, Any]:
        """Return the report as an object for `json.dumps`."""
        return {
            "source": self.source,
            "parameters": self.parameters,
            "dtypes": list(self.dtypes),
            "plan": self.plan.to_json(),
            "tried": [
                {"mesh": _sizes(one.mesh), "device_bytes": one.device_bytes, "step_s": one.step_s} for one in self.tried
            ],
            "smallest_mesh": None if self.smallest is None else _sizes(self.smallest.mesh),
            "compiled": None if self.compiled is None else self.compiled.to_json(),
            "seconds": {stage: round(seconds, 6) for stage, seconds in self.seconds.items()},
            "notes": list(self.notes),
        }


def plan_layouts(request: PlanRequest, step: StepSpec) -> LayoutReport:
    """Search layouts for a model and one of its steps; ``request`` names its description, the mesh and the memory."""
    request.check()
    return _Planning(request, step).run()


class _Planning:
    """One search for layouts of a model: what it was asked for, and its stages in order."""

    def __init__(self, request: PlanRequest, step: StepSpec) -> None:
        available()  # building needs JAX to compute shapes; its own error would not name the cause
        self.request, self.step = request, step
        mesh = request.placement.mesh
        self.mesh = mesh_spec("1x1" if mesh is None else mesh, axes=request.axes)
        self.rows = 0  # the model may fix them
        self.tried: tuple[TriedMesh, ...] = ()
        self.optimizer: Any = step.train
        if step.train is not None and step.train.lower() in ("rekls", "tprekls"):  # not Keras' own
            from shardload.optimizers import REKLS

            self.optimizer = REKLS()
        if step.microbatches > 1:
            self.optimizer = accumulating(self.optimizer, step.microbatches)
        self.clock, self.progress = Clock(), request.reporter

    def run(self) -> LayoutReport:
        source = open_planned(self.request)
        manifest = source.manifest
        with self._stage("build", f"Building {manifest.source}"):
            model = build(manifest, self.request.construction)
        self.rows = self._rows(model)
        with self._stage("trace", f"Tracing {manifest.source}"):
            check_positive(batch=self.rows, sequence=self.step.sequence)
            inputs = input_specs(model, batch=self.rows, sequence=self.step.sequence)
            check_rows(model, inputs, self.rows, self.step.sequence)
            hardware = Hardware(fused_attention=self.step.fused_attention)
            search = LayoutSearch(
                model, inputs, optimizer=self.optimizer, hardware=hardware, cache_size=self.request.cache_size
            )
        plan, compiled = self._planned(search, manifest)
        smallest = self._smallest(search, plan)
        spent, sizes = dict(self.clock.stages), Counter[str]()
        for variable in model.weights:
            sizes[str(stored_dtype(variable))] += math.prod(variable.shape)
        dtypes = tuple(name for name, _ in sizes.most_common())
        if self.step.microbatches > 1:
            accumulated = (
                f"the step of the plan is one of {self.step.microbatches} microbatches of {plural(self.rows, 'row')}: "
                f"weights are updated after the last, with gradient_accumulation_steps={self.step.microbatches} of the "
                "optimizer, whose sums of gradients count as slots"
            )
            plan = replace(plan, notes=(*plan.notes, accumulated))
        notes = (*source.notes, *filter(None, [dense_experts_note(model), self._dtypes_note(dtypes)]))
        return LayoutReport(manifest.source, plan, smallest, compiled, spent, notes, sizes.total(), dtypes, self.tried)

    def _dtypes_note(self, dtypes: tuple[str, ...]) -> str | None:
        """Return a note on the dtypes that a training step is planned with; ``None`` without one."""
        if self.step.train is None:
            return None
        asked = self.request.construction.dtype
        why = "the dtype of the checkpoint" if asked is None else f"as dtype {asked} asks"
        # REKLS stores its state in dtypes of its own.
        own = self.step.train.lower().endswith("rekls")
        counted = "weights and gradients" if own else "weights, gradients and slots"
        return f"{counted} count in {', '.join(dtypes)}, {why}: --dtype changes it"

    def _stage(self, name: str, text: str) -> Any:
        self.progress.start(0, text)
        return self.clock(name)

    def _rows(self, model: Any) -> int:
        """Return the batch size of the step: the requested one, else the one that the model fixes, else the default."""
        if self.step.batch is not None:
            if self.step.batch % self.step.microbatches:
                raise UsageError(
                    f"Cannot divide a batch of {self.step.batch} into {self.step.microbatches} microbatches: expected "
                    "a number that divides it"
                )
            return self.step.batch // self.step.microbatches
        # Input layers may fix the batch; the step is then planned with that.
        rows = BATCH_PER_POSITION * math.prod(map(self.mesh.axis_size, self.mesh.batch_axes))
        fixed = rows_of(input_specs(model, batch=rows, sequence=self.step.sequence))
        return rows if not fixed or rows in fixed else min(fixed)

    def _planned(self, search: LayoutSearch, manifest: Manifest) -> tuple[LayoutPlan, CompiledStep | None]:
        """Search a layout plan, and compile the step if requested; if nothing fits, the error names a larger mesh."""
        try:
            if self.step.compile:
                checked = self._compile(search, manifest)
                return checked.plan, checked.step
            return self._searched(search, self.request.device_budget_bytes), None
        except DoesNotFitError as error:
            raise DoesNotFitError(f"{error}.{self._where(search)}", least_bytes=error.least_bytes) from error

    def _where(self, search: LayoutSearch) -> str:
        """Return a sentence for an error: which larger mesh would do; empty if the estimate fits this one."""
        smallest = self._smallest(search, None)
        if smallest is None:
            return f" No mesh of up to {MAX_DEVICES} devices is large enough for this batch and sequence: reduce them"
        # The estimate fits this mesh, or a smaller one: to name it would contradict the compiled step.
        if smallest.mesh.size <= self.mesh.size and self.step.compile:
            return ""
        subject, mesh = "By the estimate, it" if self.step.compile else "It", _sizes(smallest.mesh)
        # The default batch follows the mesh, so another mesh alone would also mean another batch.
        return f" {subject} fits on {mesh} with the same batch of {self.rows}: pass --mesh {mesh} --batch {self.rows}"

    def _searched(self, search: LayoutSearch, limit: int | None) -> LayoutPlan:
        if self.step.devices is not None:
            return self._on_best_mesh(search, self.step.devices, limit)
        with self._stage("search", f"Searching layouts on {self.mesh}"):
            return search.on(self.mesh, device_memory_bytes=limit, saving=self.step.saving)

    def _on_best_mesh(self, search: LayoutSearch, devices: int, limit: int | None) -> LayoutPlan:
        """Return the plan on the mesh of so many devices where the step is fastest; raise if it fits on none."""
        with self._stage("search", f"Searching layouts on meshes of {plural(devices, 'device')}"):
            meshes = mesh_shapes(devices, self.rows)
            plan, self.tried = search.fastest_of(meshes, limit, saving=self.step.saving)
        if plan is None:
            least = min(self.tried, key=lambda one: one.device_bytes)
            raise DoesNotFitError(
                f"No mesh of {plural(devices, 'device')} needs at most {format_bytes_down(limit or 0)} per device. The "
                f"least found is {format_bytes_up(least.device_bytes)}, on {_sizes(least.mesh)}",
                least_bytes=least.device_bytes,
            )
        self.mesh = plan.mesh
        return plan

    def _smallest(self, search: LayoutSearch, plan: LayoutPlan | None) -> LayoutPlan | None:
        """Return the plan for the smallest mesh with enough memory, else ``plan``; ``None`` without a memory limit."""
        limit = self.request.device_budget_bytes
        if limit is None:
            return None
        with self._stage("smallest", "Looking for the smallest mesh"):
            # The plan fits its own mesh, so only smaller ones are of interest; without a plan, any mesh is.
            most = MAX_DEVICES if plan is None else plan.mesh.size - 1
            return smallest_mesh_plan(search, limit, most, saving=self.step.saving) or plan

    def _compile(self, search: LayoutSearch, manifest: Manifest) -> CheckedPlan:
        """Search a plan and compile its step; if it needs too much memory, search again with a lower limit."""
        model, limit = search.model, self.request.device_budget_bytes
        halved = next((d for d in map(stored_dtype, model.variables) if d.itemsize == 2), None)
        with self.clock("build"):  # on CPU, XLA computes 16-bit floats in 32 bits: compile those, and scale
            compilable = (
                model if halved is None else build(manifest, replace(self.request.construction, dtype="float32"))
            )

        def compiled(plan: LayoutPlan) -> CompiledStep:
            inputs = input_specs(compilable, batch=self.rows, sequence=self.step.sequence)
            with self._stage("compile", f"Compiling for {plan.mesh}"):
                choice = choose(compilable, plan.mesh, plan)
                found = compile_step(compilable, choice, inputs, training=self.optimizer)
            return found if halved is None else found.scaled(str(halved))

        return first_that_fits(lambda limit: self._searched(search, limit), compiled, limit)


def accumulating(optimizer: Any, steps: int) -> Any:
    """Return an optimizer, given as an object or by name, that accumulates the gradients of ``steps`` batches."""
    made = checked_optimizer(optimizer)
    return type(made).from_config({**made.get_config(), "gradient_accumulation_steps": steps})


def _sizes(mesh: MeshSpec) -> str:
    # As it can be passed: a plan may have divided an axis.
    return "x".join(map(str, mesh.undivided.sizes))
