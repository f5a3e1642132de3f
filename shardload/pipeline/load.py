"""The order of a load, from the request to the report.

    agree on the call ─► open ─► start JAX ─► place ─► build or take the model ─► map ─► lay out ─► plan ─► check
    ─► agree on the plan ─► fill ─► report

Before fill, no model is changed, and only headers are read, and the values of tensors that may be copies or zeros
(`shardload.mapping.outside`). Map, lay out, plan and check are `shardload.pipeline.preparing`; fill is
`shardload.pipeline.filling`. Both agreements, and the start of JAX, are for several processes that load together:
`shardload.pipeline.load_distributed` makes them meet there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardload.hub import kerashub
from shardload.keras_bridge import abstraction, distributions
from shardload.keras_bridge.caller import warn_caller
from shardload.keras_bridge.model_state import learning_rates_of
from shardload.keras_bridge.tracking import walking_vocabularies_once
from shardload.loaders import spec_of
from shardload.manifest import Manifest
from shardload.mapping import slots_as_stored
from shardload.mapping.assets import load_assets
from shardload.mapping.stored_values import load_stored_values
from shardload.parallel.current_layout import current_devices
from shardload.pipeline import preparing, reporting
from shardload.pipeline.load_distributed import JointLoad, ReadShare
from shardload.pipeline.reporting import Clock
from shardload.pipeline.request import LoadRequest
from shardload.resolve.opening import OpenedSource, open_source
from shardload.sharding.devices import MeshDevices, abstract_devices, available, mesh_spec, resolve_devices
from shardload.stores.fingerprint import Fingerprint
from shardload.typing import LayoutLike, MeshLike

if TYPE_CHECKING:
    from shardload.reports import LoadReport, PlanReport


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of `load`: the model, the report, and the source."""

    model: Any
    report: LoadReport
    manifest: Manifest
    shares: tuple[ReadShare, ...] = ()
    """Bytes read by each process, if several loaded together."""


def open_requested(request: LoadRequest) -> OpenedSource:
    """Open the source of a request, or the folder that describes the model to build; a plan needs no weights."""
    # A plan reads headers only, so there is nothing to verify, and a description without weights is enough.
    reads = request.function != "plan"
    return open_source(
        request.source,
        request.format,
        described=request.builds,
        verify=reads,
        weights=reads,
        step=request.step,
        ignore_config=request.ignore_config,
    )


@walking_vocabularies_once()
def load(
    request: LoadRequest,
    call: JointLoad,
    *,
    opener: Callable[[LoadRequest], OpenedSource] = open_requested,
    on_opened: Callable[[Manifest], None] = lambda manifest: None,
    on_built: Callable[[Any, Manifest], None] = lambda model, manifest: None,
) -> Loaded:
    """Load what was requested: the order of `shardload.load`, `load_weights` and `restore`.

    Args:
        request: A checked request.
        call: The call that all processes make.
        opener: Opens the source.
        on_opened: Called before the model is built.
        on_built: Called with the model that was built, before its weights are read.
    """
    # Open: headers only. From here on, a file that changes is an error.
    clock = Clock()
    with clock("other"):
        source = opener(request)
    files = Fingerprint.of(source.manifest.files)
    # Place: once all processes have headers, as the start of JAX waits for all of them.
    call.start_jax()
    with clock("imports"):  # the first use of JAX starts its devices
        devices, layout = place(request)
    call.check_shares(devices)
    with clock("other"):
        on_opened(source.manifest)
    # Build: with the same seeds on all processes, so that what the checkpoint lacks gets the same initial values.
    with call.seeds() if request.builds else nullcontext():
        model, why_uncompiled = _build(request, source.manifest, clock) if request.builds else (request.model, ())
        if request.builds:
            on_built(model, source.manifest)
        optimizer = request.compile and not why_uncompiled
        if request.function == "load_weights" and request.items == "weights":
            optimizer = False
        # Slots are created before mapping, so that their tensors find a variable, and removed if the load fails.
        builds_slots = optimizer and not request.as_keras
        with _slots(request, model, source.manifest) if builds_slots else nullcontext():
            # Map, lay out, plan, check: the model is still unchanged.
            with clock("plan"):
                notes = (*why_uncompiled, *_unused_distribution(request))
                prepared = preparing.prepare(
                    request, source, model, devices, layout=layout, optimizer=optimizer, notes=notes
                ).validated()
            for text in prepared.layouts.idle_notes:
                warn_caller(text)
            # Agree on the plan, fill.
            rates = {} if request.builds else learning_rates_of(model)
            report = reporting.with_rates(call.fill(prepared, clock, files), rates, learning_rates_of(model))
        if spec_of(source.manifest).tensor_names == "step" and request.items in ("all", "weights"):
            lost = load_stored_values(model, source.manifest, strict=request.strict)
            report = replace(report, notes=(*report.notes, *lost))
        if request.builds:  # after the weights, as in Keras: hooks may use their values
            load_assets(model, source.manifest, check=source.checker)
    reporting.remember(model, report)
    return Loaded(model, report, source.manifest, call.shares(report))


def plan(request: LoadRequest) -> PlanReport:
    """Plan the load that was requested, on devices that need not exist; reads headers only."""
    clock = Clock()
    with clock("other"):
        source = open_requested(request)
    available()  # building needs JAX to compute shapes; its own error would not name the cause
    mesh, layout = _mesh_and_layout(request)
    request = replace(request, layout=layout)
    devices = abstract_devices(mesh_spec("1x1" if mesh is None else mesh, axes=request.axes))
    with clock("build"):
        model = build(source.manifest, dtype=request.dtype, task=request.task, ignore_config=request.ignore_config)
    with clock("plan"):
        prepared = preparing.prepare(request, source, model, devices, layout=layout)
    return reporting.plan_report(prepared, clock)


def place(request: LoadRequest) -> tuple[MeshDevices, LayoutLike | None]:
    """Return the devices to load onto, and the layout; ``None`` keeps the model's own.

    Raises:
        MeshError: When the model's variables are spread over several meshes, or there are too few devices.
    """
    # A model that has values or shardings stays where it is, unless the caller names other devices.
    follows_model = not request.builds and request.mesh is None and request.devices is None
    if follows_model and (own := current_devices(request.model)) is not None:
        return own, request.layout
    mesh, layout = _mesh_and_layout(request)
    return resolve_devices(mesh, axes=request.axes, devices=request.devices), layout


def _mesh_and_layout(request: LoadRequest) -> tuple[MeshLike | None, LayoutLike]:
    """Return the requested mesh and layout; without them, those of the distribution that is set in Keras."""
    mesh, layout = request.mesh, request.layout
    # Devices that the caller names take precedence: the distribution may be over others.
    if mesh is None and request.devices is None and (found := distributions.current()) is not None:
        mesh, layout = found, found if layout is None else layout
    return mesh, "auto" if layout is None else layout


def _unused_distribution(request: LoadRequest) -> tuple[str, ...]:
    found = distributions.current() if request.function in ("load", "load_weights") else None
    if found is None or found in (request.mesh, request.layout) or (request.mesh is None and request.devices is None):
        return ()
    given = "devices" if request.mesh is None else "mesh"
    return (f"the {type(found).__name__} set with keras.distribution.set_distribution is not used: {given}= was given",)


def build(manifest: Manifest, **options: Any) -> Any:
    """Build the model that a checkpoint describes, without allocating buffers."""
    with abstraction.abstract():
        return kerashub.build_model(manifest, **options)


def _build(request: LoadRequest, manifest: Manifest, clock: Clock) -> tuple[Any, tuple[str, ...]]:
    """Build the requested model; also return why it could not be compiled, if it was saved compiled."""
    why_uncompiled: list[str] = []
    names = ("dtype", "task", "ignore_config", "custom_objects", "safe_mode", "compile")
    with clock("build"):
        model = build(manifest, **{name: getattr(request, name) for name in names}, note=why_uncompiled.append)
    # Also a warning: the report is easily missed, and an uncompiled model fails only in fit().
    for text in why_uncompiled:
        warn_caller(text)
    return model, tuple(why_uncompiled)


def _slots(request: LoadRequest, model: Any, manifest: Manifest) -> AbstractContextManager[None]:
    if request.items == "weights":  # no slots for tensors that are not loaded
        return nullcontext()
    return slots_as_stored(model, manifest, rename=request.rename, strict=request.strict)
