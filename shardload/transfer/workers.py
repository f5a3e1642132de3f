"""Worker threads whose caller sleeps until there is something worth waking up for.

The caller competes with its workers for cores, so it says how many jobs must have ended before it wants to know; by
itself that made no difference that could be measured. The threads are started before there is work: starting one while
another touches fresh memory took 3 ms, a tenth of reading 300 MB.

Ctrl-C may strike the caller between any two instructions. Where that is inside `threading.Condition`, or an executor or
event made of it, its lock stays taken and a worker waits for it for ever. So everything shared is of C: queues, a
deque, plain attributes.
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
    """Cores this process may use, at most `MAX_THREADS`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_THREADS)


@dataclass(frozen=True, slots=True)
class Ended(Generic[T]):
    """A job that is over."""

    job: Any
    """What it was handed out as."""
    result: T | None
    error: BaseException | None


class Crew(Generic[T]):
    """Some threads that do jobs in the order they are handed out.

    Args:
        threads: How many.
    """

    def __init__(self, threads: int) -> None:
        self.in_flight = 0
        """Jobs that were handed out and not yet taken back."""
        self._table = _Table[T]()
        self._dismiss = weakref.finalize(self, self._table.jobs.put, None)
        self._threads = [
            threading.Thread(target=self._table.work, name=f"shardload_{k}", daemon=True) for k in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._dismiss()
            raise

    def hand_out(self, job: Any, work: Callable[[], T]) -> None:
        """Have one of the threads do ``work``; ``job`` names it."""
        self.in_flight += 1
        self._table.jobs.put((job, work))

    def take_back(self, at_least: int = 1) -> list[Ended[T]]:
        """Return finished jobs in completion order.

        Args:
            at_least: How many to wait for; fewer are returned if no more are left, or one failed.
        """
        table = self._table
        table.wanted = max(1, min(at_least, self.in_flight))
        while len(table.ended) < table.wanted and not table.failed:
            table.bell.get()
        found = [table.ended.popleft() for _ in range(len(table.ended))]
        self.in_flight -= len(found)
        return found

    def close(self) -> None:
        """Wait for the threads; what they had not begun is dropped."""
        self._table.closed = True
        self._dismiss()
        for thread in self._threads:
            thread.join()
        self._table.ended.clear()


class _Table(Generic[T]):
    """What the threads see. They do not hold the crew, so one that is forgotten dismisses them."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[Any, Callable[[], T]] | None] = queue.SimpleQueue()
        """``None`` says that there is nothing more to do."""
        self.ended: deque[Ended[T]] = deque()
        self.bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Rung when there is something to look at; now and then once too often."""
        self.wanted = 1
        self.failed = self.closed = False

    def work(self) -> None:
        while (task := self.jobs.get()) is not None:
            if not self.closed:
                self._do(*task)
            del task  # it holds memory of shards
        self.jobs.put(None)  # for the next

    def _do(self, job: Any, work: Callable[[], T]) -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failure, self.failed = error, True
        self.ended.append(Ended(job, result, failure))
        if self.failed or len(self.ended) >= self.wanted:  # appended first: the caller looks after it has said
            self.bell.put(None)
