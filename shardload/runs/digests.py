"""Verify a step: all its bytes, or only those that are read.

                start          stop
|----unit----|--[-unit-----|--]-unit----|     the range overlaps two units: both are checked as a whole

``shardload/digests.json`` has one digest for each unit (MiB) of every file. `SavedUnits` compares bytes with these
digests. A `Checker` verifies the units that a read overlaps, each only once: the first thread that needs a unit
verifies it, others wait. `find_damage` reads a whole step.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, runtime_checkable

from shardload.errors import (
    DamagedError,
    LimitError,
    ShardloadError,
    SourceError,
    SourceNotFoundError,
    TransferError,
    UsageError,
)
from shardload.runs.digest_list import (
    DIGESTS_FILE,
    THREADS,
    Damage,
    Digests,
    DigestTask,
    FileDigest,
    digest_piece,
    flip_damage,
    hash_of,
    hasher,
    name_damage,
    pieces_of,
    scan,
    size_damage,
    step_name,
)
from shardload.runs.step import STEP_FILE, check_folder_number, number_damage
from shardload.stores.local import located
from shardload.stores.location import Location
from shardload.stores.store import UNIT_BYTES, File
from shardload.units import exact_bytes

__all__ = ["DIGESTS_FILE", "Checker", "Damage", "Digests", "SavedUnits", "find_damage"]

_PIECE_BYTES = 128 << 10
"""Bytes that `Checker.check` reads at once: they fit into the L2 cache, and are too few to count as memory used."""


def _close_all(files: dict[str, File]) -> None:
    # Empty the dict itself: `close` and the finalizer share it, so no file is closed twice.
    while files:
        files.popitem()[1].close()


class SavedUnits:
    """Compares what was read of a step with the digests that it was saved with, MiB by MiB. Thread-safe.

    ``shown`` is the step's path or URL, for messages.
    """

    def __init__(self, digests: Digests, *, step: str, shown: str) -> None:
        self.digests = digests
        self.bytes_checked = 0
        self._step, self._shown = step, shown
        self._lock = threading.Lock()

    def of_file(self, name: str) -> FileDigest:
        """Return the saved digests of the file ``name``, relative to the step's folder; raise if there are none."""
        if (found := self.digests.files.get(name)) is None:
            raise self.damaged(Damage(name, "was not saved with the step"))
        return found

    def span(self, name: str, unit: int) -> tuple[int, int]:
        """Return the byte offsets in a file at which one of its units (MiB) begins and ends (exclusive)."""
        first = unit * UNIT_BYTES
        return first, min(first + UNIT_BYTES, self.of_file(name).n_bytes)

    def compare(self, name: str, unit: int, found: str) -> None:
        """Raise a `DamagedError` unless ``found``, the digest of a unit just read, equals the unit's saved digest."""
        first, last = self.span(name, unit)
        with self._lock:
            self.bytes_checked += last - first
        if found != self.of_file(name).units[unit]:
            raise self.damaged(flip_damage(name, first, last, ""))

    def wrong_size(self, name: str, *, found: int | None = None) -> DamagedError:
        """Return the error for a file that is shorter than it was saved; ``found`` is its present size, if known."""
        expected = self.of_file(name).n_bytes
        if found is not None:
            return self.damaged(size_damage(name, found, expected, ""))
        return self.damaged(Damage(name, f"was truncated: it was saved with {exact_bytes(expected)}, and has fewer"))

    def damaged(self, found: Damage) -> DamagedError:
        """Return the error to raise for a defect."""
        where = "" if found.offset is None else f" from byte {found.offset}"
        return DamagedError(
            f"Step {self._step} is damaged: {self._shown}/{found.path}{where} {found.what}. "
            "Restore an earlier step, or copy this one again"
        )


@runtime_checkable
class _VerifyingStore(Protocol):
    """A store (a source of files, such as a URL) that contains one step and verifies all bytes that it reads."""

    saved: SavedUnits

    def name_damage(self) -> list[Damage]:
        """Return the files of the step that are missing or unexpected, found without reading data."""
        ...


class Checker:
    """Compares those parts of a step that a load reads with the step's digests, each MiB at most once. Thread-safe."""

    def __init__(self, folder: str | os.PathLike[str] | Location) -> None:
        """Read the digests of a step's folder; raise `SourceNotFoundError` if the folder has no ``digests.json``."""
        self.folder = located(folder)
        store = self.folder.store
        if isinstance(store, _VerifyingStore):
            self.saved = store.saved
        else:
            self.saved = SavedUnits(Digests.read(folder), step=step_name(folder), shown=str(self.folder))
        self._real = self.folder.resolved()
        self._lock = threading.Lock()
        self._files: dict[str, File] = {}
        # The finalizer gets the dict, not self, which it would keep alive.
        weakref.finalize(self, _close_all, self._files)
        self._units: dict[tuple[str, int], Future[None]] = {}

    @property
    def bytes_checked(self) -> int:
        """Bytes read and compared so far."""
        return self.saved.bytes_checked

    @classmethod
    def of_step(cls, folder: str | os.PathLike[str] | Location) -> Checker:
        """Open a step; verify all names and sizes, and files up to 1 MiB. Longer files are verified when they are read.

        Raise a `DamagedError` for any defect, also if the digests are missing or the folder has another step's number.
        """
        where = located(folder)
        if where.store.is_verifying:  # small files were checked when they were fetched
            return cls(where)
        try:
            found = cls(where)
        except SourceNotFoundError as error:
            raise DamagedError(f"Step {where.name} in {where.parent} lost its digests: {error}") from error
        # Names and sizes first: that needs no reads, and finds interrupted copies.
        if damage := found.saved.digests.check_names(where.local_path()):
            raise DamagedError(str(damage[0]))
        for name, digest in found.saved.digests.files.items():
            # `check_folder_number` trusts step.json, which may exceed 1 MiB: it contains the user's metadata.
            if digest.n_bytes <= UNIT_BYTES or name == STEP_FILE:
                found.check_whole(name)
        check_folder_number(where)
        return found

    def check(self, path: str | os.PathLike[str] | Location, start: int, stop: int) -> None:
        """Verify every MiB that overlaps bytes ``[start, stop)`` of a file; return when all are verified.

        The path is relative to the step's folder, or absolute in it. A `DamagedError` names step, file and offset; each
        later call raises it again. A file that cannot be read raises a `TransferError`; a later call reads it again.
        """
        name = self._relative(path)
        size = self.saved.of_file(name).n_bytes
        if not 0 <= start <= stop <= size:
            raise self.saved.damaged(
                Damage(name, f"should have at least {exact_bytes(stop)}, but was saved with {exact_bytes(size)}")
            )
        if start == stop or self.folder.store.is_verifying:  # remote bytes are checked when they arrive
            return
        file = self._open(name)
        wanted = range(start // UNIT_BYTES, (stop - 1) // UNIT_BYTES + 1)
        mine: list[int] = []
        with self._lock:
            for unit in wanted:
                if (name, unit) not in self._units:
                    self._units[name, unit] = Future()
                    mine.append(unit)
            results = {unit: self._units[name, unit] for unit in wanted}
        # First check all own units, then wait: two threads with overlapping ranges would otherwise wait for each other.
        for unit in mine:
            self._settle(results[unit], name, unit, file=file)
        for done in results.values():
            done.result()

    def read_unit(self, path: str | os.PathLike[str] | Location, unit: int, into: memoryview) -> int:
        """Read one unit (MiB) of a file into a buffer and verify it; return its length, shorter at the file's end."""
        name = self._relative(path)
        first, last = self.saved.span(name, unit)
        if first >= last:
            return 0
        part = into[: last - first]
        self._open(name).read_into(part, first)
        if not self.folder.store.is_verifying:
            self.saved.compare(name, unit, hash_of(part))
        return last - first

    def units_by_file(self) -> dict[str, tuple[str, ...]]:
        """Return the digests of all MiB of each file, by the file's name in the step, for processes to compare."""
        return {name: digest.units for name, digest in self.saved.digests.files.items()}

    def check_whole(self, path: str | os.PathLike[str] | Location) -> None:
        """Verify all bytes of a file, each MiB at most once; raise also if it was saved empty and has bytes now."""
        name = self._relative(path)
        self._open(name)
        self.check(name, 0, self.saved.of_file(name).n_bytes)

    def close(self) -> None:
        """Close all open files. The checker stays usable: it reopens files when needed."""
        with self._lock:
            _close_all(self._files)

    def __enter__(self) -> Checker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _relative(self, path: str | os.PathLike[str] | Location) -> str:
        if not isinstance(path, Location) and not Path(path).is_absolute():
            return Path(path).as_posix()
        for root in (self.folder, self._real):
            if name := located(path).relative_to(root):
                return name
        raise UsageError(f"{path} is not inside the step {self.folder}")

    def _open(self, name: str) -> File:
        with self._lock:
            if name in self._files:
                return self._files[name]
            path = self._real / name
            # `_real` contains no link, so any link on the way to the file is inside the step.
            if path.resolved() != path:
                raise self.saved.damaged(
                    Damage(name, "is reached through a symbolic link, which is not allowed in a step")
                )
            try:
                file = path.open()
            except (SourceError, SourceNotFoundError) as error:
                # Not damage: without permission, the earlier step that a DamagedError recommends would fail, too.
                if isinstance(error.__cause__, PermissionError):
                    raise TransferError(str(error)) from error
                raise self.saved.damaged(Damage(name, f"cannot be opened: {error}")) from error
            found, expected = file.n_bytes, self.saved.of_file(name).n_bytes
            if found != expected:
                file.close()
                raise self.saved.damaged(size_damage(name, found, expected, ""))
            self._files[name] = file
            return file

    def _settle(self, done: Future[None], name: str, unit: int, *, file: File) -> None:
        """Verify one unit (MiB) of a file; put the result or error into ``done``, which other threads wait for."""
        try:
            first, last = self.saved.span(name, unit)
            running, piece = hasher(), memoryview(bytearray(min(_PIECE_BYTES, last - first)))
            for start in range(first, last, _PIECE_BYTES):
                part = piece[: min(_PIECE_BYTES, last - start)]
                file.read_into(part, start)
                running.update(part)
            self.saved.compare(name, unit, running.hexdigest())
        except BaseException as error:
            # A failed read does not prove damage: forget the unit, so that a later call reads it again.
            if not isinstance(error, DamagedError):
                with self._lock:
                    self._units.pop((name, unit), None)
            done.set_exception(error)
        else:
            done.set_result(None)


def find_damage(
    folder: str | os.PathLike[str] | Location, *, progress: Callable[[int], None] | None = None
) -> list[Damage]:
    """Read a whole step that shardload saved, and return its defects; an empty list means that the step is intact.

    ``progress`` is called in this thread with the number of bytes checked since the previous call.
    """
    where = located(folder)
    if not where.is_folder():
        raise SourceNotFoundError(f"Cannot verify {where}: there is no such folder")
    step = step_name(where)
    try:
        digests = Digests.read(where)
        if isinstance(where.store, _VerifyingStore):
            damage = where.store.name_damage()
        else:
            damage = name_damage(digests, scan(where.local_path()), step)
    # A store that does not respond says nothing about the step, nor does a limit of this process.
    except (TransferError, LimitError):
        raise
    except ShardloadError as error:
        return [Damage(DIGESTS_FILE, f"cannot be trusted: {error}", step=step)]
    except OSError as error:
        if limit := LimitError.explaining(error, f"read {where}"):
            raise limit from error
        return [Damage(str(error.filename), f"cannot be listed: {error.strerror}", step=step)]
    # A file of the wrong size would also fail its digests; one line for each file is enough.
    bad = {found.path for found in damage}
    pieces = [p for name, f in digests.files.items() if name not in bad for p in pieces_of(name, f.n_bytes)]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="shardload-verify") as pool:
        results = pool.map(lambda p: _piece_damage(where, p, digests.files[p.path], step), pieces)
        try:
            for piece, found in zip(pieces, results, strict=True):
                damage += found
                if progress is not None:
                    size = digests.files[piece.path].n_bytes
                    progress(min(piece.count * UNIT_BYTES, size - piece.first * UNIT_BYTES))
        except BaseException:  # interrupted, or `progress` wants to stop: the rest need not be read
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    damage += number_damage(where)
    return sorted(damage, key=lambda d: (d.path, d.offset or 0))


def _piece_damage(folder: Location, piece: DigestTask, expected: FileDigest, step: str) -> list[Damage]:
    try:
        found = digest_piece(folder, piece, expected.n_bytes)
    except LimitError:
        raise
    except (ShardloadError, OSError) as error:
        if limit := LimitError.explaining(error, f"read {folder / piece.path}"):
            raise limit from error
        if isinstance(error, TransferError) and folder.store.is_remote:
            raise  # a store that does not respond says nothing about the step
        return [Damage(piece.path, f"cannot be read: {error}", piece.first * UNIT_BYTES, step)]
    wrong = [piece.first + k for k, unit in enumerate(found) if unit != expected.units[piece.first + k]]
    # Merge adjacent units: a lost block of 1 GiB is one line of the report, not 1024.
    runs: list[list[int]] = []
    for unit in wrong:
        if runs and runs[-1][1] == unit:
            runs[-1][1] = unit + 1
        else:
            runs.append([unit, unit + 1])
    size = expected.n_bytes
    return [flip_damage(piece.path, a * UNIT_BYTES, min(b * UNIT_BYTES, size), step) for a, b in runs]
