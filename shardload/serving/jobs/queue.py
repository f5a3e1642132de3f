"""The jobs of a server: one after the other, in a thread, cancelled or stopped between two reads.

    submit ─► waiting ─► running ─► done, failed
                 └─► cancelled ◄─┘

A server that ends leaves jobs waiting or running: the next one with the same ``--state`` goes on with them.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from typing import Any

from shardload.errors import SourceError, public_name, without_secrets
from shardload.serving.jobs.records import Job, JobKind, JobRecords
from shardload.serving.jobs.work import JobWork
from shardload.serving.limits import share_of
from shardload.serving.rack.answers import RemoteFiles
from shardload.serving.roots.catalogue import Catalogue
from shardload.serving.roots.scanning import ServedCheckpoint

_MOST_WAITING = 100
_LOOK_S = 0.25
"""How often a job that fetches looks whether it is to stop, in seconds."""
_MOST_STARTS = 3
"""How often a job is begun if the server does not survive it."""
_ROOM = "Free space where --state is"
_STORED_S = 1.0
"""How often the progress of a job is stored, in seconds."""


class TooManyJobsError(Exception):
    """So many jobs wait that no more are taken, of this client or of all."""


class OtherJobError(Exception):
    """A job with the same key has another kind or checkpoint."""


class _JobStoppedError(BaseException):
    """A job was cancelled, or the server ends."""


class Jobs:
    """Jobs with the checkpoints of a catalogue; ``log`` gets the facts of each job that ended. Thread-safe."""

    def __init__(self, catalogue: Catalogue, records: JobRecords, log: Callable[[dict[str, Any]], None]) -> None:
        self._catalogue, self._records, self._log = catalogue, records, log
        self._storing = threading.RLock()
        """Held while a job begins, ends or is cancelled, and stored: that waits for the disk."""
        self._changed = threading.Condition()
        """Held for moments, also by the event loop."""
        self._jobs = {job.id: job for job in records.jobs()}
        self._clients: dict[str, str] = {}
        """Job that is not over → the client that asked this process for it."""
        self._cancelled: set[str] = set()
        self._is_ending = False
        self._stored_s = 0.0
        self._remote: RemoteFiles | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, remote: RemoteFiles, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to work, first on what an earlier process left unfinished.

        ``remote`` serves what is at addresses, and ``loop`` is the one that fetches it.
        """
        self._remote, self._loop = remote, loop
        self._thread = threading.Thread(target=self._work, name="shardload-jobs", daemon=True)
        self._thread.start()

    def checkpoint(self, name: str) -> ServedCheckpoint | None:
        """Return a checkpoint, or a step of a run, that jobs can be done with."""
        if (found := self._catalogue.checkpoint_or_step(name)) is None and self._remote is not None:
            found = self._remote.catalogue.checkpoint_or_step(name)
        return found

    def interrupt(self) -> None:
        """Begin to stop the job that runs, so that the next process does it."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Stop the job that runs, and close the records."""
        self.interrupt()
        if self._thread is not None:
            self._thread.join()
        self._records.close()

    def all(self) -> list[Job]:
        """Return all jobs, the oldest first."""
        with self._changed:
            return list(self._jobs.values())

    def find(self, number: str) -> Job | None:
        """Return a job by its id."""
        with self._changed:
            return self._jobs.get(number)

    def sha256_of(self, key: str, tag: str) -> str | None:
        """Return the SHA-256 of a file in this version, if a job has computed it."""
        with suppress(sqlite3.Error):
            if (found := self._records.digest(key, tag)) is not None:
                return found[0]
        return None

    def submit(
        self, kind: JobKind, checkpoint: str, *, total_bytes: int, client: str, key: str | None = None
    ) -> tuple[Job, bool]:
        """Take a job that a client asks for, and return it and whether it is new.

        A job with the same key, or an unfinished one for the same, is returned instead of a new one.

        Raises:
            OtherJobError: When the job with this key is another one.
            TooManyJobsError: When too many jobs wait.
            SourceError: When the job cannot be stored.
        """
        with self._storing:
            jobs = self.all()
            if key is not None and (known := next((job for job in jobs if job.key == key), None)) is not None:
                if (known.kind, known.checkpoint) != (kind, checkpoint):
                    raise OtherJobError(known.id)
                return known, False
            unfinished = [job for job in jobs if not job.is_over]
            same = [job for job in unfinished if (job.kind, job.checkpoint) == (kind, checkpoint)]
            if same and key is None:
                return same[0], False
            self._clients = {job.id: self._clients[job.id] for job in unfinished if job.id in self._clients}
            if len(unfinished) >= _MOST_WAITING:
                raise TooManyJobsError("Too many jobs wait; try again later.")
            if list(self._clients.values()).count(client) >= share_of(_MOST_WAITING, client):
                raise TooManyJobsError("Too many jobs of this client wait; cancel some, or try again later.")
            job = Job(
                secrets.token_hex(8), kind, checkpoint, "waiting", 0, total_bytes, None, time.time(), None, key=key
            )
            try:
                removed = self._records.put(job)
            except sqlite3.Error as error:
                raise SourceError(f"Cannot store the job: {error}. {_ROOM}") from error
            with self._changed:
                for each in removed:
                    self._jobs.pop(each, None)
                self._jobs[job.id], self._clients[job.id] = job, client
                self._changed.notify_all()
        return job, True

    def cancel(self, number: str) -> Job | None:
        """Cancel a job that waits or runs, and return it; ``None`` if there is no such job.

        A job that runs is still ``running`` until it has noticed.
        """
        with self._storing:
            job = self.find(number)
            if job is not None and job.state == "running":
                with self._changed:
                    self._cancelled.add(number)
            elif job is not None and job.state == "waiting":
                job = self._put(replace(job, state="cancelled", ended_s=time.time()))
        return job

    def _put(self, job: Job) -> Job:
        with self._storing:
            self._store(job)
            with self._changed:
                self._jobs[job.id] = job
        return job

    def _store(self, job: Job) -> None:
        try:
            self._records.put(job)
        except sqlite3.Error as error:  # it is still known to this process
            self._log({"problem": f"cannot store a job: {error}"})

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_ending or self._next() is not None)
                if self._is_ending:
                    return
            with self._storing:
                if (job := self._next()) is None:  # it was cancelled meanwhile
                    continue
                is_tried = job.starts < _MOST_STARTS
                job = self._put(replace(job, state="running", done_bytes=0, starts=job.starts + is_tried))
            if is_tried:
                self._do(job)
            else:
                text = f"the server ended unexpectedly {job.starts} times while it did this; its log may say why"
                self._end(job, "failed", {"problem": text})

    def _next(self) -> Job | None:
        return next((job for job in self.all() if not job.is_over), None)

    def _do(self, job: Job) -> None:
        def count(n_bytes: int) -> None:
            with self._changed:
                if self._is_ending or job.id in self._cancelled:
                    raise _JobStoppedError
                now = self._jobs[job.id]
                self._jobs[job.id] = replace(now, done_bytes=now.done_bytes + n_bytes)

        def advance(n_bytes: int) -> None:
            count(n_bytes)
            self._store_progress(job.id)

        checkpoint = self.checkpoint(job.checkpoint)
        try:
            if checkpoint is None:
                raise FileNotFoundError(f"{job.checkpoint} is no longer there")
            advance(0)
            if checkpoint.source is not None:
                self._prefetch(job, checkpoint, count)
                result = {}
            else:
                result = JobWork(self._catalogue, self._records, job, advance).do(checkpoint)
            self._end(job, "done", result)
        except _JobStoppedError:
            if job.id in self._cancelled:
                self._end(job, "cancelled", None)
            else:
                self._put(replace(self.find(job.id) or job, starts=0))  # the server ends as it should
        except sqlite3.Error as error:
            self._end(job, "failed", {"problem": f"Cannot store the SHA-256 of a file: {error}. {_ROOM}"})
        except Exception as error:
            text = without_secrets(str(error) or public_name(error))
            if checkpoint is not None:  # clients are not told where the server has its files
                text = text.replace(str(checkpoint.location), checkpoint.name)
            self._end(job, "failed", {"problem": text})

    def _prefetch(self, job: Job, checkpoint: ServedCheckpoint, count: Callable[[int], None]) -> None:
        """Wait until the loop has fetched a remote checkpoint; it may be silent for long, or end."""
        assert self._remote is not None
        assert self._loop is not None
        fetching = asyncio.run_coroutine_threadsafe(self._remote.prefetch(checkpoint, count), self._loop)
        is_done = False
        while not is_done:
            is_done = bool(wait({fetching}, timeout=_LOOK_S).done)
            self._store_progress(job.id)
            with self._changed:
                is_stopped = self._is_ending or job.id in self._cancelled
            if is_stopped:  # at the end of the server, fetches fail in many ways
                fetching.cancel()
                raise _JobStoppedError
        fetching.result()

    def _store_progress(self, number: str) -> None:
        """Store how far a job is, in the thread of jobs, from time to time."""
        if time.monotonic() >= self._stored_s + _STORED_S and (job := self.find(number)) is not None:
            self._store(job)
            self._stored_s = time.monotonic()

    def _end(self, job: Job, state: Any, result: dict[str, Any] | None) -> None:
        with self._storing:
            job = self._put(replace(self._jobs[job.id], state=state, result=result, ended_s=time.time()))
            with self._changed:
                self._cancelled.discard(job.id)
        self._log({"job": job.id, "kind": job.kind, "checkpoint": job.checkpoint, "state": state} | (result or {}))
