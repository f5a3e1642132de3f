"""Determine where a run continues after `shardload.restore`, or with ``resume=True``: epoch, batch, metrics and data.

saved                          the next fit continues
at the end of epoch 4          with epoch 5
after 30 batches of epoch 4    in epoch 4: with batch 31 if the data position was saved, else from batch 1

Each step also stores the state of ``EarlyStopping`` and ``ReduceLROnPlateau`` (`OtherCallbacks`). Keras resets both
when ``fit`` begins, so their state is restored later, when the first epoch begins. `OrbaxCheckpoint` runs after both: a
step saved at the end of an epoch contains what they decided after that epoch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import keras

from shardload import processes
from shardload.data import Origin, Position, Reading, resumable_of_fit
from shardload.errors import MismatchError, ShardloadError
from shardload.keras_bridge.caller import warn_caller
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.model_state import learning_rates_of, plain_model
from shardload.keras_bridge.training import initial_epoch_of_fit, run_after, set_initial_epoch
from shardload.pipeline.reporting import changed_rates
from shardload.pipeline.request import RestoreRequest
from shardload.reports.facts import NoteKind, of_kind
from shardload.restoring import Restored, metric_values, run_restore, weight_values
from shardload.runs.contents import position_of_this_process, set_position, stored_positions, trained_batches
from shardload.runs.listing import steps_of_run
from shardload.runs.step import StepInfo
from shardload.units import plural

_SAVED = {
    False: "Step {step} was saved after {place}, without a data position.",
    True: "Step {step} was saved after {place}, with a data position, but this data cannot continue there.",
}
"""First sentence of a warning that the training data cannot continue at the step; the next says where it starts again.
The key says whether the step stores a position in the data."""


@dataclass(slots=True)
class Resumption:
    """Where ``fit`` continues after a restored step, and what is still to be restored when its first epoch begins."""

    info: StepInfo
    """The step to continue from."""
    epoch: int
    """The epoch with which ``fit`` begins, counted from 0."""
    complete: int
    """Number of epochs that were complete at the step; equals ``epoch`` unless the user gave ``initial_epoch``."""
    skipped: int = 0
    """How many batches of epoch ``epoch`` were trained before the step was saved; ``fit`` does not repeat them."""
    metrics: list[tuple[Any, Any]] = field(default_factory=list)
    """The model's metrics at a step within an epoch, to continue their averages: pairs of variable and value."""
    restored_before: bool = False
    """Whether the user restored the step by `shardload.restore` before ``fit``; else the callback restored it."""
    trained: int = 0
    """How many batches this model had trained before the step was restored, for a notice to the user."""
    undone: int = 0
    """How many of the ``trained`` batches came after the step, so that the restore has undone them."""
    ended_by: str | None = None
    """The callback (such as ``EarlyStopping``) that ended training at this step; ``None`` if none did."""
    changed: tuple[str, ...] = ()
    """Sentences that tell the user what the restore changed: learning rates, count of batches, moving averages."""

    @property
    def is_due(self) -> bool:
        """Whether ``fit`` begins with the epoch after the last complete one, not with another that the user chose."""
        return self.epoch == self.complete

    def end(self, model: Any, epochs: int, ended_by: str) -> None:
        """Make this ``fit`` train nothing, because the callback ``ended_by`` ended training at the step."""
        # An epoch at or after `epochs` leaves nothing to train, and `fit` ends in its usual way.
        self.ended_by, self.epoch = ended_by, max(epochs, self.epoch)
        self.set_first_epoch(model)

    def set_first_epoch(self, model: Any) -> None:
        """Make ``fit`` begin with ``epoch``, and record that this callback, not the user, chose that epoch."""
        set_initial_epoch(model, self.epoch)
        record_of(model).first_epoch = self.epoch

    def restore_metrics(self) -> None:
        """Assign the saved values to the model's metrics, which Keras resets when an epoch begins."""
        for variable, value in self.metrics:
            variable.assign(value)
        self.metrics.clear()

    def give_up(self, model: Any) -> None:
        """Leave it to the next ``fit`` to resume from the step, because this one ended before an epoch began."""
        forget_first_epoch(model)
        if self.restored_before:
            record_of(model).restored = self.info

    def notices(self, *, epochs: int | None, newest: int) -> Iterator[str]:
        """Yield sentences on where training continues; ``epochs`` is ``fit``'s argument, ``newest`` the latest step."""
        if self.undone:
            had = f"this model had trained {plural(self.trained, 'batch')}, so its last {self.undone} are undone"
            way_out = "To continue from the model's current state, pass resume=False"
            yield f"Resumed step {self.info.step} (epoch {(self.info.epoch or 0) + 1}); {had}. {way_out}"
        for changed in self.changed:
            yield f"Resumed step {self.info.step}: {changed}"
        which = f"Resumed step {self.info.step} of {self.info.folder}"
        if self.ended_by is not None:
            ended = f"{self.ended_by} ended training after epoch {self.complete}, so nothing is left to train"
            yield f"{which}: {ended}. To continue, leave it out, or give it a larger patience"
        elif epochs is not None and self.epoch >= epochs:
            given = f"fit() was given epochs={epochs}, so nothing is left to train."
            if not self.is_due:
                yield f"{which}: training begins with epoch {self.epoch + 1}, and {given}"
                return
            done = f"{plural(self.complete, 'epoch')} {'is' if self.complete == 1 else 'are'}"
            way_out = "OrbaxCheckpoint(initial_epoch=0) to continue from this step and count epochs from 0."
            yield f"{which}: {done} complete, and {given} Pass a larger epochs, or {way_out}"
        elif self.info.step < newest:
            numbers = f"new steps are numbered from {newest + 1} on"
            yield f"{which}, which has later steps: {numbers}, and the latest is {newest} until one of them is saved."


def resume_training(
    model: Any,
    directory: Path | str,
    resume: bool | int | Literal["latest", "best"],
    position: Position,
    *,
    data_iterator: Any,
    initial_epoch: int | None,
) -> Resumption | None:
    """Restore the step that ``resume`` names, unless the user has restored one; return where ``fit`` then continues."""
    record = record_of(model)
    info, record.restored = record.restored, None
    before = info is not None and _is_in(directory, info)
    trained = undone = 0
    changed: tuple[str, ...] = ()
    if resume is not False and not before:
        # A first run has nothing to resume; only a step that was named must exist.
        if resume is True and not steps_of_run(directory):
            return None
        trained, rates = trained_batches(model), learning_rates_of(model)
        restored = _restored(model, directory, resume)
        info, report = restored.info, restored.report
        if lacking := "; ".join(of_kind(report.notes, NoteKind.OPTIMIZER_UNCHANGED)):
            warn_caller(f"Resuming from {directory}: {lacking}")
        for note in of_kind(report.notes, NoteKind.ASSETS):
            warn_caller(f"Resuming from {directory}: {note}")
        advice = "To train with another, call shardload.restore before fit and set it then"
        changed = changed_rates(rates, learning_rates_of(model), advice=advice)
        changed += of_kind(report.notes, NoteKind.BATCHES_RECOUNTED)
        changed += of_kind(report.notes, NoteKind.AVERAGES)[:1]
        # A weights-only step does not change the optimizer's count.
        undone = max(0, trained - min(trained_batches(model), info.step))
    if info is None or not _is_in(directory, info):
        return None
    if not info.ours:
        warn_caller(
            f"Step {info.step} of {directory} was not saved by shardload and stores no epoch: training begins with "
            "epoch 1, or with the initial_epoch of fit()"
        )
        return None
    found = _resumption(model, info, position, data_iterator=data_iterator, initial_epoch=initial_epoch)
    found.restored_before, found.trained, found.undone, found.changed = before, trained, undone, changed
    found.set_first_epoch(model)
    return found


def _restored(model: Any, directory: Path | str, resume: bool | int | Literal["latest", "best"]) -> Restored:
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


def _is_in(directory: Path | str, info: StepInfo) -> bool:
    """Whether a step is in the folder ``directory``, whichever relative path or link leads there."""
    if isinstance(directory, str) or info.url is not None:
        return directory == info.folder
    return info.path.parent.resolve() == directory.resolve()


def _resumption(
    model: Any, info: StepInfo, position: Position, *, data_iterator: Any, initial_epoch: int | None
) -> Resumption:
    """Set the training data to the position that a step stores, if it can; return where ``fit`` continues."""
    epoch, batch = info.epoch or 0, info.batch or 0
    complete = epoch + 1 if info.recorded.epoch_done else epoch
    # `fit` has priority, except for 0: that is its default, so one cannot tell whether the user passed it.
    given = initial_epoch_of_fit() or initial_epoch
    # Another epoch than the one that is due: the stored position does not apply, and the data starts at its beginning.
    if given is not None and given != complete:
        return Resumption(info, given, complete)
    records = stored_positions(info)
    is_own_resumed = data_iterator is not None and set_position(data_iterator, records, info)
    mine = position_of_this_process(records)
    # The position of another process never reaches the data: an empty `Reading` makes its origin be refused.
    stored = mine or next(iter(records), {})
    has_position = stored.get("position") is not None
    dataset = resumable_of_fit() if has_position else None

    def resume_data(dataset: Any, skipped: int) -> None:
        reading = Reading() if mine is None else Reading.of_record(stored.get("reading"))
        saved_by = info.recorded.processes or 1
        origin = Origin(info.step, reading, processes=saved_by, processes_now=processes.count())
        # Now, not when the data is read: Keras has then taken the values out of the model, and an error would lose
        # them.
        dataset.check(origin)
        position.resume(stored["position"], skipped=skipped, origin=origin)

    if info.recorded.epoch_done:
        # At the end of an epoch only data with one iterator for all epochs has a position to return to.
        if has_position and stored.get("spans_epochs"):
            if dataset is not None:
                resume_data(dataset, skipped=0)
            elif not is_own_resumed:
                place = f"epoch {epoch + 1}"
                warn_caller(f"{_SAVED[True].format(step=info.step, place=place)} The data starts from its beginning.")
        return Resumption(info, complete, complete)
    if dataset is None and not is_own_resumed:
        # Within an epoch, but no data can return to that batch.
        place = f"{plural(batch, 'batch')} of epoch {epoch + 1}"
        warn_caller(
            f"{_SAVED[has_position].format(step=info.step, place=place)} The epoch starts again. To continue within "
            "the epoch, use shardload.data.resumable(grain_dataset)."
        )
        return Resumption(info, complete, complete)
    if dataset is not None:
        resume_data(dataset, skipped=batch)
    return Resumption(info, complete, complete, batch, metric_values(model, info))


def position_record(position: Position, own: dict[str, Any]) -> dict[str, Any]:
    """Return the data position to store: ``own``, of the user's iterator, plus that of the dataset in ``fit``."""
    state = position.state
    if state is None:
        return own
    # default=int: a state may count with integers of NumPy, which JSON does not take.
    at = {"position": json.loads(json.dumps(state, default=int)), "spans_epochs": position.spans_epochs}
    return {**own, **at, "reading": position.reading}


def forget_first_epoch(model: Any) -> None:
    """Let the next ``fit`` begin with epoch 0 again, unless another callback (BackupAndRestore) set its first epoch."""
    # Keras keeps `_initial_epoch` for all later fits of the model.
    record = record_of(model)
    if record.first_epoch is not None:
        record.first_epoch = None
        set_initial_epoch(model, None)


_KINDS = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)
_COUNTS = ("wait", "best_epoch", "stopped_epoch", "cooldown_counter")


class OtherCallbacks:
    """The ``EarlyStopping`` and ``ReduceLROnPlateau`` callbacks of one ``fit``, whose state is stored in its steps."""

    def __init__(self, saver: Any = None) -> None:
        """Find the callbacks in the running ``fit`` and make ``saver`` run after them; without ``saver``, find none."""
        self._found = () if saver is None else tuple(run_after(saver, _KINDS))
        self._waiting: list[tuple[Any, dict[str, Any]]] = []

    def record(self) -> tuple[dict[str, Any], ...]:
        """Return the state of ``EarlyStopping`` and ``ReduceLROnPlateau``, to store in ``step.json``."""
        found: list[dict[str, Any]] = []
        for callback in self._found:
            name, monitor = _name_of(callback)
            best = None if callback.best is None else float(callback.best)
            # JSON has no NaN, and a best value of NaN is never beaten.
            known = best if best is None or math.isfinite(best) else str(best)
            counts = {count: int(getattr(callback, count)) for count in _COUNTS if hasattr(callback, count)}
            found.append({"callback": name, "monitor": monitor, "best": known, **counts})
        return tuple(found)

    def resume(self, info: StepInfo) -> str | None:
        """Read the callbacks' state from a step, to assign it later; return which one ended training there, if any."""
        stored = list(info.recorded.callbacks)
        self._waiting = []
        for callback in self._found:
            name = _name_of(callback)
            known = next((state for state in stored if (state.get("callback"), state.get("monitor")) == name), None)
            if known is not None:
                # Remove it, so that two callbacks of the same kind and metric get the two states in order.
                stored.remove(known)
                self._waiting.append((callback, _valid(known)))
        for callback, state in self._waiting:
            # It would end the run again, unless it got a larger `patience`.
            if state.get("stopped_epoch") and state["wait"] >= callback.patience:
                return _call_of(callback)
        return None

    def restore(self, model: Any, info: StepInfo) -> Iterator[str]:
        """Assign the state that `resume` has read to the callbacks; yield a warning if their best weights are lost."""
        waiting, self._waiting = self._waiting, []
        for callback, state in waiting:
            for name, value in state.items():
                setattr(callback, name, value)
            if not getattr(callback, "restore_best_weights", False) or state["best"] is None:
                continue
            callback.best_weights = _best_weights(model, info, state["best_epoch"])
            if callback.best_weights is None:
                yield (
                    f"{_call_of(callback)} restores its best weights, those of epoch {state['best_epoch'] + 1}, but no "
                    f"step in {info.folder} has them: if no later epoch is better, the weights after the first "
                    "one that is trained now take their place. OrbaxCheckpoint(keep_best=1) with the same monitor "
                    "keeps them"
                )

    def finish(self, model: Any, info: StepInfo) -> Iterator[str]:
        """If ``fit`` has nothing to train, restore the callbacks' best weights, as at its usual end; yield notices."""
        waiting = [callback for callback, _ in self._waiting]
        yield from self.restore(model, info)
        for callback in waiting:
            if getattr(callback, "best_weights", None) is not None:
                model.set_weights(callback.best_weights)
                yield f"{_call_of(callback)} restored its best weights, those of epoch {callback.best_epoch + 1}"


def _name_of(callback: Any) -> tuple[str, str]:
    kind = next(kind for kind in _KINDS if isinstance(callback, kind))
    return kind.__name__, str(callback.monitor)


def _call_of(callback: Any) -> str:
    return "{}({!r})".format(*_name_of(callback))


def _valid(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes to set on a callback, from ``step.json``; a value of a wrong type becomes 0 or None."""
    found: dict[str, Any] = {name: state[name] if type(state[name]) is int else 0 for name in _COUNTS if name in state}
    best = state.get("best")
    known = best in ("nan", "inf", "-inf") or (isinstance(best, (int, float)) and not isinstance(best, bool))
    return {**found, "best": float(best) if known and best is not None else None}


def _best_weights(model: Any, info: StepInfo, epoch: int) -> list[Any] | None:
    """Return the weights at the end of ``epoch`` (from 0), if the step ``info`` or another step of its run has them."""
    for found in (info, *(step for step in steps_of_run(info.folder) if step.ours and step.run == info.run)):
        if found.epoch == epoch and found.recorded.epoch_done and found.problems is None:
            try:
                return weight_values(model, found)
            # Damaged, or of another model: another step of the run may have the same epoch.
            except ShardloadError:
                continue
    return None
