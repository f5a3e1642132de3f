"""Other servers of the same addresses: they are asked for a block before its source is.

    tag, number ─► the same order of servers on all of them ─► the first one fetches it, the others ask that one
                   (rendezvous hashing over their ids)         dead, stalled or wrong: the next one; at last the source

The one that is to fetch a block first asks all others whether they have it: some may have been here for longer.

A server has a new id each time it starts, and tells it at ``/api/v1/server``. So servers need not agree on names of
each other, all may be given the same list, and one that finds itself in it leaves itself out. A request between servers
says that it is one, and is never passed on: there are no loops.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp

from shardload.errors import UsageError
from shardload.serving.roots.pinned_files import PinnedFile
from shardload.stores.clients import certificates_file
from shardload.stores.handed import LINE_BYTES, SERVER_PATH
from shardload.stores.tokens import origin_of, token_for

PEER_HEADER = "Shardload-Peer"
"""A request with it comes from another server. It says what may be done for it: `FETCH`, or `LOOK`."""
FETCH, LOOK = "fetch", "look"
"""Send a block, and fetch it from its source if it is not here; or send it only if it is here."""
DIGEST_HEADER = "Shardload-Digest"
"""The digest of the block in an answer to another server."""
PEER_STATES = ("reachable", "left out", "not asked", "this server")
_CONNECT_S = 2.0
_SILENT_S = 15.0
"""After so many seconds without a byte, a peer counts as stalled: it may have to fetch the block first."""
_WHOLE_S = 60.0
_DOWN_S = 5.0
"""How long a peer that failed is left out; twice as long each time, up to `_LONGEST_DOWN_S`."""
_LONGEST_DOWN_S = 60.0


def digest_of(data: memoryview) -> str:
    """Return the digest of a block by which another server knows that it has got it whole."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class FileBlock:
    """A block of a file."""

    data: memoryview
    digest: str = ""
    """By `digest_of`, made when the block was fetched from its source; empty if there are no peers."""


class _FailedError(Exception):
    """Raised when a peer did not send a block; ``is_down`` if it is to be left out for a while."""

    def __init__(self, text: str, *, is_down: bool) -> None:
        super().__init__(text)
        self.is_down = is_down


_FAILURES = (_FailedError, aiohttp.ClientError, TimeoutError, OSError, EOFError, ValueError)


def _headers(file: PinnedFile, start: int, stop: int, wish: str) -> dict[str, str]:
    return {"Range": f"bytes={start}-{stop - 1}", "If-Match": f'"{file.tag}"', PEER_HEADER: wish}


def _reason(error: Exception) -> str:
    """Return why a peer was not reached, for people: aiohttp's text has the parts of a call."""
    match error:
        case aiohttp.ClientConnectorCertificateError():
            why = getattr(error.certificate_error, "verify_message", "") or "it is not valid"
            return f"its certificate is not trusted: {why}. SSL_CERT_FILE names a file with an authority of your own"
        case aiohttp.ClientSSLError():
            return "it does not answer in TLS. If it has no certificate, write http:// instead of https://"
        case aiohttp.ServerDisconnectedError():
            return "it closed the connection. If it has a certificate, its address begins with https://"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else None
    if cause is None or not cause.errno:
        return str(error) or "it is silent"
    return f"cannot connect: {os.strerror(cause.errno) if cause.errno > 0 else cause.strerror}"


class _Peer:
    """Another server."""

    def __init__(self, url: str) -> None:
        if (origin := origin_of(url)) is None:
            raise UsageError(f"Cannot ask the peer {url!r}: expected the address of a server, such as http://host:8600")
        self.url = origin
        self.headers = {} if (token := token_for(origin)) is None else token.headers
        self.id: str | None = None
        """Its id; ``None`` until it has told it."""
        self.up_s = 0.0
        """When it may be asked again."""
        self.down_s = 0.0
        """For how long it was left out last; 0 if it has answered since."""
        self.asking: asyncio.Task[None] | None = None
        self.changed_s: float | None = None
        """When it was reached first, or left out first, since the other happened; in seconds since 1970."""
        self.answered_s: float | None = None
        """When it sent its id or a block last, in seconds since 1970."""
        self.n_blocks = self.n_bytes = 0
        """What it has sent."""
        self.problem: str | None = None
        """Why it is left out."""

    def to_json(self, own_id: str) -> dict[str, Any]:
        """Return the state of the peer as a dict for JSON."""
        known = "this server" if self.id == own_id else "reachable"
        return {
            "url": self.url,
            "state": known if self.id is not None else "left out" if self.problem else "not asked",
            "since_s": self.changed_s,
            "answered_s": self.answered_s,
            "blocks": self.n_blocks,
            "bytes": self.n_bytes,
            "problem": self.problem,
        }


class Peers:
    """The other servers. Used by one event loop."""

    def __init__(self, urls: Iterable[str], *, own_id: str, note_error: Callable[[str, str], None]) -> None:
        """``note_error`` is called with the kind and the text of an error.

        Raises:
            UsageError: When an address is none of a server.
            SourceError: When the file of tokens cannot be read.
        """
        self.own_id = own_id
        self._peers = [_Peer(url) for url in dict.fromkeys(urls)]
        self._note_error = note_error
        self._session: aiohttp.ClientSession | None = None

    def __bool__(self) -> bool:
        return bool(self._peers)

    async def to_json(self) -> list[dict[str, Any]]:
        """Return the state of each peer as a dict for JSON; who was not reached yet is asked for its id."""
        await asyncio.gather(*map(self._meet, self._peers))
        return [each.to_json(self.own_id) for each in self._peers]

    def states(self) -> list[str]:
        """Return the state of each peer, without asking any."""
        return [each.to_json(self.own_id)["state"] for each in self._peers]

    async def fetched(self, file: PinnedFile, start: int, stop: int) -> FileBlock | None:
        """Return a block of a file from the server that is to fetch it; ``None`` if this is the one, or others fail."""
        began_s = time.monotonic()
        for peer in await self._before_this(f"{file.tag} {start}"):
            if (found := await self._block(peer, file, start, stop, FETCH)) is not None:
                return found
            if time.monotonic() >= began_s + _SILENT_S:
                break  # several may stall, and a client waits: its source may send it twice then
        return None

    async def found(self, file: PinnedFile, start: int, stop: int) -> FileBlock | None:
        """Return a block of a file from a server that has it already; ``None`` if none has."""
        peers = await self._others()
        for peer, has_it in zip(
            peers, await asyncio.gather(*(self._has(each, file, start, stop) for each in peers)), strict=True
        ):
            if has_it and (found := await self._block(peer, file, start, stop, LOOK)) is not None:
                return found
        return None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _others(self) -> list[_Peer]:
        """Return the servers that can be asked."""
        await asyncio.gather(*map(self._meet, self._peers))
        now_s = time.monotonic()
        there = {each.id: each for each in self._peers if each.id not in (None, self.own_id) and now_s >= each.up_s}
        return list(there.values())

    async def _before_this(self, block: str) -> list[_Peer]:
        """Return the servers that are to be asked for a block before this one fetches it."""

        def weight(server: str | None) -> bytes:
            return hashlib.blake2b(f"{block} {server}".encode(), digest_size=16).digest()

        before = [each for each in await self._others() if weight(each.id) > weight(self.own_id)]
        return sorted(before, key=lambda each: weight(each.id), reverse=True)

    async def _meet(self, peer: _Peer) -> None:
        """Ask a peer for its id if it is not known. Only the first time, who needs a block waits for that."""
        if peer.id is not None or (peer.asking is None and time.monotonic() < peer.up_s):
            return
        if peer.asking is None:
            peer.asking = asyncio.create_task(self._ask_for_id(peer))
        if not peer.down_s:
            await asyncio.shield(peer.asking)

    async def _ask_for_id(self, peer: _Peer) -> None:
        try:
            async with asyncio.timeout(2 * _CONNECT_S), self._request("GET", peer, SERVER_PATH, {}) as answer:
                if answer.status != 200 or not 0 < (answer.content_length or 0) <= LINE_BYTES:
                    raise _FailedError(f"HTTP status {answer.status}", is_down=True)
                found = json.loads(await answer.content.readexactly(answer.content_length or 0)).get("id")
                if not isinstance(found, str) or not 0 < len(found) <= 64:
                    raise _FailedError("it is no shardload serve of this version", is_down=True)
            peer.id, peer.problem = found, None
            peer.changed_s = peer.answered_s = time.time()
        except (*_FAILURES, AttributeError) as error:
            self._leave_out(peer, f"{peer.url} is left out", error)
        finally:
            peer.asking = None

    def _leave_out(self, peer: _Peer, what: str, error: Exception) -> None:
        why = _reason(error)
        self._note_error("peer", f"{what}: {why}")
        if peer.problem is None:
            peer.changed_s = time.time()
        peer.problem = why
        if time.monotonic() >= peer.up_s:  # else others have found it, too
            peer.down_s = min(_LONGEST_DOWN_S, 2 * peer.down_s or _DOWN_S)
            peer.up_s = time.monotonic() + peer.down_s
        peer.id = None  # it may be another one when it is back

    async def _block(self, peer: _Peer, file: PinnedFile, start: int, stop: int, wish: str) -> FileBlock | None:
        """Ask a peer for a block; if it fails, note that and perhaps leave it out for a while."""
        try:
            found = await self._asked(peer, file, start, stop, wish)
        except _FAILURES as error:
            what = f"{peer.url} did not send a block of {file.shown}"
            if not isinstance(error, _FailedError) or error.is_down:
                self._leave_out(peer, what, error)
            else:
                self._note_error("peer", f"{what}: {error}")
            return None
        peer.down_s, peer.answered_s = 0.0, time.time()
        peer.n_blocks, peer.n_bytes = peer.n_blocks + 1, peer.n_bytes + len(found.data)
        return found

    async def _has(self, peer: _Peer, file: PinnedFile, start: int, stop: int) -> bool:
        try:
            async with (
                asyncio.timeout(2 * _CONNECT_S),
                self._request("HEAD", peer, f"/{quote(file.path)}", _headers(file, start, stop, LOOK)) as answer,
            ):
                return answer.status == 200
        except _FAILURES as error:
            self._leave_out(peer, f"{peer.url} is left out", error)
            return False

    async def _asked(self, peer: _Peer, file: PinnedFile, start: int, stop: int, wish: str) -> FileBlock:
        async with self._request("GET", peer, f"/{quote(file.path)}", _headers(file, start, stop, wish)) as answer:
            if answer.status != 206:
                # It has another version, does not serve this file, or gets none of it from the source.
                raise _FailedError(f"HTTP status {answer.status}", is_down=answer.status not in (404, 412, 502, 503))
            if answer.headers.get("ETag") != f'"{file.tag}"' or answer.content_length != stop - start:
                raise _FailedError("it sent something else", is_down=True)
            data = memoryview(await answer.content.readexactly(stop - start))
            digest = answer.headers.get(DIGEST_HEADER, "")
        if await asyncio.to_thread(digest_of, data) != digest:
            raise _FailedError("its bytes differ from their digest", is_down=True)
        return FileBlock(data, digest)

    def _request(
        self, method: str, peer: _Peer, path: str, headers: dict[str, str]
    ) -> aiohttp.client._RequestContextManager:
        if self._session is None:
            context = ssl.create_default_context()
            if (path_of_more := certificates_file()) is not None:
                context.load_verify_locations(path_of_more)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=context, limit=0),
                timeout=aiohttp.ClientTimeout(total=_WHOLE_S, sock_connect=_CONNECT_S, sock_read=_SILENT_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session.request(method, f"{peer.url}{path}", headers=peer.headers | headers, allow_redirects=False)
