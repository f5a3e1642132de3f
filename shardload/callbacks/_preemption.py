"""Signals during ``fit``: SIGTERM, as a cluster sends it before it takes a machine away, and a Ctrl-C that was dropped.

After SIGTERM the callback saves once more and ends ``fit``. After Ctrl-C ``fit`` ends as it does without the callback,
also where Python dropped the `KeyboardInterrupt`: in a finaliser, or in a callback of the garbage collector. Handlers
only take note; the callback looks after each batch. With ``jax.distributed`` JAX listens for SIGTERM itself, and all
processes agree on the batch after which they save together; another handler would keep JAX from being notified.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from types import FrameType
from typing import Any

from jax.experimental import multihost_utils

from shardload.distributed import processes
from shardload.keras_bridge.training import in_fit

_asked = itertools.count()
"""JAX counts how often it was asked, on all processes alike."""


class Preemption:
    """Whether this process has been told to end."""

    def __init__(self) -> None:
        self._ctrl_c, self._term = _FitSignal(signal.SIGINT), _FitSignal(signal.SIGTERM)
        self._agreed = False

    def is_announced(self) -> bool:
        """Whether it is time to save and end; asked once after each batch, by all processes."""
        if not self._agreed and processes.is_distributed():
            try:
                self._agreed = bool(multihost_utils.reached_preemption_sync_point(next(_asked)))
            except RuntimeError:  # jax_enable_preemption_service is off, deliberately
                return False
        return self._agreed or self._term.came

    def raise_dropped_interrupt(self) -> None:
        """Raise the `KeyboardInterrupt` that was dropped, once."""
        came, self._ctrl_c.came = self._ctrl_c.came, False
        if came:
            raise KeyboardInterrupt

    def watch(self) -> None:
        """Begin to listen; harmless where that is not possible."""
        self._agreed = False
        self._ctrl_c.watch()
        if not processes.is_distributed():
            self._term.watch()

    def ignore(self) -> None:
        """Put back what was there before."""
        self._ctrl_c.ignore()
        self._term.ignore()


class _FitSignal:
    """Notes a signal that comes during ``fit``, and hands it on; elsewhere the signal does what it did before.

    Keras tells callbacks nothing when ``fit`` fails, so the handler may outlive it. Of Ctrl-C it stands in for the
    default action only: a handler of the user's own knows what should happen.
    """

    def __init__(self, number: signal.Signals) -> None:
        self.came = False
        self._number = number
        self._before: Any = None

    def watch(self) -> None:
        """Begin to listen, in the main thread, the only one that can."""
        self.came = False
        before = handler = signal.getsignal(self._number)
        while isinstance(other := getattr(handler, "__self__", None), _FitSignal):
            if other is self:
                return
            handler = other._before
        if threading.current_thread() is not threading.main_thread():
            return
        if self._number == signal.SIGTERM or handler is signal.default_int_handler:
            self._before = before
            signal.signal(self._number, self._note)

    def ignore(self) -> None:
        """Put back what was there before."""
        self.came = False
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(self._number) == self._note:
            signal.signal(self._number, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not in_fit(frame):
            self.ignore()
            os.kill(os.getpid(), number)
            return
        self.came = True
        if callable(self._before):
            self._before(number, frame)
