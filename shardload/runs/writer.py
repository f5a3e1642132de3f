"""Write one step at a time, from the arrays to a published folder. Most of the work runs in a background thread.

    training thread   wait for the last save · begin staging · `snapshot` of the arrays ─► returns
    worker thread     Orbax writes · shardload/*.json · digests · publish · remove old steps · post_finalization

Items that `snapshot` cannot keep (objects with their own Orbax handler, for example) go to Orbax in the training
thread. So do all items if several processes save together.

Several processes do each stage together. Process 0 creates, publishes and removes folders; each process writes its own
shards and computes the digests of its files. A failure on one process fails on all.
"""

from __future__ import annotations

import concurrent.futures.thread  # imported first: exit functions registered after its own run before it
import errno
import json
import logging
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardload import processes
from shardload.errors import (
    ProcessLostError,
    SaveError,
    ShardloadError,
    SourceError,
    SourceNotFoundError,
    UnsupportedError,
    public_name,
)
from shardload.interrupts import Worker, defer_interrupt
from shardload.loaders.orbax import saving as orbax_writer
from shardload.loaders.orbax.loader import OWN_FOLDER, open_orbax
from shardload.loaders.orbax.saving import failed_save, save_error
from shardload.manifest import Manifest
from shardload.processes.exit_reasons import ExitRecorder
from shardload.runs.digests import Digests
from shardload.runs.listing import TREE_FILE
from shardload.runs.publish import Root, Staging
from shardload.runs.remote_root import RemoteRoot, RemoteStaging
from shardload.runs.snapshot import bytes_here, snapshot
from shardload.stores.local import located
from shardload.units import format_bytes

_WRITERS: weakref.WeakSet[Writer] = weakref.WeakSet()

_LEAST_NUMBER = 200
"""The least number of the file descriptors by which processes call their folders: more than most programs have open."""
LOOK_S = 1.0
"""Seconds between checks whether the other processes are alive, while this one waits for Orbax to write."""
_OF_PROCESS = re.compile(r"(?:.*/)?ocdbt\.process_(\d+)/")
_OF_ONE_PROCESS = re.compile(r"/c(?:/\d+)*$|(?:^|/|\.)process_\d+\b")
"""Matches the files that each process writes for itself without OCDBT: chunks of arrays, and lists of them."""


_log = logging.getLogger("shardload")

AnyRoot = Root | RemoteRoot
AnyStaging = Staging | RemoteStaging
Place = Path | str
"""A folder of steps, or a step: a path on this machine, or the URL in a bucket."""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Everything that `Writer` needs to write one step: what Orbax writes, shardload's own files, and options."""

    step: int
    items: Mapping[str, Any]
    """What Orbax writes: the content of each item, by name. Each item becomes a folder of the step."""
    records: Mapping[str, Mapping[str, Any]]
    """shardload's own JSON files: name of the file in the folder ``shardload/`` → its content."""
    compression: Literal["none", "zstd"] = "none"
    timeout_s: float | None = None
    after: tuple[Callable[[int, Any], None], ...] = ()
    """Functions to call after the step is published, with its number and folder, in the worker thread of process 0."""
    begun_s: float = field(default_factory=time.monotonic)
    """When the save began, by the clock that is never set."""


class Writer:
    """Writes steps to one folder, the root, one step at a time: each in a background thread while training goes on."""

    def __init__(self, root: AnyRoot) -> None:
        self.root = root
        self.channel = processes.Channel()
        self.witness = ExitRecorder(root.local)
        self.say: Callable[[str], None] | None = None
        """Called on process 0, in the worker thread, with a line for each step that is complete; it is logged, too."""
        self._worker: Worker | None = None
        self._failure: ShardloadError | None = None
        self._later: Worker | None = None
        _WRITERS.add(self)

    def _tell(self, text: str) -> None:
        _log.info("%s", text)
        if self.say is not None:
            self.say(f"\n{text}\n")

    def begin(self) -> None:
        """Prepare the root for a run: wait for saves to it in this process, and remove unfinished steps."""
        # A save of an interrupted `fit` may still publish a step: wait, so that the list of steps is final. Failures
        # of other callbacks are not raised here.
        for writer in list(_WRITERS):
            if writer is not self and writer.root.place == self.root.place:
                for thread in (writer._worker, writer._later):
                    if thread is not None:
                        thread.wait()
        self.witness.begin()
        orbax_writer.import_orbax()
        self.channel.first(self.root.clear_up)

    def start(self, job: SaveJob) -> None:
        """Wait for the previous save, then start to save a step; return as soon as training may change its arrays."""
        self.wait()
        self.witness.note(f"step {job.step} was being saved")
        # Until the worker has the step: from then on, it is finished even if `fit` fails.
        with defer_interrupt():
            try:
                staging = self._staging(job)
            except ShardloadError as error:
                _log_failure(error)
                raise
            try:
                begin = _begin(job, staging)
                # In the worker, too: it stops if the joint call of this thread fails on another process.
                check = processes.call.check
                self._worker = Worker(lambda: self._run(job, staging, begin, check), name=f"shardload-step-{job.step}")
            except BaseException as error:  # also for a second Ctrl-C: leave nothing behind
                failure = _as_failure(error, job, staging)
                staging.discard()
                if not isinstance(error, Exception):
                    raise
                self.witness.write(str(failure))
                _log_failure(failure)
                raise failure from failure.__cause__

    def _staging(self, job: SaveJob) -> AnyStaging:
        """Return the folder in which a step is written until it is published; process 0 creates it, others open it."""
        # Process 0 has the lock of the folder that it began; the others only open it.
        mine: list[AnyStaging] = []
        n_bytes = bytes_here(job.items)

        def begin() -> str:
            mine.append(self.root.begin(job.step, n_bytes=n_bytes))
            return mine[0].tell()

        def join(told: str) -> None:
            if not mine:
                mine.append(self.root.join(told, n_bytes=n_bytes))

        told = self.channel.first(begin)
        try:
            self.channel.together(lambda: join(told))
            self._agree_on_path(mine[0])
        except BaseException:
            for staging in mine:
                staging.discard()
            raise
        return mine[0]

    def _agree_on_path(self, staging: AnyStaging) -> None:
        """Agree on the number that is a part of the path for Orbax."""
        numbers = [0] if processes.count() == 1 else self.channel.together(lambda: staging.numbered(_LEAST_NUMBER))
        while len(set(numbers)) > 1:
            least = max(numbers)
            numbers = self.channel.together(lambda least=least: staging.numbered(least))  # type: ignore[misc]

    def wait(self) -> None:
        """Wait until the current save is complete; raise its error if it failed."""
        if self._worker is not None:
            self._worker.wait()
            self._worker = None
        self.raise_failure()

    def later(self, call: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
        """Return a function that runs ``call`` in another thread, so that the next save does not wait for it.

        Calls for several steps run one after the other. With several processes, ``call`` itself is returned, and runs
        on process 0 as a part of the save. There, a failure is sent to the other processes, so that all raise it. In
        another thread, it would be known to process 0 alone.
        """
        if processes.count() > 1:
            return call

        def run(step: int, path: Place, before: Worker | None) -> None:
            if before is not None:
                before.wait()
            try:
                call(step, path)
            except BaseException as error:
                failure = _after_failed(error, step, path)
                self._failure = self._failure or failure
                _log_failure(failure)

        def start(step: int, path: Place) -> None:
            before = self._later
            self._later = Worker(lambda: run(step, path, before), name=f"shardload-after-{step}")

        return start

    def settle(self) -> None:
        """Wait for the current save and all calls made through `later`, as when ``fit`` ends; raise if any failed."""
        if self._worker is not None:
            self._worker.wait()
        if self._later is not None:
            self._later.wait()
            self._later = None
        if processes.is_first():  # also after a failure: another run may use the folder
            self.root.finish()
        self.wait()

    def raise_failure(self) -> None:
        """Raise the error of the last save, if the save failed and its error was not raised yet."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def raise_failure_together(self) -> None:
        """Raise the error of the last save, if it failed. With several processes, only if another process was lost.

        One process may notice an error a batch before the others. If it raised the error at once, the others would wait
        for it in the next batch. So all raise it at the next save, where they meet. A lost process stops all anyway.
        """
        if processes.count() == 1 or isinstance(self._failure, ProcessLostError):
            self.raise_failure()

    def _run(
        self,
        job: SaveJob,
        staging: AnyStaging,
        begin: Callable[[], orbax_writer.PendingSave],
        check: Callable[[], None],
    ) -> None:
        processes.call.check = check  # type: ignore[method-assign]
        try:
            path = _finish(job, staging, begin, self.channel, self._tell)
            self.witness.note("training")
        except BaseException as error:
            failure = _as_failure(error, job, staging)
            try:
                staging.discard()
                if not isinstance(failure, ProcessLostError):  # recorded by the heartbeat
                    self.witness.write(str(failure))
            finally:
                self._failure = failure
                _log_failure(failure)
            return

        def follow_up() -> None:
            for call in job.after:
                call(job.step, path)

        try:
            # The step is published: a failure from here on must not discard it.
            self.channel.first(follow_up)
        except BaseException as error:
            self._failure = _after_failed(error, job.step, path)
            _log_failure(self._failure)


def _log_failure(failure: ShardloadError) -> None:
    """Log the failure of a save when it happens: training raises it later, and a bucket has no list of failures."""
    _log.error("%s", failure)


def _finish_all() -> None:
    """Finish all saves when Python exits, while Orbax can still start threads; only a second Ctrl-C cancels them."""
    with suppress(KeyboardInterrupt), defer_interrupt():
        for writer in list(_WRITERS):
            try:
                writer.settle()
            except ShardloadError as error:  # no caller is left to receive it
                _log.error("%s", error)
        # Python would wait for Orbax's threads, and these for a process that is gone, until JAX aborts this one.
        if processes.are_several() and processes.heartbeat().lost and orbax_writer.is_saving():
            processes.end_stuck("Threads of Orbax waited for it")


# `atexit` runs after the thread pools stopped accepting work, and the step would be lost.
if (_register := getattr(threading, "_register_atexit", None)) is not None:
    assert concurrent.futures.thread
    _register(_finish_all)


def _begin(job: SaveJob, staging: AnyStaging) -> Callable[[], orbax_writer.PendingSave]:
    """Keep the values to save, so that training can go on; return a function for the worker thread to start the save.

    If `snapshot` cannot keep all of them, Orbax starts at once, and the function returns the save that already runs.
    """

    def begin(items: Mapping[str, Any]) -> orbax_writer.PendingSave:
        options: Any = {"compression": job.compression, "step": job.step, "timeout_s": job.timeout_s}
        options |= {"is_shared": staging.is_shared, "shown": staging.shown}
        return orbax_writer.start_save(staging.path_for_orbax, items, **options)

    # With several processes, all must start Orbax in the same order, which only their training threads guarantee.
    if processes.count() > 1 or (kept := snapshot(job.items)) is None:
        pending = begin(job.items)
        return lambda: pending
    take = kept.take
    return lambda: begin(take())


def _finish(
    job: SaveJob,
    staging: AnyStaging,
    begin: Callable[[], orbax_writer.PendingSave],
    channel: processes.Channel,
    tell: Callable[[str], None],
) -> Place:
    # Each stage is an exchange: no process digests before all have written, and a failure stops all of them.
    channel.together(lambda: _written(job, begin()))
    channel.together(lambda: _digest(job, staging))

    def publish() -> str:
        staging.take_over()
        _check_items(job, staging)
        parts = [Digests.read(staging.part(process)) for process in reversed(range(processes.count()))]
        digests = Digests({name: found for part in parts for name, found in part.files.items()})
        digests.write(staging.path)
        place = str(staging.publish())
        size, spent_s = sum(found.n_bytes for found in digests.files.values()), time.monotonic() - job.begun_s
        tell(f"Step {job.step} is complete: {format_bytes(size)} in {spent_s:.1f} s, {place}")
        return place

    path = channel.first(publish)
    if not processes.is_first():
        staging.discard()  # what this process alone has: a folder on its own disk, whose files are uploaded
    return Path(path) if isinstance(staging, Staging) else path


def _check_items(job: SaveJob, staging: AnyStaging) -> None:
    """Check that Orbax wrote all items completely: as digests cover only files that exist, they cannot show it."""
    for name in job.items:
        if not (staging.path / name).is_dir():
            why = f"the folder {name!r} that was written there is missing"
            raise failed_save(why, step=job.step, folder=staging.shown, number=errno.ENOENT)
        if name != "pytree" and not (staging.path / name / TREE_FILE).is_file():  # not a tree of arrays
            continue
        try:
            found = open_orbax(located(staging.path / name))  # finds each chunk of each array
        except UnsupportedError:  # a user's item of a kind that open_orbax does not read
            continue
        except (SourceError, SourceNotFoundError) as error:
            why = f"the written data is incomplete: {error}"
            raise failed_save(why, step=job.step, folder=staging.shown, number=errno.ENOENT) from error
        if name == "pytree" and (other := _not_as_listed(found, job)):
            raise failed_save(
                f"{other} was not written as structure.json lists it", step=job.step, folder=staging.shown
            )


def _not_as_listed(found: Manifest, job: SaveJob) -> str | None:
    """Return the path of the first array that was not written, or not with the shape and dtype in structure.json."""
    for leaf in job.records.get("structure.json", {}).get("leaves", ()):
        if not math.prod(leaf["shape"]):  # Orbax stores no arrays without elements
            continue
        tensor = found.tensors.get("/".join(leaf["path"]))
        if tensor is None or [*tensor.shape] != [*leaf["shape"]] or tensor.dtype.name != leaf["dtype"]:
            return "/".join(leaf["path"])
    return None


def _written(job: SaveJob, pending: orbax_writer.PendingSave) -> None:
    """Wait until Orbax has written all files; raise after ``job.timeout_s``, or when another process is lost."""
    until = math.inf if job.timeout_s is None else time.monotonic() + job.timeout_s
    while True:
        try:
            return pending.result(max(0.0, min(LOOK_S, until - time.monotonic())))
        except TimeoutError as error:
            if time.monotonic() >= until:
                raise SaveError(
                    f"Step {job.step} was not written within {job.timeout_s} s (async_timeout_s) and was abandoned. "
                    "Earlier steps are untouched"
                ) from error
        if processes.count() > 1:
            processes.heartbeat().check()
            processes.call.check()


def _digest(job: SaveJob, staging: AnyStaging) -> None:
    """Write shardload's own files (process 0 only), and the digests of the files that this process wrote."""
    if processes.is_first():
        own = staging.path / OWN_FOLDER
        own.mkdir(exist_ok=True)
        for name, content in job.records.items():
            (own / name).write_text(json.dumps(_finite(content), indent=1, allow_nan=False), encoding="utf-8")
    part = Digests.compute(staging.path, of=_is_ours if staging.is_shared else _is_only_here)
    folder = staging.part(processes.index())
    folder.mkdir()
    part.write(folder)
    staging.hand_over(part)


def _is_ours(name: str) -> bool:
    """Whether this process digests a file: if this process wrote it, or is process 0 and the writer is unknown."""
    found = _OF_PROCESS.match(name)
    writer = int(found.group(1)) if found else 0
    return (writer if writer < processes.count() else 0) == processes.index()


def _is_only_here(name: str) -> bool:
    """Whether a file that this process wrote to its own disk is its part of the step, not one that process 0 has."""
    return processes.is_first() or _OF_ONE_PROCESS.search(name) is not None


def _as_failure(error: BaseException, job: SaveJob, staging: AnyStaging) -> ShardloadError:
    if isinstance(error, ProcessLostError) or (isinstance(error, ShardloadError) and not isinstance(error, SaveError)):
        return error
    try:
        # A missing folder explains Orbax's errors about files in it.
        staging.check()
    except OSError as gone:
        if isinstance(gone, SaveError) and str(gone) != str(error):
            gone.__cause__ = error
            return gone
    if isinstance(error, SaveError):
        return error
    made = save_error(error, step=job.step, folder=staging.shown)
    made.__cause__ = error
    return made


def _after_failed(error: BaseException, step: int, path: Place) -> ShardloadError:
    what = str(error) if isinstance(error, ShardloadError) else f"{public_name(error)}: {error}"
    made = SaveError(f"Step {step} is saved in {path}, but a task after the save failed: {what}")
    made.__cause__ = error
    return made


def _finite(content: Any) -> Any:
    """Return ``content`` with NaN and infinities, which JSON does not support, replaced by None."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    return [_finite(value) for value in content] if isinstance(content, (list, tuple)) else content
