"""Counts bytes that are staged on the host, and refuses to count past the limit.

Used from one thread, the one that hands out work: a caller that is refused makes room (by finishing what is
in flight) and asks again. So nothing waits inside a lock, and the order of work decides that there is no deadlock.
"""

from __future__ import annotations

from shardload.errors import BudgetError


class Budget:
    """A number of bytes, how many are taken, and the most that ever were."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self.peak_bytes = 0

    def try_take(self, n_bytes: int, *, what: str) -> bool:
        """Take ``n_bytes`` if they are free now.

        Raises:
            BudgetError: When they would not fit even into an empty budget.
        """
        if n_bytes > self.limit_bytes:
            raise BudgetError(
                f"{what} needs {n_bytes} bytes of host memory at once, but the budget is {self.limit_bytes} bytes. "
                f"Raise the host-memory budget to at least {n_bytes} bytes"
            )
        if self.taken_bytes + n_bytes > self.limit_bytes:
            return False
        self.taken_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.taken_bytes)
        return True

    def give_back(self, n_bytes: int) -> None:
        """Return bytes whose memory is free again (or now belongs to a device)."""
        self.taken_bytes -= n_bytes
        if self.taken_bytes < 0:
            raise AssertionError("more bytes were given back than taken")
