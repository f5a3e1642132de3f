"""A training step at a URL, as a `Store`: the interface through which loaders read files. All bytes are verified.

    digests.json ─► names, sizes and digests of all files      (so no listing is needed: plain HTTP is enough)
    small files  ─► fetched into a private folder, each checked
    data files   ─► not fetched; `_RemoteFile` requests whole-MiB ranges and compares each MiB with its digest

Only shardload steps can be read this way. Sizes and names in ``digests.json`` are untrusted: `Digests.read` refuses
names that leave the folder, and the size of the private folder is limited.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from shardload.errors import (
    SourceError,
    SourceNotFoundError,
    TransferError,
    UnsafeSourceError,
    UnsupportedError,
)
from shardload.loaders.orbax.loader import OWN_FOLDER
from shardload.runs.digest_list import DIGESTS_FILE, Damage, Digests, FileTree, hash_of, name_damage
from shardload.runs.digests import SavedUnits
from shardload.stores.answers import COPY_FIRST, ForbiddenError
from shardload.stores.event_loop import Fetch
from shardload.stores.json_files import MAX_JSON_BYTES
from shardload.stores.local import LocalFile, PrivateCopies
from shardload.stores.location import Location
from shardload.stores.objects import NameTree
from shardload.stores.remote import RemoteStore
from shardload.stores.requests import Requests
from shardload.stores.store import UNIT_BYTES, File, FileIdentity, Kind, Store
from shardload.units import exact_bytes, plural

_MAX_FILE_BYTES = 64 << 20
"""Largest file fetched as a whole, in bytes: JSON has 32 MiB at most, B-tree nodes a few MiB, tokenizers 40 MiB."""
_MAX_COPIED_BYTES = 512 << 20
"""Most bytes of all fetched files of a step together, because they are stored on this machine's disk."""
_MAX_FILES = 1 << 14
"""Most files that are fetched of one step. A step has two or three small ones for each process that saved it."""
_IN_FLIGHT = 16
"""Number of small files that are requested at the same time, because each request takes a round trip."""
_ITEMS = frozenset({OWN_FOLDER, "pytree", "model_config", "assets"})
"""Folders of a step that are needed to load a model: their small files are fetched. Users' items are not fetched."""
_DATA = re.compile(r"(?:^|/)d/[^/]+$")
"""Matches the paths of files with array data (OCDBT, Orbax's format), which are read in place when needed."""


class RemoteStep(Store):
    """A step at a URL, read like a local one. A private folder has copies of its small files while it is in use."""

    is_remote = is_verifying = True

    def __init__(self, remote: RemoteStore, folder: str, digests: memoryview) -> None:
        """Open the step in ``folder`` of a remote store; ``digests`` is the content of the step's ``digests.json``."""
        self._remote, self._key = remote, folder
        self.pace = remote.pace
        self._name, self._copies = self.root.name, PrivateCopies()
        self._lock = threading.Lock()
        self._filled = False
        # Before `Digests.read`, which opens digests.json through this store.
        self._write(DIGESTS_FILE, digests)
        self._n_bytes = len(digests)
        self.saved = SavedUnits(Digests.read(self.root), step=self._name, shown=str(self.root))
        self._tree = NameTree((*self.saved.digests.files, DIGESTS_FILE))

    @property
    def root(self) -> Location:
        """The step's folder."""
        return Location(self, "")

    @property
    def n_bytes(self) -> int:
        """The total size of the step's files."""
        files = self.saved.digests.files.values()
        return sum(f.n_bytes for f in files) + self._n_bytes

    def shown(self, key: str) -> str:
        """Return the URL of a file or folder of the step."""
        return self._remote.shown(_joined(self._key, key))

    def kind(self, key: str) -> Kind | None:
        """Return whether ``key`` names a file, a folder or nothing (``None``) in the step's list of digests."""
        return self._tree.kinds.get(key)

    def names(self, key: str) -> list[str]:
        """Return the sorted names in a folder of the step, known from the step's list of digests, without a request."""
        if (found := self._tree.names(key)) is None:
            raise SourceError(f"Cannot list the folder {self.shown(key)}: it was not saved with the step")
        return found

    def open(self, key: str) -> File:
        """Open a file of the step: its local copy if it was fetched, else a file that requests parts from the store."""
        if self._copies.has(self._local(key)):
            return LocalFile(self._copies.path(self._local(key)), shown=self.shown(key))
        if key in self.saved.digests.files:
            return self._remote_file(key)
        if self.kind(key) == "folder":
            raise SourceError(f"{self.shown(key)} should be a file, but it is a folder")
        raise SourceNotFoundError(f"There is no file {self.shown(key)}: it was not saved with the step")

    def identity(self, key: str) -> FileIdentity:
        """Return a file's size, by which readers notice that it was replaced; digests reveal all other changes."""
        return FileIdentity(self.saved.of_file(key).n_bytes)

    def local_path(self, key: str) -> Path:
        """Fetch a file, or for a folder all small files of the step, and return the path of the local copy."""
        with self._lock:
            if self.kind(key) == "file":
                self._fetch([key])
            # All small files at once, whichever folder is requested: loading needs most of them.
            elif not self._filled:
                self._fetch(filter(_is_copied, self.saved.digests.files))
                self._filled = True
        return self._copies.path(self._local(key))

    def local_folder(self, key: str) -> Path:
        """Fetch the step's small files, and return the path of the local copy of a folder."""
        return self.local_path(key) if self.kind(key) == "folder" else Path(self.shown(key))

    def name_damage(self, sizes: Mapping[str, int] | None = None) -> list[Damage]:
        """Return which files of the step are missing, unexpected or of another size, without reading data.

        ``sizes`` are those that the store has listed, if they are known already.
        """
        digests, requests, step = self.saved.digests, self._remote.requests, self.root.name
        if sizes is not None or self._remote.can_list:
            return name_damage(digests, FileTree(dict(sizes or requests.sizes(self._key)), (), {}), step)
        # HTTP cannot list. A file with bytes is missed when it is read; an empty one never is, so ask for it.
        empty = sorted(name for name, file in digests.files.items() if not file.n_bytes)
        return [
            Damage(name, "is missing", None, step) for name in empty if requests.read(_joined(self._key, name)) is None
        ]

    def _remote_file(self, name: str) -> _RemoteFile:
        return _RemoteFile(self._remote.requests, _joined(self._key, name), self.saved, name)

    def _fetch(self, names: Iterable[str]) -> None:
        wanted = [name for name in names if not self._copies.has(self._local(name))]
        # Before the first request: digests.json, which names files and sizes, is untrusted.
        self._bound(wanted)
        for first in range(0, len(wanted), _IN_FLIGHT):
            files = [self._remote_file(name) for name in wanted[first : first + _IN_FLIGHT]]
            pending = [file.begin(0, file.n_bytes) for file in files]
            for file, fetched in zip(files, pending, strict=True):
                self._write(file.name, fetched.result())

    def _bound(self, names: list[str]) -> None:
        here = (name for name in self.saved.digests.files if self._copies.has(self._local(name)))
        sizes = {name: self.saved.digests.files[name].n_bytes for name in {*here, *names}}
        for name in names:
            if sizes[name] > _MAX_FILE_BYTES:
                raise UnsupportedError(
                    f"{self.shown(name)} has {exact_bytes(sizes[name])} and would have to be fetched whole; the limit "
                    f"is {exact_bytes(_MAX_FILE_BYTES)}. {COPY_FIRST}"
                )
        if sum(sizes.values()) > _MAX_COPIED_BYTES or len(sizes) > _MAX_FILES:
            raise UnsafeSourceError(
                f"{self.root} lists {plural(len(sizes), 'small file')} ({exact_bytes(sum(sizes.values()))} in "
                f"total); at most {_MAX_FILES} files and {exact_bytes(_MAX_COPIED_BYTES)} are fetched. {COPY_FIRST}"
            )

    def _write(self, name: str, data: bytes | memoryview) -> None:
        self._copies.write(self._local(name), data, shown=self.shown(name))

    def _local(self, key: str) -> str:
        return _joined(self._name, key)


class _RemoteFile:
    """A file of a remote step, read in place: it requests whole MiB and compares each MiB with its digest."""

    descriptor = None

    def __init__(self, requests: Requests, key: str, saved: SavedUnits, name: str) -> None:
        self._requests, self._key, self._saved, self.name = requests, key, saved, name
        self.n_bytes = saved.of_file(name).n_bytes

    def begin(self, start: int, stop: int) -> _Units:
        stop = min(stop, self.n_bytes)
        fetch = self._requests.begin(self._key, start, stop) if start < stop else None
        return _Units(self._saved, self.name, start // UNIT_BYTES, stop - start, fetch)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        rest = buffer.cast("B") if buffer.nbytes else memoryview(b"")
        if offset + len(rest) > self.n_bytes:
            raise TransferError(
                f"Cannot read {self._requests.url}/{self._key} up to byte {offset + len(rest)}: by digests.json, it "
                f"has {exact_bytes(self.n_bytes)}, so the files of the step do not fit together. Use another step"
            )
        while rest:
            unit, skip = divmod(offset, UNIT_BYTES)
            units = min(-(-(skip + len(rest)) // UNIT_BYTES), _READ_UNITS)
            part = self.begin(offset - skip, (unit + units) * UNIT_BYTES).result()[skip : skip + len(rest)]
            rest[: len(part)] = part
            rest, offset = rest[len(part) :], offset + len(part)

    def read_unchecked(self, buffer: memoryview, offset: int) -> None:
        stop = offset + len(buffer)
        if not buffer.nbytes:
            return
        found = _present(self._saved, self.name, self._requests.begin(self._key, offset, stop))
        if len(found) != len(buffer):
            raise self._saved.wrong_size(self.name, found=offset + len(found))
        buffer[:] = found

    def close(self) -> None:
        pass


_READ_UNITS = 8
"""Most MiB that one request asks for; a longer read takes several requests."""


class _Units:
    """A request for some MiB of a file. `result` waits for the bytes and compares them with their digests."""

    def __init__(self, saved: SavedUnits, name: str, unit: int, n_bytes: int, fetch: Fetch | None) -> None:
        self._saved, self._name, self._unit, self._n_bytes, self._fetch = saved, name, unit, n_bytes, fetch

    def result(self) -> memoryview:
        if self._fetch is None:
            return memoryview(b"")
        data = _present(self._saved, self._name, self._fetch)
        if len(data) != self._n_bytes:
            raise self._saved.wrong_size(self._name, found=self._unit * UNIT_BYTES + len(data))
        for at in range(0, len(data), UNIT_BYTES):
            self._saved.compare(self._name, self._unit + at // UNIT_BYTES, hash_of(data[at : at + UNIT_BYTES]))
        return data

    def cancel(self) -> None:
        if self._fetch is not None:
            self._fetch.cancel()


def _present(saved: SavedUnits, name: str, fetch: Fetch) -> memoryview:
    try:
        found = fetch.result()
    except TransferError as error:
        if fetch.is_too_short(error):
            raise saved.wrong_size(name) from error
        raise
    if found is None:
        raise saved.damaged(Damage(name, "is missing"))
    return found


def open_step(folder: Location) -> RemoteStep | None:
    """Open the step in a folder of a remote store; ``None`` if shardload saved none there (no ``digests.json``)."""
    remote = folder.store
    assert isinstance(remote, RemoteStore)
    try:
        found = remote.requests.read_small((folder / DIGESTS_FILE).key, limit=MAX_JSON_BYTES)
    except ForbiddenError:
        if remote.can_list:
            raise
        return None  # some HTTP servers refuse what is not there
    return None if found is None else RemoteStep(remote, folder.key, found)


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _is_copied(name: str) -> bool:
    top, _, rest = name.partition("/")
    # Files directly in the step, and everything in the folders of `_ITEMS` except array data.
    return (not rest or top in _ITEMS) and not _DATA.search(name)
