"""Ctrl-C that waits for the right moment, so that it does not cost the step that is being handed over, and is not lost.

Raised inside Orbax, a `KeyboardInterrupt` would leave a step half handed over and threads of Orbax complaining. Held
back until the step is in the hands of the thread that finishes it, it costs nothing but that moment.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import keras

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


class CtrlC:
    """Remembers a Ctrl-C, for where Python or a library drops the `KeyboardInterrupt` it became.

    Python drops what is raised in a finaliser or a callback of the garbage collector; training would go on. Only the
    default action is stood in for, as whoever has a handler of their own knows what should happen.
    """

    def __init__(self) -> None:
        self._came = False
        self._installed = False

    def watch(self) -> None:
        """Begin to listen; harmless where that is not possible."""
        self._came = False
        before = signal.getsignal(signal.SIGINT)
        ours = isinstance(getattr(before, "__self__", None), CtrlC)  # left by a `fit` that failed
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and (ours or before is signal.default_int_handler):
            signal.signal(signal.SIGINT, self._note)
            self._installed = True

    def ignore(self) -> None:
        """Put back what was there before."""
        self._came = False
        if self._installed and threading.current_thread() is threading.main_thread():
            self._installed = False
            if signal.getsignal(signal.SIGINT) == self._note:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def look(self) -> None:
        """Raise the `KeyboardInterrupt` that was dropped, once."""
        came, self._came = self._came, False
        if came:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if in_fit(frame):
            self._came = True
        else:  # `fit` failed, and Keras told nobody
            self.ignore()
        signal.default_int_handler(number, frame)


def in_fit(frame: FrameType | None) -> bool:
    """Whether a frame belongs to a running `keras.Model.fit`."""
    while frame is not None:
        if frame.f_code.co_name == "fit" and isinstance(frame.f_locals.get("self"), keras.Model):
            return True
        frame = frame.f_back
    return False


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
