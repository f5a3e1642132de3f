"""The server's addresses, and who may ask: an application of aiohttp.

    /NAME, /NAME/…              bytes of files; pages and lists of folders
    /api/v1/checkpoints         what there is, as JSON
    /healthz /readyz /metrics   for operators

A server that only this machine can reach needs no token. It then answers only to names of this machine, so that a web
page of someone else, whose name was made to lead here, cannot read from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from io import FileIO
from typing import Any

from aiohttp import web

from shardload.serving.catalogue import Catalogue, ServedCheckpoint
from shardload.serving.handing import Handing
from shardload.serving.metrics import Metrics
from shardload.serving.pages import STYLE, folder_page, home_page
from shardload.serving.sending import send_bytes
from shardload.stores.handed import SERVER_PATH

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_OPEN = ("/healthz", "/readyz")
"""Paths that need no token: a supervisor asks for them."""
_OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_POLICY = "default-src 'none'; style-src 'self'; img-src 'self'; frame-ancestors 'none'; base-uri 'none'"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
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

    def allows(self, authorization: str | None) -> bool:
        """Whether a request with this header may be answered; takes equally long for all wrong tokens."""
        if not self.tokens:
            return True
        kind, _, given = (authorization or "").partition(" ")
        digest = hashlib.sha256(given.strip().encode(errors="surrogateescape")).digest()
        found = [hmac.compare_digest(digest, hashlib.sha256(token.encode()).digest()) for token in self.tokens]
        return any(found) and kind.lower() == "bearer"

    def names_this_machine(self, host: str) -> bool:
        """Whether the header ``Host`` names this machine."""
        return re.sub(r":\d+$", "", host.lower()) in _OWN_NAMES


class Service:
    """Answers requests for what is in a catalogue. ``log`` gets the facts of each request."""

    def __init__(
        self, catalogue: Catalogue, access: Access, log: Callable[[dict[str, Any]], None], *, hands_over: bool = True
    ) -> None:
        self.catalogue, self.access, self.metrics = catalogue, access, Metrics()
        self.handing = Handing(catalogue, access.allows, log=log, handed=self.metrics.handed.inc)
        self.hands_over = hands_over and self.handing.socket_name is not None
        """Whether clients on this machine get open files."""
        self.is_ending = False
        """Whether the server stops soon: it is not ready for more."""
        self._log = log

    def application(self) -> web.Application:
        """Return the application, which `aiohttp.web.AppRunner` runs."""
        found = web.Application(middlewares=[self._watched, self._allowed], client_max_size=1 << 20)
        found.on_response_prepare.append(_with_headers)
        found.router.add_get("/healthz", self._health)
        found.router.add_get("/readyz", self._ready)
        found.router.add_get("/metrics", self._metrics)
        found.router.add_get(SERVER_PATH, self._server)
        found.router.add_get("/api/v1/checkpoints", self._checkpoints)
        found.router.add_get("/api/v1/style.css", self._style)
        found.router.add_get("/{key:.*}", self._key)
        return found

    @web.middleware
    async def _watched(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give each request an id, and count and log how it ended."""
        given = request.headers.get("X-Request-Id", "")
        request["id"] = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        request["sent"], request["route"] = 0, _route(request.path)
        began_s, status, problem = time.monotonic(), 0, None
        self.metrics.running.inc()
        try:
            response = await handler(request)
            status = response.status
            return response
        except web.HTTPException as error:
            status = error.status
            raise
        except (ConnectionError, TimeoutError, asyncio.CancelledError) as error:
            problem = "stalled" if isinstance(error, TimeoutError) else "cut off"
            raise
        except Exception as error:
            status, problem = 500, type(error).__name__
            raise
        finally:
            self.metrics.running.dec()
            self._note(request, status, problem, time.monotonic() - began_s)

    def _note(self, request: web.Request, status: int, problem: str | None, spent_s: float) -> None:
        route = request["route"]
        self.metrics.requests.labels(route, str(status)).inc()
        self.metrics.seconds.labels(route).observe(spent_s)
        if problem is not None:
            self.metrics.errors.labels(problem).inc()
        facts = {
            "request": request["id"],
            "client": request.remote,
            "method": request.method,
            "path": request.path,
            "range": request.headers.get("Range"),
            "status": status,
            "bytes": request["sent"],
            "seconds": round(spent_s, 6),
            "problem": problem,
        }
        self._log({name: value for name, value in facts.items() if value is not None})

    @web.middleware
    async def _allowed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse who may not ask."""
        if self.access.is_local and not self.access.names_this_machine(request.host):
            raise web.HTTPMisdirectedRequest(text=f"This server answers to {', '.join(_OWN_NAMES)} only.\n")
        if request.path not in _OPEN and not self.access.allows(request.headers.get("Authorization")):
            raise web.HTTPUnauthorized(
                text="Send a token of this server: Authorization: Bearer TOKEN\n",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if request.can_read_body:
            raise web.HTTPBadRequest(text="Requests have no body here.\n")
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return _text("ok\n")

    async def _ready(self, request: web.Request) -> web.Response:
        return _text("stopping\n", status=503) if self.is_ending else _text("ok\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        self.metrics.checkpoints.set(len(self.catalogue.checkpoints()))
        return web.Response(body=self.metrics.text(), headers={"Content-Type": _METRICS_KIND})

    async def _server(self, request: web.Request) -> web.Response:
        return _json({"server": "shardload", "socket": self.handing.socket_name if self.hands_over else None})

    async def _style(self, request: web.Request) -> web.Response:
        return web.Response(text=STYLE, content_type="text/css")

    async def _checkpoints(self, request: web.Request) -> web.Response:
        if self.catalogue.is_old():
            await asyncio.to_thread(self.catalogue.refresh)
        return _json({"checkpoints": [_described(each) for each in self.catalogue.checkpoints()]})

    async def _key(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for a file or a folder."""
        key = request.match_info["key"]
        folder = key.removesuffix("/")
        if not self._has(key) and self.catalogue.is_old():
            await asyncio.to_thread(self.catalogue.refresh)
        if (names := self.catalogue.names(folder)) is not None:
            return self._folder(request, folder, names)
        opened = await asyncio.to_thread(self.catalogue.open, key)
        if opened is None:
            raise web.HTTPNotFound(text="There is no such file.\n")
        descriptor, found = opened
        with FileIO(descriptor) as file:
            return await send_bytes(
                request,
                file,
                found,
                is_same=lambda fd: self.catalogue.is_same(fd, found),
                sent=lambda n_bytes: self._sent(request, n_bytes),
            )

    def _has(self, key: str) -> bool:
        return self.catalogue.file(key) is not None or self.catalogue.names(key.removesuffix("/")) is not None

    def _sent(self, request: web.Request, n_bytes: int) -> None:
        request["sent"] += n_bytes
        self.metrics.sent.labels("disk").inc(n_bytes)

    def _folder(self, request: web.Request, folder: str, names: dict[str, bool]) -> web.Response:
        if not request.path.endswith("/"):
            raise web.HTTPMovedPermanently(f"{request.rel_url.raw_path}/")
        if request.headers.get("Accept", "").partition(",")[0].strip() == "application/json":
            files = {name: self.catalogue.file(f"{folder}/{name}".lstrip("/")) for name in names}
            entries = [
                {"name": name, "kind": "folder"}
                if (file := files[name]) is None
                else {"name": name, "kind": "file", "size": file.n_bytes, "etag": file.tag}
                for name in names
            ]
            return _json({"entries": entries})
        page = folder_page(folder, names) if folder else home_page(names, self.catalogue.checkpoints())
        return web.Response(text=page, content_type="text/html")


async def _with_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Say in each answer which request it is for, and what a browser may do with it."""
    response.headers.update(_HEADERS)
    if (number := request.get("id")) is not None:
        response.headers["X-Request-Id"] = number


def _route(path: str) -> str:
    """Return what a path is for: the few labels of the metrics."""
    first, _, rest = path.removeprefix("/").partition("/")
    if first in ("api", "healthz", "readyz", "metrics"):
        return first
    return "files" if rest or first else "home"


def _described(each: ServedCheckpoint) -> dict[str, Any]:
    facts = {"name": each.name, "format": each.format, "kind": each.kind, "files": each.n_files, "bytes": each.n_bytes}
    return facts | ({"steps": list(each.steps)} if each.steps else {})


def _text(text: str, *, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status)


def _json(value: object) -> web.Response:
    return web.Response(text=json.dumps(value) + "\n", content_type="application/json")
