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
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardload.errors import ShardloadError, SourceError, SourceNotFoundError, UnsafeSourceError, UsageError
from shardload.loaders.contents import FolderContent
from shardload.loaders.orbax.loader import step_names, step_number
from shardload.loaders.recognition import recognise
from shardload.loaders.registry import FormatSpec, specs
from shardload.serving.folder_times import FolderTimes
from shardload.stores.handed import SERVED_TAG
from shardload.stores.local import located
from shardload.stores.location import Location, is_litter
from shardload.units import format_bytes, plural

_MOST_FILES = 1_000_000
"""Most files in all folders that are served: a catalogue is held in memory."""
_MOST_DEPTH = 32
_SMALL_FILES = (".json", ".model", "vocab.txt", "merges.txt", ".spm", ".jinja", ".tiktoken", ".vocab")
"""Endings of files that describe the weights in the same folder: configurations, tokenizers, indexes of shards."""
_ZARR_FILES = (".zarray", ".zattrs", ".zgroup", ".zmetadata")
"""Names of files of a step that begin with a dot although they are not hidden from anyone."""
_RESCAN_S = 2.0
"""Least seconds between two scans where nothing has changed; as long as the last scan took, if that is longer."""
_LONG_SCAN_S = 5.0
"""Seconds of a scan that no request waits for, only because a folder has changed."""
_DIGESTS = "shardload"
"""Folder, next to the files of a checkpoint, that has their digests."""
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOVED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})
"""Errors of a file that is gone, or whose place something else took: a link, a folder, a socket."""
RESERVED = ("api", "healthz", "readyz", "metrics", "openapi.json", "ui")
"""Names directly below a server's address that are its own."""


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


@dataclass(frozen=True, slots=True)
class ServedCheckpoint:
    """A checkpoint in the catalogue: a file, a folder, or the steps of a training run."""

    name: str
    """Its address below the server's."""
    format: str
    kind: Literal["file", "folder", "run"]
    n_files: int
    n_bytes: int
    location: Location
    steps: tuple[int, ...] = ()


@dataclass(slots=True)
class _Scan:
    """What one look at all folders has found."""

    files: dict[str, ServedFile] = field(default_factory=dict)
    folders: dict[str, dict[str, bool]] = field(default_factory=lambda: {"": {}})
    """Folder → name of what is in it → whether this is a folder."""
    checkpoints: dict[str, ServedCheckpoint] = field(default_factory=dict)
    left_out: dict[str, None] = field(default_factory=dict)
    """Why files are not served, each once."""
    n_folders: int = 0
    times: FolderTimes = field(default_factory=FolderTimes)
    is_stopped: Callable[[], bool] = lambda: False

    def count_folder(self, path: Path) -> None:
        """Count a folder that is looked at: links can make very many paths of a few folders."""
        if self.is_stopped():
            raise SourceError("Cannot look for more checkpoints: the server ends")
        self.n_folders += 1
        if self.n_folders > _MOST_FILES:
            raise UnsafeSourceError(f"Cannot serve more than {_MOST_FILES:,} folders; {path} is one more")

    def add(self, key: str, file: ServedFile) -> None:
        if len(self.files) >= _MOST_FILES:
            raise UnsafeSourceError(
                f"Cannot serve more than {_MOST_FILES:,} files; {key} is one more. Serve the folder of a checkpoint, "
                "not one with everything in it"
            )
        self.files[key] = file
        is_folder = False
        while key:
            key, _, name = key.rpartition("/")
            is_known = key in self.folders
            self.folders.setdefault(key, {})[name] = is_folder
            if is_known:
                break  # and so are all above it
            is_folder = True


class Catalogue:
    """The checkpoints below some folders. Thread-safe."""

    def __init__(self, roots: Iterable[str | os.PathLike[str]], *, runs: Iterable[str | os.PathLike[str]] = ()) -> None:
        """Scan the folders; raise if one of them cannot be read.

        ``runs`` are folders of training runs, which may be without a step yet.
        """
        folders = {_root(run) for run in runs}
        self.roots = (*(_root(root) for root in roots), *folders)
        if not self.roots:
            raise UsageError("Cannot serve nothing: name a folder with --root DIR")
        self._lock, self._stopped = threading.Lock(), threading.Event()
        # Decided once: a file that is added to a folder must not change the addresses of all others.
        self._whole = folders | {root for root in self.roots if _Folder(root).is_one_checkpoint()}
        self._scan_all()

    def checkpoints(self) -> list[ServedCheckpoint]:
        """Return the checkpoints, sorted by name."""
        return sorted(self._found.checkpoints.values(), key=lambda each: each.name)

    def checkpoint(self, name: str) -> ServedCheckpoint | None:
        """Return a checkpoint by its name; ``None`` if there is none."""
        return self._found.checkpoints.get(name)

    def files_of(self, checkpoint: ServedCheckpoint) -> list[str]:
        """Return the addresses of a checkpoint's files, sorted."""
        inside = f"{checkpoint.name}/"
        return sorted(key for key in self._found.files.copy() if key == checkpoint.name or key.startswith(inside))

    def left_out(self) -> list[str]:
        """Return why files are not served although they are in the folders: one sentence each."""
        return list(self._found.left_out)

    def names(self, folder: str) -> dict[str, bool] | None:
        """Return name → whether it is a folder, sorted, for what is directly in a folder; ``None`` if there is none."""
        found = self._found.folders.get(folder)
        return None if found is None else dict(sorted(found.items()))

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

    def _scan(self) -> _Scan:
        found = _Scan(is_stopped=self._stopped.is_set)
        for root in self.roots:
            found.times.note(root)
            own, taken = _Folder(root), set(found.folders[""])
            if root not in self._whole:
                own.add_inside(found, "", taken, depth=0)
            elif (spec := own.format()) is not None and _is_free(root, root.name, taken, found):
                own.add_whole(found, root.name, spec)
        return found


def _root(root: str | os.PathLike[str]) -> Path:
    path = Path(root).expanduser()
    try:
        found = path.resolve(strict=True)
        with os.scandir(found):
            pass
    except OSError as error:
        raise SourceNotFoundError(f"Cannot serve {path}: {error.strerror}. --root takes a folder") from error
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


class _Folder:
    """A folder of a root, while it is scanned."""

    def __init__(
        self, path: Path, root: Path | None = None, above: frozenset[Path] = frozenset(), shown: Path | None = None
    ) -> None:
        self.path, self.root = path, path if root is None else root
        self.shown = path if shown is None else shown
        self.above = above | {path}
        try:
            self.names = sorted(each.name for each in path.iterdir() if _is_shown(each.name))
        except OSError:
            self.names = []

    def format(self) -> FormatSpec | None:
        """Return the format of the folder as a whole; ``None`` if at most files in it are checkpoints."""
        with suppress(ShardloadError, OSError):
            found = recognise(located(self.path))
            content = FolderContent(located(self.path), self.names)
            if found.open_folder or found.part_format or found.contains_some(content):
                return found
        return None

    def is_one_checkpoint(self) -> bool:
        """Whether the folder is a checkpoint, and not just one that also has files of weights next to others."""
        if (spec := self.format()) is None:
            return False
        return not spec.endings or not any((self.path / name).is_dir() for name in self.names if name != _DIGESTS)

    def add_whole(self, found: _Scan, key: str, spec: FormatSpec) -> None:
        """Add a folder that is a checkpoint: everything in it, if its own files say what it is.

        Of a folder of weights that nothing describes, or of steps, only these are part of the checkpoint: it may be
        any folder with a file of weights in it.
        """
        n_before, steps = len(found.files), []
        content = FolderContent(located(self.path), self.names)
        is_described = spec.is_folder(content) and not spec.endings
        if is_described:
            n_bytes = self._add_all(found, key, depth=0)
        else:
            steps = [] if spec.endings else step_names(content.path)
            inside = [(name, self._folder(name, found)) for name in (*steps, _DIGESTS) if name in self.names]
            n_bytes = sum(
                folder._add_all(found, f"{key}/{name}", depth=1) for name, folder in inside if folder is not None
            )
            n_bytes += self._add_files(found, key, self.names, is_whole=True)
        if (n_files := len(found.files) - n_before) > 0:
            kind: Literal["folder", "run"] = "run" if steps else "folder"
            numbers = tuple(sorted(n for name in steps if (n := step_number(name)) is not None))
            found.checkpoints[key] = ServedCheckpoint(key, spec.name, kind, n_files, n_bytes, content.path, numbers)
        if not is_described:
            others = [name for name in self.names if name not in {*steps, _DIGESTS}]
            self._add_folders(found, key, others, depth=1)

    def add_inside(self, found: _Scan, key: str, taken: set[str], *, depth: int) -> None:
        """Add the checkpoints in a folder that is none itself; names in ``taken`` belong to an earlier root."""
        names = [name for name in self.names if key or _is_free(self.path / name, name, taken, found)]
        self._add_folders(found, key, names, depth=depth)
        self._add_files(found, key, names)

    def _add_folders(self, found: _Scan, key: str, names: Iterable[str], *, depth: int) -> None:
        for name in names if depth <= _MOST_DEPTH else ():
            if (folder := self._folder(name, found)) is not None:
                inner = f"{key}/{name}" if key else name
                if (spec := folder.format()) is not None:
                    folder.add_whole(found, inner, spec)
                else:
                    folder.add_inside(found, inner, set(), depth=depth + 1)

    def _add_files(self, found: _Scan, key: str, names: Iterable[str], *, is_whole: bool = False) -> int:
        """Add those files of a folder that are weights, and the small ones that may describe them.

        Each is a checkpoint of its own, unless the folder as a whole is one. Returns their number of bytes.
        """
        endings = tuple(ending for spec in specs() for ending in spec.endings if ending not in _SMALL_FILES)
        files = {name: file for name in names if (file := self._file(name, found)) is not None}
        formats: dict[str, FormatSpec] = {}
        for name, file in files.items():
            if name.lower().endswith(endings):
                with suppress(ShardloadError, OSError):
                    formats[name] = recognise(located(file.path))
        n_bytes = 0
        for name, file in files.items() if formats else ():
            inner = f"{key}/{name}" if key else name
            if not is_whole and name in formats and formats[name].first_part(name) == name:
                found.checkpoints[inner] = ServedCheckpoint(
                    inner, formats[name].name, "file", 1, file.n_bytes, located(file.path)
                )
            if name in formats or name.lower().endswith(_SMALL_FILES):
                found.add(inner, file)
                n_bytes += file.n_bytes
        return n_bytes

    def _add_all(self, found: _Scan, key: str, *, depth: int) -> int:
        n_bytes = 0
        for name in self.names:
            if (folder := self._folder(name, found)) is not None:
                if depth < _MOST_DEPTH:
                    n_bytes += folder._add_all(found, f"{key}/{name}", depth=depth + 1)
            elif (file := self._file(name, found)) is not None:
                found.add(f"{key}/{name}", file)
                n_bytes += file.n_bytes
        return n_bytes

    def _folder(self, name: str, found: _Scan) -> _Folder | None:
        path = self._inside(name, found)
        if path is None or path in self.above or not path.is_dir():
            return None
        found.count_folder(path)
        found.times.note(self.shown / name)
        if not os.access(path, os.R_OK | os.X_OK):
            found.left_out[f"{path} is not served: this user may not read it"] = None
        return _Folder(path, self.root, self.above, self.shown / name)

    def _file(self, name: str, found: _Scan) -> ServedFile | None:
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

    def _inside(self, name: str, found: _Scan) -> Path | None:
        """Return the path of something in the folder with all links followed; ``None`` if it is outside of the root."""
        path = self.path / name
        if not path.is_symlink():
            return path
        with suppress(OSError, RuntimeError):  # a link to itself
            real = path.resolve(strict=True)
            if real.is_relative_to(self.root):
                return real
            found.left_out[f"{path} is not served: it is a link to {real}, outside of {self.root}"] = None
        return None


def _is_free(path: Path, name: str, taken: set[str], found: _Scan) -> bool:
    """Whether a name directly below the server's address is free; notes it if not."""
    if name not in taken and name not in RESERVED:
        return True
    reason = "another folder has it" if name in taken else "it is the server's own"
    found.left_out[f"{path} is not served: the name {name!r} is taken, {reason}"] = None
    return False


def _is_shown(name: str) -> bool:
    if not name.isprintable() or "\\" in name or is_litter(name):
        return False
    return not name.startswith(".") or name in _ZARR_FILES


def summary(catalogue: Catalogue) -> Iterator[str]:
    """Yield lines that say what is served, for an operator."""
    found = catalogue.checkpoints()
    total = sum(each.n_bytes for each in found)
    yield f"{plural(len(found), 'checkpoint')}, {format_bytes(total)}"
    yield from catalogue.left_out()
