"""Where a run goes on after `shardload.restore`, or with ``resume=True``: epoch, batch, metrics and data.

saved                          the next fit begins
at the end of epoch 4          with epoch 5
after 30 batches of epoch 4    in epoch 4: with batch 31 if the data says where it stood, else with batch 1, said so
"""

from __future__ import annotations

import base64
import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardload import _keras, _processes, restoring
from shardload.data import Origin, Position, Reading, resumable_of_fit
from shardload.errors import DamagedError, UsageError
from shardload.steps.digests import OWN_FOLDER
from shardload.steps.listing import StepInfo

ITERATOR_FILE = "iterator.json"

_END = {
    False: "Step {step} was saved after {place}, and does not say where its data stood.",
    True: "Step {step} was saved after {place}, and says where its data stood, but the data of this fit cannot go on "
    "there.",
}
"""By whether the data said where it stood."""
_WAY_OUT = " With shardload.data.resumable(grain_dataset) it would go on there."


@dataclass(slots=True)
class Resumption:
    """How the first epoch of a ``fit`` differs from others."""

    epoch: int
    """Where to begin."""
    skipped: int = 0
    """Batches of that epoch that were trained before."""
    metrics: list[tuple[Any, Any]] = field(default_factory=list)
    """Variables of metrics and their values half-way through that epoch."""

    def restore_metrics(self) -> None:
        """Give metrics what they had gathered; Keras has just reset them."""
        for variable, value in self.metrics:
            variable.assign(value)
        self.metrics.clear()


def resumption(model: Any, info: StepInfo, position: Position, *, data_iterator: Any) -> Resumption:
    """Prepare the data and Keras' own count of epochs for going on after a step.

    Args:
        model: What was restored from it.
        info: The step.
        position: Of the data that is about to be read.
        data_iterator: The user's own source, if any.

    Raises:
        UsageError: When the step says where the user's source stood, and it takes no such thing; when it says where
            a resumable dataset stood, and that does not tell what is next in this one.
        DamagedError: When the step is damaged.
    """
    details = info.details
    epoch, batch = int(details.get("epoch") or 0), int(details.get("batch") or 0)
    records = _records(info)
    own_goes_on = data_iterator is not None and _give_back(data_iterator, records, info)
    stood = _where_it_stood(records, info)
    goes_on = None if stood is None else resumable_of_fit()
    if details.get("epoch_done"):
        if stood is not None and stood.spans_epochs:
            if goes_on is not None:
                _go_on(position, stood, goes_on, skipped=0)
            elif not own_goes_on:
                _warn(f"{_END[True].format(step=info.step, place=f'epoch {epoch}')} The data begins at its beginning.")
        return _begun(model, Resumption(epoch + 1))
    if goes_on is None and not own_goes_on:
        place = f"{batch} batches of epoch {epoch}"
        _warn(f"{_END[stood is not None].format(step=info.step, place=place)} The epoch begins again.{_WAY_OUT}")
        return _begun(model, Resumption(epoch))
    if stood is not None and goes_on is not None:
        _go_on(position, stood, goes_on, skipped=batch)
    return _begun(model, Resumption(epoch, batch, restoring.metric_values(model, info)))


def iterator_record(position: Position, own: dict[str, Any]) -> dict[str, Any]:
    """The content of ``iterator.json``: the position of a resumable dataset, and what the user's own source says."""
    state = position.state
    if state is None:
        return own
    at = {"position": json.loads(json.dumps(state, default=int)), "spans_epochs": position.spans_epochs}
    return {**own, **at, "reading": position.reading}


def joined(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The records of all processes in one: once, if they say the same."""
    return records[0] if all(record == records[0] for record in records) else {"processes": records}


def _begun(model: Any, found: Resumption) -> Resumption:
    _keras.set_initial_epoch(model, found.epoch)
    return found


def _records(info: StepInfo) -> list[dict[str, Any]]:
    """What is said about the data: by each process, or once where it is the same for all of them, or never."""
    path = Path(info.path) / OWN_FOLDER / ITERATOR_FILE
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise DamagedError(f"Step {info.step}: {path} is no JSON: {error}") from error
    records = found.get("processes", [found]) if isinstance(found, dict) else None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise DamagedError(f"Step {info.step}: {path} should hold one object, or a list of them for its processes")
    for record in records:
        if "state_base64" in record:
            record["state"] = base64.b64decode(record["state_base64"])
    return records


def _of_this_process(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """None where each process said something of its own and there are not as many now."""
    if len(records) == 1:
        return records[0]
    return records[_processes.index()] if len(records) == _processes.count() else None


@dataclass(frozen=True, slots=True)
class _Stood:
    """Where the data of `shardload.data.resumable` stood."""

    state: dict[str, Any]
    spans_epochs: bool
    origin: Origin


def _where_it_stood(records: list[dict[str, Any]], info: StepInfo) -> _Stood | None:
    """None where the data did not tell. That of another process is never given to the data: its origin is refused."""
    mine = _of_this_process(records)
    record = mine or next(iter(records), {})
    if record.get("position") is None:
        return None
    reading = Reading() if mine is None else Reading.of_record(record.get("reading"))
    saved_by = int(info.details.get("processes") or 1)
    origin = Origin(info.step, reading, processes=saved_by, processes_now=_processes.count())
    return _Stood(record["position"], bool(record.get("spans_epochs")), origin)


def _go_on(position: Position, stood: _Stood, dataset: Any, *, skipped: int) -> None:
    dataset.check(stood.origin)  # while the model has its values: Keras takes them out before it reads
    position.resume(stood.state, skipped=skipped, origin=stood.origin)


def _give_back(source: Any, records: list[dict[str, Any]], info: StepInfo) -> bool:
    """Tell a user's own source where it stood; whether the step says so."""
    record = _of_this_process(records)
    if record is None and any("state" in one for one in records):
        _warn(
            f"Step {info.step} was saved by {len(records)} processes whose data_iterator stood at different places, so "
            f"it does not say where that of {_processes.count()} should go on."
        )
    if record is None or "state" not in record:
        return False
    _set_state(source, record["state"])
    return True


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=7)


def _set_state(source: Any, state: Any) -> None:
    if hasattr(source, "set_state"):
        source.set_state(state)
    elif hasattr(source, "get_state"):
        raise UsageError(
            f"The step says where data_iterator stood, but {type(source).__name__} has no set_state(state). Give an "
            "object that has"
        )
