"""The thread in which all requests of this process wait for their answers, and `Fetch`, one of these requests."""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardload.errors import TransferError, UnsupportedError
from shardload.stores.answers import OutOfRangeError

_CLIENT_THREADS = "(tokio-rt-worker)"
"""Name of the threads of obstore, as Linux shows it."""
_CANCELLED_S = 0.01
"""How long requests have to end after they were cancelled."""
_END_S = 5.0
"""How long the end of a process waits for this thread, and then for those of the client."""
_LOOK_S, _IDLE_LOOKS = 0.005, 4
"""The client is idle if none of its threads runs in so many looks in a row, with a pause before each."""


class Fetch:
    """A pending request to a store: for bytes of an object, or for a list of names.

    ``finish``, if given, makes the result from what the request returns, in the first thread that waits for it.
    """

    def __init__(
        self, request: Coroutine[Any, Any, Any], *, shown: str, finish: Callable[[Any], Any] | None = None
    ) -> None:
        self._future = _loop().submit(request)
        self._shown, self._finish = shown, finish
        self._finished: list[Any] = []
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Cancel the request; a thread that waits for it gets a `TransferError`."""
        self._future.cancel()

    @property
    def pending(self) -> concurrent.futures.Future[Any]:
        """What the request returns, without ``finish``, for programs with an event loop of their own."""
        return self._future

    def result(self) -> memoryview | None:
        """Return the bytes; ``None`` if there is no such object."""
        found: memoryview | None = self.wait()
        return found

    def wait(self) -> Any:
        """Wait for the response and return it."""
        try:
            found = self._future.result()
        except concurrent.futures.CancelledError as error:
            raise TransferError(f"The request for {self._shown} was cancelled") from error
        if self._finish is None:
            return found
        with self._lock:
            if not self._finished:
                self._finished.append(self._finish(found))
            return self._finished[0]

    @property
    def has_failed(self) -> bool:
        """Whether the request ended with an error, or was cancelled."""
        return self._future.cancelled() or (self._future.done() and self._future.exception() is not None)

    @staticmethod
    def is_too_short(error: TransferError) -> bool:
        """Whether the request failed because the object ends before the requested range."""
        return isinstance(error, OutOfRangeError)


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python's garbage collector from running in the with block, which holds a library's lock and waits for reads.

    The collector runs in any thread that allocates, and frees objects of all. In the thread with the event loop, it
    would wait for the library's lock (h5py's) to free the library's objects, and the lock for a read by this thread.
    """
    with collector_paused():
        _loop().submit(_nothing()).result()  # a collection that has begun there is over
        yield


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector in the with block, which makes many objects that stay.

    A collection looks at all objects of JAX and Keras, which takes half a second after a large model was built: a fifth
    of the time of a plan, a quarter of that of a search for a layout.
    """
    with _pausing:
        if not _paused:
            _paused.append(gc.isenabled())
            gc.disable()
        else:
            _paused.append(_paused[0])
    try:
        yield
    finally:
        with _pausing:
            if _paused.pop() and not _paused:
                gc.enable()


async def _nothing() -> None:
    pass


_pausing = threading.Lock()
_paused: list[bool] = []
"""For each with block of `collector_paused`, whether the collector was on before the first of them."""


class _Loop:
    """A thread with an event loop, in which all requests of the process wait for their answers."""

    def __init__(self) -> None:
        import asyncio  # takes as long as importing all loaders

        self._asyncio = asyncio
        self._loop = asyncio.new_event_loop()
        self._process = os.getpid()
        # A daemon: a process that ends does not wait for a server.
        self._thread = threading.Thread(target=self._loop.run_forever, name="event-loop-of-stores", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def submit(self, request: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Start a request."""
        return self._asyncio.run_coroutine_threadsafe(request, self._loop)

    def _end(self) -> None:
        """Cancel what is pending and end the thread, and wait until those of the client are idle.

        Up to Python 3.13, a thread that needs the interpreter after it has ended is unwound. In Rust, that aborts the
        process, after all its work, with exit code 134.
        """
        if os.getpid() != self._process:
            return  # a forked process has no thread to end
        _loop_of.cache_clear()  # a request of a later function at exit gets a new thread

        def stop() -> None:
            for task in self._asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.call_later(_CANCELLED_S, self._loop.stop)

        self._loop.call_soon_threadsafe(stop)
        self._thread.join(_END_S)
        idle, end_s = 0, time.monotonic() + _END_S
        while idle < _IDLE_LOOKS and time.monotonic() < end_s:
            time.sleep(_LOOK_S)  # lets threads go on that wait for the interpreter
            idle = 0 if _is_client_busy() else idle + 1


def _is_client_busy() -> bool:
    """Whether a thread of the client runs, or is ready to; only Linux says so."""
    if sys.platform != "linux":
        return False
    for task in Path("/proc/self/task").iterdir():
        try:
            told = (task / "stat").read_text()
        except OSError:  # the thread has ended
            continue
        if _CLIENT_THREADS in told and told.rpartition(")")[2].split()[0] != "S":
            return True
    return False


@functools.cache
def _loop_of(process: int) -> _Loop:
    del process  # a forked process has no thread of its parent
    return _Loop()


_loops = threading.Lock()
_users: set[int] = set()
"""The process that has sent requests, if there is one: a forked process inherits it."""


def _loop() -> _Loop:
    with _loops:
        if _users and os.getpid() not in _users:
            raise UnsupportedError(
                "Cannot read from a remote store in a process that was forked from one which has read from a store: "
                'obstore\'s threads do not survive a fork. Start processes with the method "spawn" or "forkserver"'
            )
        _users.add(os.getpid())
        return _loop_of(os.getpid())
