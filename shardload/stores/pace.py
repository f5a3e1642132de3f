"""How fast a store answers, as measured by its answers so far: the latency, and the rate of one connection."""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.2
"""Weight of the newest answer in the averages: about the last ten count."""
_MIN_BODY_BYTES = 64 << 10
"""Shorter answers say nothing about the rate."""


@dataclass(slots=True)
class Pace:
    """Running averages. Written by the one thread of the event loop; read by any."""

    latency_s: float | None = None
    """Seconds from a request to the headers of its answer; ``None`` before the first answer."""
    bytes_per_s: float | None = None
    """Rate at which one connection sends the bytes of an object; ``None`` before the first long answer."""

    def note(self, *, latency_s: float, body_s: float, n_bytes: int) -> None:
        """Take an answer into the averages."""
        self.latency_s = _average(self.latency_s, latency_s)
        if n_bytes >= _MIN_BODY_BYTES:
            self.bytes_per_s = _average(self.bytes_per_s, n_bytes / max(body_s, 1e-6))


def _average(before: float | None, new: float) -> float:
    return new if before is None else (1 - _WEIGHT) * before + _WEIGHT * new
