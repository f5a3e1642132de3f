"""Reads of remote objects through a cache of ranges: stored pieces from the disk, the rest from the store.

    begin(name, start, stop) ─► which version is there? ─► stored pieces │ gaps ─► requests ─► the cache keeps them
                                                                │
    result() in the thread that needs the bytes ◄── reads them, compares them with digests, puts the pieces together

Which version of an object is there is always asked for first, so that a changed object is never read from the cache:
the first request for a file tells it, or one for a single byte if the cache has ranges of the object. Only an address
that names one version, as a commit of a hub does, needs no request. An object without a version that differs whenever
its bytes differ is not kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol
from urllib.parse import parse_qsl

from shardload.errors import ShardloadError
from shardload.stores import answers
from shardload.stores.clients import Address, endpoint_of
from shardload.stores.event_loop import Fetch
from shardload.stores.objects import KnownObjects, Version
from shardload.stores.range_cache import Piece, RangeCache
from shardload.stores.range_files import CachedObject
from shardload.stores.store import between

if TYPE_CHECKING:
    import asyncio

_QUIET_S = 60.0
"""How long ago an object without an ETag must have been changed, in seconds, for the time of this to be its version:
servers tell it in whole seconds, so another change may follow within the same one (RFC 9110, 8.8.2.2)."""
_SIGNATURES = ("x-amz-", "x-goog-", "x-ms-")
"""How names of parameters begin that sign an address: they differ each time, for the same object."""
_SIGNING = frozenset(
    {"awsaccesskeyid", "googleaccessid", "expires", "signature", "key-pair-id", "policy", "token", "access_token"}
    | {"sig", "se", "st", "sp", "sv", "sr", "spr", "skoid", "sktid", "skt", "ske", "sks", "skv"}  # Azure
)


class RangeSource(Protocol):
    """What the cache needs of `shardload.stores.requests.Requests`, which sends the requests."""

    address: Address
    url: str
    known: KnownObjects | None

    async def fetch(self, name: str, start: int, stop: int | None) -> memoryview | None:
        """Read bytes of an object from the store."""
        ...

    def known_version(self, name: str) -> Version | None:
        """Return the version of an object if it is known already."""
        ...

    def path(self, name: str) -> str:
        """Return the path of an object below the root of the address."""
        ...

    def shown(self, name: str) -> str:
        """Return the address of an object for messages."""
        ...


@dataclass(slots=True)
class _Found:
    """The pieces of a range, and the bytes of those that were requested from the store."""

    stored: CachedObject
    pieces: list[tuple[Piece, memoryview | None]]


class CachedReads:
    """Reads the objects below an address through a cache."""

    def __init__(self, cache: RangeCache, origin: RangeSource) -> None:
        self._cache, self._origin = cache, origin
        self.is_use = True
        """Whether what is read counts as used, so that it stays in the cache."""
        self._used_since_s = time.time()
        self._variant = _variant(origin)
        self._pins: dict[str, asyncio.Future[Version | None]] = {}

    def begin(self, name: str, start: int, stop: int | None) -> Fetch:
        """Start to read bytes of an object; see `shardload.stores.requests.Requests.begin`."""
        finish = partial(self._finished, name)
        return Fetch(self._found(name, start, stop), shown=self._origin.shown(name), finish=finish)

    def has(self, name: str, ranges: Iterable[tuple[int, int]]) -> bool:
        """Whether all these ranges of an object, whose version is known already, are in the cache."""
        stored = self._stored(name, self._origin.known_version(name))
        if stored is None:
            return False
        found = (self._find(stored, start, min(stop, stored.size)) for start, stop in ranges)
        return all(piece.segment is not None for pieces in found for piece in pieces)

    def read_into(self, name: str, buffers: Sequence[memoryview], start: int) -> bool:
        """Fill buffers, in turn, with an object's bytes from ``start`` on; false if the cache lacks some of them."""
        stored = self._stored(name, self._origin.known_version(name))
        if stored is None:
            return False
        pieces = self._find(stored, start, start + sum(map(len, buffers)))
        if any(piece.segment is None for piece in pieces):
            return False
        parts = (between(buffers, piece.start - start, piece.stop - start) for piece in pieces)
        return all(self._cache.read_into(part, stored, piece) for part, piece in zip(parts, pieces, strict=True))

    def _find(self, stored: CachedObject, start: int, stop: int) -> list[Piece]:
        return self._cache.find(stored, start, stop, is_use=self.is_use)

    async def _found(self, name: str, start: int, stop: int | None) -> _Found | memoryview | None:
        from asyncio import gather, get_running_loop

        stored = self._stored(name, await self._version(name))
        if stored is None or start >= (end := min(stored.size, stored.size if stop is None else stop)):
            return await self._fetched(name, start, stop)
        pieces = await get_running_loop().run_in_executor(None, self._find, stored, start, end)
        gaps = [piece for piece in pieces if piece.segment is None]
        data = await gather(*(self._fetched(name, gap.start, gap.stop) for gap in gaps))
        if None in data:
            return None
        by_gap = dict(zip(gaps, data, strict=True))
        return _Found(stored, [(piece, by_gap.get(piece)) for piece in pieces])

    async def _version(self, name: str) -> Version | None:
        """Return the version of an object, asked for if the cache has ranges of the object and it is not known yet."""
        from asyncio import ensure_future, shield

        if (found := self._origin.known_version(name)) is not None:
            return found
        if name not in self._pins:
            if not self._cache.knows(_address(self._origin, name), self._variant):
                return None
            self._pins[name] = ensure_future(self._pinned(name))
        # Shielded: a request that is cancelled must not cancel what others wait for.
        return await shield(self._pins[name])

    async def _pinned(self, name: str) -> Version | None:
        # One byte, not HEAD: an address may be signed for GET only. The request for the bytes meets an error again.
        with contextlib.suppress(ShardloadError):
            await self._origin.fetch(name, 0, 1)
        return self._origin.known_version(name)

    async def _fetched(self, name: str, start: int, stop: int | None) -> memoryview | None:
        """Request bytes from the store, and have the cache keep them."""
        data = await self._origin.fetch(name, start, stop)
        if data is None:
            return None
        stored = self._stored(name, self._origin.known_version(name))
        if stored is None or not data or start + len(data) > stored.size:
            self._cache.fetched(len(data))
        else:
            self._cache.keep(stored, start, data, used_since_s=self._used_since_s)
        return data

    def _finished(self, name: str, found: _Found | memoryview | None) -> memoryview | None:
        """Put a range together, in the thread that needs it."""
        if not isinstance(found, _Found):
            return found
        [(first, data), *others] = found.pieces
        if data is not None and not others:
            return data
        import numpy as np  # not bytearray, which clears its memory first

        buffer = np.empty(found.pieces[-1][0].stop - first.start, np.uint8).data
        for piece, data in found.pieces:
            part = buffer[piece.start - first.start : piece.stop - first.start]
            if data is None and self._cache.read_into([part], found.stored, piece):
                continue
            if data is None:  # damaged, or evicted since
                request = self._fetched(name, piece.start, piece.stop)
                if (data := Fetch(request, shown=self._origin.shown(name)).result()) is None:
                    return None
            if len(data) != len(part):
                raise answers.changed(self._origin.shown(name))
            part[:] = data
        found.pieces.clear()  # with the memory of what was requested
        return buffer

    def _stored(self, name: str, version: Version | None) -> CachedObject | None:
        return None if version is None else cached_object(self._origin, name, version, variant=self._variant)


def cached_object(
    origin: RangeSource, name: str, version: Version, *, variant: str | None = None
) -> CachedObject | None:
    """Return what an object is called in a cache; ``None`` if its version is not known for sure.

    It is the same on all computers that read it from the same address, by the same endpoint.
    """
    if (text := _version_text(version, is_fixed=origin.known is not None)) is None:
        return None
    return CachedObject(_address(origin, name), text, version.size, _variant(origin) if variant is None else variant)


def _address(origin: RangeSource, name: str) -> str:
    return origin.shown(name) if origin.known is not None else f"{origin.address.root}/{origin.path(name)}"


def _version_text(version: Version, *, is_fixed: bool) -> str | None:
    """Return text that differs whenever an object's bytes differ; ``None`` if its store does not tell enough."""
    if is_fixed:
        return "fixed by the address"
    if version.tag and not version.tag.startswith("W/"):  # a weak one may stay while bytes change
        return f"etag {version.tag}"
    if version.changed_s and time.time() - version.changed_s >= _QUIET_S:
        return f"changed {version.changed_s:.0f}"
    return None


def _variant(origin: RangeSource) -> str:
    """Return a digest of what tells objects of one address apart; empty if there is no such thing."""
    query = [(key, value) for key, value in parse_qsl(origin.address.query, keep_blank_values=True) if not _signs(key)]
    # Of a hub, the address for messages does not name the server.
    facts = [endpoint_of(origin.address.scheme), origin.address.root if origin.known is not None else None, query]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest() if any(facts) else ""


def _signs(parameter: str) -> bool:
    return parameter.lower() in _SIGNING or parameter.lower().startswith(_SIGNATURES)
