"""Handle signals during ``fit``: SIGTERM, which a cluster sends before it takes a machine away, and Ctrl-C.

The handlers only set a flag, which the callback checks after each batch. After SIGTERM, it saves once more and ends
``fit``. With ``jax.distributed``, JAX handles SIGTERM itself, and all processes agree on the batch after which they
save. No handler for SIGTERM is then set here, because it would replace JAX's.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from types import FrameType
from typing import Any

from jax.experimental import multihost_utils

from shardload import processes
from shardload.keras_bridge.training import in_fit

_asked = itertools.count()
"""Numbers for the calls that ask JAX whether the run is preempted: all processes must use the same ones."""


class Preemption:
    """Notices signals that should end ``fit``: SIGTERM from a cluster, and a Ctrl-C whose exception Python dropped."""

    def __init__(self) -> None:
        self._ctrl_c, self._term = _FitSignal(signal.SIGINT), _FitSignal(signal.SIGTERM)
        self._agreed = False

    def is_announced(self) -> bool:
        """Whether any process got SIGTERM: ``fit`` must then save and end. All processes call this after each batch."""
        # JAX returns true for a single query, so the answer is kept.
        if not self._agreed and processes.is_distributed():
            try:
                self._agreed = bool(multihost_utils.reached_preemption_sync_point(next(_asked)))
            except RuntimeError:  # the user disabled jax_enable_preemption_service
                return False
        return self._agreed or self._term.came

    def raise_dropped_interrupt(self) -> None:
        """Raise `KeyboardInterrupt` if Ctrl-C was pressed since the last call, in case Python dropped the exception."""
        came, self._ctrl_c.came = self._ctrl_c.came, False
        if came:
            raise KeyboardInterrupt

    def watch(self) -> None:
        """Set the signal handlers if ``fit`` runs in the main thread; a Ctrl-C handler of the user's stays in place."""
        self._agreed = False
        self._ctrl_c.watch()
        if not processes.is_distributed():
            self._term.watch()

    def ignore(self) -> None:
        """When ``fit`` ends, restore the signal handlers that `watch` replaced."""
        self._ctrl_c.ignore()
        self._term.ignore()


class _FitSignal:
    """Handles one signal: records the signal during ``fit``, and always passes it on to the handler set before.

    Keras does not notify callbacks when ``fit`` fails, so the handler may stay after ``fit``. For Ctrl-C, it
    replaces only Python's default handler: a user's own handler stays.
    """

    def __init__(self, number: signal.Signals) -> None:
        self.came = False
        self._number = number
        self._before: Any = None

    def watch(self) -> None:
        """Set the handler for the signal. Does nothing outside the main thread, where Python allows no handlers."""
        self.came = False
        # Another callback's handler may be set already: look through the chain for this one, and for the user's.
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
        """When ``fit`` ends, restore the handler that `watch` replaced."""
        self.came = False
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(self._number) == self._note:
            signal.signal(self._number, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not in_fit(frame):
            self.ignore()
            # Outside `fit`: send it again, to the previous handler, which was just restored.
            os.kill(os.getpid(), number)
            return
        self.came = True
        if callable(self._before):
            self._before(number, frame)
