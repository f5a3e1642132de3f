"""Requests to remote stores (``s3://``, ``gs://``, ``http(s)://``), sent by obstore from one thread with an event loop.

    Requests.begin(name, start, stop) ─► Fetch ─► result()
                                           └─► try, try again …: only this request, at growing random intervals

A request that fails is repeated by itself, as long as the failure may pass and its time (`window_s`) is not over. A
server that is busy may say how long to wait (``Retry-After``). Everything else is an error at once.

The size and version of an object are noted when they are first told. An answer from another version is an error, so
bytes of two versions are never mixed.

If a cache is in use, `shardload.stores.cached_reads` looks there first, and sends the rest of a request.
"""

from __future__ import annotations

import functools
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from shardload.errors import (
    ShardloadError,
    SourceNotFoundError,
    TransferError,
    UnsafeSourceError,
    UnsupportedError,
)
from shardload.stores import answers
from shardload.stores.answers import FailedTry, OutOfRangeError
from shardload.stores.cache_choice import current_cache
from shardload.stores.cached_reads import CachedReads
from shardload.stores.clients import Address, client
from shardload.stores.event_loop import Fetch
from shardload.stores.near import NearServer
from shardload.stores.objects import KnownObjects, Version
from shardload.stores.pace import Pace
from shardload.stores.queries import NameList, ObjectBytes, Query, WebPage
from shardload.stores.tokens import token_for
from shardload.stores.windows import stall_s, window_s
from shardload.units import exact_bytes

if TYPE_CHECKING:
    import asyncio


_DICE = random.SystemRandom()
"""Not the user's generator, which may be seeded alike on all hosts, and which a load leaves as it is."""
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 4.0
"""Before try 2, 3, …, a random time of up to 0.1, 0.2, … s passes (*full jitter*), so that not all come at once."""
_SMALL_BYTES = 1 << 20
"""How many bytes are read of a file before its size is known, if it is to be read as a whole."""
_INDIRECT = 2
"""How many requests for an object follow redirects, where a hub has these; later ones go where the hub redirects to.
A header needs no more, and to ask for the address is a request too."""
_SIGNED_FOR = timedelta(minutes=1)


class Requests:
    """Sends requests for the objects below a URL. Names of objects are relative to this URL.

    ``headers`` go with each request to an HTTP server; without them, the user's token for the server does, if there is
    one. ``shown`` is the address for messages, by default the URL. ``asked`` is the address that a user gave, which
    errors name until the store has answered. What is in ``known`` is not asked for.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: dict[str, str] | None = None,
        shown: str | None = None,
        asked: str | None = None,
        known: KnownObjects | None = None,
    ) -> None:
        self.address = Address.parse(url)
        self.url = shown or self.address.url
        self._asked = asked
        self._headers = headers
        self.token = token_for(self.address.root) if headers is None and self.address.is_http else None
        """The user's token for the server."""
        self._versions: dict[str, Version] = {}
        self.known = known
        if known is not None:
            self._versions |= {name: Version(size) for name, size in known.sizes.items()}
        self._begun: Counter[str] = Counter()
        self._direct: dict[str, asyncio.Future[tuple[Any, str]]] = {}
        self.pace = Pace()
        """How fast the store answers."""
        self.answered = False
        """Whether the store has answered a request, so that its address is right."""
        self.succeeded = False
        """Whether the store has sent something that was asked for, so that access is granted in principle."""
        cache = current_cache()
        self._cached = None if cache is None else CachedReads(cache, self)

    def only_look(self) -> None:
        """From now on, what is read does not count as used: it is not why it stays in the cache."""
        if self._cached is not None:
            self._cached.is_use = False

    @functools.cached_property
    def _client(self) -> Any:
        return client(self.address, stall_s=stall_s(), headers={**(self._headers or {}), **self._token_headers})

    @property
    def _token_headers(self) -> Mapping[str, str]:
        return {} if self.token is None else self.token.headers

    @property
    def _query(self) -> str:
        return f"?{self.address.query}" if self.address.query else ""

    @property
    def _secrets(self) -> tuple[str, str]:
        return self.address.query, "" if self.token is None else self.token.text

    def is_object(self) -> bool:
        """Whether the URL itself is that of an object, not of a folder."""
        return bool(self.address.path) and self.exists("")

    def exists(self, name: str) -> bool:
        """Whether there is an object of this name."""
        return self.version(name) is not None

    def is_current(self, name: str) -> bool:
        """Whether an object that was read before is still there, in the same version; never answered by the cache."""
        if self.known is not None:
            return True
        try:
            return Fetch(self.fetch(name, 0, 1), shown=self.shown(name)).result() is not None
        except answers.ChangedError:
            return False

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
        if self._cached is not None:
            return self._cached.begin(name, start, stop)
        return Fetch(self.fetch(name, start, stop), shown=self.shown(name))

    def is_cached(self, name: str, ranges: Iterable[tuple[int, int]]) -> bool:
        """Whether all these ranges of an object whose version is known are in the cache."""
        return self._cached is not None and self._cached.has(name, ranges)

    def read_cached(self, name: str, buffers: Sequence[memoryview], start: int) -> bool:
        """Fill buffers, in turn, with an object's bytes from ``start`` on; false if the cache lacks some of them."""
        return self._cached is not None and self._cached.read_into(name, buffers, start)

    async def fetch(self, name: str, start: int, stop: int | None) -> memoryview | None:
        """Read bytes of an object from the store; ``None`` if there is no such object."""
        found: memoryview | None = await self._repeated(name, ObjectBytes(self, name, start, stop))
        return found

    def known_version(self, name: str) -> Version | None:
        """Return the version of an object if it is known already."""
        return self._versions.get(name)

    def near_server(self) -> NearServer | None:
        """Return connections of its own to an HTTP server, for bytes that go where they belong without a copy.

        ``None`` if requests need more than the user's token, or if what they bring is kept in a cache.
        """
        is_plain = self._headers is None and self.known is None and self._cached is None and not self.address.query
        return NearServer.at(self.address.root, headers=self._token_headers) if is_plain else None

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
                f"{self.shown(name)} should have at most {exact_bytes(limit)}, as it is read as a whole, but has "
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

    def sizes(self, folder: str = "", *, trusts_none: bool = False) -> dict[str, int]:
        """Return name → size in bytes of all objects below a folder, relative to this folder, sorted.

        Where nothing is, it takes two more requests to be sure that the store said so; with ``trusts_none``, it may
        have been a web page.
        """
        found = self.versions(folder, trusts_none=trusts_none)
        return {name: version.size for name, version in found.items()}

    def versions(self, folder: str = "", *, trusts_none: bool = False) -> dict[str, Version]:
        """Return name → version of all objects below a folder, as the store lists them; see `sizes`."""
        return dict(sorted(self._list(folder, whole=True, trusts_none=trusts_none).items()))

    def entries(self, folder: str = "") -> dict[str, int | None]:
        """Return name → size in bytes of what is directly in a folder; ``None`` is the size of a folder in it."""
        found = self._list(folder, whole=False)
        return {name: None if version is None else version.size for name, version in found.items()}

    def _list(self, folder: str, *, whole: bool, trusts_none: bool = False) -> dict[str, Any]:
        if self.known is not None:
            return self.known.inside(folder, whole=whole)
        if not self.can_list:
            raise UnsupportedError(f"Cannot list {self.shown(folder)}: HTTP servers do not list their files")
        request = NameList(self, folder, whole=whole, trusts_none=trusts_none)
        found: dict[str, Any] | None = Fetch(self._repeated(folder, request), shown=self.shown(folder)).wait()
        if found is None:
            raise SourceNotFoundError(f"There is no bucket {self.address.root}. Check the address")
        return found

    def page(self, name: str) -> bytes | None:
        """Return the web page that an HTTP server sends for a folder; ``None`` if it sends none, or something else."""
        found: bytes | None = Fetch(
            self._repeated(name, WebPage(f"{self.encoded(name)}/{self._query}", headers=self._token_headers)),
            shown=self.shown(name),
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
            raise answers.changed(self.shown(name))
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
        return client(address, stall_s=stall_s()), address.path

    def shown(self, name: str) -> str:
        """Return the address of an object for messages."""
        return f"{self.url}/{name}".rstrip("/")

    async def _repeated(self, name: str, request: Query) -> Any:
        """Send a request until it succeeds, fails for good, or its time is over."""
        from asyncio import CancelledError, get_running_loop, sleep

        if self.known is not None and name not in self.known.sizes:
            return None
        began_s, tries, renewed = time.monotonic(), 0, False
        while True:
            tries += 1
            target = await self.target(name)
            try:
                found = await request.send(*target)
            except (CancelledError, ShardloadError):
                raise
            except Exception as error:  # obstore's kinds, FileNotFoundError, ValueError
                failed = FailedTry.of(error, secrets=self._secrets)
                is_answer = failed.status is not None and not failed.is_passing and not failed.credentials
                self.answered = self.answered or is_answer
                if failed.code == "missing":
                    return None
                # A direct address is valid for an hour or so: ask for a new one, once.
                if failed.code in ("forbidden", "expired") and target[0] is not self._client and not renewed:
                    renewed = True
                    self._forget(name, target)
                    continue
                spent_s = time.monotonic() - began_s
                pause_s = _DICE.uniform(0, min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(tries - 1, 10)))
                if failed.is_passing and failed.is_busy:
                    pause_s += await get_running_loop().run_in_executor(None, self._pause_asked, name)
                if not failed.is_passing or spent_s + pause_s > window_s(first=not self.answered):
                    # Not `from error`: its text has the address, which may be signed.
                    is_unknown = failed.is_unanswered and not self.answered
                    where = (self._asked, "") if self._asked and is_unknown else (self.url, name)
                    options: dict[str, Any] = {
                        "tries": tries,
                        "spent_s": spent_s,
                        "has_answered": self.answered,
                    }
                    raise answers.failure(*where, failed, has_token=self.token is not None, **options) from None
                await sleep(pause_s)
            else:
                self.answered = self.succeeded = True
                return found

    def _pause_asked(self, name: str) -> float:
        path = self.path(name)
        if self.address.is_http:
            return answers.pause_asked(f"{self.encoded(name)}{self._query}", headers=self._token_headers)
        import obstore

        try:
            return answers.pause_asked(obstore.sign(self._client, "GET", path, _SIGNED_FOR))
        except Exception:  # some credentials cannot sign addresses; then the random pause must do
            return 0.0
