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
from shardload.data import Position
from shardload.errors import DamagedError, UsageError
from shardload.steps.digests import OWN_FOLDER
from shardload.steps.listing import StepInfo

ITERATOR_FILE = "iterator.json"


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
        UsageError: When the step says where the user's source stood, and it takes no such thing.
        DamagedError: When the step is damaged.
    """
    details = info.details
    epoch, batch = int(details.get("epoch") or 0), int(details.get("batch") or 0)
    state = _of_this_process(_state(info), info)
    if data_iterator is not None and state is not None and "state" in state:
        _set_state(data_iterator, state["state"])
    position_state = state.get("position") if state is not None else None
    if details.get("epoch_done"):
        if position_state is not None and state is not None and state.get("spans_epochs"):
            position.resume(position_state, skipped=0)
        return _begun(model, Resumption(epoch + 1))
    if position_state is None and not (data_iterator is not None and state is not None and "state" in state):
        warnings.warn(
            f"Step {info.step} was saved after {batch} batches of epoch {epoch}, and does not say where its data "
            "stood. The epoch begins again. With shardload.data.resumable(grain_dataset) it would go on there.",
            stacklevel=5,
        )
        return _begun(model, Resumption(epoch))
    if position_state is not None:
        position.resume(position_state, skipped=batch)
    return _begun(model, Resumption(epoch, batch, restoring.metric_values(model, info)))


def iterator_record(position: Position, own: dict[str, Any]) -> dict[str, Any]:
    """The content of ``iterator.json``: the position of a resumable dataset, and what the user's own source says."""
    state = position.state
    if state is None:
        return own
    return {**own, "position": json.loads(json.dumps(state, default=int)), "spans_epochs": position.spans_epochs}


def _begun(model: Any, found: Resumption) -> Resumption:
    _keras.set_initial_epoch(model, found.epoch)
    return found


def _state(info: StepInfo) -> dict[str, Any] | None:
    path = Path(info.path) / OWN_FOLDER / ITERATOR_FILE
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DamagedError(f"Step {info.step}: {path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise DamagedError(f"Step {info.step}: {path} should hold one object")
    for record in (found, *found.get("processes", ())):
        if "state_base64" in record:
            record["state"] = base64.b64decode(record["state_base64"])
    return found


def _of_this_process(state: dict[str, Any] | None, info: StepInfo) -> dict[str, Any] | None:
    """What is said about the data of this process, where each had its own."""
    if state is None or "processes" not in state:
        return state
    each = state["processes"]
    if len(each) == _processes.count():
        return dict(each[_processes.index()])
    warnings.warn(
        f"Step {info.step} was saved by {len(each)} processes whose data stood at different places, so it does not say "
        f"where that of {_processes.count()} should go on. Shuffle and slice the data by process before batching it, "
        "and all of them stand at the same place",
        stacklevel=6,
    )
    return None


def _set_state(source: Any, state: Any) -> None:
    if hasattr(source, "set_state"):
        source.set_state(state)
    elif hasattr(source, "get_state"):
        raise UsageError(
            f"The step says where data_iterator stood, but {type(source).__name__} has no set_state(state). Give an "
            "object that has"
        )
