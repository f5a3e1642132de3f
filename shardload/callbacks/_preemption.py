"""SIGTERM, as a cluster sends it before it takes a machine away: save once more, then end ``fit``.

The handler only takes note; the callback looks after each batch. It is installed where Python can (the main
thread) and where JAX does not listen itself (``jax.distributed``), and takes the place of a default action only: a
handler of the user's own is called as well. Keras tells callbacks nothing when ``fit`` fails, so the handler may
outlive it: outside of ``fit``, SIGTERM does what it did before.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
import keras


class Preemption:
    """Whether this process has been told to end."""

    def __init__(self) -> None:
        self.is_announced = False
        self._before: Any = None
        self._installed = False

    def watch(self) -> None:
        """Begin to listen; harmless where that is not possible."""
        self.is_announced = False
        if self._installed or threading.current_thread() is not threading.main_thread() or _jax_listens():
            return
        self._before = signal.signal(signal.SIGTERM, self._note)
        self._installed = True

    def ignore(self) -> None:
        """Put back what was there before."""
        if self._installed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)
            self._installed = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if _in_fit(frame):
            self.is_announced = True
            if callable(self._before):
                self._before(number, frame)
            return
        self.ignore()
        os.kill(os.getpid(), number)


def _in_fit(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "fit" and isinstance(frame.f_locals.get("self"), keras.Model):
            return True
        frame = frame.f_back
    return False


def _jax_listens() -> bool:
    return bool(jax.distributed.is_initialized())
