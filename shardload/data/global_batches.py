"""Global batches: the same examples in the same order, for any number of processes.

    examples, shuffled       0  1  2  3  4  5  6  7 │ 8  9 10 11 12 13 14 15 │ …
                             ── global batch 0 ──── │ ── global batch 1 ──── │
    part 0 of 2              0  1  2  3             │ 8  9 10 11
    part 1 of 2                          4  5  6  7 │             12 13 14 15

The parts of a batch are concatenated in the order of the mesh, so the model sees the same array with one
process and with many, and the number of global batches determines for all of them which examples come next. With
``dataset[process::processes]`` the order within a batch would depend on the number of processes, and with a shuffle
after the slice so would the examples.

The part that a process reads follows from the mesh, not from the process index: on a 1x8 mesh over two processes both
have all rows of a batch, so both read all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardload.errors import UsageError
from shardload.units import plural

NO_NUMBERS = (
    "Cannot cut a filtered dataset into global batches: they count examples by index, so none may be missing. Filter "
    "the source, or batch the dataset yourself and call resumable(dataset) without global_batch_size"
)


@dataclass(frozen=True, slots=True)
class BatchPart:
    """One of ``count`` equal runs of rows of every global batch."""

    index: int
    count: int


def part_of_this_process() -> BatchPart:
    """Return the rows of a batch that belong to this process' devices; all rows without a Keras distribution.

    Raises:
        UsageError: If the mesh does not give each process an equal share of the rows.
    """
    import jax
    import keras
    import numpy as np

    found = keras.distribution.distribution()
    if found is None or found.batch_dim_name is None:
        return BatchPart(0, 1)
    mesh = found.device_mesh.backend_mesh
    # A row of the mesh: all devices at one index of the batch axis. They get the same rows of a batch.
    rows = np.moveaxis(mesh.devices, mesh.axis_names.index(found.batch_dim_name), 0)
    owners = [{device.process_index for device in row.flat} for row in rows]
    return part_in(owners, jax.process_index())


def part_in(owners: Sequence[set[int]], process: int) -> BatchPart:
    """Return the part of a process, given the processes that own each row of the mesh.

    Raises:
        UsageError: If the shares are unequal, or the process owns no row.
    """
    shares = {one: tuple(i for i, who in enumerate(owners) if one in who) for who in owners for one in who}
    parts = sorted(set(shares.values()))
    # JAX concatenates the parts in the order of the mesh, so they must be adjacent, disjoint and of equal size.
    together = [row for part in parts for row in part]
    if process not in shares or together != list(range(len(owners))) or len({len(part) for part in parts}) != 1:
        raise UsageError(
            f"Cannot divide the rows of a global batch among the processes: the devices along the mesh's batch axis "
            f"belong to processes {[sorted(who) for who in owners]}, expected the same number of adjacent rows for "
            "each. Build the mesh from keras.distribution.list_devices(), which has that order"
        )
    return BatchPart(parts.index(shares[process]), len(parts))


def read(dataset: Any, global_batch_size: int) -> Any:
    """Return an iterator over this process' part of each global batch.

    Args:
        dataset: A `grain.MapDataset` of examples, the same on every process.
        global_batch_size: The number of examples in a batch over all processes; an incomplete last batch is dropped.

    Raises:
        UsageError: If a batch cannot be divided into as many parts as the mesh has.
    """
    part = part_of_this_process()
    rows, left = divmod(global_batch_size, part.count)
    if left:
        raise UsageError(
            f"global_batch_size={global_batch_size} cannot be cut into {plural(part.count, 'equal part')}, one for "
            f"each share of the mesh's batch axis. Use a multiple of {part.count}"
        )
    return iter(_share_class()(dataset, part, rows).batch(rows, drop_remainder=True).to_iter_dataset())


@functools.cache
def _share_class() -> Any:
    import grain

    class BatchShare(grain.MapDataset):  # type: ignore[misc]
        """The rows of each global batch that belong to one share of the mesh's batch axis, in order."""

        def __init__(self, parent: Any, part: BatchPart, rows: int) -> None:
            super().__init__(parent)
            self._part = part
            self._rows = rows
            self._batches = len(parent) // (rows * part.count)

        def __len__(self) -> int:
            return self._batches * self._rows

        def __getitem__(self, index: Any) -> Any:
            if isinstance(index, slice):
                return self.slice(index)
            # Index in this share ─► batch and row ─► index among all examples: see the picture above.
            batch, row = divmod(index, self._rows)
            found = self._parent[(batch * self._part.count + self._part.index) * self._rows + row]
            if found is None:
                raise UsageError(NO_NUMBERS)
            return found

    return BatchShare
