"""The position in the data of one ``fit``, and whether data that goes on is read as it was before.

A dataset only tells how much of it was read: "so many batches". That says which examples come next only while the
batches are the same ones. So the way they are made is saved as well, and compared before anything is trained.
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
from shardload.keras_bridge.training import epoch_iterator_of_caller, epoch_iterator_of_fit, forget_epoch_length

KEPT = 8
"""States kept; Keras looks at most two batches ahead of what it trains."""
ENDLESS = 1 << 48
"""No dataset is as long; Grain repeats without end up to the largest index, divided by what is in a batch."""

_LENGTHS = {"examples": "examples", "batches": "batches", "repeated": "elements before repeat()"}

_active = threading.local()
_positions: weakref.WeakKeyDictionary[Any, Position] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Reading:
    """How a dataset is cut into batches."""

    global_batch_size: int | None = None
    """Examples all processes train together in a batch; None where each process has a dataset of its own."""
    examples: int | None = None
    """Of the dataset the global batches are cut from; 0 for one that is repeated without end."""
    batches: int | None = None
    """Of a dataset of the process' own, where it tells; 0 for one without end."""
    rows: int | None = None
    """Examples of this process in a batch, where it has a dataset of its own."""
    repeated: int | None = None
    """Elements of what is repeated without end."""

    @classmethod
    def of_record(cls, found: Any) -> Reading:
        """What was saved; steps from before it was say nothing."""
        given: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
        return cls(**{name: given[name] for name in cls.__slots__ if isinstance(given.get(name), int)})


@dataclass(frozen=True, slots=True)
class Origin:
    """The run that a saved position is of."""

    step: int
    reading: Reading
    processes: int
    """How many took part when it was saved."""
    processes_now: int

    def check(self, now: Reading) -> None:
        """Make sure that the same number of batches means the same examples to both.

        Raises:
            UsageError: When it does not.
        """
        then = self.reading
        if (then.global_batch_size is None) != (now.global_batch_size is None):
            saved, given = ("with", "without") if then.global_batch_size else ("without", "with")
            raise self._cannot(f"it was saved {saved} global_batch_size, and resumable() was called {given} it now")
        if then.global_batch_size != now.global_batch_size:
            sizes = f"{then.global_batch_size} examples, and now of {now.global_batch_size}"
            raise self._cannot(f"it counts global batches of {sizes}")
        for field, what in _LENGTHS.items():
            before, after = getattr(then, field), getattr(now, field)
            if before is not None and before != after:
                raise self._cannot(f"its dataset had {_number(before)} {what}, and now has {_number(after)}")
        if then.global_batch_size is None and self.processes != self.processes_now:
            raise self._cannot(
                f"it was saved by {self.processes} processes, each with a dataset of its own, and now there are "
                f"{self.processes_now}. Data for any number of processes is a grain.MapDataset of all examples, the "
                "same on each of them, that resumable(dataset, global_batch_size=…) cuts into batches"
            )

    def check_rows(self, now: int, *, at_end: bool) -> None:
        """Make sure that batches are as long as they were; the last one may be shorter.

        Raises:
            UsageError: When they are not.
        """
        then = self.reading.rows
        if then is not None and now != then and not (at_end and now < then):
            raise self._cannot(f"its batches had {then} rows in this process, and now have {now}")

    def _cannot(self, why: str) -> UsageError:
        return UsageError(
            f"Step {self.step} does not tell what comes next in this data: {why}. Read it as it was read then, "
            "or start over: restore the weights and save to another folder"
        )


def length(dataset: Any) -> int:
    """Of a `grain.MapDataset`; 0 for one without end, which has as many elements as an index can count."""
    found = len(dataset)
    return found if found < ENDLESS else 0


def repeated_length(dataset: Any) -> int | None:
    """Of what a `grain.MapDataset` without end repeats; None for one that ends, or does not tell."""
    if length(dataset):
        return None
    below = [length(parent) or repeated_length(parent) for parent in getattr(dataset, "parents", ())]
    return next((n for n in below if n), None)


def _number(found: int | None) -> str:
    return "endlessly many" if found == 0 else "an unknown number of" if found is None else str(found)


class Position:
    """The position in the data of one ``fit``. Several callbacks may report the same events to it."""

    def __init__(self, fit: Any = None) -> None:
        """Begin to follow ``fit``: what tells it from others, if anything does."""
        self.fit = fit
        self._wanted: dict[str, Any] | None = None
        self._origin: Origin | None = None
        self._skipped = 0
        self._expecting = False
        self._states: deque[tuple[int, dict[str, Any], bool]] = deque(maxlen=KEPT)
        self._given = self._trained = self._before_epoch = 0
        self._left: int | None = None
        self._epochs: Any = None
        self._reading = Reading()
        self._rows = 0

    def resume(self, state: dict[str, Any] | None, *, skipped: int, origin: Origin | None = None) -> None:
        """Let the first iterator of the coming epoch begin at ``state``, ``skipped`` batches into the epoch.

        With an ``origin``, data that is read in another way is refused when it is opened.
        """
        self._wanted, self._skipped, self._origin = state, skipped, origin

    def epoch_begins(self) -> None:
        """The next iterator that is opened, if any, is the one training reads."""
        self._expecting = True
        self._before_epoch = self._trained

    def trained(self, batches: int) -> None:
        """So many batches of this epoch were trained, not counting those that were skipped."""
        self._expecting = False
        self._trained = self._before_epoch + batches

    def epoch_ends(self) -> None:
        """Make Keras forget the length of an epoch resumed in its middle; it would cut all later ones to it."""
        if self._skipped and self._epochs is not None:
            forget_epoch_length(self._epochs)
        self._skipped = 0

    @property
    def state(self) -> dict[str, Any] | None:
        """The state after the last batch that was trained, which JSON can hold; None where no dataset tells."""
        return next((copy.deepcopy(s) for number, s, _ in self._states if number == self._trained), None)

    @property
    def reading(self) -> dict[str, int]:
        """How the data is read, as a record; see `Reading`."""
        found = asdict(self._reading)
        if self._reading.global_batch_size is None and self._rows:
            found["rows"] = self._rows
        return {name: value for name, value in found.items() if value is not None}

    @property
    def at_end(self) -> bool:
        """Whether the last batch that was trained was the last one of its epoch."""
        if self.spans_epochs:
            return bool(self._skipped + self._trained - self._before_epoch == self._epochs.steps_per_epoch)
        return next((end for number, _, end in self._states if number == self._trained), False)

    @property
    def spans_epochs(self) -> bool:
        """Whether one iterator serves all epochs, as with ``steps_per_epoch``."""
        return self._epochs is not None and bool(self._epochs.steps_per_epoch)

    def opened(self, iterator: Any, reading: Reading) -> bool:
        """An iterator was opened; whether it is the one training reads.

        Raises:
            UsageError: When it should go on where another one stood, and cannot.
        """
        if not self._expecting:
            return False
        self._expecting = False
        self._given = self._trained = self._before_epoch = 0
        self._reading = reading
        self._epochs = epoch_iterator_of_caller()
        self._left = self._epochs.steps_per_epoch - self._skipped if self._skipped and self.spans_epochs else None
        self._states.clear()
        if self._origin is not None:
            self._origin.check(reading)
            self._rows = self._origin.reading.rows or 0
        if self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            iterator.set_state(wanted)
        self._states.append((0, copy.deepcopy(iterator.get_state()), False))
        return True

    def goes_on(self) -> bool:
        """Whether the live iterator may give another batch: a resumed epoch may be shorter than its data."""
        if self._left is None or self._given < self._left:
            return True
        self._wanted, self._left = self._states[-1][1], None
        return False

    def ended(self) -> None:
        """The live iterator has no batch left.

        Raises:
            UsageError: When it gave none at all to a run that goes on: Keras would fail without saying why.
        """
        if self._origin is not None and not self._given:
            raise UsageError(
                f"Step {self._origin.step} was saved at the end of the dataset, but fit() requests more batches. "
                "Train fewer epochs, or repeat the data (dataset.repeat() with steps_per_epoch)"
            )

    def gave(self, state: dict[str, Any], *, rows: int, at_end: bool) -> None:
        """The live iterator gave out a batch of so many rows and now is at ``state``.

        Raises:
            UsageError: When batches are not as long as those of the run this one goes on with.
        """
        if self._origin is not None:
            origin, self._origin = self._origin, None
            origin.check_rows(rows, at_end=at_end)
        self._given += 1
        self._rows = max(self._rows, rows)
        self._states.append((self._given, copy.deepcopy(state), at_end))


def follow(model: Any) -> Position:
    """The position of the data ``model`` is about to be trained on in this thread."""
    position, fit = _positions.get(model), epoch_iterator_of_fit()
    if position is None or (fit is not None and fit is not position.fit):  # what another fit was to read is past
        position = _positions[model] = Position(fit)
    _active.position = position
    return position


def followed() -> Position | None:
    """The position of what is being trained in this thread, if any."""
    return getattr(_active, "position", None)


def stop_following() -> None:
    """Training in this thread has ended."""
    _active.position = None
