"""Data that goes on exactly where training stopped.

    ds = shardload.data.resumable(grain_dataset)
    model.fit(ds, callbacks=[OrbaxCheckpoint(directory)])

Keras opens many iterators over one dataset: two or three to look at a batch, a new one for every epoch (one for
all of them with ``steps_per_epoch``), and looks one batch ahead on accelerators. So the live iterator's own state is
not the state after the last batch that was *trained*. A resumable dataset keeps the state after each of the last
batches it gave out, and is told by the callback how many were trained::

    given out      b0  b1  b2  b3            states  s0  s1  s2  s3
    trained        b0  b1                    saved       s1   ─► the next run begins with b2
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from collections import deque
from typing import Any

from shardload import _keras
from shardload.errors import MissingExtraError, UsageError

KEPT = 8
"""States kept; Keras looks at most two batches ahead of what it trains."""

_active = threading.local()
_positions: weakref.WeakKeyDictionary[Any, Position] = weakref.WeakKeyDictionary()


class Position:
    """Where the data of one ``fit`` stands. Several callbacks may tell it the same things."""

    def __init__(self) -> None:
        self._wanted: dict[str, Any] | None = None
        self._skipped = 0
        self._expecting = False
        self._states: deque[tuple[int, dict[str, Any], bool]] = deque(maxlen=KEPT)
        self._given = self._trained = self._before_epoch = 0
        self._left: int | None = None
        self._epochs: Any = None

    def resume(self, state: dict[str, Any] | None, *, skipped: int) -> None:
        """Let the first iterator of the coming epoch begin at ``state``, ``skipped`` batches into the epoch."""
        self._wanted, self._skipped = state, skipped

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
            _keras.forget_epoch_length(self._epochs)
        self._skipped = 0

    @property
    def state(self) -> dict[str, Any] | None:
        """The state after the last batch that was trained, which JSON can hold; None where no dataset tells."""
        return next((copy.deepcopy(s) for number, s, _ in self._states if number == self._trained), None)

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

    def opened(self, iterator: Any) -> bool:
        """An iterator was opened; whether it is the one training reads."""
        if not self._expecting:
            return False
        self._expecting = False
        self._given = self._trained = self._before_epoch = 0
        self._epochs = _keras.epoch_iterator_of_caller()
        self._left = self._epochs.steps_per_epoch - self._skipped if self._skipped and self.spans_epochs else None
        self._states.clear()
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

    def gave(self, state: dict[str, Any], *, at_end: bool) -> None:
        """The live iterator gave out a batch and now is at ``state``."""
        self._given += 1
        self._states.append((self._given, copy.deepcopy(state), at_end))


def follow(model: Any) -> Position:
    """The position of the data ``model`` is about to be trained on in this thread."""
    position = _positions.setdefault(model, Position())
    _active.position = position
    return position


def stop_following() -> None:
    """Training in this thread has ended."""
    _active.position = None


def resumable(dataset: Any) -> Any:
    """A Grain dataset whose position `shardload.callbacks.OrbaxCheckpoint` saves and restores to the batch.

    Args:
        dataset: A `grain.IterDataset`, or a `grain.MapDataset`, which is read in its order. Shuffle, repeat and batch
            it first. Without ``repeat`` it gives the same order in every epoch.

    Returns:
        A `grain.IterDataset` of the same batches. It reads one batch ahead, to know which one is the last.

    Raises:
        UsageError: When it is no Grain dataset. Other sources have their position saved through the callback's
            ``data_iterator=``.
        MissingExtraError: When Grain is not installed.
    """
    grain = _grain()
    if isinstance(dataset, grain.MapDataset):
        dataset = dataset.to_iter_dataset()
    if not isinstance(dataset, grain.IterDataset):
        raise UsageError(
            f"resumable() takes a grain.MapDataset or grain.IterDataset; got {type(dataset).__name__}. For another "
            "source give the callback data_iterator=, an object with get_state() and set_state(state)"
        )
    return _resumable_class()(dataset)


def _grain() -> Any:
    try:
        import grain
    except ImportError as error:
        raise MissingExtraError("grain", extra="data", needed_for="shardload.data.resumable") from error
    return grain


@functools.cache
def _resumable_class() -> Any:
    grain = _grain()

    class Iterator(grain.DatasetIterator):  # type: ignore[misc,name-defined]
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self._inner = inner
            self._ahead: list[Any] = []
            self._state = inner.get_state()
            position = getattr(_active, "position", None)
            self._position = position if position is not None and position.opened(self) else None

        def __next__(self) -> Any:
            if self._position is not None and not self._position.goes_on():
                raise StopIteration
            batch = self._ahead.pop() if self._ahead else next(self._inner)
            self._state = self._inner.get_state()
            self._look_ahead()
            if self._position is not None:
                self._position.gave(self._state, at_end=not self._ahead)
            return batch

        def _look_ahead(self) -> None:
            with contextlib.suppress(StopIteration):
                self._ahead.append(next(self._inner))

        def get_state(self) -> Any:
            return self._state

        def set_state(self, state: Any) -> None:
            self._ahead.clear()
            self._inner.set_state(state)
            self._state = self._inner.get_state()

    class Resumable(grain.IterDataset):  # type: ignore[misc,name-defined]
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)

        def __iter__(self) -> Any:
            return Iterator(iter(self._parent))

    return Resumable
