"""Fill a model's variables by a prepared load, once all processes agree on what they load.

`topics` lists what must be equal on all processes, and `shardload.processes.agreement` compares it. Names of variables
are not compared, because Keras numbers them in order of creation: a variable is identified by its place in the model.

`fill_variables` is the only part of a load that changes the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from shardload.errors import LoadInterruptedError
from shardload.keras_bridge import abstraction, binding
from shardload.keras_bridge.caller import warn_caller
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.model_state import state_of
from shardload.keras_bridge.optimizer_slots import begin_slot
from shardload.keras_bridge.saving import saved_objects
from shardload.keras_bridge.variables import (
    current_value,
    has_value,
    pending_of,
    relocate,
    restore_value,
    sharding_of,
    stored_dtype,
)
from shardload.layouts.choice import KEEP_LAYOUT
from shardload.layouts.model_variables import all_variables
from shardload.mapping.assign import Assigner
from shardload.mapping.layer_hooks import AttributeSnapshot
from shardload.pipeline import reporting
from shardload.pipeline.compiling import Warming
from shardload.pipeline.preparing import PreparedLoad
from shardload.pipeline.reporting import Clock
from shardload.pipeline.request import OnFailure
from shardload.pipeline.source_facts import owners_topic, source_topics
from shardload.processes.agreement import Facts, Topic
from shardload.progress import Progress
from shardload.reports import LoadReport
from shardload.stores.location import Fingerprint
from shardload.transfer import execution
from shardload.transfer.casts import is_float, overflow_notes
from shardload.transfer.exchange import execute_together
from shardload.transfer.read_tensor import read_tensor


def fill_variables(
    prepared: PreparedLoad,
    clock: Clock,
    files: Fingerprint,
    *,
    progress: Progress,
    on_failure: OnFailure,
    meet: Callable[[str], None] = lambda what: None,
    warming: Warming,
    at_once: Callable[[], object] | None = None,
) -> LoadReport:
    """Read the planned tensors into the model's variables, initialise those without a tensor, and return the report.

    ``files``: fingerprint of the checkpoint's files from when their headers were read; if it differs now, the load
    fails. ``meet`` waits for all processes that load together. It is called before they exchange what they read, and
    when this process has all new values and can still restore the old ones. ``warming`` compiles steps of the
    model meanwhile. ``at_once`` is called when all tensors are read, before the first variable is assigned. Until then,
    a model that keeps its layouts is unchanged, so that other threads may use it.
    """
    files.check()
    with (
        _rollback(prepared, files, on_failure, at_once) as assigner,
        warming.running(prepared, clock),
        clock("transfer"),
    ):
        progress.start(prepared.plan.read_bytes, f"Loading {prepared.model.name}")
        try:
            stats = execute_together(
                prepared.plan,
                prepared.manifest,
                prepared.owners,
                prepared.mapping.bindings,
                devices=prepared.devices.devices,
                meet=meet,
                on_start=assigner.starting,
                on_ready=assigner.ready,
                progress=progress.advance,
                check=prepared.source.checker,
                direct=prepared.direct,
            )
        finally:
            progress.stop()
        # A file rewritten in place while it was read keeps its size: the bytes may be a mixture of both.
        files.check()
        assigner.finish(lambda: meet("the end of the transfer"))
    # Outside of the rollback: all values of the checkpoint are in place, and on other processes too.
    with clock("build"):
        initialised = abstraction.initialise(prepared.model)
        # Move variables that the checkpoint lacks (seeds, metrics, kept weights) to the mesh: one program, one mesh.
        if binding.binding_of(prepared.model) is not None:
            for variable in state_of(prepared.model):
                if (sharding := sharding_of(variable)) is not None:
                    relocate(variable, sharding)
        # Slots that the checkpoint lacks get what they have in a new optimizer; the weights have their values now.
        for begun in prepared.mapping.begun:
            if begun.start is not None:
                begin_slot(begun.variable, begun.start)
        abstraction.check_initialised(prepared.model)
    uncompiled = warming.notes(clock)
    report = reporting.load_report(prepared, clock, stats, initialised=tuple(initialised))
    report = replace(report, notes=(*report.notes, *uncompiled))
    for text in overflow_notes(stats.overflowed):  # also a warning: the report is easily missed
        warn_caller(text)
    return report


@contextmanager
def _rollback(
    prepared: PreparedLoad, files: Fingerprint, on_failure: OnFailure, at_once: Callable[[], object] | None
) -> Iterator[Assigner]:
    """Bind the model to its new mesh and layouts, and yield its `Assigner`; ``on_failure``: what a failure does."""
    before = binding.BindingSnapshot.of(prepared.model)
    # Counted before: a load that fails early must be told from one that replaced values.
    had_values = sum(map(has_value, prepared.mapping.provided))

    def place(variable: Any, value: Any) -> Any:
        return execution.place(value, prepared.layouts.of(variable), prepared.devices.devices)

    def read(tensor: str) -> Any:
        value = read_tensor(prepared.manifest, tensor)
        # These reads happen after those of the transfer, whose check does not cover them.
        files.check()
        return value

    is_atomic = on_failure == "restore"
    assigner = Assigner(prepared.mapping, read_tensor=read, place=place, atomic=is_atomic, at_once=at_once)
    keeps_layout = prepared.layouts.mode == KEEP_LAYOUT
    try:
        # A model that keeps its layouts is bound to its mesh already, or to none.
        if not keeps_layout:
            binding.bind(
                prepared.model,
                mesh=prepared.devices.mesh,
                devices=prepared.devices.devices,
                layouts=prepared.layouts.layouts,
                values="keep",
                batch_axes=prepared.layouts.batch_axes,
                activations=prepared.layouts.activations,
                uses=prepared.layouts.uses,
                gather_dtypes=prepared.layouts.gather_dtypes,
                remat=prepared.layouts.remat,
                call_layouts=prepared.layouts.call_layouts,
            )
        yield assigner
    except BaseException as error:
        left = assigner.abort()
        unchanged = not left.new and len(left.old) == had_values
        # The old values are in place, so the old mesh is right again, and the plain error says enough.
        if (on_failure == "restore" or unchanged) and not (at_once and keeps_layout):
            before.restore()
        if on_failure == "raise" or unchanged:
            raise
        # The values that would show the model's mesh may be gone: a second load finds it here.
        record_of(prepared.model).devices = prepared.devices
        state = f"Of the model {prepared.model.name!r} {left}."
        # Ctrl-C stays a KeyboardInterrupt, for whoever catches it.
        if not isinstance(error, Exception):
            error.add_note(f"The load was interrupted. {state}")
            raise
        raise LoadInterruptedError(
            f"Loading {prepared.manifest.source} failed: {error}\n{state} Load it again, or use atomic=True to "
            "keep the old values until the new ones are complete."
        ) from error


@contextmanager
def unchanged_on_failure(before: binding.BindingSnapshot, agreed: Callable[[], None]) -> Iterator[None]:
    """Restore a model if the with block, or ``agreed`` after it, fails: its values and attributes of its layers.

    ``before`` is the binding to restore. Objects in attributes, other than lists, dicts and sets, are not copied: what
    a layer's own code changes inside of them stays.
    """
    values = [(v, current_value(v), pending_of(v)) for v in state_of(before.model)]
    snapshots = [AttributeSnapshot.of(saved) for _, saved in saved_objects(before.model)]
    try:
        yield
        agreed()
    except BaseException:
        for snapshot in snapshots:
            snapshot.restore()
        for variable, value, initializer in values:
            restore_value(variable, value, initializer)
        before.restore()
        raise


def topics(prepared: PreparedLoad) -> list[Topic]:
    """Return what must be equal on all processes before a model is filled, in the order to compare: causes first."""
    # Causes before effects: another dtype also changes every line of the model, which would be named instead.
    same = "the same on every process"
    choices = () if prepared.owners is None else prepared.owners.choices
    rows = [*enumerate(prepared.layouts.variables)]

    def mesh() -> Facts:
        spec, devices = prepared.devices.mesh, prepared.devices.devices
        shape = f"{'x'.join(map(str, spec.sizes))} ({', '.join(spec.axes)})"
        return {"Its shape": shape, "Its devices": ", ".join(str(getattr(d, "id", None)) for d in devices)}

    def paths() -> Facts:
        return {f"Variable {number}": row.path for number, row in rows}

    def dtypes() -> Facts:  # compared before the model, where every weight would differ
        found = {str(stored_dtype(v)) for v in all_variables(prepared.model).values() if is_float(stored_dtype(v))}
        return {"That of the weights": ", ".join(sorted(found))}

    return [
        Topic("the mesh", mesh, f"Pass {same}"),
        *source_topics(prepared.manifest, prepared.source.checker),
        Topic("the dtype", dtypes, f"Pass {same}, or build the model with it"),
        Topic("the model", lambda: _model(prepared), f"Build {same}", paths),
        Topic("the layout", lambda: {f"Variable {i}": str(row.layout) for i, row in rows}, f"Use {same}", paths),
        owners_topic({f"Variable {i}": choice for i, choice in enumerate(choices)}),
    ]


def _model(prepared: PreparedLoad) -> Facts:
    # By place, never by name (module docstring); a variable without a tensor keeps its line.
    found = {id(v): f"{stored_dtype(v)} {tuple(v.shape)}, no tensor" for v in all_variables(prepared.model).values()}
    outputs = ((o, b.view) for b in prepared.mapping.bindings for o in b.outputs)
    found |= {id(o.variable): f"{o.dtype} {o.shape} from {view}" for o, view in outputs}
    for computed in prepared.mapping.computed:
        found |= {id(v): f"computed from {', '.join(computed.tensors)}" for v in computed.variables}
    return {f"Variable {number}": text for number, text in enumerate(found.values())}
