"""Determine where a run continues after `shardload.restore`, or with ``resume=True``: epoch, batch, metrics and data.

saved                          the next fit continues
at the end of epoch 4          with epoch 5
after 30 batches of epoch 4    in epoch 4: with batch 31 if the data position was saved, else from batch 1
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardload import processes
from shardload.data import Origin, Position, Reading, resumable_of_fit
from shardload.errors import MismatchError
from shardload.keras_bridge.caller import warn_caller
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.model_state import learning_rates_of, plain_model
from shardload.keras_bridge.training import initial_epoch_of_fit, set_initial_epoch
from shardload.pipeline.reporting import changed_rates
from shardload.pipeline.request import RestoreRequest
from shardload.reports.facts import NoteKind, of_kind
from shardload.restoring import Restored, metric_values, run_restore
from shardload.runs.contents import trained_batches
from shardload.runs.data_records import data_records, of_this_process, set_position
from shardload.runs.listing import list_steps
from shardload.runs.step import StepInfo
from shardload.units import plural

ITERATOR_FILE = "iterator.json"
_OWN_RATE = "To train with another, call shardload.restore before fit and set it then"

_END = {
    False: "Step {step} was saved after {place}, without a data position.",
    True: "Step {step} was saved after {place}, with a data position, but this data cannot continue there.",
}
"""The messages for a step without and with a saved data position."""
_WAY_OUT = " To continue within the epoch, use shardload.data.resumable(grain_dataset)."


@dataclass(slots=True)
class Resumption:
    """The differences between the first epoch of a resumed ``fit`` and other epochs."""

    info: StepInfo
    """The step to continue from."""
    epoch: int
    """The epoch to begin with."""
    complete: int
    """The number of epochs completed before the step: the default for ``epoch``, unless ``initial_epoch`` is given."""
    skipped: int = 0
    """The number of batches of that epoch that were already trained."""
    metrics: list[tuple[Any, Any]] = field(default_factory=list)
    """Variables of metrics, with their values in the middle of that epoch."""
    restored_before: bool = False
    """Whether the step was restored before ``fit`` began."""
    trained: int = 0
    """The number of batches the model had trained before the step was restored."""
    undone: int = 0
    """How many of these came after the step and are undone."""
    ended_by: str | None = None
    """The callback that had ended training at this step."""
    changed: tuple[str, ...] = ()
    """What the step did to the learning rates of the model, and to its count of batches."""
    averages: str | None = None
    """Whether the model has moving averages, of an optimizer with ``use_ema``."""

    @property
    def is_due(self) -> bool:
        """Whether training continues where it stopped, not with another epoch that the user gave."""
        return self.epoch == self.complete

    def end(self, model: Any, epochs: int, ended_by: str) -> None:
        """Train nothing: ``ended_by`` had ended training at this step."""
        # An epoch at or after `epochs` leaves nothing to train, and `fit` ends in its usual way.
        self.ended_by, self.epoch = ended_by, max(epochs, self.epoch)
        _begun(model, self)

    def restore_metrics(self) -> None:
        """Assign the saved values to the metrics, which Keras has just reset."""
        for variable, value in self.metrics:
            variable.assign(value)
        self.metrics.clear()

    def give_up(self, model: Any) -> None:
        """Leave the resumption to the next ``fit``, because this one began no epoch."""
        forget_beginning(model)
        if self.restored_before:
            record_of(model).restored = self.info

    def notices(self, *, epochs: int | None, newest: int) -> Iterator[str]:
        """Yield notices for the user; ``epochs`` is the argument of ``fit``, ``newest`` the folder's newest step."""
        if self.undone:
            had = f"this model had trained {plural(self.trained, 'batch')}, so its last {self.undone} are undone"
            way_out = "To continue from the model's current state, pass resume=False"
            yield f"Resumed step {self.info.step} (epoch {(self.info.epoch or 0) + 1}); {had}. {way_out}"
        for changed in self.changed:
            yield f"Resumed step {self.info.step}: {changed}"
        if self.averages is not None:
            yield f"Resumed step {self.info.step}: {self.averages}"
        if notice := self._notice(epochs=epochs, newest=newest):
            yield notice

    def _notice(self, *, epochs: int | None, newest: int) -> str | None:
        which = f"Resumed step {self.info.step} of {self.info.path.parent}"
        if self.ended_by is not None:
            ended = f"{self.ended_by} ended training after epoch {self.complete}, so nothing is left to train"
            return f"{which}: {ended}. To continue, leave it out, or give it a larger patience"
        if epochs is not None and self.epoch >= epochs:
            given = f"fit() was given epochs={epochs}, so nothing is left to train."
            if self.epoch != self.complete:
                return f"{which}: training begins with epoch {self.epoch + 1}, and {given}"
            done = f"{plural(self.complete, 'epoch')} {'is' if self.complete == 1 else 'are'}"
            way_out = "OrbaxCheckpoint(initial_epoch=0) to continue from this step and count epochs from 0."
            return f"{which}: {done} complete, and {given} Pass a larger epochs, or {way_out}"
        if self.info.step < newest:
            numbers = f"new steps are numbered from {newest + 1} on"
            return f"{which}, which has later steps: {numbers}, and the latest is {newest} until one of them is saved."
        return None


def go_on(
    model: Any,
    directory: Path,
    resume: bool | int | Literal["latest", "best"],
    position: Position,
    *,
    data_iterator: Any,
    initial_epoch: int | None,
) -> Resumption | None:
    """Continue after the step that was restored into a model, or restore the step that ``resume`` requests.

    Raises:
        UsageError: As for `resumption`.
        DamagedError: If the step is damaged; other errors of `shardload.restore` likewise.
    """
    record = record_of(model)
    info, record.restored = record.restored, None
    before = info is not None and _lies_in(directory, info)
    trained = undone = 0
    changed: tuple[str, ...] = ()
    averages = None
    if resume is not False and not before:
        # A first run has nothing to resume; only a step that was named must exist.
        if resume is True and not list_steps(directory):
            return None
        trained, rates = trained_batches(model), learning_rates_of(model)
        restored = _restored(model, directory, resume)
        info, report = restored.info, restored.report
        if lacking := "; ".join(of_kind(report.notes, NoteKind.OPTIMIZER_UNCHANGED)):
            warn_caller(f"Resuming from {directory}: {lacking}")
        for note in of_kind(report.notes, NoteKind.ASSETS):
            warn_caller(f"Resuming from {directory}: {note}")
        averages = next(iter(of_kind(report.notes, NoteKind.AVERAGES)), None)
        changed = changed_rates(rates, learning_rates_of(model), advice=_OWN_RATE)
        changed += of_kind(report.notes, NoteKind.BATCHES_RECOUNTED)
        # A weights-only step does not change the optimizer's count.
        undone = max(0, trained - min(trained_batches(model), info.step))
    if info is None or not _lies_in(directory, info):
        return None
    if not info.ours:
        warn_caller(
            f"Step {info.step} of {directory} was not saved by shardload and stores no epoch: training begins with "
            "epoch 1, or with the initial_epoch of fit()"
        )
        return None
    found = resumption(model, info, position, data_iterator=data_iterator, initial_epoch=initial_epoch)
    found.restored_before, found.trained, found.undone, found.averages = before, trained, undone, averages
    found.changed = changed
    return found


def _restored(model: Any, directory: Path, resume: bool | int | Literal["latest", "best"]) -> Restored:
    try:
        return run_restore(
            RestoreRequest(model=plain_model(model), directory=directory, step="latest" if resume is True else resume)
        )
    except MismatchError as error:
        if not error.other_arguments:
            raise
        # One cannot call restore() with other arguments from `fit`.
        raise MismatchError(
            error.problem,
            f" To take its weights alone, call shardload.restore(model, {str(directory)!r}, items='weights') before "
            "fit, and pass resume=False.",
        ) from error


def _lies_in(directory: Path, info: StepInfo) -> bool:
    """Whether a step is in a folder, regardless of the spelling of the two paths."""
    return info.path.parent.resolve() == directory.resolve()


def resumption(
    model: Any, info: StepInfo, position: Position, *, data_iterator: Any, initial_epoch: int | None
) -> Resumption:
    """Prepare the data and Keras' epoch count to continue after a step.

    Args:
        model: The model that was restored.
        info: The step.
        position: The position of the data that is about to be read.
        data_iterator: The user's own source, if any.
        initial_epoch: The epoch to begin with, unless ``fit`` got one. The data then starts at its beginning.

    Raises:
        UsageError: If the step stores a position that the user's source cannot accept, or a position of a
            resumable dataset that does not apply to this one.
        DamagedError: If the step is damaged.
    """
    epoch, batch = info.epoch or 0, info.batch or 0
    complete = epoch + 1 if info.recorded.epoch_done else epoch
    # `fit` has priority, except for 0: that is its default, so one cannot tell whether the user passed it.
    given = initial_epoch_of_fit() or initial_epoch
    # Another epoch than the one that is due: the stored position does not apply to it.
    if given is not None and given != complete:
        return _begun(model, Resumption(info, given, complete))
    records = data_records(info)
    own_goes_on = data_iterator is not None and set_position(data_iterator, records, info)
    stood = _where_it_stood(records, info)
    goes_on = None if stood is None else resumable_of_fit()
    if info.recorded.epoch_done:
        # At the end of an epoch only data with one iterator for all epochs has a position to return to.
        if stood is not None and stood.spans_epochs:
            if goes_on is not None:
                _go_on(position, stood, goes_on, skipped=0)
            elif not own_goes_on:
                place = f"epoch {epoch + 1}"
                warn_caller(f"{_END[True].format(step=info.step, place=place)} The data starts from its beginning.")
        return _begun(model, Resumption(info, complete, complete))
    if goes_on is None and not own_goes_on:
        # Within an epoch, but no data can return to that batch.
        place = f"{plural(batch, 'batch')} of epoch {epoch + 1}"
        warn_caller(f"{_END[stood is not None].format(step=info.step, place=place)} The epoch starts again.{_WAY_OUT}")
        return _begun(model, Resumption(info, complete, complete))
    if stood is not None and goes_on is not None:
        _go_on(position, stood, goes_on, skipped=batch)
    return _begun(model, Resumption(info, complete, complete, batch, metric_values(model, info)))


def position_record(position: Position, own: dict[str, Any]) -> dict[str, Any]:
    """Return the content of ``iterator.json``: the position of a resumable dataset and of the user's own source."""
    state = position.state
    if state is None:
        return own
    # default=int: a state may count with integers of NumPy, which JSON does not take.
    at = {"position": json.loads(json.dumps(state, default=int)), "spans_epochs": position.spans_epochs}
    return {**own, **at, "reading": position.reading}


def _begun(model: Any, found: Resumption) -> Resumption:
    set_initial_epoch(model, found.epoch)
    record_of(model).first_epoch = found.epoch
    return found


def forget_beginning(model: Any) -> None:
    """Remove the epoch set for the next ``fit``, but not one set by another callback (Keras' BackupAndRestore)."""
    # Keras keeps `_initial_epoch` for all later fits of the model.
    record = record_of(model)
    if record.first_epoch is not None:
        record.first_epoch = None
        set_initial_epoch(model, None)


@dataclass(frozen=True, slots=True)
class _Stood:
    """The saved position of `shardload.data.resumable`."""

    state: dict[str, Any]
    spans_epochs: bool
    origin: Origin


def _where_it_stood(records: list[dict[str, Any]], info: StepInfo) -> _Stood | None:
    """Return the saved position, or ``None``. One of another process never reaches the data: its origin is refused."""
    mine = of_this_process(records)
    record = mine or next(iter(records), {})
    if record.get("position") is None:
        return None
    reading = Reading() if mine is None else Reading.of_record(record.get("reading"))
    saved_by = info.recorded.processes or 1
    origin = Origin(info.step, reading, processes=saved_by, processes_now=processes.count())
    return _Stood(record["position"], bool(record.get("spans_epochs")), origin)


def _go_on(position: Position, stood: _Stood, dataset: Any, *, skipped: int) -> None:
    # Now, not when the data is read: Keras has then taken the values out of the model, and an error would lose them.
    dataset.check(stood.origin)
    position.resume(stood.state, skipped=skipped, origin=stood.origin)
