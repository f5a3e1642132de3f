"""The jobs of a server, and the digests of files that they computed, in an SQLite file: both survive a restart."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from shardload.errors import SourceError, UsageError

JobKind = Literal["verify", "prefetch"]
JobState = Literal["waiting", "running", "done", "failed", "cancelled"]
JOB_KINDS: tuple[str, ...] = get_args(JobKind)
JOB_STATES: tuple[str, ...] = get_args(JobState)
_FILE = "serve.sqlite"
_FORM = 1
"""Number of this form of the tables."""
_KEPT = 1000
"""Most jobs that are kept after their end."""
_TABLES = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, key TEXT UNIQUE, kind TEXT, checkpoint TEXT, state TEXT,
    starts INTEGER, done_bytes INTEGER, total_bytes INTEGER, result TEXT, created_s REAL, ended_s REAL
);
CREATE TABLE digests (address TEXT PRIMARY KEY, tag TEXT, sha256 TEXT, job TEXT);
"""


@dataclass(frozen=True, slots=True)
class Job:
    """Work that a client asked a server to do with one of its checkpoints."""

    id: str
    kind: JobKind
    checkpoint: str
    """Address of the checkpoint below the server's."""
    state: JobState
    done_bytes: int
    total_bytes: int
    result: dict[str, Any] | None
    """What a job that is done found, or why it failed; ``None`` before its end."""
    created_s: float
    """When it was asked for, in seconds since 1970."""
    ended_s: float | None
    starts: int = 0
    """How often it was begun and not ended: a server that fails while it does a job would do it again and again."""
    key: str | None = None
    """What the client called it, so that asking again does not begin another one."""

    @property
    def is_over(self) -> bool:
        """Whether it is done, failed or cancelled."""
        return self.state not in ("waiting", "running")

    def to_json(self) -> dict[str, Any]:
        """Return the job as a dict for JSON."""
        return asdict(self)


class JobRecords:
    """What is known of jobs and digests. Thread-safe."""

    def __init__(self, folder: Path | None) -> None:
        """Open the file in a folder, or create it; without a folder, the records are in memory only.

        Raises:
            SourceError: When the folder or the file cannot be used.
            UsageError: When another server uses the folder.
        """
        self._lock = threading.Lock()
        path = ":memory:" if folder is None else str(folder / _FILE)
        try:
            if folder is not None:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite would let others read it
            self._file = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=0.0)
            self._open_tables(path)
        except (OSError, sqlite3.Error) as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                raise UsageError(
                    f"Cannot use {folder}: another server uses it. Give each server a --state of its own"
                ) from error
            raise SourceError(
                f"Cannot keep jobs in {folder}: {getattr(error, 'strerror', None) or error}. --state takes a folder "
                f"that this user may write to; if {_FILE} in it is damaged, remove that"
            ) from error

    def _open_tables(self, path: str) -> None:
        # A lock that is kept: two servers would do the same jobs. It also lets the log work without shared memory.
        self._file.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._file.execute("PRAGMA journal_mode = WAL")
        self._file.execute("PRAGMA synchronous = NORMAL")
        self._file.execute("BEGIN IMMEDIATE")
        form = self._file.execute("PRAGMA user_version").fetchone()[0]
        if form == 0:
            for statement in filter(str.strip, _TABLES.split(";\n")):
                self._file.execute(statement)
            self._file.execute(f"PRAGMA user_version = {_FORM}")
        self._file.execute("COMMIT")
        if form > _FORM:
            raise sqlite3.DatabaseError(f"a later version of shardload wrote {path}")

    def jobs(self) -> list[Job]:
        """Return all jobs, the oldest first."""
        names = [each.name for each in fields(Job)]
        with self._lock:
            rows = self._file.execute(f"SELECT {', '.join(names)} FROM jobs ORDER BY number").fetchall()
        found = [dict(zip(names, row, strict=True)) for row in rows]
        return [Job(**each | {"result": json.loads(each["result"] or "null")}) for each in found]

    def put(self, job: Job) -> list[str]:
        """Store a job, in place of what was stored of it; return the ids of old ones that were removed."""
        facts = (
            job.state,
            job.starts,
            job.done_bytes,
            None if job.result is None else json.dumps(job.result),
            job.ended_s,
        )
        with self._lock:
            changed = self._file.execute(
                "UPDATE jobs SET state = ?, starts = ?, done_bytes = ?, result = ?, ended_s = ? WHERE id = ?",
                (*facts, job.id),
            )
            if changed.rowcount:
                return []
            self._file.execute("BEGIN IMMEDIATE")
            try:
                removed = self._insert(job, facts)
                self._file.execute("COMMIT")
            except sqlite3.Error:
                with suppress(sqlite3.Error):  # SQLite has done so already after some errors
                    self._file.execute("ROLLBACK")
                raise
        return removed

    def _insert(self, job: Job, facts: tuple[Any, ...]) -> list[str]:
        self._file.execute(
            "INSERT INTO jobs (state, starts, done_bytes, result, ended_s, id, key, kind, checkpoint, total_bytes, "
            "created_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*facts, job.id, job.key, job.kind, job.checkpoint, job.total_bytes, job.created_s),
        )
        removed = self._file.execute(
            "DELETE FROM jobs WHERE ended_s IS NOT NULL AND number NOT IN "
            "(SELECT number FROM jobs WHERE ended_s IS NOT NULL ORDER BY number DESC LIMIT ?) RETURNING id",
            (_KEPT,),
        ).fetchall()
        return [each for (each,) in removed]

    def digest(self, address: str, tag: str) -> tuple[str, str] | None:
        """Return the SHA-256 of a file in this version, and the id of the job that computed it."""
        with self._lock:
            found = self._file.execute(
                "SELECT sha256, job FROM digests WHERE address = ? AND tag = ?", (address, tag)
            ).fetchone()
        return None if found is None else (found[0], found[1])

    def put_digest(self, address: str, tag: str, sha256: str, job: str) -> None:
        """Store the SHA-256 of a file, in place of that of an earlier version."""
        with self._lock:
            self._file.execute("INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?)", (address, tag, sha256, job))

    def close(self) -> None:
        """Close the file."""
        with self._lock, suppress(sqlite3.Error):
            self._file.close()
