"""`Checkpointer`: save and restore steps in a training loop of your own, like `OrbaxCheckpoint` in ``fit``.

    checkpointer = shardload.Checkpointer("runs/7", max_to_keep=3)
    last = checkpointer.restore(model, optimizer=optimizer, iterator=iterator)     # None: nothing was saved yet
    for step in range(last.step + 1 if last else 1, 1001):
        ...
        if step % 100 == 0:
            checkpointer.save(step, model, optimizer=optimizer, iterator=iterator, metrics={"loss": loss})
    checkpointer.wait()

Both write the same kind of steps: ``fit`` can continue from steps that such a loop saved, and the loop from ``fit``'s.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

from shardload import processes, restoring
from shardload.errors import UsageError, suggests_arguments
from shardload.keras_bridge.caller import warn_caller
from shardload.keras_bridge.model_state import plain_model, with_optimizer
from shardload.pipeline.request import RestoreRequest, check_keras_model
from shardload.processes.joint_call import Alone, Call, joint
from shardload.runs.best import Monitor, Retention, plain_logs
from shardload.runs.contents import (
    Selection,
    Variables,
    check_settable,
    checked_metadata,
    iterator_record,
    restore_iterator,
)
from shardload.runs.listing import Which, steps_of_run
from shardload.runs.saver import StepSaver, check_flags
from shardload.runs.step import StepInfo, StepRecord
from shardload.runs.step_list import StepList
from shardload.stores.clients import Address, is_bucket
from shardload.stores.local import expanded
from shardload.typing import LayoutLike, MeshLike, PathLike

_log = logging.getLogger("shardload")


class Checkpointer:
    """Save steps to a folder in the background, and restore them: for training loops without ``fit``.

    The steps are those of `shardload.callbacks.OrbaxCheckpoint`, which describes the arguments with the same names:
    either may continue what the other has saved. Also a context manager, which waits for the last save.

    Examples:
        ```python
        with shardload.Checkpointer("run", max_to_keep=3) as saver:
            last = saver.restore(model)  # None if nothing was saved yet
            for step in range(last.step + 1 if last else 1, 11):
                metrics = model.train_on_batch(x, y, return_dict=True)
                if step % 5 == 0:
                    saver.save(step, model, metrics=metrics)
        ```

    Args:
        directory: The folder of the steps, created if missing, or its address in a bucket: ``s3://`` or ``gs://``.
        max_to_keep: The number of latest steps to keep; ``None`` keeps all.
        monitor: The metric that ranks steps, among the ``metrics`` of `save`.
        mode: ``min`` if lower values are better, ``max`` if higher, ``auto`` to ask the model's metric of that name.
        keep_best: The number of best steps to keep as well.
        keep_every_steps: Also keep the first step at or after each multiple of this number.
        keep_every_hours: Also keep one step per this many hours.
        save_on_background: Whether training continues while a step is written. Saves do not overlap.
        compression: ``"zstd"`` makes smaller files that take longer to write and read.
        async_timeout_s: The time limit of a save in seconds.
        save_trainable_only: Omit the weights that training does not change.
        variables: The weights to store, if not all: patterns of variable paths, or a function of a variable.

    Raises:
        UsageError: If an argument is invalid.
        SaveError: If the folder cannot be created or is not writable.
    """

    @suggests_arguments
    def __init__(
        self,
        directory: PathLike,
        *,
        max_to_keep: int | None = None,
        monitor: str = "loss",
        mode: str = "auto",
        keep_best: int | None = None,
        keep_every_steps: int | None = None,
        keep_every_hours: float | None = None,
        save_on_background: bool = True,
        compression: Literal["none", "zstd"] = "none",
        async_timeout_s: float | None = None,
        save_trainable_only: bool = False,
        variables: Variables = None,
    ) -> None:
        check_flags(save_on_background=save_on_background)
        self._saver = StepSaver(
            directory,
            monitor=Monitor(monitor, mode=mode),
            rule="keep_best",
            retention=Retention(max_to_keep, keep_best, keep_every_steps, keep_every_hours),
            selection=Selection(save_trainable_only, variables),
            warn=warn_caller,
            compression=compression,
            timeout_s=async_timeout_s,
        )
        self._background = save_on_background
        self._has_begun = False
        self._newest = -1

    @property
    def directory(self) -> Path | str:
        """The folder of the steps: an absolute path, or the URL."""
        return self._saver.directory

    def save(
        self,
        step: int,
        model: Any,
        *,
        optimizer: Any = None,
        metrics: Mapping[str, Any] | None = None,
        epoch: int | None = None,
        metadata: Any = None,
        iterator: Any = None,
        checkpointables: Mapping[str, Any] | None = None,
    ) -> None:
        """Save the values that the variables have now; training may continue at once.

        If a loop keeps values elsewhere, as with ``stateless_call``, it must first assign them to the variables.

        Args:
            step: The number of the step; larger than those in the folder.
            model: A built Keras model.
            optimizer: The optimizer of the loop, if the model is not compiled with it.
            metrics: Scalars by name, which rank the step and are listed with it.
            epoch: The epoch that this step completes, counted from 0; ``fit`` continues after it.
            metadata: A JSON value to store with the step.
            iterator: The data source whose position is stored: an object with ``get_state``, a function, or JSON.
            checkpointables: Further named items (pytrees, or objects with an Orbax handler) stored in the same step.

        Raises:
            UsageError: If an argument is invalid.
            StepExistsError: If the step exists already.
            SaveError: If the last save failed, or this one failed to start; without ``save_on_background``, if it
                failed.
        """
        self._save(
            step,
            model,
            optimizer=optimizer,
            metrics=metrics,
            epoch=epoch,
            metadata=metadata,
            iterator=iterator,
            checkpointables=checkpointables,
        )

    def _save(
        self,
        step: int,
        model: Any,
        *,
        optimizer: Any,
        metrics: Mapping[str, Any] | None,
        epoch: int | None,
        metadata: Any,
        iterator: Any,
        checkpointables: Mapping[str, Any] | None = None,
        function: str = "Checkpointer.save",
    ) -> None:
        """Save as `save` does; errors of several processes name ``function``."""
        model = plain_model(model)
        check_keras_model(model)
        step, epoch = _count("step", step), None if epoch is None else _count("epoch", epoch)
        if metrics is not None and not isinstance(metrics, Mapping):
            raise UsageError(f"Cannot use metrics={metrics!r:.60}: expected a mapping from names to numbers")
        logs = plain_logs(metrics)
        if left := [name for name in metrics or () if str(name) not in logs]:
            raise UsageError(f"Cannot use the metric {left[0]!r}: expected a number")
        saver = self._saver
        saver.writer.wait()
        # Not in the constructor: with mode="auto" the model's metrics say which direction is better.
        if not self._has_begun:
            saver.begin(function)
            steps = self.steps()
            for line in saver.compare(model, steps):
                _log.info("%s", line)
            self._newest = max((info.step for info in steps), default=-1)
            self._has_begun = True
        # Not <=: an equal number is refused by `Staging.begin`, which can say who saved that step.
        if step < self._newest:
            raise UsageError(
                f"Cannot save step {step} to {self.directory}: it has later steps, up to {self._newest}, and `restore` "
                "would take the latest. Continue to count from there, or use another directory"
            )
        if saver.retention.best and saver.monitor.name not in logs:
            warn_caller(f"Step {step} cannot be ranked by {saver.monitor.name!r}: metrics has {sorted(logs)}")
        with with_optimizer(model, optimizer):
            saver.save(
                model,
                StepRecord(step=step, epoch=epoch, epoch_done=epoch is not None, logs=logs),
                metadata=checked_metadata(metadata),
                position={} if iterator is None else iterator_record(iterator),
                checkpointables=checkpointables,
                in_background=self._background,
            )
        self._newest = step

    def wait(self) -> None:
        """Return when no save is running.

        Raises:
            SaveError: If the last save failed.
        """
        self._saver.writer.settle()

    def restore(
        self,
        model: Any,
        *,
        step: Which = "latest",
        optimizer: Any = None,
        iterator: Any = None,
        mesh: MeshLike | None = None,
        layout: LayoutLike | None = None,
        devices: Sequence[Any] | None = None,
        fallback: Literal["previous"] | None = None,
    ) -> StepInfo | None:
        """Restore a step: model, optimizer and the position of the data; see `shardload.restore`.

        Args:
            model: A built Keras model.
            step: The step's number, ``"latest"`` or ``"best"``.
            optimizer: The optimizer of the loop, if the model is not compiled with it.
            iterator: The data source to set to the stored position: an object with ``set_state``.
            mesh: The mesh for the weights, such as ``"2x4"``; by default the model's current one.
            layout: How to split weights over the mesh, such as ``"auto"``; by default the model's current layouts.
            devices: The devices to use, in mesh order.
            fallback: ``"previous"`` replaces a damaged step by the newest undamaged one before it, or the best
                step by the next best.

        Returns:
            The step, with its ``step`` (number), ``metrics`` and ``recorded.metadata``; ``None`` if the latest one is
            requested and there is none. `shardload.report` has the report.

        Raises:
            ShardloadError: As `shardload.restore`.
        """
        model = plain_model(model)
        check_keras_model(model)
        self.wait()
        if iterator is not None:  # before the restore changes the model
            check_settable(iterator, "iterator")
        if step == "latest" and self.latest() is None:
            return None
        request = RestoreRequest(
            model=model,
            directory=self.directory,
            step=step,
            optimizer=optimizer,
            mesh=mesh,
            layout=layout,
            devices=devices,
            fallback=fallback,
        )
        info = restoring.run_restore(request).info
        if iterator is not None:
            restore_iterator(iterator, info)
        return info

    def steps(self) -> StepList:
        """Return the steps in the folder, in ascending order; notebooks show them as a table."""
        return StepList(steps_of_run(self.directory))

    def latest(self) -> StepInfo | None:
        """Return the newest step, ``None`` without one."""
        return next(reversed(self.steps()), None)

    def best(self) -> StepInfo | None:
        """Return the step with the best value of the monitored metric, or ``None`` if there is no such step."""
        return next((info for info in self.steps() if info.best), None)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the last save; raise its failure."""
        self.wait()


@suggests_arguments
def save(
    model: Any,
    directory: PathLike,
    *,
    step: int,
    optimizer: Any = None,
    metrics: Mapping[str, Any] | None = None,
    epoch: int | None = None,
    metadata: Any = None,
    iterator: Any = None,
    compression: Literal["none", "zstd"] = "none",
    save_trainable_only: bool = False,
    variables: Variables = None,
) -> Path | str:
    """Save one step and wait for it; `shardload.restore` and ``fit`` with `OrbaxCheckpoint` continue from it.

    In a `jax.distributed` run, all processes make the call, with a folder that all of them share. The step is saved by
    all of them or by none. Of ``metrics`` and ``metadata``, those of process 0 are stored.

    Examples:
        ```python
        shardload.save(model, "run", step=1000, metrics={"loss": 0.1})
        shardload.restore(model, "run", step=1000)
        ```

    Args:
        model: A built Keras model.
        directory: The folder of the steps, created if missing, or its address in a bucket (``s3://``, ``gs://``); steps
            that are there stay.
        step: The number of the step; larger than those in the folder.
        optimizer: The optimizer of the loop, if the model is not compiled with it.
        metrics: Scalars by name, which rank the step and are listed with it.
        epoch: The epoch that this step completes, counted from 0; ``fit`` continues after it.
        metadata: A JSON value to store with the step.
        iterator: The data source whose position is stored: an object with ``get_state``, a function, or JSON.
        compression: ``"zstd"`` makes smaller files that take longer to write and read.
        save_trainable_only: Omit the weights that training does not change.
        variables: The weights to store, if not all: patterns of variable paths, or a function of a variable.

    Returns:
        The folder of the step: a path, or the URL.

    Raises:
        UsageError: If an argument is invalid.
        StepExistsError: If the step exists already.
        SaveError: If the step could not be saved; earlier steps are untouched.
        DisagreementError: If the processes of a `jax.distributed` run request different saves.
        ProcessFailedError: If it failed on another process with an error that is not from shardload.
        ProcessLostError: If another process ended, or does not respond for 15 s.
    """
    options: dict[str, Any] = {"save_trainable_only": save_trainable_only, "variables": variables}
    options["compression"] = compression
    path = _place(directory)
    together: AbstractContextManager[Call] = nullcontext(Alone())
    if processes.are_several():
        # Of metrics and metadata, those of process 0 are stored; each process stores the position of its own iterator.
        compared = {"step": step, "directory": str(path), "epoch": epoch, "optimizer": optimizer, **options}
        together = joint("save", path, compared, doing="saving")
    with _removing_if_empty(path), together as call:
        with Checkpointer(directory, **options) as checkpointer:
            checkpointer._save(
                step,
                model,
                optimizer=optimizer,
                metrics=metrics,
                epoch=epoch,
                metadata=metadata,
                iterator=iterator,
                function="save",
            )
        call.meet("the end")
    name = str(_count("step", step))
    found = checkpointer.directory
    return found / name if isinstance(found, Path) else f"{found}/{name}"


def _place(directory: PathLike) -> Path | str:
    """Return the folder that a user gave, as all processes of a run call it."""
    if is_bucket(directory):
        return Address.parse(str(directory)).url
    return expanded(directory).absolute() if isinstance(directory, str | os.PathLike) else Path()


@contextmanager
def _removing_if_empty(path: Path | str) -> Iterator[None]:
    """If the with block fails, remove the folders that it made on the way to ``path``, unless they contain anything."""
    folders = (path, *path.parents) if isinstance(path, Path) else ()  # a bucket has none
    missing = [folder for folder in folders if not folder.exists()]
    try:
        yield
    except BaseException:
        # The first that is not empty, or that another process removed, ends it.
        with suppress(OSError):
            for folder in missing:
                folder.rmdir()
        raise


def _count(argument: str, value: Any) -> int:
    """Return an argument, a non-negative integer of Python, NumPy or JAX, as a Python int; raise for anything else."""
    try:
        # operator.index accepts integers of NumPy and JAX, and refuses floats.
        found = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = -1
    if found < 0:
        raise UsageError(f"Cannot use {argument}={value!r:.60}: expected a non-negative integer")
    return found
