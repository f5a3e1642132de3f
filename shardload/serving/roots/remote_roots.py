"""What a server has at addresses (``s3://``, ``gs://``, ``http(s)://``, ``hf://``): a catalogue of remote checkpoints.

    --root URL ─► list of names ─► scan, as of a folder ─► RemoteCatalogue ─► file(key)
                  (one request for 1000)                                  └─► names(key), checkpoints()

A list costs requests, so it is read again only after some minutes, or when someone asks for a name that is not in it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shardload.errors import ShardloadError, SourceNotFoundError, TransferError, UnsafeSourceError, UsageError
from shardload.loaders.recognition import recognise
from shardload.serving.roots.scanning import Scan, ScannedFolder, ServedCheckpoint, is_shown
from shardload.stores.json_files import read_object
from shardload.stores.location import Location
from shardload.stores.objects import ListedFolder, StoreFacts
from shardload.stores.remote import RemoteStore, knowing
from shardload.stores.requests import Requests
from shardload.stores.store import Kind

RESCAN_S = 300.0
"""Seconds after which an address is listed again when someone asks for a list."""
SEARCH_S = 10.0
"""Least seconds between two lists when someone asks for a name that is not known."""
_MOST_WEB_FOLDERS = 10_000
"""Most folders of an HTTP server: each is a request, and its links can lead on without end."""
_ASKED_AT_ONCE = 16
"""Requests for sizes of files that are sent to an HTTP server at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class ListedObject:
    """A file at an address, as it was listed."""

    root: AddressRoot
    key: str
    """Its name in the store of the root."""
    n_bytes: int


class AddressRoot:
    """An address whose checkpoints are served. Thread-safe."""

    def __init__(self, place: Callable[[], Location]) -> None:
        """``place`` returns the address, as a location of a new store each time."""
        first = place()
        self.url = str(first)
        self.is_fixed = _store_of(first).requests.known is not None
        """Whether the address names one version of what is there, as a commit of a hub does."""
        self._place: Callable[[], Location] = (lambda: first) if self.is_fixed else place
        self._lock = threading.Lock()
        self._requests: Requests | None = None
        self._is_whole: bool | None = None
        self.found = Scan[ListedObject]()
        """What the last scan has found."""
        self.problem: str | None = None
        """Why it was never scanned: it could not be reached."""
        self.is_listed = False
        """Whether it was listed and scanned the last time that this was tried."""
        self._scanned_s: float | None = None
        self._took_s = 0.0

    @property
    def requests(self) -> Requests:
        """What sends requests for the files; once it was told a file's version, it reads no other."""
        with self._lock:
            if self._requests is None:
                self._requests = _store_of(self._place()).requests
            return self._requests

    def renewed(self, before: Requests) -> Requests:
        """Return requests that know no versions yet, because a file has changed since ``before`` was told its own."""
        with self._lock:
            if (self._requests is before or self._requests is None) and not self.is_fixed:
                self._requests = _store_of(self._place()).requests
        return self.requests

    def is_old(self, *, least_s: float) -> bool:
        """Whether the address may be listed again, as it was done so many seconds ago, or longer if it took long."""
        if self._scanned_s is None:
            return True
        if self.problem is not None:
            return time.monotonic() >= self._scanned_s + min(least_s, SEARCH_S)
        return not self.is_fixed and time.monotonic() >= self._scanned_s + max(least_s, 10 * self._took_s)

    def scan(self, taken: set[str]) -> None:
        """List and scan the address again; names in ``taken`` belong to earlier roots.

        Raises:
            TransferError: When it cannot be reached.
            SourceNotFoundError: When nothing is there.
        """
        began_s, self.is_listed = time.monotonic(), False
        try:
            found = self._scan(taken)
        finally:  # also after a failure: who asks waits for the next one
            self._scanned_s, self._took_s = time.monotonic(), time.monotonic() - began_s
        self.found, self.problem, self.is_listed = found, None, True

    def _scan(self, taken: set[str]) -> Scan[ListedObject]:
        found = Scan[ListedObject]()
        place = self._looked_at()
        sizes: Mapping[str, int] | None = None
        if _store_of(place).can_list:
            below = _store_of(place).requests.sizes(place.key, trusts_none=True)
            sizes = {f"{place.key}/{name}".lstrip("/"): n_bytes for name, n_bytes in below.items()}
            if below and not self.is_fixed:
                facts = StoreFacts(folders=_folders(below, above=place.key))
                with knowing({_store_of(place).url: facts}):
                    place = self._looked_at()
        name = _name(place)
        if not is_shown(name):
            raise UsageError(f"Cannot serve {self.url}: {name!r} is no name that the server can show. Give another one")
        if not sizes and place.key and place.is_file():
            if found.is_free(place, name, taken):
                file = self._file(place, None)
                found.add(name, file)
                found.checkpoints[name] = ServedCheckpoint(name, recognise(place).name, "file", 1, file.n_bytes, place)
        elif (sizes is None or sizes) and place.is_folder():
            folder = _RemoteFolder(self, place, sizes)
            if not place.store.is_listed(place.key):
                text = f"{self.url} may have more files than are served: the server shows no list of its files"
                found.left_out[text] = None
            if self._is_whole is None:  # decided once, as for folders on this machine
                self._is_whole = folder.is_one_checkpoint()
            if not self._is_whole:
                folder.add_inside(found, "", taken, depth=0)
            elif (spec := folder.format()) is not None and found.is_free(place, name, taken):
                folder.add_whole(found, name, spec)
        else:
            raise SourceNotFoundError(f"Cannot serve {self.url}: there is nothing at this address. Check it")
        return found

    def _looked_at(self) -> Location:
        place = self._place()
        _store_of(place).requests.only_look()  # or what no client asks for would stay in the cache
        return place

    def _file(self, place: Location, sizes: Mapping[str, int] | None) -> ListedObject:
        n_bytes = None if sizes is None else sizes.get(place.key)
        return ListedObject(self, place.key, place.size if n_bytes is None else n_bytes)


def _store_of(place: Location) -> RemoteStore:
    assert isinstance(place.store, RemoteStore), place
    return place.store


def _name(place: Location) -> str:
    if place.key or _store_of(place).requests.known is None:
        return place.name
    return place.name.partition("@")[0]  # of a hub: the commit is part of the address


def _folders(names: Iterable[str], *, above: str) -> dict[str, ListedFolder | None]:
    """Return what is in each folder, given all names below the folder ``above``, relative to it."""
    kinds: dict[str, dict[str, Kind]] = {above: {}}
    for name in names:
        kind: Kind = "file"
        inner = f"{above}/{name}" if above else name
        while inner != above:
            folder, _, own = inner.rpartition("/")
            is_known = folder in kinds
            kinds.setdefault(folder, {})
            if kinds[folder].get(own) != "folder":  # an empty object may stand for a folder
                kinds[folder][own] = kind
            if is_known:
                break
            inner, kind = folder, "folder"
    return {folder: ListedFolder(inside, is_complete=True) for folder, inside in kinds.items()}


class _RemoteFolder(ScannedFolder[ListedObject]):
    """A folder at an address, while it is scanned."""

    def __init__(self, root: AddressRoot, place: Location, sizes: Mapping[str, int] | None) -> None:
        """``sizes`` are those of all files, by their keys, if the store lists them."""
        names = place.names()
        if not place.store.is_listed(place.key):
            names = sorted({*names, *_shards(place, names)})
        super().__init__(place, [name for name in names if is_shown(name)])
        self._root = root
        self._listed = sizes
        self._sizes = self._asked() if sizes is None else sizes

    def _asked(self) -> dict[str, int]:
        """Return the sizes of the files of an HTTP server, each of which is asked for."""
        requests = _store_of(self.place).requests
        files = [(self.place / name).key for name in self.names if not self.has_folder(name)]
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
            found = zip(files, pool.map(lambda key: _size(requests, key), files), strict=True)
            return {key: size for key, size in found if size is not None}

    def folder_in(self, name: str, found: Scan[ListedObject]) -> _RemoteFolder | None:
        """Return a folder below the address; see `ScannedFolder.folder_in`."""
        place = self.place / name
        if not self.has_folder(name):
            return None
        found.count_folder(place)
        if self._listed is None and found.n_folders > _MOST_WEB_FOLDERS:
            raise UnsafeSourceError(
                f"Cannot serve more than {_MOST_WEB_FOLDERS:,} folders of an HTTP server; {place} is one more. Give "
                "the address of a checkpoint"
            )
        try:
            inner = _RemoteFolder(self._root, place, self._listed)
        except (ShardloadError, OSError) as error:
            self.note_failure(error)
            return None
        return inner

    def file_in(self, name: str, found: Scan[ListedObject]) -> ListedObject | None:
        """Return a file below the address; see `ScannedFolder.file_in`."""
        place = self.place / name
        size = self._sizes.get(place.key)
        return None if size is None or self.has_folder(name) else ListedObject(self._root, place.key, size)

    def has_folder(self, name: str) -> bool:
        """Whether a name is that of a folder, as the list says."""
        return (self.place / name).is_folder()

    def place_of(self, name: str, file: ListedObject) -> Location:
        """Return the file's address; see `ScannedFolder.place_of`."""
        return self.place / name

    def note_failure(self, error: ShardloadError | OSError) -> None:
        """Raise what says nothing about the files: the store did not answer. Then what was found before counts."""
        if type(error) is TransferError or not isinstance(error, ShardloadError):
            raise error


def _shards(folder: Location, names: Iterable[str]) -> set[str]:
    """Return the names of files that indexes in a folder list, whose server does not show all names."""
    found: set[str] = set()
    for name in names:
        if name.endswith(".index.json"):
            weights = read_object(folder / name).get("weight_map")
            values = weights.values() if isinstance(weights, dict) else ()
            found |= {str(value) for value in values if "/" not in str(value)}
    return found


def _size(requests: Requests, key: str) -> int | None:
    """Return the size of a file of an HTTP server; ``None`` if it is none, or not shown to this user."""
    try:
        return requests.size(key)
    except TransferError as error:
        if type(error) is TransferError:
            raise
        return None


class RemoteCatalogue:
    """The checkpoints at some addresses. Thread-safe."""

    def __init__(
        self,
        roots: Iterable[AddressRoot],
        *,
        taken: Iterable[str] = (),
        rescan_s: float = RESCAN_S,
        search_s: float = SEARCH_S,
    ) -> None:
        """List and scan the addresses; raise if one of them cannot be read, unless it is just not reached now.

        Args:
            roots: The addresses. A name counts in the first one that has it.
            taken: Names that the server uses for something else.
            rescan_s: Least seconds until an address is listed again.
            search_s: The same where a name is asked for that is not known.
        """
        self.roots = tuple(roots)
        self._taken = frozenset(taken)
        self._rescan_s, self._search_s = rescan_s, search_s
        self._lock = threading.Lock()
        for root in self.roots:
            try:
                self._scan(root)
            except TransferError as error:
                if type(error) is not TransferError:  # the store has answered
                    raise
                root.problem = str(error)

    def problems(self) -> list[str]:
        """Return why addresses were not reached yet: one sentence each."""
        return [root.problem for root in self.roots if root.problem is not None]

    def checkpoints(self) -> list[ServedCheckpoint]:
        """Return the checkpoints, sorted by name."""
        return sorted((each for root in self.roots for each in root.found.checkpoints.values()), key=lambda e: e.name)

    def checkpoint(self, name: str) -> ServedCheckpoint | None:
        """Return a checkpoint by its name; ``None`` if there is none."""
        return self._found_of(name).checkpoints.get(name)

    def checkpoint_or_step(self, name: str) -> ServedCheckpoint | None:
        """Return a checkpoint by its name, or a step of a run by the name of its folder; ``None`` if there is none."""
        return self._found_of(name).checkpoint_or_step(name)

    def files_of(self, checkpoint: ServedCheckpoint) -> list[str]:
        """Return the addresses of a checkpoint's files, sorted."""
        return self._found_of(checkpoint.name).files_of(checkpoint)

    def left_out(self) -> list[str]:
        """Return why files are not served although they are at the addresses: one sentence each."""
        return [text for root in self.roots for text in root.found.left_out]

    def names(self, folder: str) -> dict[str, bool] | None:
        """Return name → whether it is a folder, sorted, for what is directly in a folder; ``None`` if there is none."""
        if folder:
            return self._found_of(folder).names(folder)
        return dict(sorted((name, kind) for root in self.roots for name, kind in root.found.folders[""].items()))

    def has_top(self, name: str) -> bool:
        """Whether a name is directly below the server's address."""
        return any(name in root.found.folders[""] for root in self.roots)

    def file(self, key: str) -> ListedObject | None:
        """Return a file by its address below the server's; ``None`` if there is none."""
        return self._found_of(key).files.get(key)

    def is_old(self, *, is_search: bool = False) -> bool:
        """Whether an address may be listed again; ``is_search``: to find a name that is not known."""
        return any(root.is_old(least_s=self._search_s if is_search else self._rescan_s) for root in self.roots)

    def refresh(self, *, is_search: bool = False) -> None:
        """List those addresses again that may be; raise the first error, after the others were listed."""
        errors: list[Exception] = []
        with self._lock:
            for root in self.roots:
                if root.is_old(least_s=self._search_s if is_search else self._rescan_s):
                    try:
                        self._scan(root)
                    except (ShardloadError, OSError) as error:
                        errors.append(error)
        if errors:
            raise errors[0]

    def _scan(self, root: AddressRoot) -> None:
        earlier = self.roots[: self.roots.index(root)]
        root.scan({*self._taken, *(name for each in earlier for name in each.found.folders[""])})

    def _found_of(self, key: str) -> Scan[ListedObject]:
        top = key.partition("/")[0]
        return next((root.found for root in self.roots if top in root.found.folders[""]), _NOTHING)


_NOTHING = Scan[ListedObject]()
