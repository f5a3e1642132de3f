"""A lock with two sides: threads that use the weights of a model, and the one that replaces them all.

held      held      held          many at once; one thread may enter several times
     └─ waits ─┴─ swapping ─┴─ held …      a swap waits until nobody holds, and who comes meanwhile waits for it

A swap that waits is given up once its event is set, so that a thread that holds the weights may end the follower.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class StoppedError(Exception):
    """The follower was told to stop while a step was read, or waited to be swapped in."""


class Gate:
    """Keeps the weights of a model the same while a thread holds them. ``ended`` gives up a swap that waits."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended
        self._changed = threading.Condition()
        self._holders = 0
        self._swaps = False
        self._mine = threading.local()

    @property
    def is_held_here(self) -> bool:
        """Whether this thread holds the weights, so that a swap in it would wait forever."""
        return bool(getattr(self._mine, "depth", 0))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the weights for the with block; wait for a swap that is due, unless this thread holds them already."""
        if not self.is_held_here:
            with self._changed:
                self._changed.wait_for(lambda: not self._swaps)
                self._holders += 1
        self._mine.depth = getattr(self._mine, "depth", 0) + 1
        try:
            yield
        finally:
            self._mine.depth -= 1
            if not self._mine.depth:
                with self._changed:
                    self._holders -= 1
                    self._changed.notify_all()

    @contextmanager
    def swapping(self) -> Iterator[None]:
        """Let nobody hold the weights for the with block; wait for those who do.

        Raises:
            StoppedError: If it was given up before the with block.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._swaps)
            self._swaps = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._holders or self._ended.is_set())
                if self._ended.is_set():
                    raise StoppedError
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
