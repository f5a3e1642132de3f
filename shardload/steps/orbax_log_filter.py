"""Suppress what Orbax and TensorStore print about a failed save, so that shardload's own error stays visible.

    Orbax          logs a traceback for each of its threads before it raises the first of their errors
    TensorStore    prints "Event loop is closed" for each write that finishes after Orbax gave up
    Python         warns of Orbax coroutines that were "never awaited" when they are garbage-collected

All of it repeats shardload's error. The first two are suppressed during a save by shardload and for a while after a
failed one, the third after the first failure. At other times they concern other users of Orbax and are shown.
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
"""How long threads of Orbax and writes of TensorStore may continue after Orbax gave up."""

LEFT_BEHIND = r"coroutine '(.*\._background_save|async_serialize\w*\..*)' was never awaited"
"""Coroutines that were not started when Orbax closed the event loop of a failed save."""

_lock = threading.Lock()
_saving = 0
"""Saves in progress; more than one if several callbacks or threads save."""
# Not 0: the monotonic clock may have started with the machine, less than STRAGGLERS_S ago.
_failed_at = -STRAGGLERS_S
_installed = False


def save_began() -> None:
    """Record that a save begins."""
    global _saving  # noqa: PLW0603
    _install()
    with _lock:
        _saving += 1


def save_ended(*, failed: bool) -> None:
    """Record that a save ended. After a failure, the caller raises the error."""
    global _saving, _failed_at  # noqa: PLW0603
    with _lock:
        _saving -= 1
        if failed:
            _failed_at = time.monotonic()
            # For good: some later garbage collection finds the coroutines, after an unknown time.
            warnings.filterwarnings("ignore", LEFT_BEHIND, RuntimeWarning)


def is_from_save() -> bool:
    """Whether Orbax output printed now belongs to a save by shardload, which reports failures itself."""
    return _saving > 0 or time.monotonic() < _failed_at + STRAGGLERS_S


def is_worth_logging(record: logging.LogRecord) -> bool:
    """Drop errors of saves by shardload, and Orbax's warning about items without arrays (``model_config``)."""
    if "Skipping merge of OCDBT checkpoints: No per-process OCDBT" in record.getMessage():
        return False
    # By the path of the code, not by logger: absl's logger is shared by all packages that use absl.
    return not (record.levelno >= logging.ERROR and "orbax" in record.pathname and is_from_save())


def is_late_write(error: BaseException | None, trace: TracebackType | None) -> bool:
    """Whether a TensorStore thread failed to report a finished write because Orbax had closed the event loop."""
    return (
        # The write is reported by a C++ thread, so the outermost frame is the asyncio function that it calls.
        isinstance(error, RuntimeError)
        and str(error) == "Event loop is closed"
        and trace is not None
        and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"
        and trace.tb_frame.f_globals.get("__name__") == "asyncio.base_events"
    )


def _install() -> None:
    """Install the filters once per process; hooks installed later take precedence."""
    global _installed  # noqa: PLW0603
    with _lock:
        if _installed:
            return
        _installed = True
    logging.getLogger("absl").addFilter(is_worth_logging)
    print_error, print_unraisable = sys.excepthook, sys.unraisablehook

    def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (is_late_write(error, trace) and is_from_save()):
            print_error(kind, error, trace)

    def on_unraisable(what: Any) -> None:
        if not (is_late_write(what.exc_value, what.exc_traceback) and is_from_save()):
            print_unraisable(what)

    sys.excepthook, sys.unraisablehook = on_error, on_unraisable
