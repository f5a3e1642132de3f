"""Datasets that continue exactly where training stopped.

    ds = shardload.data.resumable(grain_dataset)
    model.fit(ds, callbacks=[OrbaxCheckpoint(directory)])

Keras opens many iterators over one dataset: two or three to inspect a batch, then a new one for every epoch (with
``steps_per_epoch``, one for all epochs). On accelerators Keras also reads one batch ahead, so the newest state of the
data is not that after the last *trained* batch. A resumable dataset keeps the state after each of the last batches it
returned. The callback tells it how many batches were trained, and saves the state after the last of them::

    returned       b0  b1  b2  b3            states  s0  s1  s2  s3
    trained        b0  b1                    saved       s1   ─► the next run begins with b2

With ``global_batch_size``, each process reads one part of every batch, and the batch as a whole is the same for any
number of processes:

    examples, shuffled       0  1  2  3  4  5  6  7 │ 8  9 10 11 12 13 14 15 │ …
                             ── global batch 0 ──── │ ── global batch 1 ──── │
    part 0 of 2              0  1  2  3             │ 8  9 10 11
    part 1 of 2                          4  5  6  7 │             12 13 14 15

The parts of a batch are concatenated in the order of the mesh, so the model sees the same array with one process and
with many. (With ``dataset[process::processes]``, the order within a batch would depend on the number of processes.) So
a saved count of global batches is enough to know which examples come next.

Which part a process reads depends on the mesh, not on its index: on a 1x8 mesh over two processes, the batch is not
split, and both processes read all of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardload.data.position import (
    Origin,
    Position,
    Reading,
    follow_data,
    followed,
    length,
    repeated_length,
    stop_following,
)
from shardload.errors import MissingExtraError, UsageError
from shardload.keras_bridge.training import epoch_iterator_of_fit, grain_dataset
from shardload.units import is_integer, plural

_NO_NUMBERS = (
    "Cannot cut a filtered dataset into global batches: they count examples by index, so none may be missing. Filter "
    "the source, or batch the dataset yourself and call resumable(dataset) without global_batch_size"
)


def resumable(dataset: Any, *, global_batch_size: int | None = None) -> Any:
    """Return a Grain dataset whose position `shardload.callbacks.OrbaxCheckpoint` saves and restores to the batch.

    Examples:
        ```python
        import grain
        from shardload.callbacks import OrbaxCheckpoint

        pairs = grain.MapDataset.source(list(zip(x, y)))
        data = shardload.data.resumable(pairs.shuffle(seed=0).repeat().batch(32))
        saves = OrbaxCheckpoint("run", save_freq=3, resume=True)
        model.fit(data, shuffle=False, steps_per_epoch=4, epochs=2, callbacks=[saves])
        ```

    Args:
        dataset: A `grain.IterDataset`, or a `grain.MapDataset`, which is read in order. Shuffle, repeat and batch
            it first. Without ``repeat`` its order is the same in every epoch. With several processes it is the
            dataset of this process, and can only continue with the same number of processes.
        global_batch_size: If given, ``dataset`` is a `grain.MapDataset` of single examples, shuffled and repeated but
            not batched, and the same on every process. Each process reads its part of every batch according to the
            mesh, and a later run can have another number of processes. An incomplete last batch is dropped.

    Returns:
        A `grain.IterDataset` of the batches of this process. It reads one batch ahead, to detect the last one.

    Raises:
        UsageError: If ``dataset`` is not a Grain dataset, or cannot be cut into global batches. For other
            sources, use the callback's ``data_iterator=``. Also raised later, in ``fit``, if the data should continue
            from the position of another dataset whose batches differ.
        MissingExtraError: If Grain is not installed.
    """
    grain = _grain()
    if global_batch_size is not None:
        return _resumable_class()(dataset, _checked(dataset, global_batch_size))
    reading = Reading()
    if isinstance(dataset, grain.MapDataset):
        reading = Reading(batches=length(dataset), repeated=repeated_length(dataset))
        dataset = dataset.to_iter_dataset()
    if not isinstance(dataset, grain.IterDataset):
        raise UsageError(
            f"Cannot make {type(dataset).__name__} resumable: expected a grain.MapDataset or grain.IterDataset. For "
            "another source, pass the callback data_iterator=, an object with get_state() and set_state(state)"
        )
    return _resumable_class()(dataset, reading)


class Unseen:
    """Stands for the dataset while no ``fit`` runs, and it is unknown. It is checked later, when it is opened."""

    def check(self, origin: Origin) -> None:
        """Do nothing: the data is not known yet."""


def resumable_of_fit() -> Any:
    """Return the resumable dataset that ``fit`` reads; ``None`` if it reads another, `Unseen` if no ``fit`` runs."""
    epochs = epoch_iterator_of_fit()
    if epochs is None:
        return Unseen()
    # The user may have added transformations to the resumable dataset, so search its parents.
    waiting = [grain_dataset(epochs)]
    while waiting:
        found = waiting.pop()
        if getattr(found, "is_resumable", False):
            return found
        waiting += getattr(found, "parents", ())
    return None


def _checked(dataset: Any, global_batch_size: int) -> Reading:
    if not isinstance(dataset, _grain().MapDataset):
        raise UsageError(
            f"Cannot cut {type(dataset).__name__} into global batches: expected a grain.MapDataset of examples, which "
            "have indices"
        )
    if not (is_integer(global_batch_size) and global_batch_size >= 1):
        raise UsageError(f"Cannot use global_batch_size={global_batch_size!r:.60}: expected a positive integer")
    if (size := len(dataset)) < global_batch_size:
        raise UsageError(
            f"Cannot make a global batch of {global_batch_size}: the dataset has only {plural(size, 'example')}. Use a "
            "smaller global_batch_size"
        )
    try:
        # Grain refuses to batch a filtered dataset, which is the only public sign that examples may be missing.
        dataset.batch(global_batch_size)
    except ValueError as error:
        raise UsageError(_NO_NUMBERS) from error
    sizes = {"examples": length(dataset), "repeated": repeated_length(dataset)}
    return Reading(global_batch_size=int(global_batch_size), **sizes)


def _grain() -> Any:
    try:
        import grain
    except ImportError as error:
        raise MissingExtraError.explaining(error, needed_for="shardload.data.resumable", extra="data") from error
    return grain


def _rows(batch: Any) -> int:
    """Return the number of examples (rows) in a batch; 0 if none of its arrays has a first dimension."""
    import jax

    return next((int(leaf.shape[0]) for leaf in jax.tree.leaves(batch) if getattr(leaf, "shape", ())), 0)


@functools.cache
def _resumable_class() -> Any:
    grain = _grain()

    class Iterator(grain.DatasetIterator):  # type: ignore[misc,name-defined]
        def __init__(self, inner: Any, reading: Reading) -> None:
            super().__init__(inner)
            self._inner = inner
            self._ahead: list[Any] = []
            self._state = inner.get_state()
            # Data that is opened outside `fit`, or only to be inspected, has no position to report to.
            position = followed()
            self._position = position if position is not None and position.opened(self, reading) else None

        def __next__(self) -> Any:
            if self._position is not None and not self._position.may_continue():
                raise StopIteration
            try:
                batch = self._ahead.pop() if self._ahead else next(self._inner)
            except StopIteration:
                if self._position is not None:
                    self._position.ended()
                raise
            # Take the state before looking ahead: the next run must still get the batch that was only looked at.
            # Whether there is one tells if this batch ends the epoch.
            self._state = self._inner.get_state()
            with contextlib.suppress(StopIteration):
                self._ahead.append(next(self._inner))
            if self._position is not None:
                self._position.gave(self._state, rows=_rows(batch), at_end=not self._ahead)
            return batch

        def get_state(self) -> Any:
            return self._state

        def set_state(self, state: Any) -> None:
            self._ahead.clear()
            self._inner.set_state(state)
            self._state = self._inner.get_state()

    class Resumable(grain.IterDataset):  # type: ignore[misc,name-defined]
        is_resumable = True

        def __init__(self, inner: Any, reading: Reading) -> None:
            super().__init__(inner)
            self._reading = reading

        def check(self, origin: Origin) -> None:
            """Raise `UsageError` if the count of batches saved in ``origin`` would mean other examples in this data."""
            origin.check(self._reading)
            if origin.reading.rows is not None:
                # A Grain dataset does not know how many rows its batches have: read one.
                origin.check_rows(_rows(next(iter(self), None)), at_end=False)

        def __iter__(self) -> Any:
            size = self._reading.global_batch_size
            inner = iter(self._parent) if size is None else global_batches_of(self._parent, size)
            return Iterator(inner, self._reading)

    return Resumable


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Which rows of every global batch a process reads: the ``index``-th of ``count`` equal parts."""

    index: int
    count: int


def part_of_this_process() -> BatchPart:
    """Return the part of a batch that this process' devices need; the whole batch without a Keras distribution."""
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
    """Return the part of a batch that a process reads; ``owners``: for each index of the batch axis, its processes."""
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


def global_batches_of(dataset: Any, global_batch_size: int) -> Any:
    """Return an iterator over this process' part of each global batch, a batch for all processes together."""
    part = part_of_this_process()
    rows, left = divmod(global_batch_size, part.count)
    if left:
        raise UsageError(
            f"Cannot use global_batch_size={global_batch_size}: it cannot be cut into "
            f"{plural(part.count, 'equal part')}, one for each share of the mesh's batch axis. Use a multiple of "
            f"{part.count}"
        )
    return iter(_share_class()(dataset, part, rows).batch(rows, drop_remainder=True).to_iter_dataset())


@functools.cache
def _share_class() -> Any:
    import grain

    class BatchShare(grain.MapDataset):  # type: ignore[misc]
        """The examples that one process reads, as a dataset: its part of every global batch, in order."""

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
                raise UsageError(_NO_NUMBERS)
            return found

    return BatchShare


__all__ = ["Origin", "Position", "Reading", "follow_data", "resumable", "resumable_of_fit", "stop_following"]
