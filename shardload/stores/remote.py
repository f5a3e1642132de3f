"""Folders at URLs (``s3://``, ``gs://``, ``http(s)://``) as stores; `location_of` says whether a source is a URL."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection

from shardload.errors import SourceError, SourceNotFoundError, TransferError, UnsupportedError
from shardload.stores.location import Location
from shardload.stores.requests import Fetch, Requests
from shardload.stores.store import UNIT_BYTES, FileIdentity, Kind, Store
from shardload.units import exact_bytes

_KEPT_UNITS = 8
"""How many MiB of an open remote file stay in memory: headers of HDF5 and ZIP are read in many short pieces."""
_OTHER_URL = re.compile(r"[a-z][a-z0-9+.\-]+://", re.ASCII | re.IGNORECASE)


class RemoteStore(Store):
    """A store whose files are the objects below a URL; a file's key is the rest of the object's URL.

    Objects do not change while they are read: their names are listed and their sizes determined once.
    """

    is_remote = True

    def __init__(self, url: str) -> None:
        self.requests = Requests(url)

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

    @functools.cached_property
    def _tree(self) -> NameTree:
        return NameTree(self.requests.names())

    def shown(self, key: str) -> str:
        """Return the URL of a file or folder, which is its name in messages."""
        return f"{self.url}/{key}".rstrip("/")

    def kind(self, key: str) -> Kind | None:
        """Return whether a key names a file or a folder; if the store cannot list, only the root counts as a folder."""
        if self.can_list:
            return self._tree.kinds.get(key)
        return "folder" if not key else "file" if self.requests.exists(key) else None

    def names(self, key: str) -> list[str]:
        """Return the names directly in a folder, sorted; raise `UnsupportedError` if the store cannot list."""
        if (found := self._tree.names(key)) is None:
            raise SourceError(f"Cannot list the folder {self.shown(key)}: it does not exist")
        return found

    def open(self, key: str) -> RemoteObject:
        """Open an object for reading; see `Store.open`."""
        match self.kind(key):
            case "folder":
                raise SourceError(f"{self.shown(key)} should be a file, but it is a folder")
            case None:
                raise SourceNotFoundError(f"There is no file {self.shown(key)}. Check the address")
        return RemoteObject(self, key)

    def identity(self, key: str) -> FileIdentity:
        """Return an object's size and a number that differs between its versions; see `Store.identity`."""
        self.open(key)
        found = self.requests.version(key)
        return FileIdentity(0) if found is None else FileIdentity(found.size, (0, found.number))


class RemoteObject:
    """A file of a remote store (an object) that is open for reading."""

    descriptor = None

    def __init__(self, store: RemoteStore, key: str) -> None:
        self._store, self._key = store, key
        self._unit = functools.lru_cache(_KEPT_UNITS)(
            lambda unit: self.begin(unit * UNIT_BYTES, (unit + 1) * UNIT_BYTES).result()
        )

    @property
    def n_bytes(self) -> int:
        """Size of the file in bytes; the store is asked for it when it is first needed."""
        if (found := self._store.requests.size(self._key)) is None:
            raise SourceNotFoundError(f"There is no file {self._store.shown(self._key)}. Check the address")
        return found

    def begin(self, start: int, stop: int) -> PendingObject:
        """Request bytes ``[start, stop)`` of the object, to wait for later; see `shardload.stores.store.RemoteFile`."""
        stop = min(stop, self.n_bytes)
        fetch = self._store.requests.begin(self._key, start, stop) if start < stop else None
        return PendingObject(fetch, stop - start, shown=self._store.shown(self._key))

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` on; a short read fetches a whole MiB, which is kept for later reads."""
        rest = buffer.cast("B") if buffer.nbytes else memoryview(b"")
        if offset + len(rest) > self.n_bytes:
            raise TransferError(
                f"{self._store.shown(self._key)} has {exact_bytes(self.n_bytes)}, expected {offset + len(rest)} or more"
            )
        if len(rest) >= UNIT_BYTES:
            rest[:] = self.begin(offset, offset + len(rest)).result()
            return
        while rest:
            unit, skip = divmod(offset, UNIT_BYTES)
            part = self._unit(unit)[skip : skip + len(rest)]
            rest[: len(part)] = part
            rest, offset = rest[len(part) :], offset + len(part)

    read_unchecked = read_into

    def close(self) -> None:
        """Forget the bytes that are kept for short reads."""
        self._unit.cache_clear()


class PendingObject:
    """A pending request for bytes of an object, which is a file in a remote store."""

    def __init__(self, fetch: Fetch | None, n_bytes: int, *, shown: str) -> None:
        self._fetch, self._n_bytes, self._shown = fetch, n_bytes, shown

    def result(self) -> memoryview:
        """Wait for the bytes and return them; see `shardload.stores.store.PendingBytes`."""
        found = memoryview(b"") if self._fetch is None else self._fetch.result()
        if found is None or len(found) < self._n_bytes:
            raise TransferError(
                f"{self._shown} changed while it was read: it lacks some of {exact_bytes(self._n_bytes)}"
            )
        return found

    def cancel(self) -> None:
        """Cancel the request; a thread that waits for it gets a `TransferError`."""
        if self._fetch is not None:
            self._fetch.cancel()


class NameTree:
    """Files and folders of a remote store, found from the files' names, as a store lists only files, no folders."""

    def __init__(self, files: Collection[str]) -> None:
        self.kinds: dict[str, Kind] = {"": "folder"}
        for name in files:
            parts = name.split("/")[:-1]
            self.kinds |= dict.fromkeys(("/".join(parts[:n]) for n in range(1, len(parts) + 1)), "folder")
        self.kinds |= dict.fromkeys(files, "file")

    def names(self, folder: str) -> list[str] | None:
        """Return the names of files and folders directly in a folder, sorted; ``None`` if there is no such folder."""
        if self.kinds.get(folder) != "folder":
            return None
        prefix = f"{folder}/" if folder else ""
        inside = (name.removeprefix(prefix) for name in self.kinds if name.startswith(prefix) and name != folder)
        return sorted(name for name in inside if "/" not in name)


REMOTE_SCHEMES = ("s3", "gs", "http", "https")
"""Schemes of URLs that `RemoteStore` reads: only training steps (saved states), as only they have digests."""
SCHEMES: dict[str, Callable[[str], Location]] = dict.fromkeys(
    REMOTE_SCHEMES, lambda url: Location(RemoteStore(url), "")
)
"""URL scheme → function that returns the location of a URL. A new scheme needs an entry here, and a `Store`."""


def location_of(source: object) -> Location | None:
    """Return the location of a URL whose scheme is in `SCHEMES`; ``None`` for other sources."""
    scheme, separator, _ = source.partition("://") if isinstance(source, str) else ("", "", "")
    found = SCHEMES.get(scheme.lower()) if separator else None
    return None if found is None else found(str(source))


def remote_store(source: object) -> RemoteStore | None:
    """Return the store at a URL of `REMOTE_SCHEMES`; ``None`` for a local path. Raise for any other URL."""
    found = location_of(source)
    if found is not None and isinstance(found.store, RemoteStore):
        return found.store
    if found is not None or (isinstance(source, str) and _OTHER_URL.match(source)):
        raise UnsupportedError(f"Cannot read {source}, expected a path, or an address at s3://, gs:// or http(s)://")
    return None
