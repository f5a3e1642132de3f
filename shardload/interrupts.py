"""Ctrl-C that always works, costs no step that is being saved, and is not lost.

Python's own way, a `KeyboardInterrupt` at an arbitrary point of the program, is not enough once JAX and Orbax run: JAX
runs Python code inside garbage collections and C++ callbacks, where the exception is printed and dropped (the load
goes on, for seconds) or ends the process with an abort; raised inside Orbax it leaves a step half handed over::

    exit_at_once             load, plan         nothing on disk     a thread ends the process, deep in C++ too
    raise_interrupt_safely   synth, download    a folder to remove  KeyboardInterrupt, but outside those callbacks
    defer_interrupt          handing over       a step              KeyboardInterrupt, once the block is done
    Worker.wait              waiting for it     a step              KeyboardInterrupt, and the wait can go on
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells report it (128 + SIGINT)."""
LOOK_S = 0.5
"""How long a Ctrl-C may go unnoticed in a wait."""
_SWALLOWING = "_xla_gc_callback"
"""JAX's function inside garbage collections, where exceptions are printed and dropped."""
_RETRY_S = 0.02


@contextlib.contextmanager
def exit_at_once(farewell: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C end the process with `INTERRUPTED` at once, also while it is deep in C++.

    Args:
        farewell: Called before, on another thread; must not wait for anything. Nothing registered to run at exit runs.
    """
    if not may_handle():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    # The C level writes the signal's number to this pipe even while the interpreter is busy elsewhere.
    previous_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(read, farewell), name="interrupts", daemon=True).start()
    try:
        with _handled_by(lambda signum, frame: None):
            yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        os.close(write)  # ends the thread


def _wait(read: int, farewell: Callable[[], None]) -> None:
    while number := os.read(read, 1):
        if number[0] == signal.SIGINT:
            with contextlib.suppress(Exception):
                farewell()
            os._exit(INTERRUPTED)
    os.close(read)


@contextlib.contextmanager
def raise_interrupt_safely() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on Ctrl-C, a moment later where it would be swallowed."""
    if not may_handle():
        yield
        return
    with _handled_by(_raise):
        yield


def _raise(signum: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_name == _SWALLOWING:
            threading.Timer(_RETRY_S, os.kill, (os.getpid(), signum)).start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


@contextlib.contextmanager
def defer_interrupt() -> Iterator[None]:
    """Act on the first Ctrl-C when the block has ended; on a second one at once."""
    before = signal.getsignal(signal.SIGINT)
    if not may_handle() or not callable(before):
        yield
        return
    deferred: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        if deferred:
            before(number, frame)
        deferred.append(frame)

    with _handled_by(note):
        yield
    if len(deferred) == 1:
        before(signal.SIGINT, deferred[0])


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


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def may_handle() -> bool:
    """Whether this thread may set handlers, and whoever started the process wants Ctrl-C to work (`nohup` does not)."""
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None)
