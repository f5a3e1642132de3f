"""Fill the variables of a prepared load: the only part that changes the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardload.errors import LoadInterruptedError
from shardload.keras_bridge import abstraction, binding
from shardload.keras_bridge.caller import warn_caller
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.model_state import state_of
from shardload.keras_bridge.optimizer_slots import begin_slot
from shardload.keras_bridge.variables import has_value, relocate, sharding_of
from shardload.layouts.choice import KEEP_LAYOUT
from shardload.mapping.assign import Assigner
from shardload.pipeline import reporting
from shardload.pipeline.preparing import PreparedLoad
from shardload.pipeline.reporting import Clock
from shardload.pipeline.request import OnFailure
from shardload.progress import Progress
from shardload.reports import LoadReport
from shardload.stores.location import Fingerprint
from shardload.transfer import execution
from shardload.transfer.casts import overflow_notes
from shardload.transfer.read_tensor import read_tensor


def fill(
    prepared: PreparedLoad,
    clock: Clock,
    files: Fingerprint,
    *,
    progress: Progress,
    on_failure: OnFailure,
    on_filled: Callable[[], None] = lambda: None,
) -> LoadReport:
    """Read, assign, initialise the rest, and report.

    Args:
        prepared: The load; its model is changed only here.
        clock: Measures the stages.
        files: Fingerprint of the checkpoint's files from when their headers were read.
        progress: Receives the number of bytes read.
        on_failure: What to do with a half-loaded model.
        on_filled: Called when all values are in place here, while old values can still be restored.

    Raises:
        LoadInterruptedError: When it failed after values had been replaced; describes the state of the model.
        TransferError: When reading failed and nothing had been replaced.
    """
    files.check()
    with clock("transfer"), _rollback(prepared, files, on_failure) as assigner:
        stats = _stream(prepared, assigner, progress)
        # A file rewritten in place while it was read keeps its size: the bytes may be a mixture of both.
        files.check()
        assigner.finish(on_filled)
    # Outside of the rollback: all values of the checkpoint are in place, and on other processes too.
    with clock("build"):
        initialised = abstraction.initialise(prepared.model)
        _gather(prepared)
        _begin(prepared)
        abstraction.check_initialised(prepared.model)
    report = reporting.load_report(prepared, clock, stats, initialised=tuple(initialised))
    for text in overflow_notes(stats.overflowed):  # also a warning: the report is easily missed
        warn_caller(text)
    return report


def _stream(prepared: PreparedLoad, assigner: Assigner, shown: Progress) -> execution.TransferStats:
    shown.start(prepared.plan.read_bytes, f"Loading {prepared.model.name}")
    try:
        return execution.execute(
            prepared.plan,
            prepared.manifest,
            devices=prepared.devices.devices,
            on_start=assigner.starting,
            on_ready=assigner.ready,
            progress=shown.advance,
            check=prepared.source.checker,
        )
    finally:
        shown.stop()


def _gather(prepared: PreparedLoad) -> None:
    """Move variables that the checkpoint lacks (seeds, metrics, kept weights) to the mesh: one program, one mesh."""
    if binding.binding_of(prepared.model) is not None:
        for variable in state_of(prepared.model):
            if (sharding := sharding_of(variable)) is not None:
                relocate(variable, sharding)


def _begin(prepared: PreparedLoad) -> None:
    """Give slots that the checkpoint lacks what they have in a new optimizer; the weights have their values now."""
    for begun in prepared.mapping.begun:
        if begun.start is not None:
            begin_slot(begun.variable, begun.start)


@contextmanager
def _rollback(prepared: PreparedLoad, files: Fingerprint, on_failure: OnFailure) -> Iterator[Assigner]:
    """Bind the model to its new mesh and yield its assigner; on failure describe its state, or restore everything."""
    before = binding.BindingSnapshot.of(prepared.model)
    # Counted before: a load that fails early must be told from one that replaced values.
    had_values = sum(map(has_value, prepared.mapping.provided))
    assigner = _assigner(prepared, files, atomic=on_failure == "restore")
    try:
        _bind(prepared)
        yield assigner
    except BaseException as error:
        left = assigner.abort()
        unchanged = not left.new and len(left.old) == had_values
        # The old values are in place, so the old mesh is right again, and the plain error says enough.
        if on_failure == "restore" or unchanged:
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


def _bind(prepared: PreparedLoad) -> None:
    # A model that keeps its layouts is bound to its mesh already, or to none.
    if prepared.layouts.mode != KEEP_LAYOUT:
        binding.bind(
            prepared.model,
            mesh=prepared.devices.mesh,
            devices=prepared.devices.devices,
            layouts=prepared.layouts.layouts,
            values="keep",
            batch_axis=prepared.layouts.batch_axis,
            activations=prepared.layouts.activations,
            uses=prepared.layouts.uses,
        )


def _assigner(prepared: PreparedLoad, files: Fingerprint, *, atomic: bool) -> Assigner:
    def place(variable: Any, value: Any) -> Any:
        return execution.place(value, prepared.layouts.of(variable), prepared.devices.devices)

    def read(tensor: str) -> Any:
        value = read_tensor(prepared.manifest, tensor)
        # These reads happen after those of the transfer, whose check does not cover them.
        files.check()
        return value

    return Assigner(prepared.mapping, read_tensor=read, place=place, atomic=atomic)
