"""Whether the processes of one run are about to give an array the same value."""

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
    """Make sure that the processes initialise a variable alike; all of them call this, in the same order.

    JAX's ``device_put`` compares, too, but on all devices: a process that gave up on what it saw could never end, its
    devices still waiting for those of a process that has, and one that was killed would keep the others waiting. So
    digests go through the key-value store.

    Args:
        values: What the initial value is, or is computed from.
        path: Of the variable, for the message.
        sharding: Its sharding, over devices of all processes that call this.

    Raises:
        UninitialisedError: When they do not.
        ProcessLostError: When one of them has ended.
    """
    members = tuple(sorted({d.process_index for d in sharding.device_set}))
    digest = hashlib.sha256()
    for value in values:
        array = np.asarray(value)
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    channel = _channel(members, processes.call.name)
    if len(set(channel.together(digest.hexdigest))) > 1:
        raise UninitialisedError(
            f"The initial value of {path!r}, which the checkpoint does not hold, differs from process to process, most "
            "likely as each draws its own random seed. Before building the model, call keras.utils.set_random_seed(n) "
            "with the same n on every process, or set them up with keras.distribution.initialize(), which does so"
        )


@functools.cache
def _channel(members: tuple[int, ...], call: str) -> processes.Channel:
    """One for each call, as a call may fail between two words."""
    return processes.Channel("-".join(("initial", *map(str, members), call)), members=members)
