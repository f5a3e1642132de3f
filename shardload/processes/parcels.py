"""Bytes that process 0 hands out to all others: more than one message of the coordination service may have (4 MiB)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax

from shardload.errors import ProcessLostError
from shardload.processes import heartbeat, run_client

_PART_BYTES = 2 << 20
"""Most bytes in one message."""
_WAIT_MS = 5000
"""Milliseconds that one request for a part may take; then it is repeated, if process 0 and the call still exist."""


def put(name: str, data: bytes) -> int:
    """Store bytes as parts of a parcel, on process 0, whose coordination service keeps them; return their number."""
    starts = range(0, len(data), _PART_BYTES)
    for number, at in enumerate(starts):
        run_client().key_value_set_bytes(f"{name}/{number}", data[at : at + _PART_BYTES])
    return len(starts)


def get(name: str, count: int, *, check: Callable[[], None]) -> bytes:
    """Return the bytes of a parcel of ``count`` parts; ``check`` is called now and then, and may raise."""
    client = run_client()
    return b"".join(_part(client, f"{name}/{number}", check) for number in range(count))


def discard(folder: str) -> None:
    """Remove all parcels whose names begin with ``folder``, which ends with ``/``, if the service still runs."""
    with suppress(Exception):
        run_client().key_value_delete(folder)


def _part(client: Any, key: str, check: Callable[[], None]) -> bytes:
    while True:
        try:
            return bytes(client.blocking_key_value_get_bytes(key, _WAIT_MS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise ProcessLostError(
                    f"Cannot get what process 0 hands out: it cannot be reached, most likely because it has ended: "
                    f"{str(error).splitlines()[0]}. Start all processes again"
                ) from error
        heartbeat().check(0)
        check()
