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

import copy
import functools
from collections import deque
from typing import Any

from shardload import _keras
from shardload.errors import MissingExtraError, UsageError

KEPT = 8
"""States kept beyond what one call of the training function takes; Keras looks at most two batches ahead."""


class Position:
    """Where one dataset stands in one ``fit``; shared by the iterators over it."""

    def __init__(self) -> None:
        self._wanted: dict[str, Any] | None = None
        self._expecting = False
        self._states: deque[tuple[int, dict[str, Any]]] = deque(maxlen=KEPT)
        self._given = self._trained = 0
        self._live: Any = None
        self._epochs: Any = None

    def resume(self, state: dict[str, Any]) -> None:
        """Let the first iterator of the coming epoch begin at ``state``."""
        self._wanted = state

    def epoch_begins(self) -> None:
        """The next iterator that is opened, if any, is the one training reads."""
        self._expecting = True

    def trained(self, batches: int) -> None:
        """``batches`` more were trained; the first of an epoch end the wait for its iterator."""
        self._expecting = False
        self._trained += batches

    @property
    def state(self) -> dict[str, Any] | None:
        """The state after the last batch that was trained; None where the next epoch opens an iterator of its own."""
        for number, state in self._states:
            if number == self._trained:
                return copy.deepcopy(state)
        return None

    @property
    def spans_epochs(self) -> bool:
        """Whether one iterator serves all epochs, as with ``steps_per_epoch``."""
        return self._epochs is not None and bool(self._epochs.steps_per_epoch)

    def epoch_ends(self, *, shortened: bool) -> None:
        """Make Keras forget the length of an epoch resumed in its middle; it would cut all later ones to it."""
        if shortened and self._epochs is not None:
            _keras.forget_epoch_length(self._epochs)

    def opened(self, iterator: Any) -> bool:
        """An iterator was opened; whether it is the one training reads."""
        if not self._expecting:
            return False
        self._expecting = False
        self._live, self._given, self._trained = iterator, 0, 0
        self._epochs = _keras.epoch_iterator_of_caller()
        self._states.clear()
        if self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            iterator.set_state(wanted)
        self._states.append((0, copy.deepcopy(iterator.get_state())))
        return True

    def gave(self, state: dict[str, Any]) -> None:
        """The live iterator gave out a batch and now is at ``state``."""
        self._given += 1
        self._states.append((self._given, copy.deepcopy(state)))


def resumable(dataset: Any) -> Any:
    """A Grain dataset whose position `shardload.callbacks.OrbaxCheckpoint` saves and restores to the batch.

    Args:
        dataset: A `grain.IterDataset`, or a `grain.MapDataset`, which is read in its order. Shuffle, repeat and batch
            it first. Without ``repeat`` it gives the same order in every epoch.

    Returns:
        A `grain.IterDataset` of the same batches; its ``position`` is a `Position`.

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


def position_of(data: Any) -> Position | None:
    """The position of a resumable dataset, None for anything else."""
    found = getattr(data, "position", None)
    return found if isinstance(found, Position) else None


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
        def __init__(self, inner: Any, position: Position) -> None:
            super().__init__(inner)
            self._inner, self._position = inner, position
            self._is_live = position.opened(self)

        def __next__(self) -> Any:
            batch = next(self._inner)
            if self._is_live:
                self._position.gave(self._inner.get_state())
            return batch

        def get_state(self) -> Any:
            return self._inner.get_state()

        def set_state(self, state: Any) -> None:
            self._inner.set_state(state)

    class Resumable(grain.IterDataset):  # type: ignore[misc,name-defined]
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.position = Position()

        def __iter__(self) -> Any:
            return Iterator(iter(self._parent), self.position)

    return Resumable
