"""For how long a request to a store is repeated, and after what time without progress a connection is given up."""

from __future__ import annotations

import math
import os

from shardload.errors import SourceError
from shardload.stores.answers import TIMEOUT_VARIABLE

_WINDOW_S = 120.0
"""For how long a request that fails is repeated, in seconds from its first try."""
_FIRST_WINDOW_S = 10.0
"""The same until a store has answered once: its first answer shows whether the address is right."""
_STALL_BYTES = 512 << 10
"""Fewest bytes that a connection has to send in the time after which a silent one counts as stalled: 17 kB/s."""
_STALLS = 4
"""A connection that sends nothing for a quarter of the time is given up, so that a stalled request is repeated."""


def window_s(*, first: bool = False) -> float:
    """Return for how many seconds a failing request is repeated; ``first`` if the store has never answered."""
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return _FIRST_WINDOW_S if first else _WINDOW_S
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise SourceError(f"{TIMEOUT_VARIABLE} should be a number of seconds, but is {text!r}")
    return found


def stall_s() -> float:
    """Return after how many seconds a connection that sends nothing is given up."""
    return window_s() / _STALLS


def body_s(n_bytes: int) -> float:
    """Return how many seconds so many bytes may take: a byte now and then would keep a connection open for hours."""
    return stall_s() * (1 + n_bytes / _STALL_BYTES)
