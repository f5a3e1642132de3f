"""One step at a time, from the arrays to a published folder; what fails in the background is raised in the foreground.

    training thread   wait for the last save · begin staging · take hold of the arrays ─► returns
    worker thread     Orbax writes · shardload/*.json · digests · publish · remove old steps · post_finalization

The arrays of CPU devices are held where they are (`_snapshot`); what cannot be, and what several processes save
together, Orbax copies off the devices in the training thread.

Several processes do each of these stages together: process 0 begins, publishes and removes, every one writes its own
shards and makes the digests of the files it wrote, and what fails on one of them fails on all.

A process that ends, also by an exception in ``fit``, first finishes the step in flight. A failure is kept until
`raise_failure` or `wait`. Nothing half-written stays in the root: all before the publishing rename is in staging.
"""

from __future__ import annotations

import concurrent.futures.thread  # first: what registers later than it, runs before it
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

from shardload.callbacks._snapshot import snapshot
from shardload.distributed import processes
from shardload.distributed.exit_reasons import ExitRecorder
from shardload.errors import (
    ProcessLostError,
    SaveError,
    ShardloadError,
    SourceError,
    SourceNotFoundError,
    UnsupportedError,
)
from shardload.interrupts import Worker, defer_interrupt
from shardload.loaders.orbax import open_orbax
from shardload.steps import orbax_writer
from shardload.steps.digests import OWN_FOLDER, Digests
from shardload.steps.file_tree import sync_files
from shardload.steps.listing import TREE_FILE
from shardload.steps.publish import Root, Staging
from shardload.steps.save_errors import describe, save_error

_WRITERS: weakref.WeakSet[Writer] = weakref.WeakSet()

LOOK_S = 1.0
"""How often a process that waits for Orbax looks whether the others are still there."""
_OF_PROCESS = re.compile(r"(?:.*/)?ocdbt\.process_(\d+)/")


@dataclass(frozen=True, slots=True)
class SaveJob:
    """All that makes one step."""

    step: int
    items: Mapping[str, Any]
    """What Orbax writes, by name."""
    records: Mapping[str, Mapping[str, Any]]
    """Our own files: name in ``shardload/`` to JSON."""
    compression: Literal["none", "zstd"] = "none"
    timeout_s: float | None = None
    after: tuple[Callable[[int, Path], None], ...] = field(default=())
    """Called with the step and its folder once it is published, in the worker; on process 0."""


class Writer:
    """Writes the steps of one root, one at a time."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.channel = processes.Channel()
        self.witness = ExitRecorder(root.path)
        self._worker: Worker | None = None
        self._failure: ShardloadError | None = None
        self._later: Worker | None = None
        _WRITERS.add(self)

    def start(self, job: SaveJob) -> None:
        """Return as soon as the arrays may change again; waits for the step before first.

        Raises:
            ShardloadError: What made the step before fail, or this one at its start.
        """
        self.wait()
        self.witness.note(f"step {job.step} was being saved")
        with defer_interrupt():  # until the worker has it: from there on the step is finished even if fit fails
            self._start(job)

    def _start(self, job: SaveJob) -> None:
        staging = self._staging(job.step)
        try:
            begin = _begin(job, staging)
            self._worker = Worker(lambda: self._run(job, staging, begin), name=f"shardload-step-{job.step}")
        except BaseException as error:  # a second Ctrl-C as well: nothing may be left behind
            failure = _as_failure(error, job, staging)
            staging.discard()
            if not isinstance(error, Exception):
                raise
            self.witness.write(str(failure))
            raise failure from failure.__cause__

    def _staging(self, step: int) -> Staging:
        """The folder that process 0 began, seen by all of them."""
        mine: list[Staging] = []

        def begin() -> str:
            mine.append(Staging.begin(self.root, step))
            return str(mine[0].path)

        def join(path: str) -> None:
            if not mine:
                mine.append(Staging.join(path))

        path = self.channel.first(begin)
        try:
            self.channel.together(lambda: join(path))
        except BaseException:
            for staging in mine:
                staging.discard()
            raise
        return mine[0]

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            ShardloadError: When it failed.
        """
        if self._worker is not None:
            self._worker.wait()
            self._worker = None
        self.raise_failure()

    def later(self, call: Callable[[int, Path], None]) -> Callable[[int, Path], None]:
        """The same to be done ``after`` a step in a thread that the next save does not wait for, one at a time.

        Of several processes one alone would hear of its failure, so there it is done with the save.
        """
        if processes.count() > 1:
            return call

        def run(step: int, path: Path, before: Worker | None) -> None:
            if before is not None:
                before.wait()
            try:
                call(step, path)
            except BaseException as error:
                self._failure = self._failure or _after_failed(error, step, path)

        def start(step: int, path: Path) -> None:
            before = self._later
            self._later = Worker(lambda: run(step, path, before), name=f"shardload-after-{step}")

        return start

    def settle(self) -> None:
        """`wait`, and for what is done `later` as well.

        Raises:
            ShardloadError: What failed.
        """
        if self._worker is not None:
            self._worker.wait()
        if self._later is not None:
            self._later.wait()
            self._later = None
        self.wait()

    def raise_failure(self) -> None:
        """Raise what made the last save fail, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def look(self) -> None:
        """Raise what made the last save fail, if this is the place for it.

        Of several processes one would hear of it a batch before the others, and leave them waiting for it in the
        next one. So they raise it where all of them wait, with the next save; unless one of them is lost anyway.
        """
        if processes.count() == 1 or isinstance(self._failure, ProcessLostError):
            self.raise_failure()

    def _run(self, job: SaveJob, staging: Staging, begin: Callable[[], orbax_writer.PendingSave]) -> None:
        try:
            path = _finish(job, staging, begin, self.channel)
            self.witness.note("training")
        except BaseException as error:
            failure = _as_failure(error, job, staging)
            try:
                staging.discard()
                if not isinstance(failure, ProcessLostError):  # recorded where it was noticed
                    self.witness.write(str(failure))
            finally:
                self._failure = failure
            return
        try:
            self.channel.first(lambda: _follow_up(job, path))
        except BaseException as error:
            self._failure = _after_failed(error, job.step, path)


def finish_others(root: Root, *, but: Writer) -> None:
    """Wait for saves of this process that other callbacks left behind in a folder: an interrupted ``fit``, say.

    Their failures stay theirs; what they publish counts.
    """
    for writer in list(_WRITERS):
        if writer is not but and writer.root.path == root.path:
            for thread in (writer._worker, writer._later):
                if thread is not None:
                    thread.wait()


def _finish_all() -> None:
    """Called when the interpreter ends, while threads can still be started, which Orbax needs.

    Ctrl-C once more does not cost the step, as it is about to be done; another one does.
    """
    with suppress(KeyboardInterrupt), defer_interrupt():
        for writer in list(_WRITERS):
            try:
                writer.settle()
            except ShardloadError as error:  # no caller is left to raise it to
                logging.getLogger("shardload").error("%s", error)


# `atexit` and waiting for threads come too late: by then no pool takes work any more, and the step would be lost.
if (_register := getattr(threading, "_register_atexit", None)) is not None:
    assert concurrent.futures.thread
    _register(_finish_all)


def _begin(job: SaveJob, staging: Staging) -> Callable[[], orbax_writer.PendingSave]:
    """What gives the save, which has begun by then. Once this returns, the arrays may change."""
    held = snapshot(job.items) if processes.count() == 1 else None
    if held is None:
        pending = _start_save(job, staging, job.items)
        return lambda: pending
    take = held.take
    return lambda: _start_save(job, staging, take())


def _start_save(job: SaveJob, staging: Staging, items: Mapping[str, Any]) -> orbax_writer.PendingSave:
    return orbax_writer.start_save(
        staging.path, items, compression=job.compression, step=job.step, timeout_s=job.timeout_s
    )


def _finish(
    job: SaveJob, staging: Staging, begin: Callable[[], orbax_writer.PendingSave], channel: processes.Channel
) -> Path:
    channel.together(lambda: _written(job, begin()))
    channel.together(lambda: _digest(job, staging))

    def publish() -> str:
        _check_items(job, staging)
        parts = [Digests.read(_part(staging, process)) for process in range(processes.count())]
        Digests({name: found for part in parts for name, found in part.files.items()}).write(staging.path)
        return str(staging.publish())

    return Path(channel.first(publish))


def _check_items(job: SaveJob, staging: Staging) -> None:
    """Everything that was to be written is there: digests only vouch for what they find."""
    for name in job.items:
        if not (staging.path / name).is_dir():
            why = f"the folder {name!r} that was written there is missing"
            raise describe(why, step=job.step, folder=staging.path, number=errno.ENOENT)
        if name != "pytree" and not (staging.path / name / TREE_FILE).is_file():  # no tree of arrays
            continue
        try:
            open_orbax(staging.path / name)  # finds each chunk of each array
        except UnsupportedError:  # an item of the user's own, of a kind that is not read here
            continue
        except (SourceError, SourceNotFoundError) as error:
            why = f"what was written there is not whole: {error}"
            raise describe(why, step=job.step, folder=staging.path, number=errno.ENOENT) from error


def _written(job: SaveJob, pending: orbax_writer.PendingSave) -> None:
    """Wait until Orbax has written everything, for as long as all processes are there."""
    until = math.inf if job.timeout_s is None else time.monotonic() + job.timeout_s
    while True:
        try:
            return pending.result(max(0.0, min(LOOK_S, until - time.monotonic())))
        except TimeoutError as error:
            if time.monotonic() >= until:
                raise SaveError(
                    f"Step {job.step} was not written within {job.timeout_s} s (async_timeout_s) and is given up. "
                    "Steps saved before are untouched"
                ) from error
        if processes.count() > 1:
            processes.heartbeat().check()


def _digest(job: SaveJob, staging: Staging) -> None:
    """Our own files, by process 0; then the digests of what this process wrote, which is on the disk by then."""
    if processes.is_first():
        own = staging.path / OWN_FOLDER
        own.mkdir(exist_ok=True)
        for name, content in job.records.items():
            (own / name).write_text(json.dumps(_finite(content), indent=1, allow_nan=False), encoding="utf-8")
    part = Digests.compute(staging.path, of=_is_ours_to_digest)
    if processes.count() > 1:
        sync_files(staging.path, part.files)
    folder = _part(staging, processes.index())
    folder.mkdir()
    part.write(folder)


def _is_ours_to_digest(name: str) -> bool:
    """Whether this process wrote a file; process 0 also takes files without an owner."""
    found = _OF_PROCESS.match(name)
    writer = int(found.group(1)) if found else 0
    return (writer if writer < processes.count() else 0) == processes.index()


def _part(staging: Staging, process: int) -> Path:
    """Where a process leaves its part of the digests: next to the step, not in it."""
    return staging.home / f"digests-{process}"


def _follow_up(job: SaveJob, path: Path) -> None:
    for call in job.after:
        call(job.step, path)


def _as_failure(error: BaseException, job: SaveJob, staging: Staging) -> ShardloadError:
    if isinstance(error, ProcessLostError) or (isinstance(error, ShardloadError) and not isinstance(error, SaveError)):
        return error
    try:
        staging.check()  # a missing folder explains Orbax's errors about files in it
    except OSError as gone:
        if isinstance(gone, SaveError) and str(gone) != str(error):
            gone.__cause__ = error
            return gone
    if isinstance(error, SaveError):
        return error
    made = save_error(error, step=job.step, folder=staging.path)
    made.__cause__ = error
    return made


def _after_failed(error: BaseException, step: int, path: Path) -> ShardloadError:
    what = str(error) if isinstance(error, ShardloadError) else f"{type(error).__name__}: {error}"
    made = SaveError(f"Step {step} is saved in {path}, but what was to follow failed: {what}")
    made.__cause__ = error
    return made


def _finite(content: Any) -> Any:
    """JSON has no NaN and no infinity: a loss that is none of the numbers there are is written as null."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    return [_finite(value) for value in content] if isinstance(content, (list, tuple)) else content
