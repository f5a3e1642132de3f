"""The order of a load, from the request to the report.

    ●0 open ─► ●1 start JAX ─► ●2 place ─► build or take the model ─► map ─► lay out ─► plan ─► check
    ─► ●3 read ─► ●4 assign, initialise ─► report ─► ●5

Before ●3 no model is changed, and only headers are read (the module `preparing` tells the one exception). `preparing`
has the stages map, lay out, plan and check; `filling` has read, assign and initialise. At each ● all processes of a
`jax.distributed` run wait for each other, if they load together:

    0   all make the same call with the same arguments
    1   headers are valid everywhere (process 0 read them for all): JAX, whose start waits for all processes, may start
    2   JAX has started, and the mesh gives each process an equal part
    3   all are about to load the same thing (`shardload.pipeline.filling`)
    4   all have read their part, and old values may be released: all later steps compute together
    5   all have finished; values that are swapped in for others in use can be undone until shortly before it

A load onto this process's own devices concerns this process only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from shardload import processes
from shardload.errors import MeshError
from shardload.hub import building
from shardload.keras_bridge import abstraction, distributions
from shardload.keras_bridge.binding import BindingSnapshot
from shardload.keras_bridge.caller import warn_caller
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.model_state import learning_rates_of, walking_vocabularies_once
from shardload.keras_bridge.quantising import quantisation_text
from shardload.keras_bridge.recording import seeded
from shardload.layouts.choice import current_devices
from shardload.loaders import spec_of
from shardload.manifest import Manifest
from shardload.mapping.assets import empty_vocabularies, load_assets, restore_assets, staged_assets
from shardload.mapping.built_optimizers import slots_as_stored
from shardload.mapping.stored_values import load_stored_values
from shardload.pipeline import filling, preparing, reporting
from shardload.pipeline.compiling import Lower, Warming
from shardload.pipeline.hosts import host_reads
from shardload.pipeline.opening_together import open_together
from shardload.pipeline.reporting import Clock
from shardload.pipeline.request import (
    Construction,
    JointRequest,
    LoadRequest,
    LoadWeightsRequest,
    Matching,
    Placement,
    PlanRequest,
    RestoreRequest,
)
from shardload.processes.joint_call import Alone, Call, joint
from shardload.reports import ByteCounts, HostBytes, LoadReport, PlanReport
from shardload.resolve.adapters import open_adapters, with_adapters
from shardload.resolve.opening import OpenedSource, open_source
from shardload.sharding.devices import (
    MeshDevices,
    abstract_devices,
    available,
    check_shares,
    mesh_spec,
    named_devices,
    resolve_devices,
)
from shardload.stores.event_loop import collector_paused
from shardload.stores.location import Fingerprint
from shardload.transfer.owners import process_numbers
from shardload.typing import LayoutLike, MeshLike
from shardload.units import plural


@dataclass(frozen=True, slots=True)
class ReadShare:
    """What one process read in a load by several, and the memory and time that it took."""

    process: int
    bytes: ByteCounts
    host_bytes: HostBytes
    total_s: float
    """Wall-clock seconds from the start of the load to its end."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of `run_load`: the model, the report of the load, and the source's manifest (headers)."""

    model: Any
    report: LoadReport
    manifest: Manifest
    shares: tuple[ReadShare, ...] = ()
    """What each process read, if several processes loaded together; else empty."""


@contextmanager
def joint_load(request: JointRequest) -> Iterator[Call]:
    """Yield the `Call` by which processes that load together wait for each other; one that loads alone never waits."""
    if not is_joint(request):
        request.check()
        yield Alone()
    else:
        compared = {name: getattr(request, name) for name in request.compared_names}
        compared |= {"warm_up": str(request.warming)} if request.warm_up else {}
        if not isinstance(request, RestoreRequest) and request.quantize is not None:
            compared["quantize"] = quantisation_text(request.quantize)
        if isinstance(request, LoadRequest) and request.adapter is not None:
            compared["adapter"] = request.adapter_names
        with joint(request.function, request.source, compared) as call:
            request.check()
            yield call


def is_joint(request: JointRequest) -> bool:
    """Whether all processes of this run make the call together."""
    return processes.are_several() and not _is_local(request)


def _is_local(request: JointRequest) -> bool:
    """Whether a load names devices, and all are of this process: then other processes take no part in it."""
    try:
        named = named_devices(request.mesh, request.devices)
        if request.mesh is None and request.devices is None and request.model is not None:
            current = current_devices(request.model)
            named = None if current is None else current.devices
    except Exception:  # a wrong argument: the call itself raises the error, on all processes
        return False
    # No device named means all devices of all processes (`bool(named)` is False), so the call is joint.
    return bool(named) and all(getattr(d, "process_index", None) == jax.process_index() for d in named or ())


def open_requested(request: LoadRequest | LoadWeightsRequest) -> OpenedSource:
    """Open the checkpoint that a request names, and read the model's description too if the model is to be built."""
    opened = open_source(
        request.source,
        request.format,
        described=request.matching.builds,
        step=request.step,
        ignore_config=request.matching.ignore_config,
    )
    if not isinstance(request, LoadRequest) or not request.adapters:
        return opened
    return with_adapters(opened, open_adapters(request.adapters), dtype=request.construction.dtype)


def open_planned(request: PlanRequest) -> OpenedSource:
    """Open the source of a plan without verifying digests: a checkpoint's headers, or a model's description alone."""
    return open_source(
        request.source,
        request.format,
        described=True,
        verify=False,
        weights=False,
        ignore_config=request.matching.ignore_config,
    )


@walking_vocabularies_once()
def run_load(
    request: JointRequest,
    call: Call,
    *,
    opener: Callable[[], OpenedSource],
    on_opened: Callable[[Manifest], None] = lambda manifest: None,
    on_built: Callable[[Any, Manifest], None] = lambda model, manifest: None,
    lower: Mapping[str, Lower] = MappingProxyType({}),
    looks: Callable[[], AbstractContextManager[None]] = nullcontext,
    swap: Callable[[], AbstractContextManager[None]] | None = None,
) -> Loaded:
    """Run a request of `shardload.load`, `load_weights` or `restore`: open, place, build, prepare, agree, fill, report.

    ``opener`` opens the source; ``on_opened`` is called with its manifest before the model is built, ``on_built`` with
    the model before its weights are read. ``lower`` has functions for steps of ``warm_up`` that are not Keras' own.
    ``looks`` is entered while the model is looked at, which another thread may use. With ``swap``, nothing is assigned
    before everything is read; it is entered then, and left when the model has all, on all processes, or is again as it
    was, if anything failed.
    """
    # Open: headers only. From here on, a file that changes is an error.
    clock, cache = Clock(), reporting.CacheMeter()
    with clock("other"), Fingerprint.opening():
        source = open_together(call, opener, builds=request.matching.builds)
        files = Fingerprint.of(source.manifest.files, folder=source.manifest.location)
    # Place: once all processes have headers, as the start of JAX waits for all of them.
    call.start_jax()
    with looks(), clock("imports"):  # the first use of JAX starts its devices
        devices, layout = devices_and_layout(request.placement, request.model)
    if not call.is_alone:
        check_shares(devices)
    with clock("other"):
        on_opened(source.manifest)
    # Build: with the same seeds on all processes, so that what the checkpoint lacks gets the same initial values.
    matching = request.matching
    seed = call.draw_seed() if matching.builds else None
    why_uncompiled: list[str] = []  # if it was saved compiled
    with ExitStack() as staged, nullcontext() if seed is None else seeded(seed):
        if isinstance(request, LoadRequest):
            with clock("build"):
                model = build(source.manifest, request.construction, note=why_uncompiled.append)
            # Also a warning: the report is easily missed, and an uncompiled model fails only in fit().
            for text in why_uncompiled:
                warn_caller(text)
            on_built(model, source.manifest)
        else:
            model = request.model
        optimizer = request.loads_optimizer and not why_uncompiled
        # Slots are created before mapping, so that their tensors find a variable, and removed if the load fails.
        slots: AbstractContextManager[None] = nullcontext()
        if optimizer and not matching.as_keras and matching.items != "weights":  # else their tensors are not loaded
            slots = slots_as_stored(model, source.manifest, rename=matching.rename, strict=matching.strict)
        with slots:
            # Map, lay out, plan, check: the model is still unchanged.
            with looks(), clock("plan"), collector_paused():
                unused = () if isinstance(request, RestoreRequest) else _unused_distribution(request.placement)
                prepared = preparing.prepare_load(
                    source,
                    model,
                    devices,
                    layout=layout,
                    matching=matching,
                    budget_bytes=request.budget_bytes,
                    optimizer=optimizer,
                    notes=(*why_uncompiled, *unused),
                    process_of=None if call.is_alone else process_numbers(devices.devices),
                    replicas=request.reading,
                    io=request.io,
                    quantisation=request.quantisation,
                    keep=request.keeps_codes,
                ).validated()
            for text in prepared.layouts.idle_notes:
                warn_caller(text)
            # Before any value is replaced: it verifies their bytes.
            with clock("other"):
                has_assets = not matching.as_keras and matching.items in ("all", "weights")
                assets = staged_assets(source.manifest, check=source.checker) if has_assets else nullcontext()
                folder = staged.enter_context(assets)
            # Agree on the plan, fill.
            rates = {} if matching.builds else learning_rates_of(model)
            call.require(filling.topics(prepared))
            filled = filling.fill_variables(
                prepared,
                clock,
                files,
                progress=call.watched(request.reporter),
                on_failure=request.on_failure,
                meet=call.meet,
                warming=Warming(request.warming, lower, has_files=folder is not None),
                at_once=None if swap is None else partial(_begin_swap, staged, swap, BindingSnapshot.of(model), call),
            )
            report = reporting.with_rates(filled, rates, learning_rates_of(model))
        if matching.items in ("all", "weights"):
            notes = _load_besides_variables(matching, model, source.manifest, folder)
            report = replace(report, notes=(*report.notes, *notes))
    report = cache.added_to(report)
    shares = _shares(call, report)
    if shares:
        report = replace(report, cluster=reporting.cluster_bytes(prepared, [share.bytes.read for share in shares]))
    record = record_of(model)
    record.report, record.loading_since = report, clock.began_s
    return Loaded(model, report, source.manifest, shares)


def _begin_swap(
    staged: ExitStack, swap: Callable[[], AbstractContextManager[None]], before: BindingSnapshot, call: Call
) -> None:
    staged.enter_context(swap())
    # Left first: until all processes have everything, each can undo it.
    agreed = partial(call.meet, "the end of the swap")
    staged.enter_context(filling.unchanged_on_failure(before, agreed))


def _shares(call: Call, report: LoadReport) -> tuple[ReadShare, ...]:
    """Wait until all processes have finished; return what each of them read, or nothing if this one loads alone."""
    own: dict[str, Any] = {
        "bytes": asdict(report.bytes),
        "host_bytes": asdict(report.host_bytes),
        "total_s": report.seconds.total,
    }
    accounts = call.together(lambda: own, "the account")
    if len(accounts) == 1:
        return ()
    return tuple(
        ReadShare(i, ByteCounts(**account["bytes"]), HostBytes(**account["host_bytes"]), account["total_s"])
        for i, account in enumerate(accounts)
    )


def _load_besides_variables(matching: Matching, model: Any, manifest: Manifest, folder: Path | None) -> Iterator[str]:
    """Load what layers saved besides variables, such as vocabulary files; yield notes for the report."""
    if spec_of(manifest).tensor_names == "step":
        yield from load_stored_values(model, manifest, strict=matching.strict)
    if matching.as_keras:  # Keras' `load_weights` loads no files
        return
    if matching.builds:
        load_assets(model, manifest, folder)
    else:
        yield from restore_assets(model, manifest, folder, rename=matching.rename)
    yield from empty_vocabularies(model, manifest.source)


@collector_paused()
def plan_load(request: PlanRequest) -> PlanReport:
    """Run a request of `shardload.plan`: prepare a load from headers alone, for devices that need not exist."""
    clock = Clock()
    with clock("other"):
        source = open_planned(request)
    available()  # building needs JAX to compute shapes; its own error would not name the cause
    mesh, layout = _mesh_and_layout(request.placement)
    devices = abstract_devices(mesh_spec("1x1" if mesh is None else mesh, axes=request.axes))
    if request.hosts is not None and devices.mesh.size % request.hosts:
        raise MeshError(
            f"Cannot divide the {plural(devices.mesh.size, 'device')} of mesh {devices.mesh} equally among "
            f"{plural(request.hosts, 'host')}. Choose another number of hosts or another mesh"
        )
    with clock("build"):
        model = build(source.manifest, request.construction)
    with clock("plan"):
        prepared = preparing.prepare_load(
            source,
            model,
            devices,
            layout=layout,
            matching=request.matching,
            budget_bytes=request.budget_bytes,
            quantisation=request.quantisation,
            keep=request.keeps_codes,
        )
        hosts = None if request.hosts is None else host_reads(prepared, request.hosts, request.reading)
    before = model
    if prepared.kernels and (request.device_budget_bytes, request.cache_size) != (None, None):
        with clock("build"):
            before = build(source.manifest, request.construction)
    return reporting.plan_report(
        prepared,
        clock,
        layout=layout,
        device_memory_bytes=request.device_budget_bytes,
        hosts=hosts,
        cache_size=request.cache_size,
        model=before,
    )


def devices_and_layout(placement: Placement, model: Any) -> tuple[MeshDevices, LayoutLike | None]:
    """Return the devices and the layout of a load. Layout ``None``: keep the one that ``model`` has."""
    # A model that has values or shardings stays where it is, unless the caller names other devices.
    follows_model = model is not None and placement.mesh is None and placement.devices is None
    if follows_model and (own := current_devices(model)) is not None:
        return own, placement.layout
    mesh, layout = _mesh_and_layout(placement)
    return resolve_devices(mesh, axes=placement.axes, devices=placement.devices), layout


def _mesh_and_layout(placement: Placement) -> tuple[MeshLike | None, LayoutLike]:
    """Return the mesh and layout to use: the requested ones, else those of the distribution that is set in Keras."""
    mesh, layout = placement.mesh, placement.layout
    # Devices that the caller names take precedence: the distribution may be over others.
    if mesh is None and placement.devices is None and (found := distributions.current()) is not None:
        mesh, layout = found, found if layout is None else layout
    return mesh, "auto" if layout is None else layout


def _unused_distribution(placement: Placement) -> tuple[str, ...]:
    mesh, found = placement.mesh, distributions.current()
    if found is None or found in (mesh, placement.layout) or (mesh is None and placement.devices is None):
        return ()
    given = "devices" if mesh is None else "mesh"
    return (f"the {type(found).__name__} set with keras.distribution.set_distribution is not used: {given}= was given",)


def build(manifest: Manifest, construction: Construction, *, note: Callable[[str], None] | None = None) -> Any:
    """Build the model that a checkpoint describes, without values. ``note`` gets the reason if it is not compiled."""
    with abstraction.abstract():
        return building.build_model(
            manifest,
            dtype=construction.dtype,
            task=construction.task,
            custom_objects=construction.custom_objects,
            safe_mode=construction.safe_mode,
            ignore_config=construction.ignore_config,
            compile=construction.compile,
            note=note,
        )
