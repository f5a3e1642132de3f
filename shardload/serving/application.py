"""The server's addresses, and who may ask: an application of aiohttp.

    /NAME, /NAME/…              bytes of files; pages and lists of folders
    /ui/…                       other pages, of `site`
    /api/v1/checkpoints         what there is, as JSON
    /api/v1/jobs                work with it that takes a while
    /healthz /readyz /metrics   for operators

A server that only this machine can reach needs no token. It then answers only to names of this machine, so that a web
page of someone else, whose name was made to lead here, cannot read from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from typing import Any

from aiohttp import web

from shardload.errors import ShardloadError, public_name
from shardload.serving.announcing import Announcing
from shardload.serving.handing import Handing
from shardload.serving.jobs.queue import Jobs
from shardload.serving.jobs.records import JobRecords
from shardload.serving.jobs.requests import JobRequests, may_have_body, refuse_pages_of_others
from shardload.serving.limits import LineRate, RequestRate, client_of
from shardload.serving.metrics import Metrics
from shardload.serving.openapi import document
from shardload.serving.rack.answers import RemoteFiles
from shardload.serving.rack.peers import PEER_HEADER
from shardload.serving.roots.all_roots import AllRoots
from shardload.serving.roots.catalogue import Catalogue, ServedFile
from shardload.serving.roots.remote_roots import RemoteCatalogue
from shardload.serving.roots.scanning import LeftOut, ServedCheckpoint
from shardload.serving.sending import cut_off, send_bytes, wants_digest
from shardload.serving.server_state import ServerState
from shardload.serving.site.cache_pages import CachePages
from shardload.serving.site.checkpoint_pages import ServerPages
from shardload.serving.site.examining import Examiner
from shardload.serving.site.forms import is_form
from shardload.serving.site.job_pages import JobPages
from shardload.serving.site.live_loads import LiveLoads
from shardload.serving.site.pages import OPEN_PATHS, answer, folder_page, home_page
from shardload.serving.site.sign_in import SignIn
from shardload.stores.announced import RESERVED
from shardload.stores.handed import SERVER_PATH
from shardload.stores.range_cache import RangeCache

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_ID, _SENT, _ROUTE = web.RequestKey("id", str), web.RequestKey("sent", int), web.RequestKey("route", str)
_SUPERVISED = ("/healthz", "/readyz")
"""Paths that may be asked for at any rate, without a token: a supervisor asks for them."""
_ASKED_ALWAYS = (*_SUPERVISED, "/metrics")
"""Paths that programs ask for again and again: an answer as usual is no line of the log."""
_OPEN = (*_SUPERVISED, *OPEN_PATHS)
"""Paths that need no token."""
_OWN_NAME = "localhost"
PAGE_S = 60.0
"""Seconds in which a client must take a page or a list."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_POLICY = "default-src 'none'; style-src 'self'; img-src 'self'; frame-ancestors 'none'; base-uri 'none'"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Server": "shardload",
}
_METRICS_KIND = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask."""

    tokens: tuple[str, ...] = field(default=(), repr=False)
    """Any of these opens everything; without one, everyone who can connect may ask."""
    is_local: bool = True
    """Whether only this machine can connect, so that requests must name it."""
    own_token: str = field(default_factory=secrets.token_urlsafe, repr=False)
    """The token of processes that the server starts to read from it."""

    def is_own(self, authorization: str | None) -> bool:
        """Whether a request with this header is one of a process that the server started."""
        return hmac.compare_digest(
            (authorization or "").encode(errors="surrogateescape"), f"Bearer {self.own_token}".encode()
        )

    def allows_client(self, authorization: str | None) -> bool:
        """Whether a request with this header may be answered, and does not come from the server itself."""
        return not self.is_own(authorization) and self.allows(authorization)

    def allows(self, authorization: str | None) -> bool:
        """Whether a request with this header may be answered; takes equally long for all wrong tokens."""
        if not self.tokens or self.is_own(authorization):
            return True
        kind, _, given = (authorization or "").partition(" ")
        digest = hashlib.sha256(given.strip().encode(errors="surrogateescape")).digest()
        found = [hmac.compare_digest(digest, hashlib.sha256(token.encode()).digest()) for token in self.tokens]
        return any(found) and kind.lower() == "bearer"

    def names_this_machine(self, host: str) -> bool:
        """Whether the header ``Host`` names this machine; an address of it is as good as a name."""
        name = re.sub(r":\d+$", "", host.lower())
        if name == _OWN_NAME:
            return True
        try:
            return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
        except ValueError:
            return False


class Service:
    """Answers requests for what is in a catalogue.

    ``log`` gets the facts of each request; ``jobs`` are what it keeps of them, by default in memory; ``page_s`` is how
    long a client may take for a page or a list; ``rate`` limits how often it may ask. ``addresses`` are served, too:
    what is fetched from them is kept in ``cache``, and asked from servers at ``peers`` first.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        access: Access,
        log: Callable[[dict[str, Any]], None],
        *,
        jobs: Jobs | None = None,
        hands_over: bool = True,
        page_s: float = PAGE_S,
        rate: RequestRate | None = None,
        addresses: RemoteCatalogue | None = None,
        cache: RangeCache | None = None,
        peers: Iterable[str] = (),
    ) -> None:
        self.catalogue, self.access, self.metrics = catalogue, access, Metrics()
        self._id = secrets.token_hex(16)
        self.remote = RemoteFiles(
            addresses or RemoteCatalogue(()), self.metrics, log, cache=cache, peers=peers, server_id=self._id
        )
        self.roots = AllRoots(catalogue, self.remote.catalogue)
        self.loads = LiveLoads(self.roots)
        self.sign_in = SignIn(
            access.allows, is_needed=bool(access.tokens), failed=self.metrics.errors.labels("token").inc
        )
        self.handing = Handing(catalogue, access.allows_client, log=log, handed=self._handed)
        self.hands_over = hands_over and self.handing.socket_name is not None
        """Whether clients on this machine get open files."""
        self.announcing = Announcing(catalogue, self._refresh_old)
        self.is_ending = False
        """Whether the server stops soon: it is not ready for more."""
        self._log, self._page_s, self._rate, self._lines = log, page_s, rate, LineRate()
        self._scanning: asyncio.Task[None] | None = None
        self._left_out = LeftOut(catalogue.left_out(), log)
        self._jobs = jobs or Jobs(catalogue, JobRecords(None), log)
        self._job_requests = JobRequests(
            self._jobs,
            refresh=self._look_for,
            is_ending=lambda: self.is_ending,
            page_s=page_s,
        )
        self.metrics.read(ServerState(self.remote, self._jobs))
        self._job_pages = JobPages(self._jobs, self._job_requests)
        self._cache_pages = CachePages(self.remote, self.metrics, self.roots.checkpoints)
        self.examiner = Examiner(access.own_token)
        self.site = ServerPages(
            self.roots, self.examiner, self.loads, refresh=self._look_for, remote_tags=self.remote.tags
        )

    def application(self) -> web.Application:
        """Return the application, which `aiohttp.web.AppRunner` runs."""
        found = web.Application(middlewares=[self._watched, self._allowed], client_max_size=1 << 20)
        found.on_response_prepare.append(_with_headers)
        found.on_startup.append(self._started)
        found.on_shutdown.append(self._stopping)
        found.on_cleanup.append(self.remote.ended)
        found.router.add_get("/healthz", self._health)
        found.router.add_get("/readyz", self._ready)
        found.router.add_get("/metrics", self._metrics)
        found.router.add_get("/openapi.json", self._document)
        found.router.add_get(SERVER_PATH, self._server)
        found.router.add_get("/api/v1/checkpoints", self._checkpoints)
        self._job_requests.add_routes(found.router)
        self._job_pages.add_routes(found.router)
        self._cache_pages.add_routes(found.router)
        self.announcing.add_routes(found.router)
        self.site.add_routes(found.router)
        self.sign_in.add_routes(found.router)
        found.router.add_get("/{key:.*}", self._key)
        return found

    async def _started(self, application: web.Application) -> None:
        self._jobs.start(self.remote, asyncio.get_running_loop())

    async def _stopping(self, application: web.Application) -> None:
        self._jobs.interrupt()

    async def _look_for(self, checkpoint: str) -> None:
        await self._refresh_old(checkpoint)
        if not self.roots.is_own(checkpoint):
            await self.remote.look_for(checkpoint)

    @web.middleware
    async def _watched(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give each request an id, and count and log how it ended."""
        given = request.headers.get("X-Request-Id", "")
        request[_ID] = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        request[_SENT], request[_ROUTE] = 0, _route(request.path)
        began_s, status, problem = time.monotonic(), 0, None
        self.metrics.running.inc()
        try:
            response = await handler(request)
            status, request[_SENT] = response.status, request[_SENT] or _body_bytes(request, response)
            async with asyncio.timeout(self._page_s):  # nothing happens here if the handler has sent it already
                await response.prepare(request)
                await response.write_eof()
            return response
        except web.HTTPException as error:
            status, request[_SENT] = error.status, _body_bytes(request, error)
            problem = str(error.__cause__ or error.text).strip() if status >= 500 else None
            raise
        except (ConnectionError, TimeoutError, asyncio.CancelledError) as error:
            problem = "stalled" if isinstance(error, TimeoutError) else "cut off"
            self.metrics.errors.labels(problem).inc()
            if isinstance(error.__cause__, ShardloadError):
                problem = f"{problem}: {error}"
            cut_off(request.transport, error)  # a client must not take what it has for all
            raise
        except Exception as error:  # aiohttp reports it, and `shardload.serving.noise` counts it
            status, problem = 500, public_name(error)
            raise
        finally:
            self.metrics.running.dec()
            self._note(request, status, problem, time.monotonic() - began_s)

    def note_error(self, kind: str, client: str, text: str) -> None:
        """Count and log an error that no request shows, such as bytes that are none."""
        self.metrics.errors.labels(kind).inc()
        self._log({"client": client, "problem": f"{kind}: {text}"} | ({"level": "error"} if kind == "server" else {}))

    def note_connection(self, kind: str, client: str, text: str) -> None:
        """Count a connection that comes to nothing, and log it, unless there was a line of its kind just now."""
        if (left_out := self._lines.left_out(kind)) is None:
            self.metrics.errors.labels(kind).inc()
        else:
            self.note_error(kind, client, f"{text} (and {left_out:,} more before)" if left_out else text)

    def _note(self, request: web.Request, status: int, problem: str | None, spent_s: float) -> None:
        route = request[_ROUTE]
        self.metrics.requests.labels(route, str(status)).inc()
        self.metrics.seconds.labels(route).observe(spent_s)
        if status == 200 and problem is None and request.path in _ASKED_ALWAYS:
            return
        facts = {
            "request": request[_ID],
            "client": request.remote,
            "method": request.method,
            "path": request.path,
            "range": request.headers.get("Range"),
            "status": status,
            "bytes": request[_SENT],
            "seconds": round(spent_s, 6),
            "problem": problem,
        }
        self._log({name: value for name, value in facts.items() if value is not None})

    @web.middleware
    async def _allowed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse who may not ask, or asks too often."""
        authorization = request.headers.get("Authorization")
        is_limited = request.path not in _SUPERVISED and not self.access.is_own(authorization)
        if self._rate and is_limited and (wait_s := self._rate.wait_s(client_of(request.remote or ""))):
            text = "This client sends too many requests. Retry-After says how many seconds to wait.\n"
            raise web.HTTPTooManyRequests(text=text, headers={"Retry-After": str(wait_s)})
        if self.access.is_local and not self.access.names_this_machine(request.host):
            raise web.HTTPMisdirectedRequest(text=f"This server answers to {_OWN_NAME} and 127.0.0.1 only.\n")
        is_open = request.path in _OPEN or self.access.allows(authorization)
        if not is_open and not self.sign_in.is_signed_in(request):
            return self._without_token(request, authorization or "")
        if request.method not in ("GET", "HEAD"):
            refuse_pages_of_others(request)
        is_known = request.match_info.http_exception is None  # otherwise that says what is wrong
        if is_known and request.can_read_body and not (may_have_body(request) or is_form(request)):
            raise web.HTTPBadRequest(text="Requests have no body here.\n")
        return await handler(request)

    def _without_token(self, request: web.Request, authorization: str) -> web.Response:
        has_other = authorization.lower().startswith("bearer ")
        if has_other:
            self.metrics.errors.labels("token").inc()
        if (refused := self.sign_in.refusal(request)) is None:
            if not has_other:
                self.metrics.errors.labels("no token").inc()
            asked = "Send a token of this server: Authorization: Bearer TOKEN"
            refused = _text(f"{'This is not a token of this server.' if has_other else asked}\n", status=401)
        refused.headers["WWW-Authenticate"] = "Bearer"
        return refused

    async def _health(self, request: web.Request) -> web.Response:
        return _text("ok\n")

    async def _ready(self, request: web.Request) -> web.Response:
        if self.is_ending:
            return _text("stopping\n", status=503)
        if await self.remote.problems():  # which say more than those without a token should know
            return _text("An address of --root was not reached yet. The log says why.\n", status=503)
        return _text("ok\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        self.metrics.checkpoints.set(len(self.roots.checkpoints()))
        self.remote.count_removed()
        text = await asyncio.to_thread(self.metrics.text)
        return web.Response(body=text, headers={"Content-Type": _METRICS_KIND})

    async def _document(self, request: web.Request) -> web.Response:
        return _json(document())

    async def _server(self, request: web.Request) -> web.Response:
        socket_name = self.handing.socket_name if self.hands_over else None
        return _json({"server": "shardload", "id": self._id, "socket": socket_name})

    async def _checkpoints(self, request: web.Request) -> web.Response:
        await self._refresh_old()
        await self.remote.refresh()
        return await asyncio.to_thread(self._checkpoint_list)

    def _checkpoint_list(self) -> web.Response:
        return _json({"checkpoints": [_described(each) | self.remote.facts(each) for each in self.roots.checkpoints()]})

    async def _refresh_old(self, key: str = "") -> None:
        if await asyncio.to_thread(self.catalogue.is_old, key):
            await self._refresh()
            if await asyncio.to_thread(self.catalogue.has_changed, key):  # the scan had begun before
                await self._refresh()

    async def _refresh(self) -> None:
        """Scan the folders. All who wait, wait for one scan in one thread: the other threads open and read files."""
        if self._scanning is None:
            self._scanning = asyncio.create_task(self._scan())
        await asyncio.shield(self._scanning)

    async def _scan(self) -> None:
        try:
            await asyncio.sleep(self.catalogue.pause_s())
            await asyncio.to_thread(self.catalogue.refresh)
            self._left_out.tell(self.catalogue.left_out())
        except (ShardloadError, OSError) as error:  # what was found before is still served
            if not self.is_ending:
                self.metrics.errors.labels("scan").inc()
                self._log({"problem": f"cannot look for new checkpoints: {error}"})
        finally:
            self._scanning = None

    async def _key(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for a file or a folder."""
        key = request.match_info["key"]
        folder = key.removesuffix("/")
        # Of a file, it is seen when it is opened whether it changed; what is at an address is in no folder.
        if self.catalogue.file(key) is None and not self.roots.is_remote(key):
            await self._refresh_old(key)
        if not self.roots.is_own(folder):
            await self.remote.look_for(folder)
        if self.roots.names(folder) is not None and not key.startswith("/"):
            return await asyncio.to_thread(self._folder, request, folder)
        if not self.roots.is_own(key):
            with self._noted_load(request, key) as noted:
                answer = await self.remote.answer(request, key, partial(self._sent, request, noted, "address"))
            if answer is not None:
                return answer
        if (opened := await self._opened(key)) is None:
            if self.is_ending:  # the scan that would have found it may have ended early
                raise web.HTTPServiceUnavailable(text="The server is to end.\n")
            if problems := await self.remote.problems():  # it may be there
                raise web.HTTPBadGateway(text="".join(f"{problem}\n" for problem in problems))
            raise web.HTTPNotFound(text="There is no such file.\n")
        descriptor, found = opened
        with FileIO(descriptor) as file, self._noted_load(request, key) as noted:
            sent = partial(self._sent, request, noted, "disk")
            sha256 = await asyncio.to_thread(self._jobs.sha256_of, key, found.tag) if wants_digest(request) else None
            return await send_bytes(
                request, file, found, is_same=lambda fd: self.catalogue.is_same(fd, found), sent=sent, sha256=sha256
            )

    def _noted_load(self, request: web.Request, key: str) -> AbstractContextManager[Callable[[int], None]]:
        """Count a request for bytes as part of a load, unless the server itself sent it, or it asks for none."""
        is_load = request.method == "GET" and not self.access.is_own(request.headers.get("Authorization"))
        return self.loads.reading(request.remote, key) if is_load else nullcontext(lambda n_bytes: None)

    def _handed(self, key: str) -> None:
        self.metrics.handed.inc()
        self.loads.handed(key)

    async def _opened(self, key: str) -> tuple[int, ServedFile] | None:
        try:
            found = await asyncio.to_thread(self.catalogue.open, key)
            if found is None and self.catalogue.file(key) is not None:  # it is gone, or a link leads elsewhere since
                await self._refresh()
                found = await asyncio.to_thread(self.catalogue.open, key)
        except OSError as error:
            self.metrics.errors.labels("open").inc()
            raise web.HTTPServiceUnavailable(text="The file cannot be opened now.\n") from error
        return found

    def _sent(self, request: web.Request, noted: Callable[[int], None], source: str, n_bytes: int) -> None:
        noted(n_bytes)
        request[_SENT] += n_bytes
        self.metrics.sent.labels(source, "peer" if PEER_HEADER in request.headers else "client").inc(n_bytes)

    def _folder(self, request: web.Request, folder: str) -> web.Response:
        if not request.path.endswith("/"):
            raise web.HTTPMovedPermanently(f"{request.rel_url.raw_path}/")
        names = self.roots.names(folder) or {}
        if request.headers.get("Accept", "").partition(",")[0].strip() == "application/json":
            entries = [self._entry(name, f"{folder}/{name}".lstrip("/")) for name in names]
            return _json({"entries": entries})
        if folder:
            return web.Response(text=folder_page(folder, names), content_type="text/html")
        match = request.query.get("match", "")[:200]
        return answer(home_page(names, self.roots.checkpoints(), match=match))

    def _entry(self, name: str, key: str) -> dict[str, Any]:
        if self.roots.is_own(key):
            if (file := self.catalogue.file(key)) is not None:
                return {"name": name, "kind": "file", "size": file.n_bytes, "etag": file.tag}
        elif (listed := self.remote.catalogue.file(key)) is not None:
            return {"name": name, "kind": "file", "size": listed.n_bytes}
        return {"name": name, "kind": "folder"}


async def _with_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Say in each answer which request it is for, and what a browser may do with it."""
    policy = response.headers.get("Content-Security-Policy", _POLICY)  # of a page that has its own
    response.headers.update({**HEADERS, "Content-Security-Policy": policy})
    if (number := request.get(_ID)) is not None:
        response.headers["X-Request-Id"] = number


def _body_bytes(request: web.Request, response: web.StreamResponse) -> int:
    """Return how many bytes the body of a page, a list or a refusal has."""
    body = response.body if isinstance(response, web.Response) and request.method != "HEAD" else None
    return len(body) if isinstance(body, bytes) else 0


def _route(path: str) -> str:
    """Return what a path is for: the few labels of the metrics."""
    first, _, rest = path.removeprefix("/").partition("/")
    if first in RESERVED:
        return first
    return "files" if rest or first else "home"


def _described(each: ServedCheckpoint) -> dict[str, Any]:
    facts = {"name": each.name, "format": each.format, "kind": each.kind, "files": each.n_files, "bytes": each.n_bytes}
    return facts | ({"steps": list(each.steps)} if each.steps else {})


def _text(text: str, *, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status)


def _json(value: object) -> web.Response:
    return web.Response(text=json.dumps(value) + "\n", content_type="application/json")
