"""Ctrl-C that waits for the right moment, so that it does not cost the step that is being handed over.

Raised inside Orbax, a `KeyboardInterrupt` would leave a step half handed over and threads of Orbax complaining. Held
back until the step is in the hands of the thread that finishes it, it costs nothing but that moment.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

LOOK_S = 0.5
"""How long a Ctrl-C may go unnoticed in a wait."""


class Worker:
    """A thread that can be waited for, also once more after Ctrl-C ended a wait.

    `threading.Thread.join` cannot: interrupted, it takes the running thread for ended from then on (Python 3.11, 3.12).
    And a wait without an end misses a Ctrl-C that comes right before it begins: Python only looks when a wait returns.
    """

    def __init__(self, do: Callable[[], object], *, name: str) -> None:
        self._do = do
        self._done = threading.Event()
        threading.Thread(target=self._run, name=name).start()

    def wait(self) -> None:
        """Return once it has ended."""
        while not self._done.wait(LOOK_S):
            pass

    def _run(self) -> None:
        try:
            self._do()
        finally:
            self._done.set()


@contextmanager
def held_back() -> Iterator[None]:
    """Do the first Ctrl-C once the block is through; a second one at once, as nothing should be waited for then."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        if held:
            before(number, frame)
        held.append(frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if len(held) == 1:
        before(signal.SIGINT, held[0])
