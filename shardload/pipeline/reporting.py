"""Build the report of a job that ran, or was only planned."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shardload.hub import fidelity
from shardload.keras_bridge.model_state import variables_of
from shardload.keras_bridge.variables import stored_dtype
from shardload.parallel import fit, smallest_mesh
from shardload.reports import (
    ByteCounts,
    Cast,
    DeviceUse,
    Fit,
    HostBytes,
    LayoutSummary,
    LoadReport,
    Mismatched,
    Outside,
    PlanReport,
    Stages,
)
from shardload.units import format_bytes

if TYPE_CHECKING:
    from shardload.pipeline.filling import Clock, LoadJob
    from shardload.transfer.execution import TransferStats


def load_report(
    job: LoadJob, clock: Clock, stats: TransferStats, *, initialised: tuple[str, ...], notes: tuple[str, ...]
) -> LoadReport:
    """Report a job that ran."""
    computed_bytes = sum(job.manifest.tensors[t].stored_bytes for t in _computed_tensors(job))
    return LoadReport(
        **_facts(job, notes),
        bytes=ByteCounts(job.plan.needed_bytes + computed_bytes, stats.read_bytes + computed_bytes),
        seconds=_stages(clock),
        host_bytes=HostBytes(job.plan.host_memory_bytes, stats.peak_staging_bytes),
        initialised=_of_the_model(job, initialised),
    )


def _of_the_model(job: LoadJob, initialised: tuple[str, ...]) -> tuple[str, ...]:
    """Return only the model's own variables: an optimizer or a metric that starts from scratch is expected."""
    own = {v.path for v in variables_of(job.model)}
    return tuple(path for path in initialised if path in own)


def plan_report(
    job: LoadJob, clock: Clock, *, layout: Any, device_memory_bytes: int | None, notes: tuple[str, ...]
) -> PlanReport:
    """Report a job that was only planned."""
    computed_bytes = sum(job.manifest.tensors[t].stored_bytes for t in _computed_tensors(job))
    return PlanReport(
        **_facts(job, notes),
        bytes=ByteCounts(job.plan.needed_bytes + computed_bytes, job.plan.read_bytes + computed_bytes),
        seconds=_stages(clock),
        host_bytes=HostBytes(job.plan.host_memory_bytes, job.plan.peak_staging_bytes),
        fits=None if device_memory_bytes is None else _fit(job, layout, device_memory_bytes),
    )


def _facts(job: LoadJob, notes: tuple[str, ...]) -> dict[str, Any]:
    variables = job.mapping.provided
    layouts = [job.choice.layouts[id(v)] for v in variables]
    replicated = sum(layout.is_replicated for layout in layouts)
    weight_bytes = sum(math.prod(v.shape) * stored_dtype(v).itemsize for v in variables)
    mesh_notes = tuple(f"replicated though large: {path}" for path in job.choice.replicated_large)
    return {
        "source": job.manifest.source,
        "format": job.manifest.format,
        "mesh": str(job.place.mesh),
        "devices": _devices(job),
        "variables": len(variables),
        "parameters": sum(math.prod(v.shape) for v in variables),
        "weight_bytes": weight_bytes,
        "layout": LayoutSummary(len(layouts) - replicated, replicated, job.choice.fallbacks),
        "missing": job.mapping.missing,
        "unused": job.mapping.unused,
        "outside": tuple(Outside(o.tensor, o.reason) for o in job.outside),
        "cast": _casts(job),
        "mismatched": tuple(
            Mismatched(m.variable, m.tensor, m.expected, m.found) for m in (*job.left_out, *job.mapping.mismatched)
        ),
        "computed": tuple(name for c in job.mapping.computed for name in c.names),
        "notes": (
            *notes,
            *fidelity.notes_of(job.model, job.manifest),
            *job.mapping.notes,
            *_unasked(job),
            *mesh_notes,
            *_raised(job),
        ),
    }


def _raised(job: LoadJob) -> tuple[str, ...]:
    if not job.plan.budget_raised:
        return ()
    size = format_bytes(job.plan.host_memory_bytes)
    return (f"host memory up to {size}, as chunks of the checkpoint decode as a whole",)


def _devices(job: LoadJob) -> tuple[DeviceUse, ...]:
    """Return the bytes that the load put on each device; equal for all positions, because every split is even."""
    held = sum(
        math.prod(job.choice.layouts[id(v)].shard_shape(tuple(v.shape))) * stored_dtype(v).itemsize
        for v in job.mapping.provided
    )
    return tuple(
        DeviceUse(position if d is None else d.id, "planned" if d is None else d.platform, held)
        for position, d in enumerate(job.place.devices)
    )


def _casts(job: LoadJob) -> tuple[Cast, ...]:
    return tuple(Cast(b.name, str(b.stored), str(b.dtype)) for b in job.mapping.bindings if b.stored != b.dtype)


def _computed_tensors(job: LoadJob) -> set[str]:
    return {t for c in job.mapping.computed for t in c.tensors}


def _unasked(job: LoadJob) -> tuple[str, ...]:
    if not job.mapping.unasked:
        return ()
    counts = [name for name in job.mapping.unasked if name.startswith("metrics_variables/")]
    others = [name for name in job.mapping.unasked if not name.startswith("metrics_variables/")]
    found = []
    if others:
        what = f"{len(others)} tensors belong to parts this model does not have, or were not asked for"
        found.append(f"{what}, and were left alone: {others[0]} …")
    if counts:
        found.append(f"metrics count from the beginning: the {len(counts)} values they stood at were left alone")
    return tuple(found)


def _stages(clock: Clock) -> Stages:
    return Stages(clock.stages.get("build"), clock.stages.get("plan"), clock.stages.get("transfer"), clock.total_s)


def _fit(job: LoadJob, layout: Any, device_memory_bytes: int) -> Fit:
    found = fit(job.model, job.place.mesh, device_memory_bytes, layout=layout)
    smallest = smallest_mesh(job.model, device_memory_bytes, layout=layout)
    return Fit(
        device_memory=device_memory_bytes,
        per_device_max=found.device_bytes,
        fits=found.fits,
        smallest_mesh="x".join(map(str, smallest.mesh.sizes)) if smallest else None,
    )
