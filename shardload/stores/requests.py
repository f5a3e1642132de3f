"""Requests to remote stores (``s3://``, ``gs://``, ``http(s)://``), sent by obstore from one thread with an event loop.

    Requests.begin(name, start, stop) ─► Fetch ─► result()
                                           └─► try, try again …: only this request, at growing random intervals

A request that fails is repeated by itself, as long as the failure may pass and its time (`window_s`) is not over. A
server that is busy may say how long to wait (``Retry-After``). Everything else is an error at once.

The size and version of an object are noted when they are first told. An answer from another version is an error, so
bytes of two versions are never mixed.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from shardload.errors import (
    ShardloadError,
    SourceError,
    SourceNotFoundError,
    TransferError,
    UnsafeSourceError,
    UnsupportedError,
)
from shardload.stores import answers
from shardload.stores.answers import TIMEOUT_VARIABLE, FailedTry, OutOfRangeError
from shardload.stores.clients import Address, client
from shardload.units import exact_bytes

if TYPE_CHECKING:
    import asyncio

    from obstore import GetOptions

_WINDOW_S = 120.0
"""For how long a request that fails is repeated, in seconds from its first try."""
_FIRST_WINDOW_S = 10.0
"""The same until a store has answered once: its first answer shows whether the address is right."""
_STALLS = 4
"""A connection that sends nothing for a quarter of the time is given up, so that a stalled request is repeated."""
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 4.0
"""Before try 2, 3, …, a random time of up to 0.1, 0.2, … s passes (*full jitter*), so that not all come at once."""
_SMALL_BYTES = 1 << 20
"""How many bytes are read of a file before its size is known, if it is to be read as a whole."""
_INDIRECT = 2
"""How many requests for an object follow redirects, where a hub has these; later ones go where the hub redirects to.
A header needs no more, and to ask for the address is a request too."""
_SIGNED_FOR = timedelta(minutes=1)
_PAGES = ("text/html", "application/xhtml+xml")
_MAX_PAGE_BYTES = 4 << 20
"""Longest web page that is searched for links to the files of a folder."""


@dataclass(frozen=True, slots=True)
class Version:
    """Size and version of an object, as its store tells them."""

    size: int
    tag: str = ""
    """ETag without its quotes; empty if the store has none."""
    changed_s: float = 0.0
    """When the object was last written, in seconds since 1970; 0 if the store does not say."""

    @classmethod
    def of(cls, meta: Any) -> Version:
        """Return what obstore's description of an object says."""
        return cls(meta["size"], (meta.get("e_tag") or "").strip('"'), meta["last_modified"].timestamp() // 1)

    def differs(self, other: Version) -> bool:
        """Whether two answers were certainly given for different versions."""
        if self.size != other.size:
            return True
        if self.tag and other.tag:
            return self.tag != other.tag
        return bool(self.changed_s and other.changed_s and self.changed_s != other.changed_s)

    @property
    def number(self) -> int:
        """A number that differs between versions."""
        return int.from_bytes(f"{self.tag or self.changed_s}".encode(), "big")


@dataclass(frozen=True, slots=True)
class KnownObjects:
    """What is known of the objects at an address that names one version of them, such as a commit."""

    sizes: Mapping[str, int]
    """Name → size in bytes of all objects."""
    sha256: Mapping[str, str]
    """Name → digest of objects for which one is known."""
    address_of: Callable[[str], str | None]
    """Returns where the server redirects requests for an object to; ``None`` if it sends the object itself."""

    def inside(self, folder: str, *, whole: bool) -> dict[str, int | None]:
        """Return name → size of all objects below a folder, or of what is directly in it: ``None`` for a folder."""
        prefix = f"{folder}/" if folder else ""
        below = {name[len(prefix) :]: size for name, size in self.sizes.items() if name.startswith(prefix)}
        if whole:
            return dict(below)
        return {name.partition("/")[0]: None if "/" in name else size for name, size in below.items()}


class Requests:
    """Sends requests for the objects below a URL. Names of objects are relative to this URL.

    ``headers`` go with each request to an HTTP server. ``shown`` is the address for messages, by default the URL. What
    is in ``known`` is not asked for.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: dict[str, str] | None = None,
        shown: str | None = None,
        known: KnownObjects | None = None,
    ) -> None:
        self.address = Address.parse(url)
        self.url = shown or self.address.url
        self._headers = headers
        self._versions: dict[str, Version] = {}
        self.known = known
        if known is not None:
            self._versions |= {name: Version(size) for name, size in known.sizes.items()}
        self._begun: Counter[str] = Counter()
        self._direct: dict[str, asyncio.Future[tuple[Any, str]]] = {}
        self.answered = False
        """Whether the store has answered a request, so that its address is right."""
        self.succeeded = False
        """Whether the store has sent something that was asked for, so that access is granted in principle."""

    @functools.cached_property
    def _client(self) -> Any:
        return client(self.address, stall_s=window_s() / _STALLS, headers=self._headers)

    def is_object(self) -> bool:
        """Whether the URL itself is that of an object, not of a folder."""
        return bool(self.address.path) and self.exists("")

    def exists(self, name: str) -> bool:
        """Whether there is an object of this name."""
        return self.version(name) is not None

    @property
    def can_list(self) -> bool:
        """Whether the store can list the names of its objects; HTTP servers cannot."""
        return self.known is not None or not self.address.is_http

    def read(self, name: str, start: int = 0, stop: int | None = None) -> memoryview | None:
        """Read bytes of an object, all by default; ``None`` if there is no such object."""
        return self.begin(name, start, stop).result()

    def begin(self, name: str, start: int = 0, stop: int | None = None) -> Fetch:
        """Start to read bytes of an object, all by default, and return the pending request."""
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise TransferError(f"{self.url}/{name!a} cannot be read: its name is not valid Unicode") from error
        return Fetch(self._repeated(name, _Body(self, name, start, stop)), shown=self._shown(name))

    def read_small(self, name: str, *, limit: int) -> memoryview | None:
        """Read a whole object; return ``None`` if it is missing, and raise if it has more than ``limit`` bytes."""
        try:
            found = self.read(name, 0, _SMALL_BYTES)
        except OutOfRangeError:
            return memoryview(b"")
        if found is None or (n_bytes := self._versions[name].size) <= _SMALL_BYTES:
            return found
        if n_bytes > limit:
            raise UnsafeSourceError(
                f"{self._shown(name)} should have at most {exact_bytes(limit)}, as it is read as a whole, but has "
                f"{exact_bytes(n_bytes)}. It is probably another kind of file. Check the address"
            )
        return self.read(name)

    def version(self, name: str) -> Version | None:
        """Return the size and version of an object; ``None`` if there is no such object."""
        if (known := self._versions.get(name)) is None and self.known is None:
            # One byte, not HEAD: an address may be signed for GET only.
            try:
                if self.read(name, 0, 1) is None:
                    return None
            except OutOfRangeError:
                return self.empty(name)
            known = self._versions[name]
        return known

    def empty(self, name: str) -> Version:
        """Return the version of an object that turned out to be empty."""
        return self._versions.setdefault(name, Version(0))

    def encoded(self, name: str) -> str:
        """Return the address of an object on an HTTP server as it is sent, without what follows ``?``."""
        return f"{self.address.root}/{quote(self.path(name))}"

    def size(self, name: str) -> int | None:
        """Return the size of an object; ``None`` if there is no such object."""
        found = self.version(name)
        return None if found is None else found.size

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return name → size in bytes of all objects below a folder, relative to this folder, sorted."""
        return dict(sorted(self._list(folder, whole=True).items()))

    def entries(self, folder: str = "") -> dict[str, int | None]:
        """Return name → size in bytes of what is directly in a folder; ``None`` is the size of a folder in it."""
        return self._list(folder, whole=False)

    def _list(self, folder: str, *, whole: bool) -> dict[str, Any]:
        if self.known is not None:
            return self.known.inside(folder, whole=whole)
        if not self.can_list:
            raise UnsupportedError(f"Cannot list {self._shown(folder)}: HTTP servers do not list their files")
        request = _Listing(whole=whole)
        found: dict[str, Any] | None = Fetch(self._repeated(folder, request), shown=self._shown(folder)).wait()
        if found is None:
            raise SourceNotFoundError(f"There is no bucket {self.address.root}. Check the address")
        return found

    def page(self, name: str) -> bytes | None:
        """Return the web page that an HTTP server sends for a folder; ``None`` if it sends none, or something else."""
        found: bytes | None = Fetch(
            self._repeated(name, _Page(f"{self.encoded(name)}/")), shown=self._shown(name)
        ).wait()
        return found

    def path(self, name: str) -> str:
        """Return the path of an object in its bucket, or on its server."""
        return "/".join(part for part in (self.address.path, name) if part)

    def note(self, name: str, found: Version) -> None:
        """Remember an object's version, or raise if an earlier answer came from another one."""
        if self.known is not None:  # the address names the version; servers that have copies may call it otherwise
            found = Version(found.size)
        before = self._versions.setdefault(name, found)
        if found.differs(before):
            raise answers.changed(self._shown(name))
        if found.tag and not before.tag:  # a listing may not tell it
            self._versions[name] = found

    def tag(self, name: str) -> str | None:
        """Return the ETag that an answer must have, if the store compares it itself."""
        # Not over HTTP: where the server redirects to may have another one.
        known = self._versions.get(name)
        return f'"{known.tag}"' if known is not None and known.tag and not self.address.is_http else None

    async def target(self, name: str) -> tuple[Any, str]:
        """Return the client for a request for an object, and the object's path there."""
        self._begun[name] += 1
        if self.known is None or self._begun[name] <= _INDIRECT:
            return self._client, self.path(name)
        from asyncio import ensure_future, shield

        if name not in self._direct:
            self._direct[name] = ensure_future(self._look_up(name))
        # Shielded: a request that is cancelled must not cancel the search for all others.
        return await shield(self._direct[name])

    def _forget(self, name: str, target: tuple[Any, str]) -> None:
        """Forget a direct address that is no longer valid, unless another request has a newer one already."""
        found = self._direct.get(name)
        if found is not None and found.done() and not found.cancelled() and found.result() == target:
            del self._direct[name]

    async def _look_up(self, name: str) -> tuple[Any, str]:
        from asyncio import get_running_loop

        assert self.known is not None
        try:
            url = await get_running_loop().run_in_executor(None, self.known.address_of, name)
        except Exception:  # of any kind, from the hub's library: then each request is redirected
            url = None
        if url is None:
            return self._client, self.path(name)
        address = Address.parse(url)
        return client(address, stall_s=window_s() / _STALLS), address.path

    def _shown(self, name: str) -> str:
        return f"{self.url}/{name}".rstrip("/")

    async def _repeated(self, name: str, request: _Request) -> Any:
        """Send a request until it succeeds, fails for good, or its time is over."""
        from asyncio import CancelledError, get_running_loop, sleep

        began_s, tries, renewed = time.monotonic(), 0, False
        while True:
            tries += 1
            target = await self.target(name)
            try:
                found = await request.send(*target)
            except (CancelledError, ShardloadError):
                raise
            except Exception as error:  # obstore's kinds, FileNotFoundError, ValueError
                failed = FailedTry.of(error)
                self.answered = self.answered or (failed.status is not None and not failed.is_passing)
                if failed.code == "missing":
                    return None
                # A direct address is valid for an hour or so: ask for a new one, once.
                if failed.code == "forbidden" and target[0] is not self._client and not renewed:
                    renewed = True
                    self._forget(name, target)
                    continue
                spent_s = time.monotonic() - began_s
                pause_s = random.uniform(0, min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(tries - 1, 10)))
                if failed.is_passing and failed.is_busy:
                    pause_s += await get_running_loop().run_in_executor(None, self._pause_asked, name)
                if not failed.is_passing or spent_s + pause_s > window_s(first=not self.answered):
                    # Not `from error`: its text has the address, which may be signed.
                    told = failed.without(self.address.query)
                    raise answers.failure(self.url, name, told, tries=tries, spent_s=spent_s) from None
                await sleep(pause_s)
            else:
                self.answered = self.succeeded = True
                return found

    def _pause_asked(self, name: str) -> float:
        path = self.path(name)
        if self.address.is_http:
            query = f"?{self.address.query}" if self.address.query else ""
            return answers.pause_asked(f"{self.encoded(name)}{query}")
        import obstore

        try:
            return answers.pause_asked(obstore.sign(self._client, "GET", path, _SIGNED_FOR))
        except Exception:  # some credentials cannot sign addresses; then the random pause must do
            return 0.0


class _Request:
    async def send(self, client: Any, path: str) -> Any:
        """Send the request once."""
        raise NotImplementedError


class _Body(_Request):
    """A request for bytes of an object."""

    def __init__(self, requests: Requests, name: str, start: int = 0, stop: int | None = None) -> None:
        self._requests, self._name, self._start, self._stop = requests, name, start, stop

    async def send(self, client: Any, path: str) -> memoryview:
        import obstore

        options: GetOptions = {}
        if self._stop is not None:
            options["range"] = self._start, self._stop
        elif self._start:
            options["range"] = {"offset": self._start}
        if (tag := self._requests.tag(self._name)) is not None:
            options["if_match"] = tag
        try:
            answer = await obstore.get_async(client, path, options=options)
        except Exception as error:
            failed = FailedTry.of(error)
            if failed.code == "no length":  # made as it is sent: no file
                raise answers.web_page(self._requests.url, self._name) from None
            if failed.code == "no ranges" or (failed.status == 416 and self._start):
                # Perhaps a web page: shorter than the file, or made for this request.
                self._refuse_page(await self._whole(client, path))
            raise
        self._refuse_page(answer)
        self._requests.note(self._name, Version.of(answer.meta))
        return memoryview(await answer.bytes_async())

    async def _whole(self, client: Any, path: str) -> Any:
        import obstore

        try:
            return await obstore.get_async(client, path)
        except Exception as error:
            if FailedTry.of(error).code == "no length":
                raise answers.web_page(self._requests.url, self._name) from None
            raise

    def _refuse_page(self, answer: Any) -> None:
        if _is_page(answer) and not self._requests.can_list and not self._name.endswith((".html", ".htm")):
            raise answers.web_page(self._requests.url, self._name)


def _is_page(answer: Any) -> bool:
    kind: str = answer.attributes.get("Content-Type", "")
    return kind.lower().startswith(_PAGES)


class _Listing(_Request):
    """A request for the names of objects: of all below a folder (``whole``), or of what is directly in it."""

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole

    async def send(self, client: Any, path: str) -> dict[str, int | None]:
        import obstore

        skip = len(path) + 1 if path else 0
        found: dict[str, int | None] = {}
        if self._whole:
            objects = await obstore.list(client, path or None).collect_async()
        else:
            listed = await obstore.list_with_delimiter_async(client, path or None)
            objects = listed["objects"]
            found |= {folder[skip:].strip("/"): None for folder in listed["common_prefixes"]}
        # Some programs make an object for each folder: what contains other objects is a folder.
        return {meta["path"][skip:]: meta["size"] for meta in objects} | found


class _Page(_Request):
    """A request for the web page by which an HTTP server shows a folder."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def send(self, client: Any, path: str) -> bytes | None:
        import obstore

        try:
            answer = await obstore.get_async(client, path)
        except Exception as error:
            if FailedTry.of(error).code != "no length":
                raise
            return await self._without_length()
        if not _is_page(answer) or answer.meta["size"] > _MAX_PAGE_BYTES:
            return None
        return bytes(await answer.bytes_async())

    async def _without_length(self) -> bytes | None:
        """Read a page that the server makes as it sends it, which obstore cannot."""
        from asyncio import get_running_loop

        return await get_running_loop().run_in_executor(None, answers.page_of, self._address, _MAX_PAGE_BYTES)


class Fetch:
    """A pending request to a store: for bytes of an object, or for a list of names."""

    def __init__(self, request: Coroutine[Any, Any, Any], *, shown: str) -> None:
        self._future = _loop().submit(request)
        self._shown = shown

    def cancel(self) -> None:
        """Cancel the request; a thread that waits for it gets a `TransferError`."""
        self._future.cancel()

    def result(self) -> memoryview | None:
        """Return the bytes; ``None`` if there is no such object."""
        found: memoryview | None = self.wait()
        return found

    def wait(self) -> Any:
        """Wait for the response and return it."""
        try:
            return self._future.result()
        except concurrent.futures.CancelledError as error:
            raise TransferError(f"The request for {self._shown} was cancelled") from error

    @property
    def has_failed(self) -> bool:
        """Whether the request ended with an error, or was cancelled."""
        return self._future.cancelled() or (self._future.done() and self._future.exception() is not None)

    @staticmethod
    def is_too_short(error: TransferError) -> bool:
        """Whether the request failed because the object ends before the requested range."""
        return isinstance(error, OutOfRangeError)


class _Loop:
    """A thread with an event loop, in which all requests of the process wait for their answers."""

    def __init__(self) -> None:
        import asyncio  # takes as long as importing all loaders

        self._asyncio = asyncio
        self._loop = asyncio.new_event_loop()
        # A daemon: a process that ends does not wait for a server.
        threading.Thread(target=self._loop.run_forever, name="event-loop-of-stores", daemon=True).start()

    def submit(self, request: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Start a request."""
        return self._asyncio.run_coroutine_threadsafe(request, self._loop)


@functools.cache
def _loop_of(process: int) -> _Loop:
    del process  # a forked process has no thread of its parent
    return _Loop()


_loops = threading.Lock()
_users: set[int] = set()
"""The process that has sent requests, if there is one: a forked process inherits it."""


def _loop() -> _Loop:
    with _loops:
        if _users and os.getpid() not in _users:
            raise UnsupportedError(
                "Cannot read from a remote store in a process that was forked from one which has read from a store: "
                'obstore\'s threads do not survive a fork. Start processes with the method "spawn" or "forkserver"'
            )
        _users.add(os.getpid())
        return _loop_of(os.getpid())


def window_s(*, first: bool = False) -> float:
    """Return for how many seconds a failing request is repeated; ``first`` if the store has never answered."""
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return _FIRST_WINDOW_S if first else _WINDOW_S
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise SourceError(f"{TIMEOUT_VARIABLE} should be a number of seconds, but is {text!r}")
    return found
