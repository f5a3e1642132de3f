"""Make Ctrl-C reliable: it always takes effect, and does not lose a step that is being saved.

The command treats SIGTERM and SIGHUP (from a cluster, or a terminal that was closed) like Ctrl-C.

Python's default, a `KeyboardInterrupt` at an arbitrary point of the program, is not enough with JAX and Orbax: JAX
runs Python code inside garbage collections, C++ callbacks and imports, where the exception is printed and dropped (the
load continues for seconds) or aborts the process; raised inside Orbax, it leaves a step half handed over::

    function                 used while         may be lost         effect of Ctrl-C
    exit_at_once             loading, planning  nothing on disk     a thread ends the process, even inside C++ code
    raise_interrupt_safely   doing all else     temporary folders   KeyboardInterrupt, but outside those callbacks
    defer_interrupt          handing over       a step              KeyboardInterrupt at the end of the block
    end_with                 exiting            nothing             the process ends at once with its own exit code
    Worker.wait              awaiting a save    a step              KeyboardInterrupt, and wait() can be called again
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as shells report it (128 + SIGINT)."""
_ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_LOOK_S = 0.5
"""Most seconds until `Worker.wait` notices a Ctrl-C."""
_NO_PLACE = {
    "_xla_gc_callback": "JAX's garbage collection callback, in which exceptions are printed and dropped",
    "ExtensionFileLoader.create_module": "code of a compiled module, which may abort on an exception of Python",
    "ExtensionFileLoader.exec_module": "the same: JAX's make enums there, and optree takes it for a missing module",
}
"""Functions during which a signal must not raise an exception, by qualified name → why it must not."""
_RETRY_S = 0.02
"""Seconds after which a signal is sent again if it arrived inside code that must not raise an exception, such as a
callback of JAX. This is repeated until that code has ended."""


class Terminated(KeyboardInterrupt):
    """Raised for SIGTERM and SIGHUP: a `KeyboardInterrupt`, so that they end whatever Ctrl-C ends."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


_raised: list[KeyboardInterrupt] = []


def raised() -> KeyboardInterrupt:
    """Return the exception that the last signal raised, to raise it again.

    typer, the library that runs the command, catches a `KeyboardInterrupt` and returns only an exit code. The exception
    has more: its notes say what an interrupted command has written, and how to go on.
    """
    return _raised[-1] if _raised else KeyboardInterrupt()


def signal_of(error: BaseException) -> int:
    """Return the number of the signal that raised a `KeyboardInterrupt` or `Terminated`."""
    return error.number if isinstance(error, Terminated) else signal.SIGINT


def message_of(number: int) -> str:
    """Return the last line to print before signal ``number`` ends the process, such as ``"Interrupted."``."""
    return "Interrupted." if number == signal.SIGINT else f"Terminated by {signal.Signals(number).name}."


@contextlib.contextmanager
def exit_at_once(farewell: Callable[[int], None]) -> Iterator[None]:
    """Make Ctrl-C, SIGTERM and SIGHUP end the process at once, even inside C++ code, with code 128 + signal number.

    ``farewell`` is called first with the signal's number, in another thread, to print a last line or to remove
    files. It must not block. Functions registered with `atexit` do not run.
    """
    if not _may_handle():
        yield
        return
    write, previous_fd = _watched(farewell, None)
    try:
        # The thread ends the process; a KeyboardInterrupt in this one could only get ahead of it.
        with _handled_by(lambda signum, frame: None, _ENDING):
            yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        os.close(write)  # ends the thread


def ignore_at_exit() -> None:
    """Ignore Ctrl-C, SIGTERM and SIGHUP at exit, once all `atexit` functions registered after this call have run.

    Otherwise Python would restore the default handlers while it unloads modules, and a signal could kill a process that
    has done its work.
    """
    atexit.register(drop, signal.SIG_IGN)


def drop(handler: Any = lambda number, frame: None) -> None:
    """Make Ctrl-C, SIGTERM and SIGHUP do nothing from now on, so that they cannot interrupt the last output."""
    for number in _handled(_ENDING):
        signal.signal(number, handler)


def end_with(code: int, farewell: Callable[[int], None]) -> None:
    """Make Ctrl-C, SIGTERM and SIGHUP exit at once with the process' own exit ``code``: its results are complete."""
    if _handled(_ENDING):
        drop()
        _watched(farewell, code)


def _watched(farewell: Callable[[int], None], code: int | None) -> tuple[int, int]:
    """Start a thread that ends the process when a signal arrives, even while the main thread is in C++ code.

    Return two descriptors: the end of a pipe to which Python writes each signal's number, and where Python wrote them
    before, to be set again by `signal.set_wakeup_fd`. With ``code`` = ``None``, the exit code is 128 + number.
    """
    # `set_wakeup_fd` takes no descriptor that could block inside a signal handler.
    read, write = os.pipe()
    os.set_blocking(write, False)
    # CPython's C signal handler writes the number to this pipe even while the interpreter is busy.
    previous_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(read, farewell, code), name="interrupts", daemon=True).start()
    return write, previous_fd


def _wait(read: int, farewell: Callable[[int], None], code: int | None) -> None:
    while number := os.read(read, 1):
        if number[0] in _ENDING:
            # A farewell that fails must not keep the process running.
            with contextlib.suppress(Exception):
                farewell(number[0])
            os._exit(128 + number[0] if code is None else code)
    os.close(read)


@contextlib.contextmanager
def raise_interrupt_safely(*, restore: bool = True) -> Iterator[None]:
    """Raise `KeyboardInterrupt` on Ctrl-C, and `Terminated` on SIGTERM and SIGHUP, unless the signal is ignored.

    Where an exception would be dropped or abort the process (in JAX's garbage collection callback, in the import of a
    compiled module), it is raised slightly later. Without ``restore``, these handlers stay for the whole process.
    """
    with _handled_by(_raise, _ENDING, restore=restore):
        yield


def _raise(signum: int, frame: FrameType | None) -> None:
    # The handler runs on top of any frame of the main thread: look for these functions among its callers.
    while frame is not None:
        if frame.f_code.co_qualname in _NO_PLACE:
            threading.Timer(_RETRY_S, os.kill, (os.getpid(), signum)).start()
            return
        frame = frame.f_back
    _raised.append(KeyboardInterrupt() if signum == signal.SIGINT else Terminated(signum))
    raise _raised[-1]


@contextlib.contextmanager
def defer_interrupt(*, after_errors: bool = False) -> Iterator[None]:
    """Delay a first Ctrl-C, SIGTERM or SIGHUP until the block has finished its work; obey a second one at once.

    If the block raises, its error ends the work as well, so that the signal is dropped; with ``after_errors``, for work
    that goes on after an error, it is obeyed then.
    """
    before = {number: found for number in _ENDING if callable(found := signal.getsignal(number))}
    if not _may_handle() or signal.SIGINT not in before:
        yield
        return
    deferred: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        if deferred:
            before[number](number, frame)
        deferred.append((number, frame))

    def obey() -> None:
        if len(deferred) == 1:
            [(number, frame)] = deferred
            before[number](number, frame)

    try:
        with _handled_by(note, tuple(before)):
            yield
    except Exception:
        if after_errors:
            obey()
        raise
    obey()


class Worker:
    """A thread whose `wait` can be repeated after Ctrl-C interrupted it.

    `threading.Thread.join` cannot: once interrupted, it considers the thread ended (Python 3.11, 3.12).
    And a wait without a timeout misses a Ctrl-C right before it begins: Python only checks when a wait returns.
    """

    def __init__(self, do: Callable[[], object], *, name: str) -> None:
        self._do = do
        self._done = threading.Event()
        threading.Thread(target=self._run, name=name).start()

    def wait(self) -> None:
        """Wait until the thread has ended."""
        while not self._done.wait(_LOOK_S):
            pass

    def _run(self) -> None:
        try:
            self._do()
        finally:
            self._done.set()


@contextlib.contextmanager
def _handled_by(
    handler: Callable[[int, FrameType | None], None], numbers: Sequence[int] = _ENDING, *, restore: bool = True
) -> Iterator[None]:
    previous: dict[int, Any] = {number: signal.signal(number, handler) for number in _handled(numbers)}
    try:
        yield
    finally:
        for number, before in previous.items() if restore else ():
            signal.signal(number, before)


def _handled(numbers: Sequence[int]) -> list[int]:
    """Return those of the signals ``numbers`` that this thread may handle: in the main thread, all but ignored ones."""
    in_main = threading.current_thread() is threading.main_thread()
    return [n for n in numbers if in_main and signal.getsignal(n) not in (signal.SIG_IGN, None)]


def _may_handle() -> bool:
    """Whether this thread can set signal handlers and SIGINT is not ignored (as under `nohup`)."""
    return bool(_handled([signal.SIGINT]))
