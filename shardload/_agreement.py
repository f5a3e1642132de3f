"""Whether the processes of one run are about to give an array the same value."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardload.errors import UninitialisedError


def require_agreement(values: Iterable[Any], path: str, sharding: Sharding) -> None:
    """Make sure that the processes initialise a variable alike; all of them call this, in the same order.

    JAX's ``device_put`` compares, too, but on all devices, and waits for the first of them alone: a process that gave
    up on what it saw could never end, its other devices still waiting for those of a process that has. So here one
    device of each process takes part.

    Args:
        values: What the initial value is, or is computed from.
        path: Of the variable, for the message.
        sharding: Its sharding, over devices of all processes that call this.

    Raises:
        UninitialisedError: When they do not.
    """
    devices = {d.process_index: d for d in sorted(sharding.device_set, key=lambda d: -d.id)}
    mesh = Mesh([devices[i] for i in sorted(devices)], ("processes",))
    digest = hashlib.sha256()  # of one length, whatever the others compare: Gloo aborts where lengths differ
    for value in values:
        array = np.asarray(value)
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    mine = np.frombuffer(digest.digest(), np.uint8)[None]
    parts = jax.make_array_from_single_device_arrays(
        (len(devices), mine.size),
        NamedSharding(mesh, PartitionSpec("processes")),
        [jax.device_put(mine, devices[jax.process_index()])],
    )
    found = _gathering(NamedSharding(mesh, PartitionSpec()))(parts)
    if (np.asarray(found.addressable_data(0)) != mine).any():
        raise UninitialisedError(
            f"The initial value of {path!r}, which the checkpoint does not hold, differs from process to process, most "
            "likely as each draws its own random seed. Before building the model, call keras.utils.set_random_seed(n) "
            "with the same n on every process, or set them up with keras.distribution.initialize(), which does so"
        )


@functools.cache
def _gathering(whole: Sharding) -> Any:
    """What brings parts together, compiled once."""
    return jax.jit(lambda parts: parts, out_shardings=whole)
