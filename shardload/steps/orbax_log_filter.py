"""What Orbax and TensorStore print about a save that fails, kept from drowning the one paragraph that tells it.

    Orbax          logs the traceback of each of its threads before it hands us the first of their errors
    TensorStore    prints "Event loop is closed" for each write that ends after Orbax has given up
    Python         warns of Orbax's coroutines that were "never awaited", whenever it collects them

All repeat what shardload raises. The first two are silent while shardload saves and for a while after one
failed, the last once one failed; at any other time they are about somebody else's doing, and are shown.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from types import TracebackType
from typing import Any

STRAGGLERS_S = 30.0
"""Threads of Orbax go on for a moment after it gave up; TensorStore's writes too."""

LEFT_BEHIND = r"coroutine '(.*\._background_save|async_serialize\w*\..*)' was never awaited"
"""Orbax closes the loop of a save that fails with what had not begun still on it."""

_lock = threading.Lock()
_written = 0
_failed_at = -STRAGGLERS_S
_installed = False


def begins() -> None:
    """A save begins."""
    global _written  # noqa: PLW0603
    _install()
    with _lock:
        _written += 1


def ended(*, failed: bool) -> None:
    """A save that had begun is over; if it failed, somebody is told why."""
    global _written, _failed_at  # noqa: PLW0603
    with _lock:
        _written -= 1
        if failed:
            _failed_at = time.monotonic()
            warnings.filterwarnings("ignore", LEFT_BEHIND, RuntimeWarning)


def is_ours() -> bool:
    """Whether what goes wrong in Orbax now is about a save that tells it itself."""
    return _written > 0 or time.monotonic() < _failed_at + STRAGGLERS_S


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Orbax also warns in every save that an item without arrays has none (Keras' ``model_config``, our own)."""
    if "Skipping merge of OCDBT checkpoints: No per-process OCDBT" in record.getMessage():
        return False
    return not (record.levelno >= logging.ERROR and "orbax" in record.pathname and is_ours())


def is_late_write(error: BaseException | None, trace: TracebackType | None) -> bool:
    """Whether TensorStore, from its own thread, could not tell a loop of Orbax' that a write has ended."""
    return (
        isinstance(error, RuntimeError)
        and str(error) == "Event loop is closed"
        and trace is not None
        and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"
        and trace.tb_frame.f_globals.get("__name__") == "asyncio.base_events"
    )


def _install() -> None:
    """Once: whoever takes the place of these hooks later has the last word."""
    global _installed  # noqa: PLW0603
    with _lock:
        if _installed:
            return
        _installed = True
    logging.getLogger("absl").addFilter(_is_worth_logging)
    print_error, print_unraisable = sys.excepthook, sys.unraisablehook

    def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (is_late_write(error, trace) and is_ours()):
            print_error(kind, error, trace)

    def on_unraisable(what: Any) -> None:
        if not (is_late_write(what.exc_value, what.exc_traceback) and is_ours()):
            print_unraisable(what)

    sys.excepthook, sys.unraisablehook = on_error, on_unraisable
