"""Build the report of a load, either carried out or only planned, and measure the time of its stages."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardload.errors import UnsupportedError
from shardload.hub import fidelity
from shardload.hub.built import dense_experts_note
from shardload.keras_bridge.hub_imports import imports_s
from shardload.keras_bridge.model_state import are_averages, variables_of
from shardload.keras_bridge.variables import stored_dtype
from shardload.layouts.kv_cache import KvCache
from shardload.mapping.quantising import quantised_bytes
from shardload.mapping.roles import AVERAGE
from shardload.parallel import choose
from shardload.parallel.choosing import MeshFit, belongs_to_a_mesh, fit_weights, smallest_fit
from shardload.reports import (
    ByteCounts,
    Cast,
    ClusterBytes,
    DeviceUse,
    Fit,
    HostBytes,
    HostReads,
    LayoutSummary,
    LoadReport,
    Mismatched,
    Outside,
    PlanReport,
    Stages,
    VariableUse,
    fold,
)
from shardload.reports.facts import CacheBytes, CacheUse, Note, NoteKind
from shardload.sharding.mesh import MeshSpec
from shardload.stores.cache_choice import current_cache
from shardload.stores.range_cache import CacheTraffic
from shardload.transfer.casts import overflow_notes
from shardload.units import format_bytes, format_parameters, plural

if TYPE_CHECKING:
    from shardload.pipeline.preparing import PreparedLoad
    from shardload.transfer.execution import TransferStats

_SETTLE_S = 1.0
"""How long a load waits at its end for the cache to write, so that the report says what is stored, in seconds."""
_AVERAGED = "the model has the moving averages of its weights (use_ema), not the weights in training"
_IN_TRAINING = (
    "the model has the weights in training; their moving averages (use_ema) are in the optimizer, and "
    "model.optimizer.finalize_variable_values(model.trainable_variables) puts them into the model"
)


class Clock:
    """Measures wall-clock seconds per stage of a load (build, plan, transfer). Imports count as a separate stage."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.stages = defaultdict[str, float](float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Measure the ``with`` block: add its time to ``stage``, except imports, which count separately."""
        began, imported = time.perf_counter(), imports_s()
        try:
            yield
        finally:
            imports = imports_s() - imported
            self.stages["imports"] += imports
            self.stages[stage] += max(0.0, time.perf_counter() - began - imports)

    @property
    def began_s(self) -> float:
        """The value of `time.perf_counter` when this object was created."""
        return self._began

    @property
    def total_s(self) -> float:
        """Wall-clock seconds since this object was created."""
        return time.perf_counter() - self._began


class CacheMeter:
    """Counts what comes from the cache of remote stores from its creation on."""

    def __init__(self) -> None:
        self._cache = current_cache()
        self._before = CacheTraffic() if self._cache is None else self._cache.traffic

    def added_to(self, report: LoadReport) -> LoadReport:
        """Return a load's report with what came from the cache, and notes on it, if one was used."""
        if self._cache is None:
            return report
        self._cache.settle(_SETTLE_S)
        found = self._cache.traffic.since(self._before)
        if not (found.cached or found.fetched or found.notes):
            return report
        counts = CacheBytes(found.cached, found.fetched, found.stored, found.left_out)
        return replace(report, cache=counts, notes=(*report.notes, *found.notes))


def load_report(
    prepared: PreparedLoad, clock: Clock, stats: TransferStats, *, initialised: tuple[str, ...]
) -> LoadReport:
    """Build the report of a load that ran; ``initialised``: paths of the variables that got initial values."""
    own = {v.path for v in variables_of(prepared.model)}
    facts = _facts(prepared, clock, read_bytes=stats.read_bytes, peak_staging_bytes=stats.peak_staging_bytes)
    facts["notes"] += overflow_notes(stats.overflowed)
    # Whether a step has the weights in training or their moving averages, if the optimizer keeps averages. If these
    # begin, they are equal to the weights, as another note says.
    is_whole_step = prepared.matching.is_restore and prepared.matching.items == "all"
    if is_whole_step and not any(begun.attribute == AVERAGE for begun in prepared.mapping.begun):
        averages = are_averages(prepared.model)
        if averages is not None:
            facts["notes"] += (Note(_AVERAGED if averages else _IN_TRAINING, NoteKind.AVERAGES),)
    return LoadReport(
        **facts,
        # An optimizer or a metric that starts from scratch is expected, so only the model's own are listed.
        initialised=tuple(path for path in initialised if path in own),
    )


def cluster_bytes(prepared: PreparedLoad, read: Sequence[int]) -> ClusterBytes:
    """Return what processes that loaded together read, ``read`` bytes each, and what they exchanged."""
    choices = () if prepared.owners is None else prepared.owners.choices
    needed = prepared.mesh_bytes + prepared.computed_bytes
    return ClusterBytes(
        needed=needed,
        total_read=sum(read),
        ratio=sum(read) / needed if needed else 1.0,
        read=tuple(read),
        received=(sum(choice.received_bytes for choice in choices),) * len(read),
        exchanged=sum(bool(choice.moves) for choice in choices),
    )


def changed_rates(before: Mapping[str, float], now: Mapping[str, float], *, advice: str) -> tuple[str, ...]:
    """Return a note for each optimizer whose learning rate (by name) a load has changed; each ends with ``advice``."""
    return tuple(
        f"the state of {name} was loaded too: its learning rate was {rate:g}, and is {now[name]:g}. {advice}"
        for name, rate in before.items()
        if now.get(name, rate) != rate
    )


def with_rates(report: LoadReport, before: Mapping[str, float], now: Mapping[str, float]) -> LoadReport:
    """Return the report with a note for each changed learning rate; ``before`` and ``now``: optimizer name → rate."""
    advice = "To keep the optimizer as it is, pass items='weights'; to change only its rate, set it again afterwards"
    return replace(report, notes=(*report.notes, *changed_rates(before, now, advice=advice)))


def plan_report(
    prepared: PreparedLoad,
    clock: Clock,
    *,
    layout: Any,
    device_memory_bytes: int | None,
    hosts: HostReads | None,
    cache_size: tuple[int, int] | None,
    model: Any,
) -> PlanReport:
    """Build the report of a load that was only planned; ``cache_size``: rows and tokens of a KV cache to count.

    ``model`` is the model that was planned, before it was quantised.
    """
    plan = prepared.plan
    facts = _facts(prepared, clock, read_bytes=plan.read_bytes, peak_staging_bytes=plan.peak_staging_bytes)
    if layout == "search" and device_memory_bytes is not None:
        facts["notes"] += (
            "device memory and the smallest mesh cover weights alone, as for every load. To plan a whole step within a "
            "limit, use shardload.parallel.search or search_smallest_mesh",
        )
    facts["notes"] += tuple(filter(None, [dense_experts_note(prepared.model)]))
    cache: KvCache | None = None
    if cache_size is not None:
        try:
            cache = KvCache.of(model, rows=cache_size[0], tokens=cache_size[1])
        except UnsupportedError as error:
            facts["notes"] += (f"the KV cache is not counted: {error}",)
    use = None
    if cache is not None:
        layouts = choose(model, prepared.devices.mesh, layout) if prepared.kernels else prepared.layouts
        use = CacheUse(cache.rows, cache.tokens, cache.nbytes, cache.bytes_under(layouts))
    fits = _fit(prepared, layout, device_memory_bytes, cache, model)
    return PlanReport(**facts, fits=fits, hosts=hosts, kv_cache=use)


def _facts(prepared: PreparedLoad, clock: Clock, *, read_bytes: int, peak_staging_bytes: int) -> dict[str, Any]:
    """Return the values that reports of a load and of a plan have in common (bytes, seconds, notes), by field name."""
    mapping, tensors, spent = prepared.mapping, prepared.manifest.tensors, clock.stages.get
    computed_bytes = prepared.computed_bytes
    stored = ((b, tensors[b.view.tensor].dtype) for b in mapping.bindings)
    read_bytes += computed_bytes + prepared.compared_bytes
    return {
        "source": prepared.manifest.source,
        "format": prepared.manifest.format,
        "bytes": ByteCounts(prepared.needed_bytes + computed_bytes, read_bytes),
        "seconds": Stages(
            *(spent("build"), spent("plan"), spent("transfer")),
            total=clock.total_s,
            imports=spent("imports"),
            warm_up=spent("warm_up"),
        ),
        "host_bytes": HostBytes(prepared.plan.host_memory_bytes, peak_staging_bytes),
        "notes": tuple(_notes(prepared)),
        **_weights(prepared),
        "missing": mapping.missing,
        "unused": mapping.unused,
        "outside": tuple(Outside(o.tensor, o.reason) for o in prepared.outside),
        "cast": tuple(Cast(b.name, str(dtype), str(b.dtype)) for b, dtype in stored if dtype != b.dtype),
        # Left out of a load that is not strict; in a plan, which is not validated, still part of the mapping.
        "mismatched": tuple(
            Mismatched(m.variable, m.tensor, m.expected, m.found) for m in (*prepared.left_out, *mapping.mismatched)
        ),
        "computed": tuple(name for c in mapping.computed for name in c.names),
    }


def _weights(prepared: PreparedLoad) -> dict[str, Any]:
    """Return fields of the report, by name, on variables that get tensors: counts, sizes, dtypes, devices, layout."""
    used, sizes = _variables(prepared), Counter[str]()
    for v in used:
        sizes[v.dtype] += v.bytes
    # Equal for all positions, because every split is even.
    device_bytes = sum(v.device_bytes for v in used)
    sharded = sum(v.shape != v.shard_shape for v in used)
    # Of what is quantised, the floats count, not codes and scales.
    encoded = (o for b in prepared.mapping.bindings if b.encoding is not None for o in b.outputs)
    more = sum(math.prod(kernel.kernel.shape) for kernel in prepared.kernels)
    more -= sum(math.prod(o.shape) for o in encoded)
    return {
        "mesh": str(prepared.devices.mesh),
        "devices": tuple(
            DeviceUse(position if d is None else d.id, "planned" if d is None else d.platform, device_bytes)
            for position, d in enumerate(prepared.devices.devices)
        ),
        "variables": len(used),
        "parameters": sum(math.prod(v.shape) for v in used) + more,
        "weight_bytes": sizes.total(),
        "dtypes": tuple(name for name, _ in sizes.most_common()),
        "layout": LayoutSummary(sharded, len(used) - sharded, prepared.layouts.fallbacks, used),
    }


def _variables(prepared: PreparedLoad) -> tuple[VariableUse, ...]:
    """Return an entry for each variable that gets a value from the checkpoint, in the order of the model."""
    named = [(o.name, o.variable, b.view.tensor) for b in prepared.mapping.bindings for o in b.outputs]
    named += [(name, v, "") for c in prepared.mapping.computed for name, v in zip(c.names, c.variables, strict=True)]
    used: dict[int, VariableUse] = {}
    for name, variable, tensor in named:
        planned, dtype, shape = prepared.layouts.by_id[id(variable)], stored_dtype(variable), tuple(variable.shape)
        shard = planned.layout.shard_shape(shape)
        used.setdefault(
            id(variable),
            VariableUse(
                name=name,
                tensor=tensor,
                dtype=str(dtype),
                shape=shape,
                shard_shape=shard,
                spec=planned.layout.spec,
                bytes=math.prod(shape) * dtype.itemsize,
                device_bytes=math.prod(shard) * dtype.itemsize,
                reason=planned.rule,
            ),
        )
    return tuple(used[key] for key in prepared.layouts.by_id if key in used)


def _notes(prepared: PreparedLoad) -> Iterator[str]:
    mapping, layouts = prepared.mapping, prepared.layouts
    yield from (*prepared.notes, *fidelity.notes_of(prepared.model, prepared.manifest), *mapping.notes)
    if mapping.kept:
        shapes = [(math.prod(v.shape), stored_dtype(v).itemsize) for v in mapping.kept_variables]
        parameters, n_bytes = sum(n for n, _ in shapes), sum(n * size for n, size in shapes)
        yield (
            "the step is partial: unchanged in the model, and not counted above, are "
            f"{plural(len(mapping.kept), 'weight')} ({format_parameters(parameters)}, {format_bytes(n_bytes)}): "
            f"{', '.join(map(str, fold(mapping.kept)))}"
        )
    counts = [name for name in mapping.skipped if name.startswith("metrics_variables/")]
    if others := [name for name in mapping.skipped if name not in counts]:
        what = f"skipped {plural(len(others), 'tensor')} of parts that this model lacks, or that were not requested"
        yield f"{what}: {others[0]} …"
    if counts:
        yield f"metrics start over: their {len(counts)} saved values were skipped"
    yield from (*layouts.idle_notes, *layouts.guess_notes, *layouts.rule_notes)
    yield from (f"replicated though large: {paths}" for paths in fold(layouts.replicated_large))
    if prepared.plan.budget_raised:
        size = format_bytes(prepared.plan.host_memory_bytes)
        why = "chunks of the checkpoint decode as a whole"
        why += ", or kernels are quantised as a whole" if prepared.kernels else ""
        yield f"host-memory budget raised to {size}, because {why}"


def _fit(
    prepared: PreparedLoad, layout: Any, device_memory_bytes: int | None, cache: KvCache | None, model: Any
) -> Fit | None:
    if device_memory_bytes is None:
        return None
    options: dict[str, Any] = {"layout": layout, "cache": cache}
    if prepared.kernels:
        options["weight_bytes"] = partial(quantised_bytes, kernels=prepared.kernels)

    def fit_on(mesh: MeshSpec) -> MeshFit:
        return fit_weights(model, mesh, device_memory_bytes, **options)

    found = fit_on(prepared.devices.mesh)
    smallest = None if belongs_to_a_mesh(layout) else smallest_fit(fit_on)
    # The search tries powers of two only, and the mesh of the plan may be smaller.
    if smallest is not None and found.fits and found.mesh.size < smallest.mesh.size:
        smallest = found
    return Fit(
        device_memory=device_memory_bytes,
        per_device_max=found.device_bytes + found.cache_bytes,
        fits=found.fits,
        smallest_mesh="x".join(map(str, smallest.mesh.sizes)) if smallest else None,
    )
