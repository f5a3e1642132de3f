"""SIGTERM, as a cluster sends it before it takes a machine away: save once more, then end ``fit``.

The handler only takes note; the callback looks after each batch. It is installed where Python can (the main
thread) and where JAX does not listen itself (``jax.distributed``), and takes the place of a default action only: a
handler of the user's own is called as well.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import jax


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
        self.is_announced = True
        if callable(self._before):
            self._before(number, frame)


def _jax_listens() -> bool:
    return bool(jax.distributed.is_initialized())
