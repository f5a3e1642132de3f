"""Worker threads that wake their caller only when enough jobs have finished.

The caller competes with its workers for cores, so it states how many jobs must finish before it wakes; alone,
that made no measurable difference. The threads start before there is work: starting one while
another touches fresh memory took 3 ms, a tenth of reading 300 MB.

Ctrl-C may interrupt the caller between any two instructions. Inside `threading.Condition`, or an executor or
event built on it, that leaves its lock taken, and a worker waits for it forever. So all shared objects are
implemented in C: queues, a deque, plain attributes.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MAX_THREADS = 8
"""Enough to saturate the page cache or a fast disk; more only take scratch memory."""


def default_threads() -> int:
    """Return the cores this process may use, at most `MAX_THREADS`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_THREADS)


@dataclass(frozen=True, slots=True)
class Completed(Generic[T]):
    """A finished job."""

    job: Any
    """The ``job`` it was submitted with."""
    result: T | None
    error: BaseException | None


class WorkerThreads(Generic[T]):
    """Threads that run jobs in the order of submission."""

    def __init__(self, threads: int) -> None:
        self.in_flight = 0
        """Jobs submitted and not yet collected."""
        self._table = _Table[T]()
        # Not only in `close`: an error before the caller gets there must not leave threads behind.
        self._dismiss = weakref.finalize(self, self._table.jobs.put, None)
        # Daemons: a read that hangs must not keep the program from ending.
        self._threads = [
            threading.Thread(target=self._table.work, name=f"shardload_{k}", daemon=True) for k in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._dismiss()
            raise

    def submit(self, job: Any, work: Callable[[], T]) -> None:
        """Run ``work`` on one of the threads; ``job`` identifies it."""
        self.in_flight += 1
        self._table.jobs.put((job, work))

    def collect(self, at_least: int = 1) -> list[Completed[T]]:
        """Return finished jobs in completion order, after ``at_least`` of them, all that remain, or one that failed."""
        table = self._table
        # Set before looking: a worker that finishes in between sees the new number and wakes us.
        table.wanted = max(1, min(at_least, self.in_flight))
        while len(table.completed) < table.wanted and not table.failed:
            table.wakeups.get()
        found = [table.completed.popleft() for _ in range(len(table.completed))]
        self.in_flight -= len(found)
        return found

    def close(self) -> None:
        """Wait for the threads; drop jobs that have not started."""
        # The workers still empty the queue, but run nothing more: its end (``None``) comes after the jobs.
        self._table.closed = True
        self._dismiss()
        for thread in self._threads:
            thread.join()
        self._table.completed.clear()


class _Table(Generic[T]):
    """State shared by the threads, which do not refer to `WorkerThreads`: its garbage collection stops them."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[Any, Callable[[], T]] | None] = queue.SimpleQueue()
        """``None``: no more jobs."""
        self.completed: deque[Completed[T]] = deque()
        self.wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Signals that the caller should look; sometimes once too often."""
        self.wanted = 1
        self.failed = self.closed = False

    def work(self) -> None:
        while (task := self.jobs.get()) is not None:
            if not self.closed:
                self._do(*task)
            del task  # it refers to shard memory
        self.jobs.put(None)  # stops the next thread

    def _do(self, job: Any, work: Callable[[], T]) -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failure, self.failed = error, True
        self.completed.append(Completed(job, result, failure))
        # Appended before this check, and the caller checks after setting `wanted`: no wake-up is lost.
        if self.failed or len(self.completed) >= self.wanted:
            self.wakeups.put(None)
