"""A training step in a remote store, as a `shardload.stores.store.Store` whose bytes are all verified.

    digests.json ─► names, sizes and digests of all files      (so no listing is needed: plain HTTP is enough)
    small files  ─► fetched into a private folder, each checked
    data files   ─► not fetched; `_RemoteFile` requests whole-MiB ranges and compares each MiB with its digest

Only shardload steps can be read this way. Sizes and names in ``digests.json`` are untrusted: `Digests.read` refuses
names that leave the folder, and the size of the private folder is limited.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path

from shardload.errors import (
    DamagedError,
    SourceError,
    SourceNotFoundError,
    TransferError,
    UnsafeSourceError,
    UnsupportedError,
)
from shardload.steps.checker import SavedUnits
from shardload.steps.digest_list import DIGESTS_FILE, OWN_FOLDER, Damage, Digests, is_saved
from shardload.stores import private_copies
from shardload.stores.json_files import MAX_JSON_BYTES
from shardload.stores.local import LocalFile
from shardload.stores.location import Location
from shardload.stores.remote import Fetch, Folder
from shardload.stores.remote_failures import COPY_FIRST, web_page
from shardload.stores.store import UNIT_BYTES, File, FileIdentity, Kind, Store
from shardload.units import exact_bytes, plural

MAX_FILE_BYTES = 64 << 20
"""The largest file fetched as a whole: JSON is read up to 32 MiB, B-tree nodes take a few MiB, tokenizers 40."""
MAX_COPIED_BYTES = 512 << 20
"""The limit for all fetched files together, on this machine's disk."""
MAX_FILES = 1 << 14
"""The limit for their number; each process that saved wrote two or three."""
IN_FLIGHT = 16
"""Small files fetched concurrently: their cost is one round trip each."""
_ITEMS = frozenset({OWN_FOLDER, "pytree", "model_config", "assets"})
"""Folders of a step that loading reads; other checkpointables may be of any size."""
_DATA = re.compile(r"(?:^|/)d/[^/]+$")
"""OCDBT data files. They contain B-tree nodes, too; such files are fetched on demand."""


class RemoteStep(Store):
    """A remote step. Its private folder is removed when this object is garbage-collected.

    Args:
        remote: The step's remote folder.
        digests: The content of its ``digests.json``.

    Raises:
        DamagedError: If the digests are damaged.
        TransferError: If they are a web page.
    """

    is_remote = is_verifying = True

    def __init__(self, remote: Folder, digests: bytes) -> None:
        self._remote = remote
        base = private_copies.make()
        self._folder = base / remote.name
        self._remove = weakref.finalize(self, private_copies.remove, base)
        # `Digests.read` below opens digests.json through this store, so it must count as fetched.
        self._here: set[str] = {DIGESTS_FILE}
        self._lock = threading.Lock()
        self._filled = False
        try:
            self._write(DIGESTS_FILE, digests)
            self.saved = SavedUnits(
                Digests.read(self.root),
                step=remote.name,
                shown=remote.url,
                explain=lambda name: web_page(remote.url, name),
            )
        except BaseException as error:
            self._remove()
            if isinstance(error, DamagedError) and (page := web_page(remote.url, DIGESTS_FILE)) is not None:
                raise page from error
            raise
        files = self.saved.digests.files
        # A remote store has no folders, only names with slashes, so the folders are derived from the files.
        self._kinds: dict[str, Kind] = {"": "folder"}
        for name in (*files, DIGESTS_FILE):
            self._kinds |= dict.fromkeys(_parents(name), "folder")
        self._kinds |= dict.fromkeys((*files, DIGESTS_FILE), "file")

    @property
    def root(self) -> Location:
        """The step's folder."""
        return Location(self, "")

    @property
    def n_bytes(self) -> int:
        """The total size of the step's files."""
        files = self.saved.digests.files.values()
        return sum(f.n_bytes for f in files) + (self._folder / DIGESTS_FILE).stat().st_size

    def shown(self, key: str) -> str:
        """Return the URL."""
        return f"{self._remote.url}/{key}".rstrip("/")

    def kind(self, key: str) -> Kind | None:
        """Return what the step's digests say, without a request."""
        return self._kinds.get(key)

    def names(self, key: str) -> list[str]:
        """Return what the step's digests say, without a request."""
        if self.kind(key) != "folder":
            raise SourceError(f"Cannot list the folder {self.shown(key)}: it was not saved with the step")
        prefix = f"{key}/" if key else ""
        inside = (name.removeprefix(prefix) for name in self._kinds if name.startswith(prefix) and name != key)
        return sorted(name for name in inside if "/" not in name)

    def open(self, key: str) -> File:
        """Open a fetched file, or one that is read from the store in parts."""
        if key in self._here:
            return LocalFile(self._folder / key, shown=self.shown(key))
        if key in self.saved.digests.files:
            return _RemoteFile(self._remote, self.saved, key)
        if self.kind(key) == "folder":
            raise SourceError(f"{self.shown(key)} should be a file, but it is a folder")
        raise SourceNotFoundError(f"There is no file {self.shown(key)}: it was not saved with the step")

    def identity(self, key: str) -> FileIdentity:
        """Return the size; nothing else is needed, as changed bytes never match their digests."""
        return FileIdentity(self.saved.of_file(key).n_bytes)

    def local_path(self, key: str) -> Path:
        """Return the path of a private copy: of one file, or of all small files in a folder.

        Raises:
            UnsupportedError: If the file is too large to be fetched.
            DamagedError: If a file is missing or differs from the saved one.
            TransferError: If the store does not return it.
        """
        with self._lock:
            if self.kind(key) == "file":
                self._fetch([key])
            # All small files at once, whichever folder is requested: loading needs most of them.
            elif not self._filled:
                self._fetch(filter(_is_copied, self.saved.digests.files))
                self._filled = True
        return self._folder / key

    def name_damage(self) -> list[Damage]:
        """Return missing and unexpected files, as far as the store can list them; reads no data.

        Raises:
            TransferError: If the store does not respond.
        """
        listed = {*self.saved.digests.files, DIGESTS_FILE}
        if self._remote.can_list:
            there = set(self._remote.names())
        else:
            # HTTP cannot list. A file with bytes is missed when it is read; an empty one never is, so ask for it.
            empty = (name for name, file in self.saved.digests.files.items() if not file.n_bytes)
            there = listed - {name for name in empty if self._remote.read(name) is None}
        missing = [Damage(name, "is missing", None, self._remote.name) for name in sorted(listed - there)]
        return missing + [
            Damage(name, "is unexpected: it was not saved with the step", None, self._remote.name)
            for name in sorted(filter(is_saved, there - listed))
        ]

    def _fetch(self, names: Iterable[str]) -> None:
        wanted = [name for name in names if name not in self._here]
        # Before the first request: digests.json, which names files and sizes, is untrusted.
        self._bound(wanted)
        for first in range(0, len(wanted), IN_FLIGHT):
            files = [_RemoteFile(self._remote, self.saved, name) for name in wanted[first : first + IN_FLIGHT]]
            pending = [file.begin(0, file.n_bytes) for file in files]
            for file, fetched in zip(files, pending, strict=True):
                self._write(file.name, fetched.result())
                self._here.add(file.name)

    def _bound(self, names: list[str]) -> None:
        sizes = {name: self.saved.digests.files[name].n_bytes for name in {*self._here, *names} - {DIGESTS_FILE}}
        for name in names:
            if sizes[name] > MAX_FILE_BYTES:
                raise UnsupportedError(
                    f"{self.shown(name)} has {exact_bytes(sizes[name])} and would have to be fetched whole; the limit "
                    f"is {MAX_FILE_BYTES}. {COPY_FIRST}"
                )
        if sum(sizes.values()) > MAX_COPIED_BYTES or len(sizes) > MAX_FILES:
            raise UnsafeSourceError(
                f"{self._remote.url} lists {plural(len(sizes), 'small file')} ({exact_bytes(sum(sizes.values()))} in "
                f"total); at most {MAX_FILES} files and {MAX_COPIED_BYTES} bytes are fetched. {COPY_FIRST}"
            )

    def _write(self, name: str, data: bytes | memoryview) -> None:
        target = self._folder / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        except (OSError, ValueError) as error:
            raise TransferError(
                f"Cannot copy {self.shown(name)} into the temporary folder {self._folder}: {error}. Free some "
                "space, or set TMPDIR to another folder"
            ) from error


class _RemoteFile:
    """A file of a remote step, read in whole MiB; each MiB is compared with its digest before it is returned."""

    descriptor = None

    def __init__(self, remote: Folder, saved: SavedUnits, name: str) -> None:
        self._remote, self._saved, self.name = remote, saved, name
        self.n_bytes = saved.of_file(name).n_bytes

    def begin(self, start: int, stop: int) -> _Units:
        stop = min(stop, self.n_bytes)
        fetch = self._remote.begin(self.name, start, stop) if start < stop else None
        return _Units(self._saved, self.name, start // UNIT_BYTES, stop - start, fetch)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        rest = buffer.cast("B") if buffer.nbytes else memoryview(b"")
        if offset + len(rest) > self.n_bytes:
            raise TransferError(
                f"{self._remote.url}/{self.name} has {exact_bytes(self.n_bytes)}, not {offset + len(rest)}"
            )
        while rest:
            unit, skip = divmod(offset, UNIT_BYTES)
            units = min(-(-(skip + len(rest)) // UNIT_BYTES), READ_UNITS)
            part = self.begin(offset - skip, (unit + units) * UNIT_BYTES).result()[skip : skip + len(rest)]
            rest[: len(part)] = part
            rest, offset = rest[len(part) :], offset + len(part)

    def read_unchecked(self, buffer: memoryview, offset: int) -> None:
        stop = offset + len(buffer)
        found = _present(self._saved, self.name, self._remote.begin(self.name, offset, stop))
        if len(found) != len(buffer):
            raise self._saved.wrong_size(self.name, found=offset + len(found))
        buffer[:] = found

    def close(self) -> None:
        pass


READ_UNITS = 8
"""MiB per request."""


class _Units:
    """A request for some MiB of a file."""

    def __init__(self, saved: SavedUnits, name: str, unit: int, n_bytes: int, fetch: Fetch | None) -> None:
        self._saved, self._name, self._unit, self._n_bytes, self._fetch = saved, name, unit, n_bytes, fetch

    def result(self) -> memoryview:
        if self._fetch is None:
            return memoryview(b"")
        data = memoryview(_present(self._saved, self._name, self._fetch))
        if len(data) != self._n_bytes:
            raise self._saved.wrong_size(self._name, found=self._unit * UNIT_BYTES + len(data))
        for at in range(0, len(data), UNIT_BYTES):
            self._saved.compare(self._name, self._unit + at // UNIT_BYTES, data[at : at + UNIT_BYTES])
        return data

    def cancel(self) -> None:
        if self._fetch is not None:
            self._fetch.cancel()


def _present(saved: SavedUnits, name: str, fetch: Fetch) -> bytes:
    try:
        found = fetch.result()
    except TransferError as error:
        if fetch.is_too_short(error):
            raise saved.wrong_size(name) from error
        raise
    if found is None:
        raise saved.missing(name)
    return found


def open_step(remote: Folder) -> RemoteStep | None:
    """Open the shardload step in a remote folder; ``None`` if the folder has no digests.

    Raises:
        DamagedError: If the digests are damaged.
        TransferError: If the store does not respond.
    """
    found = remote.read_small(DIGESTS_FILE, limit=MAX_JSON_BYTES)
    return None if found is None else RemoteStep(remote, found)


def _is_copied(name: str) -> bool:
    top, _, rest = name.partition("/")
    # Files directly in the step, and everything in the folders of `_ITEMS` except array data.
    return (not rest or top in _ITEMS) and not _DATA.search(name)


def _parents(name: str) -> Iterable[str]:
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name
