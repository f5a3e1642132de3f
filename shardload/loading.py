"""Load a source into a sharded Keras model: the public functions, in the order of a load.

    resolve ─► open_manifest ─► build (abstract) ─► map names ─► choose layouts ─► make plan
                                                                                     │  above: headers only
    report ◄── initialise the rest ◄── assign through the layers ◄── execute ◄───────┘  and no model is changed

Each arrow is a function of another module; `shardload.pipeline.filling` has the checks between them. This module is
the public entry point.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardload.errors import UnsupportedError
from shardload.manifest import Manifest
from shardload.mapping import slots_as_stored
from shardload.mapping.assets import load_assets
from shardload.parallel.current_layout import whereabouts
from shardload.pipeline import arguments, filling, load_distributed, reporting
from shardload.progress import Progress
from shardload.resolve.opening import open_source
from shardload.sharding import devices as placement
from shardload.stores.fingerprint import Fingerprint
from shardload.typing import DTypeLike, LayoutLike, MeshLike, PathLike

if TYPE_CHECKING:
    from shardload.reports import LoadReport, PlanReport

_reports: weakref.WeakKeyDictionary[Any, LoadReport] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of `run`: the model, the report, and the source."""

    model: Any
    report: LoadReport
    manifest: Manifest
    shares: tuple[load_distributed.ReadShare, ...] = ()
    """Bytes read by each process, if several loaded together."""


def load(
    source: PathLike,
    *,
    mesh: MeshLike | None = None,
    axes: str | None = None,
    layout: LayoutLike = "auto",
    dtype: DTypeLike | None = None,
    host_memory_bytes: int | str | None = None,
    strict: bool = True,
    ignore: Sequence[str] = (),
    devices: Sequence[Any] | None = None,
    task: bool = True,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
    compile: bool = True,
    atomic: bool = False,
    format: str | None = None,
    progress: Progress | None = None,
    ignore_config: Sequence[str] = (),
) -> Any:
    """Build the model a checkpoint describes and load it straight into its layout.

    In a `jax.distributed` run, all processes make the call, and it succeeds or fails on all of them. A mesh of only
    this process's devices does not involve the other processes.

    Args:
        source: A path, a name in the checkpoint root, a KerasHub preset or handle, or an alias.
        mesh: ``"1x8"``, ``"data=2,model=4"``, sizes, a `jax.sharding.Mesh` or a `keras.distribution.DeviceMesh`; all
            devices along one ``model`` axis by default.
        layout: ``"auto"``, ``"keras_hub"``, ``"replicated"``, the path of a rules file or a
            `keras.distribution.LayoutMap`.
        dtype: Dtype of the floating-point weights; the checkpoint's own by default.
        axes: As for `run`.
        host_memory_bytes: As for `run`.
        strict: As for `run`.
        ignore: As for `run`.
        devices: As for `run`.
        task: As for `run`.
        custom_objects: As for `run`.
        safe_mode: As for `run`.
        compile: As for `run`.
        atomic: As for `run`.
        format: As for `run`.
        progress: As for `run`.
        ignore_config: As for `run`.

    Returns:
        The Keras task if the checkpoint is one, else the backbone, ready for predict, fit and generate.

    Raises:
        UsageError: When an argument is of the wrong kind or out of range.
        SourceNotFoundError: When the name resolves to nothing.
        SourceError: When the checkpoint contradicts itself.
        MismatchError: When checkpoint and model disagree and ``strict`` is set; when floats would become integers.
        BackendError: When Keras does not run on JAX.
        MeshError: When there are too few devices.
        LayoutError: When the layout cannot be applied.
        TransferError: When reading fails half-way.
        DisagreementError: When the processes of a `jax.distributed` run request different loads.
        ProcessFailedError: When it failed on another process with an error that is not from shardload.
        ProcessLostError: When another process ended, or does not respond for 15 s.
    """
    return run(
        source,
        mesh=mesh,
        axes=axes,
        layout=layout,
        dtype=dtype,
        host_memory_bytes=host_memory_bytes,
        strict=strict,
        ignore=ignore,
        devices=devices,
        task=task,
        custom_objects=custom_objects,
        safe_mode=safe_mode,
        compile=compile,
        atomic=atomic,
        format=format,
        progress=progress,
        ignore_config=ignore_config,
    ).model


def run(
    source: PathLike,
    *,
    mesh: MeshLike | None = None,
    axes: str | None = None,
    layout: LayoutLike = "auto",
    dtype: DTypeLike | None = None,
    host_memory_bytes: int | str | None = None,
    strict: bool = True,
    ignore: Sequence[str] = (),
    devices: Sequence[Any] | None = None,
    task: bool = True,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
    compile: bool = True,
    atomic: bool = False,
    format: str | None = None,
    progress: Progress | None = None,
    ignore_config: Sequence[str] = (),
) -> Loaded:
    """Like `load`, but also return the report and the manifest.

    Args:
        source: As for `load`.
        mesh: As for `load`.
        axes: Names for a mesh given as sizes, joined by commas; ``batch,model`` by default.
        layout: As for `load`.
        dtype: As for `load`.
        host_memory_bytes: Most bytes staged in host memory, or text like ``"512MiB"``; 256 MiB by default, or the
            size of a compressed chunk if it needs more.
        strict: Refuse a checkpoint that lacks a weight of the model, has one that the model should use but does not,
            has another shape for one, or integers for floats. Tensors outside the model (buffers, heads, copies of
            the embedding: ``report.outside``) are always accepted. Otherwise layers whose shapes differ keep their
            values, or get their initial values, as with ``skip_mismatch`` in Keras, and the report says so.
        ignore: Names of tensors to skip even if the model needs them, with ``*`` and ``?``: ``"score.*"``.
        devices: Devices to use, in mesh order.
        task: Build the task if the checkpoint is one; the backbone otherwise.
        custom_objects: Classes in the checkpoint's configuration that Keras does not know.
        safe_mode: Refuse configurations that contain Python code.
        compile: Compile the model as it was saved, and load the state of its optimizer. If its class does not accept
            the stored ``compile`` configuration, the model is loaded uncompiled, with a warning.
        atomic: No effect here, as a new model is returned complete or not at all; see `load_weights`.
        format: Name of a format, to override a contradicting file ending, or to choose one of several in a
            folder.
        progress: Called with the number of bytes read.
        ignore_config: Fields of a Hugging Face ``config.json`` (or of a GGUF header, under the same names) that the
            model may differ from, such as ``("rope_scaling",)``. Otherwise a field that changes what the model
            computes, and that KerasHub's class cannot express, is refused. The report lists what was ignored.
    """
    told: list[str] = []
    options = {"custom_objects": custom_objects, "safe_mode": safe_mode, "compile": compile, "note": told.append}
    same: dict[str, Any] = {"strict": strict, "ignore": ignore, "ignore_config": ignore_config, "task": task}
    same |= {"compile": compile, "safe_mode": safe_mode, "custom_objects": custom_objects}
    with load_distributed.joint_load("load", source, mesh=mesh, devices=devices, **same) as call:
        clock = filling.Clock()
        dtype, limit = arguments.float_dtype(dtype), arguments.budget(host_memory_bytes)
        arguments.check_backend()
        opened = open_source(source, format, described=True)
        manifest = opened.manifest
        files = Fingerprint.of(manifest.files)
        call.ready()
        place = placement.place_on(mesh, axes=axes, devices=devices)
        call.share(place)
        with call.seeds():
            with clock("build"):
                model = filling.build(manifest, dtype=dtype, task=task, ignore_config=ignore_config, **options)
            for text in told:
                warnings.warn(text, stacklevel=3)
            as_saved = compile and not told
            with slots_as_stored(model, manifest) if as_saved else nullcontext():
                with clock("plan"):
                    job = filling.prepare(
                        model,
                        manifest,
                        place,
                        layout=layout,
                        host_memory_bytes=limit,
                        check=opened.checker,
                        ignore_config=ignore_config,
                        optimizer=as_saved,
                    )
                    job = job.with_unused_sorted(ignore=arguments.patterns(ignore)).checked(strict=strict)
                notes = (*opened.notes, *told)
                report = call.fill(job, clock, files=files, on_failure="raise", progress=progress, notes=notes)
            load_assets(
                model, manifest, check=opened.checker
            )  # after the weights, as in Keras: hooks may use their values
        shares = call.done(report)
    _reports[model] = report
    return Loaded(model, report, manifest, shares)


def load_weights(
    model: Any,
    source: PathLike,
    *,
    mesh: MeshLike | None = None,
    axes: str | None = None,
    layout: LayoutLike | None = None,
    names: Mapping[str, str] | None = None,
    host_memory_bytes: int | str | None = None,
    strict: bool = True,
    devices: Sequence[Any] | None = None,
    atomic: bool = False,
    format: str | None = None,
    progress: Progress | None = None,
    ignore_config: Sequence[str] = (),
) -> LoadReport:
    """Load weights into an existing model, live or built inside `shardload.abstract`.

    Args:
        model: A built Keras model. If it is compiled and the checkpoint contains the state of its optimizer, the state
            is loaded too, whether the optimizer has trained before or not.
        source: As for `load`; also bare safetensors and h5 files.
        mesh: Mesh for the weights; by default the model's current one (all devices for an abstract model).
        axes: As for `run`.
        layout: As for `load`; by default the model's current layouts (``"auto"`` for an abstract model).
        names: For bare files: tensor name → variable path, if they differ.
        host_memory_bytes: As for `run`.
        strict: As for `run`.
        devices: As for `run`.
        atomic: Keep the old values until all new ones are loaded, and restore them if the load fails; takes twice the
            memory.
        format: As for `run`.
        progress: As for `run`.
        ignore_config: As for `run`. Of a model you built yourself, only ``quantization_config`` is checked; other
            fields in which it differs are listed in the report.

    Raises:
        LoadInterruptedError: When the load failed after it began to replace values; describes the current values.
        DisagreementError: As in `load`, like all other errors.
    """
    same: dict[str, Any] = {"names": names, "strict": strict, "atomic": atomic, "ignore_config": ignore_config}
    with load_distributed.joint_load("load_weights", source, mesh=mesh, devices=devices, model=model, **same) as call:
        clock = filling.Clock()
        limit = arguments.budget(host_memory_bytes)
        arguments.check_model(model)
        opened = open_source(source, format)
        manifest = opened.manifest
        files = Fingerprint.of(manifest.files)
        call.ready()
        with slots_as_stored(model, manifest):
            with clock("plan"):
                place, wanted = whereabouts(model, mesh=mesh, axes=axes, layout=layout, devices=devices)
                call.share(place)
                job = filling.prepare(
                    model,
                    manifest,
                    place,
                    layout=wanted,
                    tensor_names=names,
                    host_memory_bytes=limit,
                    check=opened.checker,
                    ignore_config=ignore_config,
                ).checked(strict=strict)
            after = filling.on_failure(atomic=atomic)
            report = call.fill(job, clock, files=files, on_failure=after, progress=progress, notes=opened.notes)
        call.done(report)
    _reports[model] = report
    return report


def plan(
    source: PathLike,
    *,
    mesh: MeshLike = "1x1",
    axes: str | None = None,
    layout: LayoutLike = "auto",
    dtype: DTypeLike | None = None,
    host_memory_bytes: int | str | None = None,
    device_memory_bytes: int | str | None = None,
    ignore: Sequence[str] = (),
    task: bool = True,
    format: str | None = None,
    ignore_config: Sequence[str] = (),
) -> PlanReport:
    """Plan a load from headers alone: which bytes are read and where they go; needs no devices.

    Args:
        source: As for `load`.
        mesh: As for `load`; need not exist.
        axes: As for `run`.
        layout: As for `load`.
        dtype: As for `load`.
        host_memory_bytes: As for `run`.
        device_memory_bytes: Bytes of one device, or text like ``"16GiB"``: the report says whether the plan fits.
        ignore: As for `run`.
        task: As for `run`.
        format: As for `run`.
        ignore_config: As for `run`.
    """
    clock = filling.Clock()
    dtype, limit = arguments.float_dtype(dtype), arguments.budget(host_memory_bytes)
    arguments.check_backend()
    memory = None if device_memory_bytes is None else arguments.byte_count("device_memory_bytes", device_memory_bytes)
    opened = open_source(source, format, described=True, verify=False)
    manifest = opened.manifest
    placement.available()  # building needs JAX to compute shapes; its own error would not name the cause
    with clock("build"):
        model = filling.build(manifest, dtype=dtype, task=task, ignore_config=ignore_config)
    with clock("plan"):
        spec = placement.mesh_spec(mesh, axes=axes)
        job = filling.prepare(
            model,
            manifest,
            placement.planned(spec),
            layout=layout,
            host_memory_bytes=limit,
            ignore_config=ignore_config,
        )
        job = job.with_unused_sorted(ignore=arguments.patterns(ignore), compare=False)
    return reporting.plan_report(job, clock, layout=layout, device_memory_bytes=memory, notes=opened.notes)


def inspect(source: PathLike, *, format: str | None = None) -> Manifest:
    """Read the headers of a checkpoint and return its tensors.

    Args:
        source: As for `load`; also bare safetensors and h5 files.
        format: As for `run`.

    Raises:
        SourceNotFoundError: When the name resolves to nothing.
        SourceError: When the checkpoint contradicts itself.
    """
    return open_source(source, format, verify=False).manifest


def report(model: Any) -> LoadReport:
    """Return the report of the last load into ``model``.

    Raises:
        UnsupportedError: When shardload loaded nothing into it in this process.
    """
    if model not in _reports:
        raise UnsupportedError(f"Nothing was loaded into the model {getattr(model, 'name', model)!r} by shardload")
    return _reports[model]


def remember_report(model: Any, report: LoadReport) -> None:
    """Store the report that `report` returns for ``model``."""
    _reports[model] = report
