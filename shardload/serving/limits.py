"""What one client may take of a server: a share of its connections and of its jobs, so many requests a second, lines.

A client is an address; of IPv6, a network of 64 bits, as one machine has all addresses of such a network.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress

_BURST_S = 2.0
"""A client that was idle may send the requests of so many seconds at once."""
_LINE_S = 10.0
"""Seconds between two lines of the same kind that cost those who cause them next to nothing."""
_MOST_CLIENTS = 10_000
"""How many clients are remembered; who is forgotten is taken for one that was idle."""


def client_of(address: str) -> str:
    """Return whose address it is: that of an IPv4 client, or the network of an IPv6 one."""
    with suppress(ValueError):
        found = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(found, ipaddress.IPv6Address) and not found.is_loopback:
            mapped = found.ipv4_mapped
            return str(ipaddress.ip_network((found, 64), strict=False)) if mapped is None else str(mapped)
    return address


def share_of(most: int, client: str) -> int:
    """Return how many of the places that all clients have together one of them may take, if nothing else is said.

    A client may have half of all, but this machine any number: a proxy may run here, for all clients.
    """
    return most if _is_here(client) else -(-most // 2)


def _is_here(client: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(client).is_loopback
    return False


class ConnectionShare:
    """Counts open connections, and says whether a client may have one more: by default as `share_of` says."""

    def __init__(self, most: int, *, each: int | None) -> None:
        """``most`` are allowed to all clients together, ``each`` to one."""
        self._most, self._each = most, each
        self._open: Counter[str] = Counter()

    @property
    def n_open(self) -> int:
        """How many connections are open."""
        return self._open.total()

    def take(self, client: str) -> bool:
        """Count a connection, unless there are too many."""
        own = share_of(self._most, client) if self._each is None else self._each
        if self.n_open >= self._most or self._open[client] >= own:
            return False
        self._open[client] += 1
        return True

    def give_back(self, client: str) -> None:
        """Count a connection no longer."""
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]


class RequestRate:
    """Says how long a client has to wait for its next request, if it may send so many a second (token bucket)."""

    def __init__(self, per_s: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._now = per_s, now
        self._most = max(1.0, per_s * _BURST_S)
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Client → how many requests it could send, and when that was."""

    def wait_s(self, client: str) -> int:
        """Count a request and return 0, or return after how many whole seconds it may be sent."""
        now_s = self._now()
        left, at_s = self._left.pop(client, (self._most, now_s))
        left = min(self._most, left + (now_s - at_s) * self._per_s)
        is_allowed = left >= 1
        self._left[client] = left - is_allowed, now_s
        if len(self._left) > _MOST_CLIENTS:
            self._left.popitem(last=False)
        return 0 if is_allowed else math.ceil((1 - left) / self._per_s)


class LineRate:
    """Says whether a line of a kind may be logged: a flood of connections must not fill a disk."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next_s: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def left_out(self, kind: str) -> int | None:
        """Return how many lines of the kind were left out since the last one; ``None`` if this one is to be, too."""
        now_s = self._now()
        if now_s < self._next_s.get(kind, now_s):
            self._left_out[kind] += 1
            return None
        self._next_s[kind] = now_s + _LINE_S
        return self._left_out.pop(kind, 0)
