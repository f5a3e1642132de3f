"""Files and folders at URLs (``s3://``, ``gs://``, ``http(s)://``) as a store; `location_of` turns a URL into a place.

    s3://bucket/run/7  ─►  Location(RemoteStore("s3://bucket"), "run/7")

What a name means is asked for when it is needed, and remembered: the first bytes of a file (with its size and version),
the names in a folder. Short reads, of headers, fetch *pages* of files, which are kept for a while.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType

from shardload.errors import (
    DamagedError,
    SourceError,
    SourceNotFoundError,
    TransferError,
    UnsafeSourceError,
    UnsupportedError,
)
from shardload.stores import web_folders
from shardload.stores.answers import COPY_FIRST, ForbiddenError, OutOfRangeError, WebPageError
from shardload.stores.clients import Address
from shardload.stores.event_loop import Fetch
from shardload.stores.handed import SERVED_TAG, HandedFiles, handed_files
from shardload.stores.local import LocalFile, PrivateCopies
from shardload.stores.location import Location
from shardload.stores.near import NearFile, NearServer
from shardload.stores.objects import ListedFolder, StoreFacts, Version
from shardload.stores.requests import Requests
from shardload.stores.store import FileIdentity, Kind, Store, between
from shardload.units import exact_bytes

_PAGE_BYTES = 256 << 10
"""Bytes of a file that are fetched at once for short reads: the headers of most files are not longer."""
_KEPT_PAGES = 64
"""How many pages are kept, of all files of a store: HDF5 and ZIP read their headers in many short pieces."""
_PAGES_AHEAD = 32
"""How many files' first pages are requested in advance, if a checkpoint has many files."""
_REQUEST_BYTES = 4 << 20
"""Most bytes of one request for what a cache had when a load was planned, and lacks now."""
_COPIED = re.compile(r".*\.(json|model|txt|spm|jinja|tiktoken|vocab)$|(?:.*/)?assets/.*", re.DOTALL)
"""Matches the paths of small files that libraries open by themselves: configurations, tokenizers, assets."""
_MAX_COPY_BYTES = 64 << 20
"""Largest file that is copied to this machine for a library that opens it, in bytes."""
_MAX_COPIED_BYTES = 512 << 20
"""Most bytes of all such copies of a store together."""
_MAX_COPIED_DEPTH = 4
_GONE = "changed while it was read: there is no such object any more"
_OTHER_URL = re.compile(r"[a-z][a-z0-9+.\-]+://", re.ASCII | re.IGNORECASE)


_handed_out: ContextVar[Mapping[str, StoreFacts]] = ContextVar("handed_out", default=MappingProxyType({}))


@contextmanager
def knowing(facts: Mapping[str, StoreFacts]) -> Iterator[None]:
    """Have stores that this thread makes in the with block know what other ones of the same URL were told."""
    token = _handed_out.set(facts)
    try:
        yield
    finally:
        _handed_out.reset(token)


class RemoteStore(Store):
    """A store whose files are the objects below a URL; a file's key is the rest of the object's URL.

    Objects do not change while they are read: a read of another version than the first one is an error.
    """

    is_remote = True

    def __init__(self, url: str, *, requests: Requests | None = None) -> None:
        self.requests = requests or Requests(url)
        self.hands_files = False  # until a file's tag says that `shardload serve` sent it
        self.pace = self.requests.pace
        self._facts = _handed_out.get().get(self.url, StoreFacts())
        self._folders = self._facts.folders
        self.knows_more = bool(self._facts.versions)
        """Whether it has begun with what another process was told."""
        for key, version in self._facts.versions.items():
            if version is not None:
                self.requests.note(key, version)
        self._pages = _Pages(self.requests)
        self._copies = PrivateCopies()
        self._refused: ForbiddenError | None = None

    @property
    def url(self) -> str:
        """The URL of the folder that this store reads, without a slash at its end."""
        return self.requests.url

    @property
    def name(self) -> str:
        """The last part of the URL, which is the name of the folder."""
        return self.url.rpartition("/")[2]

    @property
    def can_list(self) -> bool:
        """Whether the store can list the names of its files; HTTP servers cannot."""
        return self.requests.can_list

    @property
    def facts(self) -> StoreFacts | None:
        """What it was told so far, if that holds for all processes: HTTP servers may each make ETags of their own."""
        return self._facts if self.can_list else None

    def shown(self, key: str) -> str:
        """Return the URL of a file or folder, which is its name in messages."""
        return f"{self.url}/{key}".rstrip("/")

    def kind(self, key: str) -> Kind | None:
        """Return whether a key names a file or a folder; see `Store.kind`."""
        if not key or self._folders.get(key):
            return "folder"
        folder, _, name = key.rpartition("/")
        known = self._folder(folder) if self.requests.known is not None else self._folders.get(folder)
        if known is not None and (known.is_complete or name in known.kinds):
            return known.kinds.get(name)
        version = self._version(key)
        # An empty object may stand for a folder. HTTP servers have none of these.
        if version is not None and (version.size or not self.can_list):
            return "file"
        try:
            if self._folder(key) is not None:
                return "folder"
        except ForbiddenError:  # files can be read without the right to list
            if not self.requests.succeeded:
                raise
        return None if version is None else "file"

    def names(self, key: str) -> list[str]:
        """Return the names directly in a folder, sorted; of an HTTP server without index pages, usual names alone."""
        if (found := self._folder(key)) is None:
            raise SourceError(f"Cannot list the folder {self.shown(key)}: it does not exist")
        return sorted(found.kinds)

    def listed(self, key: str = "") -> list[str] | None:
        """Return all names directly in a folder, sorted; ``None`` if the server does not list them."""
        found = self._folder(key)
        return sorted(found.kinds) if found is not None and found.is_complete else None

    def is_listed(self, key: str) -> bool:
        """Whether the server shows which files are in a folder; see `Store.is_listed`."""
        found = self._folders.get(key)
        return found is None or found.is_complete

    def open(self, key: str) -> RemoteObject | LocalFile:
        """Open an object for reading; see `Store.open`."""
        self._require(key)
        return self._handed_file(key) or RemoteObject(self, key)

    @functools.cached_property
    def _handed(self) -> HandedFiles | None:
        """What hands over files, if the server is on this machine; asked for once."""
        found = handed_files(self.requests.address.root, self.requests.token)
        self.hands_files = found is not None
        return found

    def _handed_file(self, key: str) -> LocalFile | None:
        version = self.requests.version(key)
        if version is None or not version.tag.startswith(SERVED_TAG) or self._handed is None:
            return None
        return self._handed.open(self.requests.path(key), tag=version.tag, shown=self.shown(key))

    def _require(self, key: str) -> None:
        """Raise unless an object is there."""
        if self._version(key) is None:
            if self.kind(key) == "folder":
                raise SourceError(f"{self.shown(key)} should be a file, but it is a folder")
            # HTTP servers refuse to show folders, too: only if nothing else was sent either, access is the cause.
            if self._refused is not None and not self.requests.succeeded:
                raise self._refused
            hint = "" if self.can_list else ". If it is a folder, the server shows no list of its files"
            raise SourceNotFoundError(f"There is no file {self.shown(key)}. Check the address{hint}")

    def identity(self, key: str) -> FileIdentity:
        """Return an object's size and a number that differs between its versions; see `Store.identity`."""
        self._require(key)
        if (file := self._handed_file(key)) is not None:
            with closing(file):
                facts = os.fstat(file.descriptor)
                return FileIdentity(facts.st_size, (facts.st_dev, facts.st_ino, facts.st_mtime_ns))
        found = self.requests.version(key)
        return FileIdentity(0) if found is None else FileIdentity(found.size, (0, found.number))

    def is_current(self, key: str) -> bool:
        """Whether an object is still there, in the version that was read; see `Store.is_current`."""
        # The process whose reads this one was handed has asked already.
        return self.knows_more or self.requests.is_current(key)

    def is_unchanged(self, key: str) -> bool:
        """Whether a file that `shardload serve` sent is still what it was; see `Store.is_unchanged`.

        Objects in a bucket are replaced as a whole. A file may be written to while it is sent, with the tag of before.
        """
        found = self.requests.known_version(key)
        if found is None or not found.tag.startswith(SERVED_TAG) or self.hands_files:
            return True
        return self.requests.is_current(key)

    def tag(self, key: str) -> str | None:
        """Return an object's ETag in s3 and gs, its SHA-256 on a hub that tells it; see `Store.tag`."""
        if self.requests.known is not None:
            return self.sha256(key)
        found = self.requests.version(key)
        # Not over HTTP: each server of an address may make ETags of its own.
        return found.tag or None if found is not None and self.can_list else None

    def sha256(self, key: str) -> str | None:
        """Return the digest of an object that a hub tells; see `Store.sha256`."""
        return self.requests.known.sha256.get(key) if self.requests.known is not None else None

    def is_here(self, key: str, ranges: Iterable[tuple[int, int]]) -> bool:
        """Whether the cache has these ranges of an object; see `Store.is_here`."""
        return self.requests.is_cached(key, ranges)

    def is_near(self, key: str) -> bool:
        """Whether `shardload serve` sends a file from nearby; see `Store.is_near`."""
        found = self.requests.known_version(key)
        return found is not None and found.tag.startswith(SERVED_TAG) and self._near is not None and self._near.is_near

    @functools.cached_property
    def _near(self) -> NearServer | None:
        return self.requests.near_server()

    def near_file(self, key: str) -> NearFile | None:
        """Return what receives bytes of a file that `shardload serve` sends, if it is near; ``None`` for others."""
        version = self.requests.known_version(key)
        if version is None or not version.tag.startswith(SERVED_TAG) or self._near is None:
            return None
        return NearFile(self._near, self.requests.path(key), version, shown=self.shown(key))

    def read_ahead(self, keys: Iterable[str]) -> None:
        """Request the first bytes of files in advance, several at a time; see `Store.read_ahead`."""
        if not self.knows_more:  # else these bytes are known, too
            self._pages.read_ahead(keys)

    def local_path(self, key: str) -> Path:
        """Copy a file, or a folder's small files (configuration, tokenizer, assets), to a private folder.

        The folder is removed when the store is garbage-collected.
        """
        if self.kind(key) == "file":
            self._copy(key)
        else:
            self._copy_folder(key, _MAX_COPIED_DEPTH)
        return self._copies.path(key)

    def local_folder(self, key: str) -> Path:
        """Copy a folder's small files to a private folder and return its path; see `Store.local_folder`."""
        return self.local_path(key) if self.kind(key) == "folder" else Path(self.shown(key))

    def local_part(self, key: str, start: int, stop: int) -> Path:
        """Copy a part of a file to its place in a private file, which has nothing but zeros elsewhere."""
        self._bound(key, stop - start)
        file = RemoteObject(self, key)
        self._copies.write(key, file.begin(start, stop).result(), offset=start, shown=self.shown(key))
        return self._copies.path(key)

    def page(self, key: str, number: int) -> memoryview:
        """Return 256 KiB of a file, or fewer at its end, for short reads."""
        found = self._pages.get(key, number).result()
        if found is None:
            raise TransferError(f"{self.shown(key)} {_GONE}")
        return found

    def _version(self, key: str, *, may_be_folder: bool = True) -> Version | None:
        """Return an object's size and version, which come with its first page; ``None`` if there is no such object."""
        if self.knows_more and key in self._facts.versions:
            return self._facts.versions[key]
        found = self._facts.versions[key] = self._asked_version(key, may_be_folder=may_be_folder)
        return found

    def _asked_version(self, key: str, *, may_be_folder: bool) -> Version | None:
        try:
            if self._pages.get(key, 0).result() is None:
                return None
        except OutOfRangeError:
            return self.requests.empty(key)
        except ForbiddenError as error:
            # Stores that may not tell whether there is such an object refuse access to it.
            if (not self.requests.succeeded and self.can_list) or self._is_listed(key):
                raise
            self._refused = self._refused or error
            return None
        except WebPageError:
            if not may_be_folder or self._folder(key) is None:
                raise
            return None
        return self.requests.version(key)

    def _is_listed(self, key: str) -> bool:
        folder, _, name = key.rpartition("/")
        found = self._folders.get(folder)
        return found is not None and found.kinds.get(name) == "file"

    def _folder(self, key: str) -> ListedFolder | None:
        if key not in self._folders:
            found = self._listed(key) if self.can_list else self._web_folder(key)
            self._folders[key] = found if found.kinds or not key else None
        return self._folders[key]

    def _listed(self, key: str) -> ListedFolder:
        entries = self.requests.entries(key)
        plain = ((name, size) for name, size in entries.items() if name not in ("", ".", "..") and "/" not in name)
        kinds: dict[str, Kind] = {name: "folder" if size is None else "file" for name, size in plain}
        return ListedFolder(kinds, is_complete=True)

    def _web_folder(self, key: str) -> ListedFolder:
        if key.lower().endswith(web_folders.FILE_ENDINGS):
            return ListedFolder({}, is_complete=True)
        try:
            page = self.requests.page(key)
        except (ForbiddenError, SourceNotFoundError):
            page = None
        found = web_folders.links(page, self.requests.encoded(key)) if page else {}
        linked: dict[str, Kind] = {name: "folder" if inside else "file" for name, inside in found.items()}
        if page and web_folders.is_list(page, found):
            return ListedFolder(linked, is_complete=True)
        usual = {name: _joined(key, name) for name in web_folders.USUAL_NAMES}
        self._pages.read_ahead(usual.values())
        there: dict[str, Kind] = {name: "file" for name, path in usual.items() if self._is_object(path)}
        return ListedFolder(linked | there, is_complete=False)

    def _is_object(self, key: str) -> bool:
        try:
            # Not a folder: a server that answers any address with a page to log in has folders in folders without end.
            return self._version(key, may_be_folder=False) is not None
        except WebPageError:
            return False

    def _copy_folder(self, key: str, depth: int) -> None:
        for name in self.names(key):
            inside = _joined(key, name)
            if self.kind(inside) == "file":
                if _COPIED.fullmatch(inside) and not self._copies.has(inside):
                    self._copy(inside)
            elif depth and name in web_folders.USUAL_FOLDERS:
                self._copy_folder(inside, depth - 1)
        self._copies.path(key).mkdir(parents=True, exist_ok=True)

    def _copy(self, key: str) -> None:
        if self._copies.has(key):
            return
        with closing(Location(self, key).open()) as file:  # by what notes reads for other processes, or has their notes
            self._bound(key, file.n_bytes)
            data = memoryview(bytearray(file.n_bytes))
            file.read_into(data, 0)
        self._check(key, data)
        self._copies.write(key, data, shown=self.shown(key))

    def _check(self, key: str, data: memoryview) -> None:
        expected = self.sha256(key)
        if expected and (found := hashlib.sha256(data).hexdigest()) != expected:
            raise DamagedError(
                f"{self.shown(key)} is damaged: its SHA-256 is {found}, expected {expected}. Try again; if this "
                "repeats, the copy on the server is bad"
            )

    def _bound(self, key: str, n_bytes: int) -> None:
        if n_bytes > _MAX_COPY_BYTES:
            raise UnsupportedError(
                f"{self.shown(key)} has {exact_bytes(n_bytes)} and would have to be copied to this machine; the limit "
                f"is {exact_bytes(_MAX_COPY_BYTES)}. {COPY_FIRST}"
            )
        if self._copies.n_bytes + n_bytes > _MAX_COPIED_BYTES:
            raise UnsafeSourceError(
                f"{self.shown(key)}: the small files of this checkpoint have more than "
                f"{exact_bytes(_MAX_COPIED_BYTES)} together. {COPY_FIRST}"
            )


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


class _Pages:
    """The pages of files that are kept for short reads, and those that are on their way. Thread-safe."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._kept: OrderedDict[tuple[str, int], Fetch] = OrderedDict()
        self._waiting: deque[str] = deque()
        self._begun: set[str] = set()
        self._lock = threading.Lock()

    def get(self, key: str, number: int) -> Fetch:
        """Return the request for a page, which may be answered already."""
        with self._lock:
            self._begun.discard(key)
            found = self._begin(key, number)
            self._top_up()
            while len(self._kept) > _KEPT_PAGES + len(self._begun):
                self._kept.popitem(last=False)
            return found

    def read_ahead(self, keys: Iterable[str]) -> None:
        """Request the first pages of files, a limited number of them at a time."""
        with self._lock:
            self._waiting.extend(keys)
            self._top_up()

    def _top_up(self) -> None:
        while self._waiting and len(self._begun) < _PAGES_AHEAD:
            key = self._waiting.popleft()
            self._begun.add(key)
            self._begin(key, 0)

    def _begin(self, key: str, number: int) -> Fetch:
        page = key, number
        if page not in self._kept or self._kept[page].has_failed:
            start = number * _PAGE_BYTES
            self._kept[page] = self._requests.begin(key, start, start + _PAGE_BYTES)
        self._kept.move_to_end(page)
        return self._kept[page]


class RemoteObject:
    """A file of a remote store (an object) that is open for reading."""

    descriptor = None

    def __init__(self, store: RemoteStore, key: str) -> None:
        self._store, self._key = store, key
        self._near = store.near_file(key)
        self._awaited: set[PendingObject] = set()
        self._is_cancelled = False

    @property
    def n_bytes(self) -> int:
        """Size of the file in bytes, which came with its first page."""
        if (found := self._store.requests.size(self._key)) is None:
            raise SourceNotFoundError(f"There is no file {self._store.shown(self._key)}. Check the address")
        return found

    def begin(self, start: int, stop: int) -> PendingObject:
        """Request bytes ``[start, stop)`` of the object, to wait for later; see `shardload.stores.store.RemoteFile`."""
        stop = min(stop, self.n_bytes)
        fetch = self._store.requests.begin(self._key, start, stop) if start < stop else None
        return PendingObject(fetch, stop - start, shown=self._store.shown(self._key))

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` on; a short read fetches whole pages, which are kept for later reads."""
        rest = self._fitting(buffer, offset)
        if len(rest) > _PAGE_BYTES:
            rest[:] = self.begin(offset, offset + len(rest)).result()
            return
        while rest:
            number, skip = divmod(offset, _PAGE_BYTES)
            part = self._store.page(self._key, number)[skip : skip + len(rest)]
            if not part:
                raise TransferError(f"{self._store.shown(self._key)} changed while it was read: it is shorter now")
            rest[: len(part)] = part
            rest, offset = rest[len(part) :], offset + len(part)

    read_unchecked = read_into

    def scatter_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill buffers, in turn, from the cache or from nearby; what is lacking then, with what the store sends."""
        n_bytes = sum(map(len, buffers))
        if self._store.requests.read_cached(self._key, buffers, offset):
            return
        for start in range(self._received(buffers, offset), n_bytes, _REQUEST_BYTES):
            data = self._requested(offset + start, offset + min(start + _REQUEST_BYTES, n_bytes))
            for part in between(buffers, start, start + len(data)):
                part[:], data = data[: len(part)], data[len(part) :]

    def read_exactly(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` on without a page; see `shardload.stores.store.fill_exactly`."""
        rest = self._fitting(buffer, offset)
        rest[:] = self.begin(offset, offset + len(rest)).result()

    def _fitting(self, buffer: memoryview, offset: int) -> memoryview:
        """Return the buffer's bytes; raise if the object ends before them."""
        rest = buffer.cast("B") if buffer.nbytes else memoryview(bytearray())
        if offset + len(rest) > self.n_bytes:
            raise TransferError(
                f"{self._store.shown(self._key)} has {exact_bytes(self.n_bytes)}, expected {offset + len(rest)} or more"
            )
        return rest

    def _received(self, buffers: Sequence[memoryview], offset: int) -> int:
        return 0 if self._near is None else self._near.receive(buffers, offset)

    def _requested(self, start: int, stop: int) -> memoryview:
        pending = self.begin(start, stop)
        self._awaited.add(pending)
        if self._is_cancelled:  # looked at when `cancel` knows of the request
            pending.cancel()
        try:
            return pending.result()
        finally:
            self._awaited.discard(pending)

    def cancel(self) -> None:
        """End calls of `scatter_into` in other threads: they get a `TransferError`."""
        self._is_cancelled = True
        for pending in self._awaited.copy():
            pending.cancel()
        if self._near is not None:
            self._near.cancel()

    def close(self) -> None:
        """Close connections to a server nearby; pages belong to the store."""
        if self._near is not None:
            self._near.close()


class PendingObject:
    """A pending request for bytes of an object, which is a file in a remote store."""

    def __init__(self, fetch: Fetch | None, n_bytes: int, *, shown: str) -> None:
        self._fetch, self._n_bytes, self._shown = fetch, n_bytes, shown

    def result(self) -> memoryview:
        """Wait for the bytes and return them; see `shardload.stores.store.PendingBytes`."""
        found = memoryview(b"") if self._fetch is None else self._fetch.result()
        if found is None:
            raise TransferError(f"{self._shown} {_GONE}")
        if len(found) < self._n_bytes:
            raise TransferError(
                f"{self._shown} changed while it was read: it lacks some of {exact_bytes(self._n_bytes)}"
            )
        return found

    def cancel(self) -> None:
        """Cancel the request; a thread that waits for it gets a `TransferError`."""
        if self._fetch is not None:
            self._fetch.cancel()


SCHEMES: dict[str, Callable[[str], Location]] = {}
"""URL scheme → function that returns the location of a URL. A new scheme needs an entry here, and a `Store`."""


def _in_store(url: str) -> Location:
    address = Address.parse(url)
    query = f"?{address.query}" if address.query else ""
    requests = Requests(f"{address.root}{query}", asked=address.url)
    return Location(RemoteStore(requests.url, requests=requests), address.path)


SCHEMES |= dict.fromkeys(("s3", "gs", "http", "https"), _in_store)


def location_of(source: object) -> Location | None:
    """Return the location of a URL whose scheme is in `SCHEMES`; ``None`` for other sources."""
    scheme, separator, _ = source.partition("://") if isinstance(source, str) else ("", "", "")
    found = SCHEMES.get(scheme.lower()) if separator else None
    return None if found is None else found(str(source))


def remote_place(source: object) -> Location | None:
    """Return the location of a URL in a `RemoteStore`; ``None`` for a local path; raise for any other URL."""
    found = location_of(source)
    if found is not None and isinstance(found.store, RemoteStore):
        return found
    if found is not None or (isinstance(source, str) and _OTHER_URL.match(source)):
        raise UnsupportedError(f"Cannot read {source}, expected a path, or an address at s3://, gs:// or http(s)://")
    return None
