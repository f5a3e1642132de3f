"""How a folder, on this machine or at an address, is scanned for checkpoints: by the loaders' own recognition.

ScannedFolder.add_whole   the folder is one checkpoint ─┐
ScannedFolder.add_inside  it has some in it            ─┴─► Scan: files, folders, checkpoints, what was left out
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from shardload.errors import ShardloadError, SourceError, UnsafeSourceError
from shardload.loaders.contents import FolderContent
from shardload.loaders.orbax.loader import step_names, step_number
from shardload.loaders.recognition import recognise
from shardload.loaders.registry import FormatSpec, specs
from shardload.serving.roots.folder_times import FolderTimes
from shardload.stores.announced import RESERVED
from shardload.stores.location import Location, is_litter
from shardload.units import format_bytes, plural

_MOST_FILES = 1_000_000
"""Most files in all folders that are served: a catalogue is held in memory."""
_MOST_DEPTH = 32
_SMALL_FILES = (".json", ".model", "vocab.txt", "merges.txt", ".spm", ".jinja", ".tiktoken", ".vocab")
"""Endings of files that describe the weights in the same folder: configurations, tokenizers, indexes of shards."""
_ZARR_FILES = (".zarray", ".zattrs", ".zgroup", ".zmetadata")
"""Names of files of a step that begin with a dot although they are not hidden from anyone."""
_DIGESTS = "shardload"
"""Folder, next to the files of a checkpoint, that has their digests."""


class ListedFile(Protocol):
    """A file that a scan has found."""

    @property
    def n_bytes(self) -> int:
        """Its size."""
        ...


FileT = TypeVar("FileT", bound=ListedFile)


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

    @property
    def source(self) -> str | None:
        """The address that it is fetched from; ``None`` if it is on the server's machine."""
        return str(self.location) if self.location.store.is_remote else None


@dataclass(slots=True)
class Scan(Generic[FileT]):
    """What one look at all folders has found."""

    files: dict[str, FileT] = field(default_factory=dict)
    folders: dict[str, dict[str, bool]] = field(default_factory=lambda: {"": {}})
    """Folder → name of what is in it → whether this is a folder."""
    checkpoints: dict[str, ServedCheckpoint] = field(default_factory=dict)
    left_out: dict[str, None] = field(default_factory=dict)
    """Why files are not served, each once."""
    n_folders: int = 0
    times: FolderTimes = field(default_factory=FolderTimes)
    is_stopped: Callable[[], bool] = lambda: False

    def count_folder(self, path: object) -> None:
        """Count a folder that is looked at: links can make very many paths of a few folders."""
        if self.is_stopped():
            raise SourceError("Cannot look for more checkpoints: the server ends")
        self.n_folders += 1
        if self.n_folders > _MOST_FILES:
            raise UnsafeSourceError(f"Cannot serve more than {_MOST_FILES:,} folders; {path} is one more")

    def add(self, key: str, file: FileT) -> None:
        """Add a file at an address below the server's."""
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

    def names(self, folder: str) -> dict[str, bool] | None:
        """Return name → whether it is a folder, sorted, for what is directly in a folder; ``None`` if there is none."""
        found = self.folders.get(folder)
        return None if found is None else dict(sorted(found.items()))

    def checkpoint_or_step(self, name: str) -> ServedCheckpoint | None:
        """Return a checkpoint by its name, or a step of a run by the name of its folder; ``None`` if there is none."""
        above, _, own = name.rpartition("/")
        run, step = self.checkpoints.get(above), step_number(own)
        if name in self.checkpoints or run is None or step not in run.steps or name not in self.folders:
            return self.checkpoints.get(name)
        sizes = [file.n_bytes for file in self._files_below(name)]
        return ServedCheckpoint(name, run.format, "folder", len(sizes), sum(sizes), run.location / own)

    def _files_below(self, folder: str) -> Iterator[FileT]:
        for name, is_folder in self.folders[folder].items():
            if is_folder:
                yield from self._files_below(f"{folder}/{name}")
            else:
                yield self.files[f"{folder}/{name}"]

    def files_of(self, checkpoint: ServedCheckpoint) -> list[str]:
        """Return the addresses of a checkpoint's files, sorted."""
        inside = f"{checkpoint.name}/"
        return sorted(key for key in self.files.copy() if key == checkpoint.name or key.startswith(inside))

    def is_free(self, path: object, name: str, taken: set[str]) -> bool:
        """Whether a name directly below the server's address is free for ``path``; notes it if not."""
        if name not in taken and name not in RESERVED:
            return True
        reason = "another folder has it" if name in taken else "it is the server's own"
        self.left_out[f"{path} is not served: the name {name!r} is taken, {reason}. Rename it"] = None
        return False


class LeftOut:
    """Tells an operator why files are not served: each reason once, as long as it lasts."""

    def __init__(self, told: Iterable[str], log: Callable[[dict[str, Any]], None]) -> None:
        """``told`` are reasons that the operator knows."""
        self._told, self._log = set(told), log

    def tell(self, reasons: Iterable[str]) -> None:
        """Log those reasons, of all that there are now, which were not there the last time."""
        now = list(reasons)
        for text in now:
            if text not in self._told:
                self._log({"problem": text})
        self._told = set(now)


class ScannedFolder(ABC, Generic[FileT]):
    """A folder of a root, while it is scanned."""

    def __init__(self, place: Location, names: list[str]) -> None:
        """``names`` are those in the folder that may be shown, sorted."""
        self.place, self.names = place, names

    @abstractmethod
    def folder_in(self, name: str, found: Scan[FileT]) -> ScannedFolder[FileT] | None:
        """Return a folder in this one; ``None`` if there is none of that name, or it is not served."""

    @abstractmethod
    def file_in(self, name: str, found: Scan[FileT]) -> FileT | None:
        """Return a file in this folder; ``None`` if there is none of that name, or it is not served."""

    @abstractmethod
    def has_folder(self, name: str) -> bool:
        """Whether a name in this folder is that of a folder."""

    @abstractmethod
    def place_of(self, name: str, file: FileT) -> Location:
        """Return where a file in this folder is read, to recognise its format."""

    @abstractmethod
    def note_failure(self, error: ShardloadError | OSError) -> None:
        """Take an error of a look at a file or at this folder, which then counts as none; or raise it."""

    def format(self) -> FormatSpec | None:
        """Return the format of the folder as a whole; ``None`` if at most files in it are checkpoints."""
        try:
            found = recognise(self.place)
            content = FolderContent(self.place, self.names)
            if found.open_folder or found.part_format or found.contains_some(content):
                return found
        except (ShardloadError, OSError) as error:
            self.note_failure(error)
        return None

    def is_one_checkpoint(self) -> bool:
        """Whether the folder is a checkpoint, and not just one that also has files of weights next to others."""
        if (spec := self.format()) is None:
            return False
        return not spec.endings or not any(self.has_folder(name) for name in self.names if name != _DIGESTS)

    def add_whole(self, found: Scan[FileT], key: str, spec: FormatSpec) -> None:
        """Add a folder that is a checkpoint: everything in it, if its own files say what it is.

        Of a folder of weights that nothing describes, or of steps, only these are part of the checkpoint: it may be
        any folder with a file of weights in it.
        """
        n_before, steps = len(found.files), []
        content = FolderContent(self.place, self.names)
        is_described = spec.is_folder(content) and not spec.endings
        if is_described:
            n_bytes = self._add_all(found, key, depth=0)
        else:
            steps = [] if spec.endings else step_names(content.path)
            inside = [(name, self.folder_in(name, found)) for name in (*steps, _DIGESTS) if name in self.names]
            n_bytes = sum(
                folder._add_all(found, f"{key}/{name}", depth=1) for name, folder in inside if folder is not None
            )
            n_bytes += self._add_files(found, key, self.names, is_whole=True)
        if (n_files := len(found.files) - n_before) > 0:
            kind: Literal["folder", "run"] = "run" if steps else "folder"
            numbers = tuple(sorted(n for name in steps if (n := step_number(name)) is not None))
            found.checkpoints[key] = ServedCheckpoint(key, spec.name, kind, n_files, n_bytes, self.place, numbers)
        if not is_described:
            others = [name for name in self.names if name not in {*steps, _DIGESTS}]
            self._add_folders(found, key, others, depth=1)

    def add_inside(self, found: Scan[FileT], key: str, taken: set[str], *, depth: int) -> None:
        """Add the checkpoints in a folder that is none itself; names in ``taken`` belong to an earlier root."""
        names = [name for name in self.names if key or found.is_free(self.place / name, name, taken)]
        self._add_folders(found, key, names, depth=depth)
        self._add_files(found, key, names)

    def _add_folders(self, found: Scan[FileT], key: str, names: Iterable[str], *, depth: int) -> None:
        for name in names if depth <= _MOST_DEPTH else ():
            if (folder := self.folder_in(name, found)) is not None:
                inner = f"{key}/{name}" if key else name
                if (spec := folder.format()) is not None:
                    folder.add_whole(found, inner, spec)
                else:
                    folder.add_inside(found, inner, set(), depth=depth + 1)

    def _add_files(self, found: Scan[FileT], key: str, names: Iterable[str], *, is_whole: bool = False) -> int:
        """Add those files of a folder that are weights, and the small ones that may describe them.

        Each is a checkpoint of its own, unless the folder as a whole is one. Returns their number of bytes.
        """
        endings = tuple(ending for spec in specs() for ending in spec.endings if ending not in _SMALL_FILES)
        files = {name: file for name in names if (file := self.file_in(name, found)) is not None}
        formats: dict[str, FormatSpec] = {}
        for name, file in files.items():
            if name.lower().endswith(endings):
                try:
                    formats[name] = recognise(self.place_of(name, file))
                except (ShardloadError, OSError) as error:
                    self.note_failure(error)
        n_bytes = 0
        for name, file in files.items() if formats else ():
            inner = f"{key}/{name}" if key else name
            if not is_whole and name in formats and formats[name].first_part(name) == name:
                found.checkpoints[inner] = ServedCheckpoint(
                    inner, formats[name].name, "file", 1, file.n_bytes, self.place_of(name, file)
                )
            if name in formats or name.lower().endswith(_SMALL_FILES):
                found.add(inner, file)
                n_bytes += file.n_bytes
        return n_bytes

    def _add_all(self, found: Scan[FileT], key: str, *, depth: int) -> int:
        n_bytes = 0
        for name in self.names:
            if (folder := self.folder_in(name, found)) is not None:
                if depth < _MOST_DEPTH:
                    n_bytes += folder._add_all(found, f"{key}/{name}", depth=depth + 1)
            elif (file := self.file_in(name, found)) is not None:
                found.add(f"{key}/{name}", file)
                n_bytes += file.n_bytes
        return n_bytes


def is_shown(name: str) -> bool:
    """Whether a file or folder of this name may be served: it is not hidden, and fits in an address."""
    if not name.isprintable() or "\\" in name or is_litter(name):
        return False
    return not name.startswith(".") or name in _ZARR_FILES


def summary(found: Iterable[ServedCheckpoint]) -> str:
    """Return how much is served, for an operator."""
    checkpoints = list(found)
    return f"{plural(len(checkpoints), 'checkpoint')}, {format_bytes(sum(each.n_bytes for each in checkpoints))}"
