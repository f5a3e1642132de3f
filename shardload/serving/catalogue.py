"""What a server has: the checkpoints in its folders, and the files of each that it may hand out.

    --root DIR ─► scan ─► Catalogue ─► file(key)   ─► open: the same file as was listed, or none
                                   └─► names(key), checkpoints()

A request is answered from the catalogue, never from the disk: a name that is not in it does not exist. It contains
regular files of checkpoints, also where a link leads to one, but none outside of the folder that is served.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardload.errors import ShardloadError, SourceNotFoundError, UnsafeSourceError, UsageError
from shardload.loaders.contents import FolderContent
from shardload.loaders.orbax.loader import possible_steps, step_number
from shardload.loaders.recognition import recognise
from shardload.loaders.registry import FormatSpec, specs
from shardload.stores.handed import SERVED_TAG
from shardload.stores.local import located
from shardload.stores.location import is_litter
from shardload.units import plural

_MOST_FILES = 1_000_000
"""Most files in all folders that are served: a catalogue is held in memory."""
_MOST_DEPTH = 32
_SMALL_FILES = (".json", ".model", ".txt", ".spm", ".jinja", ".tiktoken", ".vocab")
"""Endings of files that describe the weights beside them: configurations, tokenizers, indexes of shards."""
_ZARR_FILES = (".zarray", ".zattrs", ".zgroup", ".zmetadata")
"""Names of files of a step that begin with a dot although they are not hidden from anyone."""
_RESCAN_S = 2.0
"""How soon a scan may follow another one, where a name is asked for that the catalogue lacks."""
RESERVED = ("api", "healthz", "readyz", "metrics", "openapi.json")
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


@dataclass(frozen=True, slots=True)
class ServedCheckpoint:
    """A checkpoint in the catalogue: a file, a folder, or the steps of a training run."""

    name: str
    """Its address below the server's."""
    format: str
    kind: Literal["file", "folder", "run"]
    n_files: int
    n_bytes: int
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

    def __init__(self, roots: Iterable[str | os.PathLike[str]]) -> None:
        """Scan the folders; raise if one of them cannot be read."""
        self.roots = tuple(_root(root) for root in roots)
        if not self.roots:
            raise UsageError("Cannot serve nothing: name a folder with --root DIR")
        self._lock = threading.Lock()
        self._found, self._scanned_s = self._scan(), time.monotonic()

    def checkpoints(self) -> list[ServedCheckpoint]:
        """Return the checkpoints, sorted by name."""
        return sorted(self._found.checkpoints.values(), key=lambda each: each.name)

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

    def is_old(self) -> bool:
        """Whether the folders may be scanned again for a name that the catalogue lacks."""
        return time.monotonic() - self._scanned_s >= _RESCAN_S

    def refresh(self) -> None:
        """Scan the folders again, unless another thread has just done so."""
        asked_s = time.monotonic()
        with self._lock:
            if self._scanned_s < asked_s:
                began_s = time.monotonic()
                self._found = self._scan()
                self._scanned_s = began_s

    def open(self, key: str) -> tuple[int, ServedFile] | None:
        """Open a file for reading and return its descriptor, and what it is now; ``None`` if it is gone."""
        if (listed := self.file(key)) is None:
            return None
        try:
            # Links and pipes that took the file's place since the scan are not followed, and not waited for.
            descriptor = os.open(listed.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or listed.path.resolve() != listed.path:
                raise FileNotFoundError
        except OSError:
            os.close(descriptor)
            return None
        found = _served(listed.path, facts)
        if found != listed:
            self._found.files[key] = found
        return descriptor, found

    def is_same(self, descriptor: int, found: ServedFile) -> bool:
        """Whether an open file is still what it was when it was opened."""
        return _served(found.path, os.fstat(descriptor)) == found

    def _scan(self) -> _Scan:
        found = _Scan()
        for root in self.roots:
            own, taken = _Folder(root), set(found.folders[""])
            if (spec := own.format()) is None:
                own.add_inside(found, "", taken, depth=0)
            elif _is_free(root, root.name, taken, found):
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


def _served(path: Path, facts: os.stat_result) -> ServedFile:
    identity = f"{facts.st_dev} {facts.st_ino} {facts.st_mtime_ns} {facts.st_ctime_ns} {facts.st_size}"
    tag = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
    return ServedFile(path, facts.st_size, f"{SERVED_TAG}{tag}", facts.st_mtime)


class _Folder:
    """A folder of a root, while it is scanned."""

    def __init__(self, path: Path, root: Path | None = None, above: frozenset[Path] = frozenset()) -> None:
        self.path, self.root = path, path if root is None else root
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

    def add_whole(self, found: _Scan, key: str, spec: FormatSpec) -> None:
        """Add a folder that is a checkpoint, with everything in it."""
        before = len(found.files)
        n_bytes = self._add_all(found, key, depth=0)
        content = FolderContent(located(self.path), self.names)
        names = [] if not spec.contains_some(content) or spec.is_folder(content) else possible_steps(self.names)
        steps = tuple(sorted(n for name in names if (n := step_number(name)) is not None))
        if len(found.files) > before:
            kind: Literal["folder", "run"] = "run" if steps else "folder"
            n_files = len(found.files) - before
            found.checkpoints[key] = ServedCheckpoint(key, spec.name, kind, n_files, n_bytes, steps)

    def add_inside(self, found: _Scan, key: str, taken: set[str], *, depth: int) -> None:
        """Add the checkpoints in a folder that is none itself; names in ``taken`` belong to an earlier root."""
        files: dict[str, ServedFile] = {}
        for name in self.names:
            inner = f"{key}/{name}" if key else name
            if not key and not _is_free(self.path / name, name, taken, found):
                continue
            if (folder := self._folder(name, found)) is not None:
                if (spec := folder.format()) is not None:
                    folder.add_whole(found, inner, spec)
                elif depth < _MOST_DEPTH:
                    folder.add_inside(found, inner, set(), depth=depth + 1)
            elif (file := self._file(name, found)) is not None:
                files[name] = file
        self._add_files(found, key, files)

    def _add_files(self, found: _Scan, key: str, files: dict[str, ServedFile]) -> None:
        """Add those files of a folder that are checkpoints, and the small ones that may describe them."""
        endings = tuple(ending for spec in specs() for ending in spec.endings if ending not in _SMALL_FILES)
        formats: dict[str, FormatSpec] = {}
        for name, file in files.items():
            if name.lower().endswith(endings):
                with suppress(ShardloadError, OSError):
                    formats[name] = recognise(located(file.path))
        for name, file in files.items() if formats else ():
            inner = f"{key}/{name}" if key else name
            if name in formats and formats[name].first_part(name) == name:
                found.checkpoints[inner] = ServedCheckpoint(inner, formats[name].name, "file", 1, file.n_bytes)
            if name in formats or name.lower().endswith(_SMALL_FILES):
                found.add(inner, file)

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
        return _Folder(path, self.root, self.above)

    def _file(self, name: str, found: _Scan) -> ServedFile | None:
        path = self._inside(name, found)
        if path is None:
            return None
        with suppress(OSError):
            facts = path.lstat()
            return _served(path, facts) if stat.S_ISREG(facts.st_mode) else None
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
    yield f"{plural(len(found), 'checkpoint')}, {total / 1e9:.3g} GB"
    yield from catalogue.left_out()
