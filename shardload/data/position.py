"""How far one ``fit`` has read its data, and a check that a later run cuts the same data into the same batches.

A dataset's state is only a count of batches, so it determines the next examples only if the batches are cut in the same
way. So facts such as the batch size are saved as well, and compared when a later run continues.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardload.errors import UsageError
from shardload.keras_bridge.training import (
    epoch_iterator_of_caller,
    epoch_iterator_of_fit,
    expect_end_of_data,
    forget_bar_length,
    forget_epoch_length,
    has_unknown_length,
)
from shardload.units import plural

_KEPT = 8
"""Number of latest states of the data to keep, one per batch; Keras reads at most two batches ahead of training."""
_ENDLESS = 1 << 48
"""Least length at which a dataset counts as endless: Grain states a huge number for one without end."""

_LENGTHS = {"examples": "examples", "batches": "batches", "repeated": "elements before repeat()"}

_active = threading.local()
_positions: weakref.WeakKeyDictionary[Any, Position] = weakref.WeakKeyDictionary()
"""Model → data position of its running ``fit``, which the dataset and the callback share. References are weak, because
a ``fit`` may end without notice."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How a dataset is cut into batches: saved with a position, which is a count of batches, to give it a meaning."""

    global_batch_size: int | None = None
    """Number of examples per batch over all processes; ``None`` if each process has its own dataset."""
    examples: int | None = None
    """Number of examples in the dataset that the global batches are cut from; 0 if it repeats endlessly."""
    batches: int | None = None
    """If a process has its own dataset: number of batches in it, if known; 0 if it is endless."""
    rows: int | None = None
    """Number of examples per batch in this process, if it has its own dataset."""
    repeated: int | None = None
    """If the dataset is endless: number of elements in the part of it that is repeated."""

    @classmethod
    def of_record(cls, found: Any) -> Reading:
        """Return the `Reading` that a training step stores as a mapping; an empty one if the step stores none."""
        given: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
        return cls(**{name: given[name] for name in cls.__slots__ if isinstance(given.get(name), int)})


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a saved position comes from: the training step, and how the run that saved it cut its data into batches."""

    step: int
    reading: Reading
    processes: int
    """The number of processes at the time of the save."""
    processes_now: int

    def check(self, now: Reading) -> None:
        """Raise unless a count of batches means the same examples in ``now`` as in the run that saved the position."""
        then = self.reading
        if (then.global_batch_size is None) != (now.global_batch_size is None):
            saved, given = ("with", "without") if then.global_batch_size else ("without", "with")
            raise self._cannot(f"it was saved {saved} global_batch_size, and resumable() was called {given} it now")
        if then.global_batch_size and then.global_batch_size != now.global_batch_size:
            sizes = f"{plural(then.global_batch_size, 'example')}, and now of {now.global_batch_size}"
            raise self._cannot(f"the saved data position counts global batches of {sizes} (global_batch_size)")
        for field, what in _LENGTHS.items():
            before, after = getattr(then, field), getattr(now, field)
            if before is not None and before != after:
                raise self._cannot(f"its dataset had {_number(before)} {what}, and now has {_number(after)}")
        if then.global_batch_size is None and self.processes != self.processes_now:
            raise self._cannot(
                f"it was saved by {plural(self.processes, 'process')}, each with a dataset of its own, and now there "
                f"are {self.processes_now}",
                more=". To change the number of processes in later runs, pass the same grain.MapDataset of all "
                "examples on each of them: resumable(dataset, global_batch_size=…)",
            )

    def check_rows(self, now: int, *, at_end: bool) -> None:
        """Raise unless a batch has as many rows as in the run that saved the position; a last batch may have fewer."""
        then = self.reading.rows
        if then is not None and now != then and not (at_end and now < then):
            raise self._cannot(f"its batches had {plural(then, 'row')} in this process, and now have {now}")

    def _cannot(self, why: str, more: str = "") -> UsageError:
        return UsageError(
            f"Cannot continue in this data from step {self.step}: {why}. Read the data as before, or start over: "
            f"restore the weights and save to another folder{more}"
        )


def length(dataset: Any) -> int:
    """Return the length of a `grain.MapDataset`, but 0 if it is endless, for which Grain states a huge number."""
    found = len(dataset)
    return found if found < _ENDLESS else 0


def repeated_length(dataset: Any) -> int | None:
    """Return the length of the repeated part of an endless `grain.MapDataset`; ``None`` if finite or unknown."""
    if length(dataset):
        return None
    below = [length(parent) or repeated_length(parent) for parent in getattr(dataset, "parents", ())]
    return next((n for n in below if n), None)


def _number(found: int | None) -> str:
    return "endlessly many" if found == 0 else "an unknown number of" if found is None else str(found)


class Position:
    """How far one ``fit`` has read its data: the dataset and callbacks report events to it, some of them repeatedly."""

    def __init__(self, fit: Any = None) -> None:
        """Begin a position at the start of the data.

        ``fit``: an object that belongs to one call of ``fit`` only (Keras' iterator over epochs). A later ``fit`` has
        another object, and so gets a new position. ``None``: the position belongs to no particular ``fit``.
        """
        self.fit = fit
        self._wanted: dict[str, Any] | None = None
        self._origin: Origin | None = None
        self._skipped = 0
        self._was_shorter = False
        self._expecting = False
        # (batches returned so far, state after them, whether they end the epoch), for the last few batches.
        self._states: deque[tuple[int, dict[str, Any], bool]] = deque(maxlen=_KEPT)
        self._given = self._trained = self._before_epoch = 0
        self._left: int | None = None
        self._epochs: Any = None
        self._reading = Reading()
        self._rows = 0

    def resume(self, state: dict[str, Any] | None, *, skipped: int, origin: Origin | None = None) -> None:
        """Make the next epoch begin at a saved ``state`` of the data, which is ``skipped`` batches into that epoch.

        With an ``origin``, data that is cut differently is refused when it is opened.
        """
        self._wanted, self._skipped, self._origin = state, skipped, origin

    def epoch_begins(self) -> None:
        """Record that an epoch begins: if an iterator is opened now, it is for training, not to inspect a batch."""
        self._expecting = True
        self._before_epoch = self._trained
        if self._was_shorter:
            forget_bar_length()
        if (epochs := epoch_iterator_of_fit()) is not None:
            expect_end_of_data(epochs, expected=has_unknown_length(epochs))

    def trained(self, batches: int) -> None:
        """Record that ``batches`` batches of this epoch were trained, not counting skipped ones."""
        self._expecting = False
        # Numbers count from the last opened iterator, which with steps_per_epoch serves several epochs.
        self._trained = self._before_epoch + batches

    def epoch_ends(self) -> None:
        """Record that an epoch ends.

        An epoch that was resumed in the middle has only its remaining batches, and Keras takes their number for the
        length of every epoch. Keras is made to forget that length, because the next epoch is a whole one. The progress
        bar takes the length only after this call, and is made to forget it when the next epoch begins.
        """
        self._was_shorter = bool(self._skipped)
        if self._skipped and self._epochs is not None:
            forget_epoch_length(self._epochs)
        self._skipped = 0

    @property
    def state(self) -> dict[str, Any] | None:
        """The state of the data after the last trained batch, JSON-compatible; ``None`` if no dataset reports one."""
        return next((copy.deepcopy(s) for number, s, _ in self._states if number == self._trained), None)

    @property
    def reading(self) -> dict[str, int]:
        """The way the data is cut into batches: the known fields of `Reading`, as JSON to store in a step."""
        found = asdict(self._reading)
        if self._reading.global_batch_size is None and self._rows:
            found["rows"] = self._rows
        return {name: value for name, value in found.items() if value is not None}

    @property
    def at_end(self) -> bool:
        """Whether the last trained batch was the last one of its epoch."""
        if self.spans_epochs:
            # With steps_per_epoch, the epoch ends by count and not with the data.
            return bool(self._skipped + self._trained - self._before_epoch == self._epochs.steps_per_epoch)
        return next((end for number, _, end in self._states if number == self._trained), False)

    @property
    def spans_epochs(self) -> bool:
        """Whether one iterator serves all epochs, as with ``steps_per_epoch``."""
        return self._epochs is not None and bool(self._epochs.steps_per_epoch)

    def opened(self, iterator: Any, reading: Reading) -> bool:
        """Register an iterator that was opened; return whether it is for training, not for inspection or validation."""
        # Keras also opens iterators to inspect a batch, and for validation: those are not training.
        if not self._expecting:
            return False
        self._expecting = False
        # Count from this iterator, so that numbers of returned and of trained batches can be compared.
        self._given = self._trained = self._before_epoch = 0
        self._reading = reading
        self._epochs = epoch_iterator_of_caller()
        # In an epoch resumed in the middle, the batches before the saved position are not trained again.
        self._left = self._epochs.steps_per_epoch - self._skipped if self._skipped and self.spans_epochs else None
        self._states.clear()
        if self._origin is not None:
            # Check first: `set_state` accepts any count of batches, also of another dataset.
            self._origin.check(reading)
            self._rows = self._origin.reading.rows or 0
        if self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            iterator.set_state(wanted)
        self._states.append((0, copy.deepcopy(iterator.get_state()), False))
        return True

    def may_continue(self) -> bool:
        """Whether training may read another batch in this epoch; one resumed in the middle has only the rest."""
        if self._left is None or self._given < self._left:
            return True
        # The next epoch opens another iterator, which must go on with the batch after this one.
        self._wanted, self._left = self._states[-1][1], None
        expect_end_of_data(self._epochs, expected=True)
        return False

    def ended(self) -> None:
        """Record that training's iterator has no more data; raise if a resumed run found none at all."""
        if self._origin is not None and not self._given:
            raise UsageError(
                f"Step {self._origin.step} was saved at the end of the dataset, but fit() requests more batches. "
                "Train fewer epochs, or repeat the data (dataset.repeat() with steps_per_epoch)"
            )

    def gave(self, state: dict[str, Any], *, rows: int, at_end: bool) -> None:
        """Record that training's iterator returned a batch of ``rows`` rows, after which the data is at ``state``."""
        if self._origin is not None:
            # The first batch shows the number of rows; later ones need no check.
            origin, self._origin = self._origin, None
            origin.check_rows(rows, at_end=at_end)
        self._given += 1
        self._rows = max(self._rows, rows)
        self._states.append((self._given, copy.deepcopy(state), at_end))


def follow_data(model: Any) -> Position:
    """Return the data position of the ``fit`` that trains ``model``; datasets read in this thread report to it."""
    position, fit = _positions.get(model), epoch_iterator_of_fit()
    if position is None or (fit is not None and fit is not position.fit):  # an earlier fit's data is over
        position = _positions[model] = Position(fit)
    _active.position = position
    return position


def followed() -> Position | None:
    """Return the data position of the ``fit`` that runs in this thread; ``None`` if nothing records one."""
    return getattr(_active, "position", None)


def stop_following() -> None:
    """Stop recording the data position of the ``fit`` in this thread, when its training ends."""
    _active.position = None
