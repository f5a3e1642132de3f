"""One step at a time, from the arrays to a published folder; what fails in the background is raised in the foreground.

    training thread   wait for the last save · begin staging · Orbax copies the arrays off the devices ─► returns
    worker thread     Orbax is done · shardload/*.json · digests · publish · remove old steps · post_finalization

A process that ends, also by an exception in ``fit``, first finishes the step in flight. A failure is kept until
`raise_failure` or `wait`. Nothing half-written stays in the root: all before the publishing rename is in staging.
"""

from __future__ import annotations

import concurrent.futures.thread  # first: what registers later than it, runs before it
import json
import logging
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardload import _orbax
from shardload.errors import SaveError, ShardloadError
from shardload.steps._failures import save_error
from shardload.steps.digests import OWN_FOLDER, Digests
from shardload.steps.publish import Root, Staging

_WRITERS: weakref.WeakSet[Writer] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Job:
    """All that makes one step."""

    step: int
    items: Mapping[str, Any]
    """What Orbax writes, by name."""
    records: Mapping[str, Mapping[str, Any]]
    """What we write beside it: file name in ``shardload/`` to its JSON."""
    compression: Literal["none", "zstd"] = "none"
    timeout_s: float | None = None
    after: tuple[Callable[[int, Path], None], ...] = field(default=())
    """Called with the step and its folder once it is published, in the worker."""


class Writer:
    """Writes the steps of one root, one at a time."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self._worker: threading.Thread | None = None
        self._failure: ShardloadError | None = None
        _WRITERS.add(self)

    def start(self, job: Job) -> None:
        """Return as soon as the arrays may change again; waits for the step before first.

        Raises:
            ShardloadError: What made the step before fail, or this one at its start.
        """
        self.wait()
        staging = Staging.begin(self.root, job.step)
        try:
            pending = _orbax.start_save(
                staging.path, job.items, compression=job.compression, step=job.step, timeout_s=job.timeout_s
            )
            worker = threading.Thread(target=self._run, args=(job, staging, pending), name=f"shardload-step-{job.step}")
            worker.start()
        except BaseException as error:  # Ctrl-C as well: nothing may be left behind
            staging.discard()
            if isinstance(error, (OSError, ValueError, RuntimeError)) and not isinstance(error, ShardloadError):
                raise save_error(error, step=job.step, folder=staging.path) from error
            raise
        self._worker = worker

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            ShardloadError: When it failed.
        """
        if self._worker is not None:
            self._worker.join()
            self._worker = None
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what made the last save fail, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, job: Job, staging: Staging, pending: _orbax.Pending) -> None:
        try:
            path = _finish(job, staging, pending)
        except BaseException as error:
            staging.discard()
            self._failure = _as_failure(error, job, staging)
            return
        try:
            for call in job.after:
                call(job.step, path)
        except BaseException as error:
            self._failure = _after_failed(error, job.step, path)


def finish_others(root: Root, *, but: Writer) -> None:
    """Wait for saves of this process that other callbacks left behind in a folder: an interrupted ``fit``, say.

    Their failures stay theirs; what they publish counts.
    """
    for writer in list(_WRITERS):
        worker = writer._worker
        if writer is not but and worker is not None and writer.root.path == root.path:
            worker.join()


def _finish_all() -> None:
    """Called when the interpreter ends, while threads can still be started, which Orbax needs."""
    for writer in list(_WRITERS):
        try:
            writer.wait()
        except ShardloadError as error:  # nobody is left to raise it to
            logging.getLogger("shardload").error("%s", error)


# `atexit` and waiting for threads come too late: by then no pool takes work any more, and the step would be lost.
if (_register := getattr(threading, "_register_atexit", None)) is not None:
    assert concurrent.futures.thread
    _register(_finish_all)


def _finish(job: Job, staging: Staging, pending: _orbax.Pending) -> Path:
    try:
        pending.result(job.timeout_s)
    except TimeoutError as error:
        raise SaveError(
            f"Step {job.step} was not written within {job.timeout_s} s (async_timeout_s) and is given up. "
            "Steps saved before are untouched"
        ) from error
    own = staging.path / OWN_FOLDER
    own.mkdir(exist_ok=True)
    for name, content in job.records.items():
        (own / name).write_text(json.dumps(_finite(content), indent=1, allow_nan=False), encoding="utf-8")
    Digests.compute(staging.path).write(staging.path)
    return staging.publish()


def _as_failure(error: BaseException, job: Job, staging: Staging) -> ShardloadError:
    if isinstance(error, ShardloadError):
        return error
    made = save_error(error, step=job.step, folder=staging.path)
    made.__cause__ = error
    return made


def _after_failed(error: BaseException, step: int, path: Path) -> ShardloadError:
    made = SaveError(f"Step {step} is saved in {path}, but what was to follow failed: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made


def _finite(content: Any) -> Any:
    """JSON has no NaN and no infinity: a loss that is none of the numbers there are is written as null."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    return [_finite(value) for value in content] if isinstance(content, (list, tuple)) else content
