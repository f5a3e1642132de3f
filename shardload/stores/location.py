"""A file or a folder in a store, used like a `pathlib.PurePosixPath` that can also read.

Listings leave out *litter*, which operating systems and file systems leave in folders and which belongs to no
checkpoint. Finder writes ``.DS_Store`` into folders that it shows. macOS writes ``._model.safetensors`` next to each
file on disks that cannot store its attributes, and into archives. Windows writes ``Thumbs.db`` and ``desktop.ini``. NFS
renames a deleted file that is still open to ``.nfs000000000012ab34``.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from shardload.errors import SourceError, SourceNotFoundError, TransferError
from shardload.stores.store import File, FileIdentity, FileStream, Kind, Store, read_bytes
from shardload.units import exact_bytes

_LITTER = frozenset({".DS_Store", "Thumbs.db", "desktop.ini"})
_LITTER_PREFIXES = ("._", ".nfs0")


@dataclass(frozen=True, slots=True)
class Location:
    """The place of a file or folder, which need not exist; as text, its name in messages: an absolute path or a URL."""

    store: Store
    key: str
    """Path in the store: names joined by ``/``. For a local file, the absolute path."""

    def __lt__(self, other: Location) -> bool:
        return self.key < other.key

    def __str__(self) -> str:
        return self.store.shown(self.key)

    def __truediv__(self, name: str) -> Location:
        return Location(self.store, f"{self.key.rstrip('/')}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """Last part of the path or URL."""
        return (self.key or str(self)).rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """The folder that contains this file or folder; the root is its own parent."""
        folder = self.key.rstrip("/").rpartition("/")[0]
        # Nothing before the last slash: the parent is "/" for an absolute key, else the empty key, the store's root.
        return Location(self.store, folder or self.key[: self.key.startswith("/")])

    def is_file(self) -> bool:
        """Whether there is a regular file at this location."""
        return self.store.kind(self.key) == "file"

    def is_folder(self) -> bool:
        """Whether there is a folder at this location."""
        return self.store.kind(self.key) == "folder"

    def exists(self) -> bool:
        """Whether there is anything at this location."""
        return self.store.kind(self.key) is not None

    def is_link(self) -> bool:
        """Whether there is a symbolic link at this location."""
        return self.store.is_link(self.key)

    def resolved(self) -> Location:
        """Return the location with all symbolic links followed."""
        return Location(self.store, self.store.resolved(self.key))

    def is_inside(self, folder: Location) -> bool:
        """Whether this location is ``folder`` or below it. Only paths are compared; links are not followed."""
        return self.relative_to(folder) is not None

    def relative_to(self, folder: Location) -> str | None:
        """Return this location's path relative to ``folder``: empty for the folder itself, ``None`` outside of it."""
        if self.store is not folder.store:
            return None
        if self.key == folder.key:
            return ""
        # With its slash, so that `/a/bc` is not taken to be below `/a/b`.
        prefix = f"{folder.key.rstrip('/')}/" if folder.key else ""
        return self.key[len(prefix) :] if self.key.startswith(prefix) else None

    def names(self) -> list[str]:
        """Return the names in the folder, sorted, without litter; raise a `SourceError` if this fails."""
        return [name for name in self.store.names(self.key) if not is_litter(name)]

    def open(self) -> File:
        """Open the file; the caller closes it."""
        if (first := _first_seen.get()) is not None and self not in first and not self.store.is_remote:
            with suppress(OSError, ValueError):  # no such file, or no file name: `open` says it
                first[self] = self.store.identity(self.key)
        opener = _opener.get()
        return self.store.open(self.key) if opener is None else opener(self)

    def stream(self) -> io.BufferedReader:
        """Open the file as a Python file object, whose ``close`` closes the file; raises like `open`."""
        return io.BufferedReader(FileStream(self.open()))

    @property
    def size(self) -> int:
        """The file's size in bytes; raises like `open`."""
        with closing(self.open()) as file:
            return file.n_bytes

    def read_header(self, count: int, *, offset: int, what: str) -> bytes:
        """Read ``count`` bytes of a header; if the file has fewer, raise an error that says ``what`` is cut off."""
        with closing(self.open()) as file:
            return read_bytes(file, count, offset=offset, path=str(self), what=what)

    def identity(self) -> FileIdentity:
        """Return the current size and version of a file that was read before; raise a `TransferError` if it is gone."""
        try:
            return self.store.identity(self.key)
        except (SourceError, SourceNotFoundError, OSError) as error:
            raise TransferError(f"Cannot read {self} although its headers were read: {error}") from error

    def local_path(self) -> Path:
        """Return a path on this machine, for libraries that open files themselves."""
        return self.store.local_path(self.key)

    def local_folder(self) -> Path:
        """Return a path on this machine with the small files (configuration, tokenizer, assets) of this folder."""
        return self.store.local_folder(self.key)

    def local_part(self, start: int, stop: int) -> Path:
        """Return a path on this machine of a file that has at least these bytes of this file in their place."""
        return self.store.local_part(self.key, start, stop)


def read_ahead(files: Iterable[Location]) -> None:
    """Request the first bytes of remote files together, as their headers are read soon; do nothing for local ones."""
    for store, keys in itertools.groupby(files, lambda file: file.store):
        store.read_ahead([file.key for file in keys])


_opener: ContextVar[Callable[[Location], File] | None] = ContextVar("opener", default=None)
_first_seen: ContextVar[dict[Location, FileIdentity] | None] = ContextVar("first_seen", default=None)


@contextmanager
def opening_by(opener: Callable[[Location], File]) -> Iterator[None]:
    """Have ``opener`` open the files that this thread opens in the with block; it uses `Store.open` itself."""
    token = _opener.set(opener)
    try:
        yield
    finally:
        _opener.reset(token)


def is_litter(path: str) -> bool:
    """Whether a path ends with the name of litter, a file that an operating system leaves behind (``.DS_Store``)."""
    name = path.rpartition("/")[2]
    return name in _LITTER or name.startswith(_LITTER_PREFIXES)


class _Nowhere(Store):
    """A store without files: the place of tensors that have shapes but no values, if only a model's config exists."""

    def shown(self, key: str) -> str:
        return key

    def kind(self, key: str) -> Kind | None:
        return None

    def names(self, key: str) -> list[str]:
        raise SourceError(f"Cannot list the folder {key}: it does not exist")

    def open(self, key: str) -> File:
        raise SourceNotFoundError(f"There is no file {key}")


_NOWHERE = _Nowhere()


def nowhere(name: str) -> Location:
    """Return a location for a model that has no files; messages show it as ``name``."""
    return Location(_NOWHERE, name)


def is_nowhere(location: Location) -> bool:
    """Whether a location was made by `nowhere`: there are no files, so the tensors there have no values."""
    return location.store is _NOWHERE


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Sizes and versions of files when their headers were read; compared after the data was read, to detect changes.

    Sizes alone do not show that a file changed: a training job that rewrites its checkpoint in place keeps the file
    size but changes the weights, and a load would mix both.
    """

    files: Mapping[Location, FileIdentity]

    @classmethod
    def of(cls, paths: Iterable[Location], *, folder: Location | None = None) -> Fingerprint:
        """Return the fingerprint of files as they are now: their sizes and versions.

        In a with block of `opening`, it is that of files on this machine when they were first opened there; also of
        others that were opened inside ``folder``, such as an index of shards.
        """
        first = _first_seen.get() or {}
        inside = () if folder is None else (path for path in first if path.is_inside(folder))
        return cls({path: first.get(path) or path.identity() for path in (*paths, *inside)})

    @staticmethod
    @contextmanager
    def opening() -> Iterator[None]:
        """Note files as this thread opens them in the with block, so that none can change before `of` is called."""
        token = _first_seen.set({})
        try:
            yield
        finally:
            _first_seen.reset(token)

    def check(self) -> None:
        """Raise a `TransferError` if a file has changed since the fingerprint was taken."""
        for path, before in self.files.items():
            now = path.identity()
            if now != before:
                raise TransferError(
                    f"{path} changed since its headers were read: {_difference(before, now)}. Load it again once "
                    "its writer has finished"
                )
            if not path.store.is_unchanged(path.key):
                raise TransferError(f"{path} changed while it was read. Load it again once its writer has finished")


def _difference(before: FileIdentity, now: FileIdentity) -> str:
    if now.size != before.size:
        return f"expected {exact_bytes(before.size)}, found {exact_bytes(now.size)}"
    # Device and inode: writers often write a new file and rename it over the old one.
    if now.version[:2] != before.version[:2]:
        return f"another file of {exact_bytes(now.size)} took its place"
    return f"its {exact_bytes(now.size)} were written to"
