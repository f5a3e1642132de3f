"""A lock with two sides: threads that use the weights of a model, and the one that replaces them all.

held      held      held          many at once; one thread may enter several times
     └─ waits ─┴─ swapping ─┴─ held …      a swap waits until nobody holds, and who comes meanwhile waits for it
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Keeps the weights of a model the same for as long as a thread holds them."""

    def __init__(self) -> None:
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
        """Let nobody hold the weights for the with block; wait for those who do."""
        with self._changed:
            self._changed.wait_for(lambda: not self._swaps)
            self._swaps = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._holders)
            yield
        finally:
            with self._changed:
                self._swaps = False
                self._changed.notify_all()
