"""Worker threads whose caller sleeps until there is something worth waking up for.

The caller competes with its workers for cores: woken at the end of every job it took 0.4 ms of the worker whose core it
got, a tenth of a load on two cores. So it says how many jobs must have ended before it wants to know. The threads
are started before there is work: starting one while another touches fresh memory took 3 ms.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


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
        self.threads = threads
        self.in_flight = 0
        """Jobs that were handed out and not yet taken back."""
        self._ended: deque[Ended[T]] = deque()
        self._wanted = 1
        self._failed = False
        self._woken = threading.Event()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shardload")
        together = threading.Barrier(threads)
        for _ in range(threads):
            self._pool.submit(together.wait)

    def hand_out(self, job: Any, work: Callable[[], T]) -> None:
        """Have one of the threads do ``work``; ``job`` names it."""
        self.in_flight += 1
        self._pool.submit(self._do, job, work)

    def take_back(self, at_least: int = 1) -> list[Ended[T]]:
        """Jobs that are over, in the order they ended.

        Args:
            at_least: How many to wait for; fewer come back where that is all there are, or where one failed.
        """
        self._wanted = max(1, min(at_least, self.in_flight))
        self._woken.clear()
        if len(self._ended) < self._wanted and not self._failed:
            self._woken.wait()
        found = [self._ended.popleft() for _ in range(len(self._ended))]
        self.in_flight -= len(found)
        return found

    def close(self) -> None:
        """Wait for the threads; what they had not begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._ended.clear()

    def _do(self, job: Any, work: Callable[[], T]) -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failure, self._failed = error, True
        self._ended.append(Ended(job, result, failure))
        if self._failed or len(self._ended) >= self._wanted:  # appended first: the caller looks after it has said
            self._woken.set()
