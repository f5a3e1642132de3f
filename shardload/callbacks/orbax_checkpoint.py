"""`OrbaxCheckpoint`: save the training state of ``fit`` at intervals, as steps that are complete or absent.

    model.fit(data, epochs=10, callbacks=[OrbaxCheckpoint("runs/7", save_freq=100)])

    runs/7/100  runs/7/200  runs/7/…      docs/design/0005 describes their content

A step's number is the number of batches the model was trained on, over all runs that saved to the folder. Keras' own
callback numbers steps by epoch, from 0 in every ``fit``, so its second run in a folder saves nothing or raises.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import keras

from shardload import processes
from shardload.callbacks.preemption import Preemption
from shardload.callbacks.resume import OtherCallbacks, Resumption, forget_first_epoch, position_record, resume_training
from shardload.callbacks.step_server import Serve, StepServer
from shardload.data import Position, follow_data, stop_following
from shardload.errors import SaveError, UsageError, require_callable_with, suggests_arguments
from shardload.keras_bridge.caller import warn_caller
from shardload.keras_bridge.training import swaps_averages_before
from shardload.runs.best import Monitor, Retention, plain_logs
from shardload.runs.contents import Selection, Variables, checked_items, checked_metadata, iterations, iterator_record
from shardload.runs.listing import steps_of_run
from shardload.runs.saver import Metadata, StepSaver, check_flags
from shardload.runs.step import StepInfo, StepRecord
from shardload.units import is_function, is_integer


class OrbaxCheckpoint(keras.callbacks.Callback):  # type: ignore[misc]
    """Save weights, optimizer, metrics, seeds and the position in training, in the background.

    The arguments of ``keras.callbacks.OrbaxCheckpoint`` have the same meaning, applied to all runs in the folder.
    `shardload.restore` checks the steps; plain Orbax and, within its limits, Keras can read them, too.

    Examples:
        ```python
        from shardload.callbacks import OrbaxCheckpoint

        saves = OrbaxCheckpoint("run", max_to_keep=3, resume=True)  # run the same script again to continue
        model.fit(x, y, epochs=2, callbacks=[saves])
        ```

    Args:
        directory: The folder of the steps, created if missing; a relative path is resolved when the callback is made.
            Or the address of a folder in a bucket: ``s3://bucket/run`` or ``gs://bucket/run``.
        monitor: The metric that ranks steps.
        verbose: 1 prints a line when a save begins, and when its step is complete.
        save_best_only: Save only if ``monitor`` beats the best value so far; later steps do not displace the best one.
        mode: ``min`` if lower values are better, ``max`` if higher, ``auto`` to ask the metric of that name.
        save_freq: ``"epoch"`` to save after every epoch, or the number of batches from one save to the next.
        initial_value_threshold: The initial value of ``monitor`` to beat.
        max_to_keep: The number of latest steps to keep; ``None`` keeps all. Steps not saved by this class are
            never removed.
        save_on_background: Whether training continues while a step is written. Saves do not overlap.
        save_weights_only: Omit optimizer, metrics and the model's configuration.
        save_trainable_only: Omit the weights that training does not change, such as the frozen base of LoRA adapters,
            and the assets. `shardload.restore` puts such a step into a model that has these weights.
        variables: The weights to store, if not all: patterns of variable paths such as ``["*lora*"]``, or a function
            that returns for each variable whether to store it.
        metadata: A JSON value, or a function of step and logs that returns one; stored with each step.
        checkpointables: Further named items (pytrees, or objects with an Orbax handler) stored in the same step, or
            a function that returns them. If an item has its own handler, plain Orbax loads the step only if the
            items to load are named.
        data_iterator: The data source whose position is stored: an object with ``get_state``, a function, or JSON.
        compression: ``"zstd"`` makes smaller files that take longer to write and read.
        keep_best: The number of best steps to keep as well; with ``save_best_only`` at least one.
        keep_every_steps: Also keep the first step at or after each multiple of this number.
        keep_every_hours: Also keep one step per this many hours.
        background_delete: Do not make the next save wait until the files of removed steps are deleted.
        save_at_end: Also save what was trained since the last step when ``fit`` ends, if not by an error.
        save_decision: A function of step and logs, called before each save; the step is saved only if it returns true.
        post_finalization: Called with step and folder of each step that is safely saved, in another thread; the folder
            is a path, or the URL as text.
        async_timeout_s: The time limit of a save in seconds.
        resume: The step to restore when ``fit`` begins (``True``: the latest, if any). Without it, ``fit`` continues
            after the step of this folder that `shardload.restore` put into the model, if any.
        best_of: The steps that ``monitor`` is compared with: of all runs in the ``"folder"``, or of this ``"run"`` and
            the steps it resumed.
        initial_epoch: The epoch to begin with after a restore, instead of the first incomplete one; 0 starts over. The
            argument of ``fit`` has priority, unless it is 0, its default.
        serve: Serve the folder while this process lives, by ``shardload serve`` as a process of its own, so that other
            machines can `shardload.follow` the run: ``True`` at 127.0.0.1:8600, ``"HOST:PORT"``, or a dict of
            ``listen``, ``token_file``, ``tls_cert`` and ``tls_key``. A failure of the server is a warning.

    Raises:
        UsageError: If an argument is invalid.
        ProcessLostError: In training: if another process of the run has exited or went silent.
        DamagedError: If the step to resume from is damaged; other errors of `shardload.restore` likewise.
        SaveError: If the folder cannot be created or is not writable, or another run saves to the same bucket's folder.
            In training: if a step could not be saved; raised with its cause at the end of the next batch or epoch, at
            the latest when ``fit`` ends. Several processes raise it together, with the next save or when ``fit`` ends.
            Earlier steps are untouched.
    """

    @suggests_arguments
    def __init__(  # noqa: PLR0917  # in the order of Keras' own
        self,
        directory: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        mode: str = "auto",
        save_freq: Literal["epoch"] | int = "epoch",
        initial_value_threshold: float | None = None,
        max_to_keep: int | None = 1,
        save_on_background: bool = True,
        save_weights_only: bool = False,
        *,
        save_trainable_only: bool = False,
        variables: Variables = None,
        metadata: Metadata = None,
        checkpointables: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        data_iterator: Any = None,
        compression: Literal["none", "zstd"] = "none",
        keep_best: int | None = None,
        keep_every_steps: int | None = None,
        keep_every_hours: float | None = None,
        background_delete: bool = False,
        save_at_end: bool = False,
        save_decision: Callable[[int, Mapping[str, float]], bool] | None = None,
        post_finalization: Callable[[int, Any], None] | None = None,
        async_timeout_s: float | None = None,
        resume: bool | int | Literal["latest", "best"] = False,
        best_of: Literal["folder", "run"] = "folder",
        initial_epoch: int | None = None,
        serve: Serve = False,
    ) -> None:
        super().__init__()
        check_flags(
            save_best_only=save_best_only,
            save_weights_only=save_weights_only,
            save_on_background=save_on_background,
            background_delete=background_delete,
            save_at_end=save_at_end,
        )
        if not (isinstance(save_freq, str) and save_freq == "epoch") and not (is_integer(save_freq) and save_freq >= 1):
            raise UsageError(
                f"Unrecognized save_freq: {save_freq}. Expected save_freq are 'epoch' or integer values from 1"
            )
        if initial_epoch is not None and not (is_integer(initial_epoch) and initial_epoch >= 0):
            raise UsageError(f"Cannot use initial_epoch={initial_epoch!r:.60}: expected a non-negative integer or None")
        functions = {"metadata": metadata, "save_decision": save_decision, "post_finalization": post_finalization}
        for name, function in functions.items():
            if callable(function):
                require_callable_with(function, 0, {}, name=name)
        if not (isinstance(resume, Integral) or (isinstance(resume, str) and resume in ("latest", "best"))):
            raise UsageError(
                f'Cannot use resume={resume!r:.60}: expected True, False, "latest", "best" or a step number'
            )
        self.verbose = verbose
        self.save_best_only = save_best_only
        self.save_freq = save_freq if isinstance(save_freq, str) else int(save_freq)
        self.max_to_keep = max_to_keep
        self.save_on_background = save_on_background
        self.save_weights_only = save_weights_only
        self.metadata = metadata if callable(metadata) else checked_metadata(metadata)
        self.checkpointables = checkpointables
        if not is_function(checkpointables):
            checked_items({} if checkpointables is None else checkpointables)
        self.data_iterator = data_iterator
        self.compression, self.async_timeout_s, self.best_of = compression, async_timeout_s, best_of
        self.background_delete = background_delete
        self.save_at_end = save_at_end
        self.save_decision = save_decision
        self.post_finalization = post_finalization
        self.resume = resume
        self.initial_epoch = None if initial_epoch is None else int(initial_epoch)
        self._server = None if serve is False else StepServer(serve, directory)
        best_kept = 1 if save_best_only and keep_best is None else keep_best
        self._saver = StepSaver(
            directory,
            monitor=Monitor(monitor, mode=mode, threshold=initial_value_threshold),
            rule="save_best_only" if save_best_only else "keep_best",
            retention=Retention(max_to_keep, best_kept, keep_every_steps, keep_every_hours),
            selection=Selection(save_trainable_only, variables),
            warn=self._warn,
            best_of=best_of,
            weights_only=save_weights_only,
            compression=compression,
            timeout_s=async_timeout_s,
        )
        self._decisions = processes.Channel()
        """Over this channel, all processes agree whether to save. The writer's thread has another one."""
        self._total = 0
        self._since_save = 0
        self._epoch = 0
        self._in_epoch = 0
        self._last_saved = -1
        self._warned: set[str] = set()
        self._preemption = Preemption()
        self._preempted = False
        self._position = Position()
        self._others = OtherCallbacks()
        self._first: Resumption | None = None
        self._skipped = 0

    @property
    def directory(self) -> Path | str:
        """The folder of the steps: an absolute path, or the URL."""
        return self._saver.directory

    @property
    def monitor(self) -> str:
        """The name of the metric that ranks steps."""
        return self._saver.monitor.name

    @property
    def best(self) -> float | None:
        """The best value of ``monitor`` so far, among the steps that ``best_of`` selects."""
        return self._saver.monitor.best

    @property
    def preempted(self) -> bool:
        """Whether ``SIGTERM`` ended the last ``fit`` early, with a step saved: a script can then exit as unfinished."""
        return self._preempted

    @property
    def serving(self) -> str | None:
        """With ``serve``, the address of the run for `shardload.follow`, once the server answers; on process 0 only."""
        return None if self._server is None else self._server.address

    def wait_until_finished(self) -> None:
        """Return when no save is running.

        Raises:
            SaveError: If the last save failed.
        """
        self._saver.writer.settle()

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Prepare the folder, find the step to resume from, if any, and make ``fit`` continue after it."""
        self._preempted = False
        self._saver.writer.settle()
        shared = {"save_freq": self.save_freq, "save_best_only": self.save_best_only, "resume": self.resume}
        self._saver.begin("OrbaxCheckpoint", **shared, initial_epoch=self.initial_epoch)
        model = self.model
        if self._saver.retention.best:
            self._saver.monitor.require_direction(model)
        steps = self._steps()
        newest = steps[-1].step if steps else -1
        self._last_saved = max(self._last_saved, newest)
        # Above everything that exists: the folder may have newer steps than the model, or the model more batches.
        self._total = max(self._total, newest, iterations(model))
        # Changes between two fits, as by compile(), may show in the configuration without changing the variables.
        self._saver.contents.forget()
        self._position = follow_data(model)
        given = {"data_iterator": self.data_iterator, "initial_epoch": self.initial_epoch}
        self._first = first = resume_training(model, self.directory, self.resume, self._position, **given)
        resumed, epochs = None if first is None else first.info, (self.params or {}).get("epochs")
        self._others = OtherCallbacks(self)
        if swaps_averages_before(self):
            warn_caller(
                "SwapEMAWeights(swap_on_epoch=True) comes before OrbaxCheckpoint: steps saved at the end of an epoch "
                "will have the moving averages as weights, and a resumed run would train on those. Put OrbaxCheckpoint "
                "first in callbacks"
            )
        if first is None:
            forget_first_epoch(model)
        elif first.is_due and (ended_by := self._others.resume(first.info)) and epochs is not None:
            first.end(model, epochs, ended_by)
        notices = [] if first is None else list(first.notices(epochs=epochs, newest=newest))
        if first is not None and self.verbose and not notices:
            notices = [f"Resumed step {first.info.step} of {first.info.folder}"]
        for notice in notices:
            self._say(f"{notice}\n")
        for line in self._saver.compare(model, steps, resumed, channel=self._decisions):
            self._say(f"{line}\n")
        self._preemption.watch()
        self._serve()

    def _serve(self) -> None:
        """On process 0, start the server of the steps, or warn if it has ended."""
        if self._server is not None and processes.is_first():
            try:
                self._server.start(Path(self.directory))
            except OSError as error:
                self._warn(f"Cannot serve the steps: {error}. Training goes on")
            self._server.check(self._warn)

    def _steps(self) -> list[StepInfo]:
        """Return the steps in the folder; raise if not all processes see the same ones, as on disks of their own."""
        steps = steps_of_run(self.directory)
        numbers = [info.step for info in steps]
        seen = self._saver.writer.channel.together(lambda: numbers)
        if any(others != numbers for others in seen):
            raise SaveError(
                f"The processes of this run find different steps in {self.directory}: {seen}. Choose a folder on a "
                "file system that all processes share"
            )
        return steps

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Start counting the epoch's batches: from 0, or in a resumed epoch, from the number trained before."""
        self._position.epoch_begins()
        first, self._first = self._first, None
        self._skipped = 0 if first is None else first.skipped
        self._epoch, self._in_epoch = epoch, self._skipped
        if first is not None:
            forget_first_epoch(self.model)
            # Not in on_train_begin: Keras resets metrics after it, and other callbacks reset their state in it.
            first.restore_metrics()
            for lost in self._others.restore(self.model, first.info):
                self._warn(lost)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Save after each ``save_freq`` batches, and at SIGTERM; raise the error of the last save if it failed."""
        self._preemption.raise_dropped_interrupt()
        self._saver.writer.raise_failure_together()
        self._position.trained(batch + 1)
        batch += self._skipped
        if batch < self._in_epoch:  # a user's own loop, which does not report epochs
            self._in_epoch = 0
        # With steps_per_execution, Keras reports only the last batch of each execution.
        new = batch + 1 - self._in_epoch
        self._in_epoch += new
        self._total += new
        self._since_save += new
        if isinstance(self.save_freq, int) and self._since_save >= self.save_freq:
            self._since_save = 0
            self._consider(logs, f"batch {batch + 1}", epoch_done=self._at_end)
        if self._preemption.is_announced():
            # Preempted: save if needed, regardless of the metric, and end `fit`.
            if self._total > self._last_saved:
                self._save(plain_logs(logs), epoch_done=self._at_end)
            self._saver.writer.wait()
            self.model.stop_training = self._preempted = True
            self._say(f"\nSIGTERM: saved step {self._last_saved} to {self.directory}; training ends here\n")

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Save if ``save_freq`` is ``"epoch"``; raise the error of the last save if it failed in the background."""
        self._preemption.raise_dropped_interrupt()
        self._saver.writer.raise_failure_together()
        self._position.epoch_ends()
        if self.save_freq == "epoch":
            self._since_save = 0
            self._consider(logs, f"epoch {epoch + 1}", epoch_done=True)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """With ``save_at_end``, save; wait until the last save is complete and raise its error if it failed."""
        self._preemption.ignore()
        if self.save_at_end and self._since_save:
            self._consider(logs, "the end of training", epoch_done=True)
        stop_following()
        if self._first is not None:  # no epoch has begun
            self._first.give_up(self.model)
            for line in () if self._first.restored_before else self._others.finish(self.model, self._first.info):
                self._say(f"{line}\n")
        self._saver.writer.settle()
        self._serve()

    @property
    def _at_end(self) -> bool:
        """Whether the batch just trained was the last of its epoch, which is then complete; false if unknown."""
        steps = (self.params or {}).get("steps")
        return self._position.at_end or (steps is not None and self._in_epoch >= steps)

    def _consider(self, logs: Mapping[str, Any] | None, when: str, *, epoch_done: bool) -> None:
        plain = plain_logs(logs)
        if self._total <= self._last_saved:  # nothing was trained since the last save
            return
        if not self.save_best_only and self.save_decision is None:
            wanted = True
        else:  # process 0 decides, so that all processes save or none does
            wanted = self._decisions.first(lambda: self._is_wanted(plain, when))
        # Steps saved without validation data lack the default metric, which is no reason to warn.
        asked = self._saver.retention.best or self.monitor != "val_loss"
        if wanted and asked and self.monitor not in plain:
            self._warn(f"Cannot rank steps by {self.monitor!r}. {self._saver.monitor.absent_from(plain)}.")
        if wanted:
            self._save(plain, epoch_done=epoch_done)

    def _is_wanted(self, logs: dict[str, float], when: str) -> bool:
        if self.save_best_only:
            monitor, value = self._saver.monitor, logs.get(self.monitor)
            if value is None:
                lacking = monitor.absent_from(logs)
                self._warn(
                    f"Can save best model only with {self.monitor} available, skipping save at {when}. {lacking}."
                )
                return False
            if not math.isfinite(value):
                self._warn(
                    f"{self.monitor} is {value} at {when}, which is never the best: nothing is saved.",
                    kind="never the best",
                )
                return False
            if not monitor.improves(value, self.model):
                if self.verbose:
                    self._say(f"\n{self.monitor}={value:.6g} does not beat {self.best} at {when}: nothing is saved\n")
                return False
        return self.save_decision is None or bool(self.save_decision(self._total, logs))

    def _save(self, logs: dict[str, float], *, epoch_done: bool) -> None:
        """Save a step now. The caller has already asked ``save_freq`` and ``save_decision`` whether to save one."""
        self._serve()
        step = self._total
        self._saver.writer.wait()
        if self.verbose:
            self._say(f"\nStep {step}: saving to {self.directory}/{step}\n")
        own = {} if self.data_iterator is None else iterator_record(self.data_iterator)
        record = StepRecord(
            step=step,
            epoch=self._epoch,
            batch=self._in_epoch,
            epoch_done=epoch_done,
            logs=logs,
            # Otherwise the metrics cover only a part of an epoch: one easy batch would be the best step.
            ranks=self.save_freq != "epoch" or epoch_done,
            callbacks=self._others.record(),
        )
        # Users may change the attributes of a callback between two saves.
        self._saver.writer.say = self._say if self.verbose else None
        self._saver.compression, self._saver.timeout_s = self.compression, self.async_timeout_s
        self._saver.save(
            self.model,
            record,
            metadata=self.metadata,
            position=position_record(self._position, own),
            checkpointables=self.checkpointables,
            in_background=self.save_on_background,
            remove_later=self.background_delete,
            then=self.post_finalization,
        )
        self._last_saved = step

    def _say(self, text: str) -> None:
        if processes.is_first():
            sys.stdout.write(text)

    def _warn(self, message: str, *, kind: str = "") -> None:
        kind = kind or message[:40]
        if kind not in self._warned:  # once per kind, not at every save
            self._warned.add(kind)
            warn_caller(message)
