"""Tell clients of new steps of a training run as soon as there are any, by requests that wait.

    GET /api/v1/runs/NAME                         the numbers of the steps, with an ETag that changes with them
      If-None-Match: "…", Prefer: wait=30         the same once they change; 304 after 30 s without a change

A request that waits takes no thread. For all that wait for a run, its folder is looked at five times a second, and the
catalogue is scanned again only if a name was added to the folder or removed from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from aiohttp import web

from shardload.serving.roots.catalogue import Catalogue
from shardload.serving.roots.scanning import ServedCheckpoint
from shardload.stores.announced import RUNS_PATH

_LOOK_S = 0.2
"""Seconds between two looks at a folder."""
_MOST_WAIT_S = 60
_MOST_WAITING = 256
"""Most requests that wait at the same time; others are answered at once, as if they had not asked to wait."""
_MOST_TAGS = 256
"""Most runs whose ETag is kept."""
_RECORD = "shardload/digests.json"
_WAIT = re.compile(r"(?:^|[,;\s])wait=(\d{1,4})(?:$|[,;\s])")


class Announcing:
    """Answers requests for the steps of a run; ``refresh`` finds what was added to a folder since the last scan."""

    def __init__(self, catalogue: Catalogue, refresh: Callable[[str], Awaitable[None]]) -> None:
        self._catalogue, self._refresh = catalogue, refresh
        self._looked_s: dict[str, float] = {}
        self._tags: OrderedDict[str, tuple[ServedCheckpoint, str]] = OrderedDict()
        self._n_waiting = 0
        self._has_ended = False

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the addresses of this class."""
        router.add_get(f"/{RUNS_PATH}/{{key:.+}}", self._steps)

    def end(self) -> None:
        """Answer all requests that wait, as the server is to end."""
        self._has_ended = True

    async def _steps(self, request: web.Request) -> web.Response:
        name = request.match_info["key"]
        await self._refresh(name)
        known = request.headers.get("If-None-Match", "")
        if self._tag(name) == known and (wait_s := _wait_s(request.headers.get("Prefer", ""))):
            await self._wait(request, name, known, wait_s)
        if (tag := self._tag(name)) is None:
            raise web.HTTPNotFound(text="There is no such run.\n")
        if tag == known:
            return web.Response(status=304, headers={"ETag": tag})
        run = self._catalogue.checkpoint(name)
        steps = [] if run is None else list(run.steps)
        text = json.dumps({"steps": steps}) + "\n"
        return web.Response(
            text=text, content_type="application/json", headers={"ETag": tag, "Cache-Control": "no-cache"}
        )

    async def _wait(self, request: web.Request, name: str, known: str, wait_s: float) -> None:
        if self._n_waiting >= _MOST_WAITING:
            return
        until_s = time.monotonic() + wait_s
        self._n_waiting += 1
        try:
            while not self._has_ended and time.monotonic() < until_s and self._tag(name) == known:
                await asyncio.sleep(_LOOK_S)
                if request.transport is None or request.transport.is_closing():
                    return
                await self._look(name)
        finally:
            self._n_waiting -= 1

    async def _look(self, name: str) -> None:
        """Scan again if names were added to a run's folder, or removed from it, since the last scan."""
        now_s = time.monotonic()
        if now_s - self._looked_s.get(name, 0.0) >= _LOOK_S:
            self._looked_s[name] = now_s
            if await asyncio.to_thread(self._catalogue.has_changed, name):
                await self._refresh(name)

    def _tag(self, name: str) -> str | None:
        """Return the ETag of the steps of a run, made once after each scan; ``None`` if there is no such run."""
        run = self._catalogue.checkpoint(name)
        if run is None or run.kind != "run":
            return None
        scanned, tag = self._tags.get(name, (None, ""))
        if scanned is not run:  # each scan makes its own
            tag = self._made_tag(run)
            self._tags[name] = run, tag
            if len(self._tags) > _MOST_TAGS:
                self._tags.popitem(last=False)
        return tag

    def _made_tag(self, run: ServedCheckpoint) -> str:
        files = ((step, self._catalogue.file(f"{run.name}/{step}/{_RECORD}")) for step in run.steps)
        text = json.dumps([(step, "" if file is None else file.tag) for step, file in files])
        return f'"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"'


def _wait_s(preferences: str) -> int:
    """Return the seconds that a client would wait for an answer (RFC 7240); 0 if it does not say."""
    found = _WAIT.search(preferences)
    return 0 if found is None else min(int(found[1]), _MOST_WAIT_S)
