"""What a server has: the checkpoints in its folders, and the files of each that it may hand out.

    --root DIR ─► scan ─► Catalogue ─► file(key)   ─► open: the same file as was listed, or none
                                   └─► names(key), checkpoints()

A request is answered from the catalogue, never from the disk: a name that is not in it does not exist. It contains
regular files of checkpoints, also where a link leads to one, but none outside of the folder that is served.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardload.errors import ShardloadError, SourceNotFoundError, UsageError
from shardload.serving.roots.scanning import Scan, ScannedFolder, ServedCheckpoint, is_shown
from shardload.stores.handed import SERVED_TAG
from shardload.stores.local import located
from shardload.stores.location import Location

_RESCAN_S = 2.0
"""Least seconds between two scans where nothing has changed; as long as the last scan took, if that is longer."""
_LONG_SCAN_S = 5.0
"""Seconds of a scan that no request waits for, only because a folder has changed."""
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOVED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})
"""Errors of a file that is gone, or whose place something else took: a link, a folder, a socket."""


@dataclass(frozen=True, slots=True)
class ServedFile:
    """A file that may be handed out, as it was when the folder was scanned, or when it was opened since."""

    path: Path
    """Its path without any link."""
    n_bytes: int
    tag: str
    """Its ETag: text that differs whenever the file was changed or replaced."""
    changed_s: float
    link: Path | None = None
    """The path by which the scan came to it, if there are links in that."""


class Catalogue:
    """The checkpoints below some folders. Thread-safe."""

    def __init__(
        self,
        roots: Iterable[str | os.PathLike[str]],
        *,
        runs: Iterable[str | os.PathLike[str]] = (),
        may_be_empty: bool = False,
    ) -> None:
        """Scan the folders; raise if one of them cannot be read, or if there is none, unless it may be so.

        ``runs`` are folders of training runs, which may be without a step yet.
        """
        folders = {_root(run) for run in runs}
        self.roots = (*(_root(root) for root in roots), *folders)
        if not self.roots and not may_be_empty:
            raise UsageError("Cannot serve nothing: name a folder with --root DIR")
        self._lock, self._stopped = threading.Lock(), threading.Event()
        # Decided once: a file that is added to a folder must not change the addresses of all others.
        self._whole = folders | {root for root in self.roots if _LocalFolder(root).is_one_checkpoint()}
        self._scan_all()

    def checkpoints(self) -> list[ServedCheckpoint]:
        """Return the checkpoints, sorted by name."""
        return sorted(self._found.checkpoints.values(), key=lambda each: each.name)

    def checkpoint(self, name: str) -> ServedCheckpoint | None:
        """Return a checkpoint by its name; ``None`` if there is none."""
        return self._found.checkpoints.get(name)

    def checkpoint_or_step(self, name: str) -> ServedCheckpoint | None:
        """Return a checkpoint by its name, or a step of a run by the name of its folder; ``None`` if there is none."""
        return self._found.checkpoint_or_step(name)

    def files_of(self, checkpoint: ServedCheckpoint) -> list[str]:
        """Return the addresses of a checkpoint's files, sorted."""
        return self._found.files_of(checkpoint)

    def left_out(self) -> list[str]:
        """Return why files are not served although they are in the folders: one sentence each."""
        return list(self._found.left_out)

    def names(self, folder: str) -> dict[str, bool] | None:
        """Return name → whether it is a folder, sorted, for what is directly in a folder; ``None`` if there is none."""
        return self._found.names(folder)

    def has_top(self, name: str) -> bool:
        """Whether a name is directly below the server's address."""
        return name in self._found.folders[""]

    def file(self, key: str) -> ServedFile | None:
        """Return a file by its address below the server's; ``None`` if there is none."""
        return self._found.files.get(key)

    def is_old(self, key: str = "") -> bool:
        """Whether the folders are to be scanned again for what was added since, or for this key; see `has_changed`."""
        return time.monotonic() >= self._old_s or self.has_changed(key)

    def has_changed(self, key: str = "") -> bool:
        """Whether there may be something else at an address since the scan: a folder on the way there has changed.

        False if scans take long, or the last one failed: then they only follow each other at intervals.
        """
        if self._has_failed or self._spent_s >= _LONG_SCAN_S:
            return False
        names = [name for name in key.split("/") if name]
        return any(self._found.times.have_changed(root, names[root in self._whole :]) for root in self.roots)

    def pause_s(self) -> float:
        """Return how many seconds to wait before the next scan, so that scans take at most half of the time."""
        return max(0.0, self._began_s + 2 * self._spent_s - time.monotonic())

    def stop(self) -> None:
        """End a scan at the next folder, and scan no more."""
        self._stopped.set()

    def refresh(self) -> None:
        """Scan the folders again, unless another thread has just done so."""
        asked_s = time.monotonic()
        with self._lock:
            if self._began_s < asked_s:
                self._scan_all()

    def _scan_all(self) -> None:
        began_s, self._has_failed = time.monotonic(), True
        try:
            self._found = self._scan()
            self._has_failed = False
        finally:
            ended_s = time.monotonic()
            self._began_s, self._spent_s = began_s, ended_s - began_s
            self._old_s = ended_s + max(_RESCAN_S, self._spent_s)

    def open(self, key: str) -> tuple[int, ServedFile] | None:
        """Open a file for reading and return its descriptor, and what it is now; ``None`` if it is gone or moved.

        Raises:
            OSError: When the file may be there but cannot be opened now, as with too many open files.
        """
        if (listed := self.file(key)) is None or (listed.link and Path(os.path.realpath(listed.link)) != listed.path):
            return None
        root = next(root for root in self.roots if listed.path.is_relative_to(root))
        try:
            descriptor = _open_below(root, listed.path)
        except OSError as error:
            if error.errno in _MOVED:
                return None
            raise
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            os.close(descriptor)
            return None
        found = _served(listed.path, facts, listed.link)
        if found != listed:
            self._found.files[key] = found
        return descriptor, found

    def is_same(self, descriptor: int, found: ServedFile) -> bool:
        """Whether an open file is still what it was when it was opened."""
        return _tag(os.fstat(descriptor)) == found.tag

    def _scan(self) -> Scan[ServedFile]:
        found = Scan[ServedFile](is_stopped=self._stopped.is_set)
        for root in self.roots:
            found.times.note(root)
            own, taken = _LocalFolder(root), set(found.folders[""])
            if root not in self._whole:
                own.add_inside(found, "", taken, depth=0)
            elif (spec := own.format()) is not None and found.is_free(root, root.name, taken):
                own.add_whole(found, root.name, spec)
        return found


def _root(root: str | os.PathLike[str]) -> Path:
    path = Path(root).expanduser()
    try:
        found = path.resolve(strict=True)
        with os.scandir(found):
            pass
    except OSError as error:
        raise SourceNotFoundError(
            f"Cannot serve {path}: {error.strerror}. --root takes a folder, or an address at s3://, gs://, "
            "http(s):// or hf://"
        ) from error
    return found


def _open_below(root: Path, path: Path) -> int:
    """Open a file name by name: no link that took the place of a folder since the scan is followed, however briefly."""
    folder = os.open(root, _FOLDER)
    try:
        *above, name = path.relative_to(root).parts
        for each in above:
            inner = os.open(each, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        # A pipe that took the file's place is not waited for.
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)


def _served(path: Path, facts: os.stat_result, link: Path | None = None) -> ServedFile:
    return ServedFile(path, facts.st_size, _tag(facts), facts.st_mtime, link)


def _tag(facts: os.stat_result) -> str:
    identity = f"{facts.st_dev} {facts.st_ino} {facts.st_mtime_ns} {facts.st_ctime_ns} {facts.st_size}"
    return SERVED_TAG + hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()


class _LocalFolder(ScannedFolder[ServedFile]):
    """A folder on this machine, while it is scanned."""

    def __init__(
        self, path: Path, root: Path | None = None, above: frozenset[Path] = frozenset(), shown: Path | None = None
    ) -> None:
        self.path, self.root = path, path if root is None else root
        self.shown = path if shown is None else shown
        self.above = above | {path}
        try:
            names = sorted(each.name for each in path.iterdir() if is_shown(each.name))
        except OSError:
            names = []
        super().__init__(located(path), names)

    def place_of(self, name: str, file: ServedFile) -> Location:
        """Return the file without any link; see `ScannedFolder.place_of`."""
        return located(file.path)

    def has_folder(self, name: str) -> bool:
        """Whether a name is that of a folder, or of a link to one."""
        return _is_folder(self.path / name)

    def note_failure(self, error: ShardloadError | OSError) -> None:
        """Do nothing: what is no checkpoint, or is still being written, is not served."""

    def folder_in(self, name: str, found: Scan[ServedFile]) -> _LocalFolder | None:
        """Return a folder inside of the root, also where a link leads to it; see `ScannedFolder.folder_in`."""
        path = self._inside(name, found)
        if path is None or path in self.above or not _is_folder(path):
            return None
        found.count_folder(path)
        found.times.note(self.shown / name)
        if not os.access(path, os.R_OK | os.X_OK):
            found.left_out[f"{path} is not served: this user may not read it"] = None
            return None
        return _LocalFolder(path, self.root, self.above, self.shown / name)

    def file_in(self, name: str, found: Scan[ServedFile]) -> ServedFile | None:
        """Return a file inside of the root, also where a link leads to it; see `ScannedFolder.file_in`."""
        path = self._inside(name, found)
        if path is None:
            return None
        shown = self.shown / name
        with suppress(OSError):
            facts = path.lstat()
            if not stat.S_ISREG(facts.st_mode):
                return None
            if os.access(path, os.R_OK):
                return _served(path, facts, None if shown == path else shown)
            found.left_out[f"{path} is not served: this user may not read it"] = None
        return None

    def _inside(self, name: str, found: Scan[ServedFile]) -> Path | None:
        """Return the path of something in the folder with all links followed; ``None`` if it is outside of the root."""
        path = self.path / name
        with suppress(OSError, RuntimeError):  # a link to itself, or a folder that shows names only
            if not path.is_symlink():
                return path
            real = path.resolve(strict=True)
            if real.is_relative_to(self.root):
                return real
            found.left_out[f"{path} is not served: it is a link to {real}, outside of {self.root}"] = None
        return None


def _is_folder(path: Path) -> bool:
    """Whether a path is that of a folder; what cannot be looked at is none."""
    with suppress(OSError):
        return path.is_dir()
    return False
