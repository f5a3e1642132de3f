"""Check that all processes of a run give an array the same initial value."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.sharding import Sharding

from shardload.distributed import processes
from shardload.errors import UninitialisedError


def require_agreement(values: Iterable[Any], path: str, sharding: Sharding) -> None:
    """Check that the processes initialize a variable alike; all of them call this, in the same order.

    JAX's ``device_put`` compares too, but on the devices: a process that raises could then never exit, because its
    devices wait for the devices of the other processes, and a killed process would block the others. So digests are
    compared through the key-value store.

    Args:
        values: The initial value, or the inputs it is computed from.
        path: The path of the variable, for the message.
        sharding: The sharding of the variable, over devices of all processes that call this.

    Raises:
        UninitialisedError: If the values differ.
        ProcessLostError: If one of the processes has exited.
    """
    members = tuple(sorted({d.process_index for d in sharding.device_set}))
    digest = hashlib.sha256()
    for value in values:
        array = np.asarray(value)
        # Bytes, not values: NaN differs from itself, and dtypes and shapes must agree, too.
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    channel = _channel(members, processes.call.name)
    if len(set(channel.together(digest.hexdigest))) > 1:
        raise UninitialisedError(
            f"The initial value of {path!r}, which is not in the checkpoint, differs from process to process, most "
            "likely because each draws its own random seed. Before building the model, call "
            "keras.utils.set_random_seed(n) with the same n on every process, or keras.distribution.initialize(), "
            "which does so"
        )


@functools.cache
def _channel(members: tuple[int, ...], call: str) -> processes.Channel:
    """Return a channel; each call has its own, because a failed call may leave an exchange incomplete."""
    return processes.Channel("-".join(("initial", *map(str, members), call)), members=members)
