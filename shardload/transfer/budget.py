"""A limit on bytes staged on the host.

Used only by the thread that submits work: when a request is refused, the caller finishes work in flight to free
memory, then asks again. Nothing waits inside a lock, and submission order rules out deadlock.
"""

from __future__ import annotations

from shardload.errors import BudgetError
from shardload.units import exact_bytes


class Budget:
    """A byte limit, the bytes taken now, and the peak."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self.peak_bytes = 0

    def try_take(self, n_bytes: int, *, what: str) -> bool:
        """Take ``n_bytes`` if they are free now; return whether they were.

        Raises:
            BudgetError: When they exceed the whole budget.
        """
        if n_bytes > self.limit_bytes:
            raise BudgetError(
                f"{what} needs {exact_bytes(n_bytes)} of host memory at once, but the budget is "
                f"{exact_bytes(self.limit_bytes)}. Raise the host-memory budget to at least {exact_bytes(n_bytes)}"
            )
        if self.taken_bytes + n_bytes > self.limit_bytes:
            return False
        self.taken_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.taken_bytes)
        return True

    def give_back(self, n_bytes: int) -> None:
        """Return bytes whose memory is free again (or now belongs to a device)."""
        self.taken_bytes -= n_bytes
        # Not clamped to 0: whoever gives back too much lets later requests exceed the limit.
        if self.taken_bytes < 0:
            raise AssertionError("more bytes were given back than taken")
