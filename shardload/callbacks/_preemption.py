"""SIGTERM, as a cluster sends it before it takes a machine away: save once more, then end ``fit``.

The handler only takes note; the callback looks after each batch. It is installed where Python can (the main
thread) and takes the place of a default action only: a handler of the user's own is called as well. With
``jax.distributed`` JAX listens itself, and agrees with all processes on the batch after which they save together;
another handler would keep it from being notified. Keras tells callbacks nothing when ``fit`` fails, so the handler may
outlive it: outside of ``fit``, SIGTERM does what it did before.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from types import FrameType
from typing import Any

from jax.experimental import multihost_utils

from shardload.callbacks._interrupts import CtrlC, in_fit
from shardload.distributed import processes

_asked = itertools.count()
"""JAX counts how often it was asked, on all processes alike."""


class Preemption:
    """Whether this process has been told to end."""

    def __init__(self) -> None:
        self.ctrl_c = CtrlC()
        """Ends `fit` as well, but as it does without us: nothing is saved for it."""
        self._announced = False
        self._before: Any = None
        self._installed = False

    def is_announced(self) -> bool:
        """Whether it is time to save and end; asked once after each batch, by all processes."""
        if not self._announced and processes.is_distributed():
            try:
                self._announced = bool(multihost_utils.reached_preemption_sync_point(next(_asked)))
            except RuntimeError:  # jax_enable_preemption_service is off, deliberately
                return False
        return self._announced

    def watch(self) -> None:
        """Begin to listen; harmless where that is not possible."""
        self._announced = False
        self.ctrl_c.watch()
        in_main = threading.current_thread() is threading.main_thread()
        if self._installed or not in_main or processes.is_distributed():
            return
        self._before = signal.signal(signal.SIGTERM, self._note)
        self._installed = True

    def ignore(self) -> None:
        """Put back what was there before."""
        self.ctrl_c.ignore()
        if self._installed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)
            self._installed = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if in_fit(frame):
            self._announced = True
            if callable(self._before):
                self._before(number, frame)
            return
        self.ignore()
        os.kill(os.getpid(), number)
