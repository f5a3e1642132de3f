"""The work of a job: to verify a checkpoint, or to read it into the page cache before it is needed.

    training steps        every file against the digests of its step                    verified, or damaged
    any other checkpoint  headers; every file's SHA-256 against that of the last time   verified, or damaged
                          ... or stored for the next time                               readable

The SHA-256 of the last time counts if the file has the same ETag: nothing wrote to it since.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

from shardload.errors import LimitError, MissingExtraError, ShardloadError, UnsupportedError
from shardload.loaders import open_manifest
from shardload.runs.listing import is_ours
from shardload.serving.jobs.records import Job, JobRecords
from shardload.serving.roots.catalogue import Catalogue, ServedFile
from shardload.serving.roots.scanning import ServedCheckpoint
from shardload.units import plural
from shardload.verifying import verify

_READ_BYTES = 4 << 20


class FileChangedError(Exception):
    """A file was written to, or removed, while a job read it."""


class JobWork:
    """The work of one job; ``advance`` is called with numbers of bytes, and raises to stop."""

    def __init__(self, catalogue: Catalogue, records: JobRecords, job: Job, advance: Callable[[int], None]) -> None:
        self._catalogue, self._records, self._job, self.advance = catalogue, records, job, advance
        self._problems: list[str] = []
        self._n_compared = self._n_stored = 0

    def do(self, checkpoint: ServedCheckpoint) -> dict[str, Any]:
        """Do the work, and return what it found."""
        if self._job.kind == "prefetch":
            for key in self._catalogue.files_of(checkpoint):
                self._read(key, lambda data: None)
            return {}
        if is_ours(checkpoint.location.local_path()) or checkpoint.kind == "run":
            return self._verified_steps(checkpoint)
        return self._verified_files(checkpoint)

    def start(self, total_bytes: int, description: str) -> None:
        """Do nothing: the size of the whole checkpoint is known."""

    def stop(self) -> None:
        """Do nothing."""

    def _verified_steps(self, checkpoint: ServedCheckpoint) -> dict[str, Any]:
        path = checkpoint.location.local_path()
        found = verify(path, progress=self)
        problems = [f"{each.path}: {problem}" for each in found for problem in each.problems]
        grades = {each.verdict for each in found}
        verdict = next(grade for grade in ("damaged", "readable", "verified") if grade in grades)
        notes = [note for each in found for note in each.notes]
        return _result(verdict, problems, notes, hidden=str(path), shown=checkpoint.name)

    def _verified_files(self, checkpoint: ServedCheckpoint) -> dict[str, Any]:
        notes = []
        try:
            open_manifest(checkpoint.location)
        except (UnsupportedError, LimitError, MissingExtraError) as error:
            notes.append(str(error))
        except ShardloadError as error:
            self._problems.append(str(error))
        for key in self._catalogue.files_of(checkpoint):
            self._compare(key)
        if self._n_stored:
            notes.append(f"The SHA-256 of {plural(self._n_stored, 'file')} was stored, to be compared the next time")
        verdict = "damaged" if self._problems else "readable" if self._n_stored or notes else "verified"
        hidden = str(checkpoint.location.local_path())
        return _result(verdict, self._problems, notes, hidden=hidden, shown=checkpoint.name)

    def _compare(self, key: str) -> None:
        """Compute the SHA-256 of a file, unless this job did so before a restart; compare or store it."""
        listed = self._catalogue.file(key)
        known = None if listed is None else self._records.digest(key, listed.tag)
        if listed is not None and known is not None and known[1] == self._job.id:
            self._n_stored += 1
            self.advance(listed.n_bytes)
            return
        computed = hashlib.sha256()
        found = self._read(key, computed.update)
        known = self._records.digest(key, found.tag)
        if known is None:
            self._records.put_digest(key, found.tag, computed.hexdigest(), self._job.id)
            self._n_stored += 1
        elif known[0] != computed.hexdigest():
            self._problems.append(
                f"the SHA-256 of {key} is {computed.hexdigest()}, expected {known[0]}: nothing wrote to the file since "
                "that was computed, so its disk or the memory is damaged"
            )

    def _read(self, key: str, take: Callable[[memoryview], None]) -> ServedFile:
        opened = self._catalogue.open(key)
        if opened is None:
            raise FileChangedError(f"{key} was removed")
        descriptor, found = opened
        try:
            buffer = memoryview(bytearray(min(found.n_bytes, _READ_BYTES)))
            for at in range(0, found.n_bytes, _READ_BYTES):
                piece = buffer[: found.n_bytes - at]
                if os.preadv(descriptor, [piece], at) < len(piece):
                    raise FileChangedError(f"{key} became shorter")
                take(piece)
                self.advance(len(piece))
            if not self._catalogue.is_same(descriptor, found):
                raise FileChangedError(f"{key} was written to")
        finally:
            os.close(descriptor)
        return found


def _result(verdict: str, problems: list[str], notes: list[str], *, hidden: str, shown: str) -> dict[str, Any]:
    """Return what a client is told: where the server has the files is none of it."""
    told = {"problems": problems, "notes": notes}
    return {"verdict": verdict} | {
        name: [text.replace(hidden, shown) for text in texts] for name, texts in told.items()
    }
