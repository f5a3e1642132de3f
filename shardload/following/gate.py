"""A lock with two sides: threads that use the weights of a model, and the one that replaces them all.

held      held      held          many at once; one thread may enter several times
     └─ waits ─┴─ swapping ─┴─ held …      a swap waits until nobody holds, and who comes meanwhile waits for it

Who comes while a swap waits lets it go first for some seconds only: the one who is waited for may itself wait for the
one who came. A swap that waits is given up once its event is set, so that a thread that holds the weights may end the
follower.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE_S = 2.0
"""For how long who wants to hold the weights lets a swap that waits go first."""


class StoppedError(Exception):
    """The follower was told to stop while a step was read, or waited to be swapped in."""


class Gate:
    """Keeps the weights of a model the same while a thread holds them. ``ended`` gives up a swap that waits."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended
        self._changed = threading.Condition()
        self._holders: Counter[int] = Counter()
        """Thread → how often it holds."""
        self._waits = self._swaps = False

    @property
    def is_held_here(self) -> bool:
        """Whether this thread holds the weights, so that a swap in it would wait forever."""
        return threading.get_ident() in self._holders

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the weights for the with block, which may end in another thread, as that of a generator may.

        Wait for a swap that is due, unless this thread holds them already.
        """
        holder = threading.get_ident()
        with self._changed:
            if holder not in self._holders:
                self._changed.wait_for(lambda: not (self._waits or self._swaps), timeout=_PATIENCE_S)
                self._changed.wait_for(lambda: not self._swaps)
            self._holders[holder] += 1
        try:
            yield
        finally:
            with self._changed:
                self._holders[holder] -= 1
                if not self._holders[holder]:
                    del self._holders[holder]
                self._changed.notify_all()

    @contextmanager
    def swapping(self) -> Iterator[None]:
        """Wait for the threads that hold the weights, and let no others hold them during the with block.

        Raises:
            StoppedError: If it was given up before the with block.
        """
        with self._changed:
            self._changed.wait_for(lambda: not (self._waits or self._swaps))
            self._waits = True
            try:
                self._changed.wait_for(lambda: not self._holders or self._ended.is_set())
                if self._ended.is_set():
                    raise StoppedError
                self._swaps = True
            finally:
                self._waits = False
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._swaps = False
                self._changed.notify_all()

    def end(self) -> None:
        """Set the event, and wake the swap that waits."""
        with self._changed:
            self._ended.set()
            self._changed.notify_all()
