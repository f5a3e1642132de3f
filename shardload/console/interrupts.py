"""Ctrl-C that always works, and never shows a traceback.

Python's own way, a `KeyboardInterrupt` wherever the program happens to be, is not enough once JAX is loaded: JAX
runs Python code inside garbage collections and C++ callbacks, where the exception is printed and swallowed (the
load goes on, for seconds) or ends the process with an abort. So there are two ways, by what would be left behind::

    exit_at_once            load, plan         nothing on disk     a thread ends the process, whatever it is doing
    raise_where_it_counts   synth, download    a folder to remove  KeyboardInterrupt, but outside those callbacks
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from shardload.stores import file_access

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells report it (128 + SIGINT)."""
_SWALLOWING = "_xla_gc_callback"
"""JAX's function inside garbage collections, where exceptions are printed and dropped."""
_RETRY_S = 0.02


@contextlib.contextmanager
def exit_at_once(farewell: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C end the process with `INTERRUPTED` at once, also while it is deep in C++.

    Args:
        farewell: Called before, on another thread; must not wait for anything.
    """
    if not _may_handle():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    # The C level writes the signal's number to this pipe even while the interpreter is busy elsewhere.
    previous = signal.signal(signal.SIGINT, lambda signum, frame: None)
    previous_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(read, farewell), name="interrupts", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        signal.signal(signal.SIGINT, previous)
        os.close(write)  # ends the thread


def _wait(read: int, farewell: Callable[[], None]) -> None:
    while number := os.read(read, 1):
        if number[0] == signal.SIGINT:
            with contextlib.suppress(Exception):
                farewell()
            file_access.remove_mirrors()  # nothing registered to run at exit will
            os._exit(INTERRUPTED)
    os.close(read)


@contextlib.contextmanager
def raise_where_it_counts() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on Ctrl-C, a moment later where it would be swallowed."""
    if not _may_handle():
        yield
        return
    previous = signal.signal(signal.SIGINT, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _raise(signum: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_name == _SWALLOWING:
            threading.Timer(_RETRY_S, os.kill, (os.getpid(), signum)).start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _may_handle() -> bool:
    """Whether this thread may set handlers, and whoever started the process wants Ctrl-C to work (`nohup` does not)."""
    ours = threading.current_thread() is threading.main_thread()
    return ours and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None)
