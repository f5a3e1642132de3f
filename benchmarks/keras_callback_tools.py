"""What the cases for checkpoint callbacks do to the machine: eight devices, a full disk, damaged files, live memory."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import keras

FILE_LIMIT_BYTES = 64 << 10
"""No file may grow larger while a disk is "full": less than the state of any model here, more than all else."""


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def eight_devices() -> Iterator[None]:
    """Every matrix and table split over 1x8 where it divides."""
    mesh = keras.distribution.DeviceMesh((1, 8), ("batch", "model"), keras.distribution.list_devices()[:8])
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["(?!.*attention).*(kernel|embeddings)"] = (None, "model")
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch"))
    try:
        yield
    finally:
        keras.distribution.set_distribution(None)


@contextmanager
def full_disk() -> Iterator[None]:
    """Files cannot grow: EFBIG, as from a file system that has no room for them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def damaged(path: Path, whole: bytes, at: int) -> Iterator[None]:
    """A file with one bit flipped, for as long as this lasts."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([whole[at] ^ 16]))
    try:
        yield
    finally:
        path.write_bytes(whole)


@contextmanager
def every_assignment(look: Callable[[], int]) -> Iterator[list[int]]:
    """What ``look`` returned whenever a variable got its value."""
    kind: Any = keras.Variable
    original, seen = kind._direct_assign, []

    def watched(self: Any, value: Any) -> Any:
        seen.append(look())
        return original(self, value)

    kind._direct_assign = watched
    try:
        yield seen
    finally:
        kind._direct_assign = original


def live_bytes() -> int:
    """Bytes of distinct live buffers on all devices."""
    buffers = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(buffers.values())
