"""What clients ask of jobs, over HTTP.

    POST   /api/v1/jobs              {"kind": "verify", "checkpoint": "gemma2_9b"}
    GET    /api/v1/jobs              all of them
    GET    /api/v1/jobs/ID           one
    GET    /api/v1/jobs/ID/events    one as server-sent events, until it ends
    DELETE /api/v1/jobs/ID           cancel it

A client that repeats a POST with the same ``Idempotency-Key`` gets the same job.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import cast
from urllib.parse import urlsplit

from aiohttp import web

from shardload.errors import SourceError
from shardload.serving.jobs.queue import Jobs, OtherJobError, TooManyJobsError
from shardload.serving.jobs.records import JOB_KINDS, Job, JobKind
from shardload.serving.limits import ConnectionShare, client_of

JOBS_PATH = "/api/v1/jobs"
_MOST_BODY_BYTES = 16 << 10
_MOST_STREAMS = 64
_LOOK_S = 0.25
"""How often a stream looks whether its job went on, in seconds."""
_QUIET_S = 15.0
"""How long a stream says nothing, in seconds: proxies close what is silent."""
_KEY = re.compile(r"[!-~]{1,255}")


class JobRequests:
    """Answers requests for jobs.

    ``refresh`` looks for a checkpoint that is not known, ``is_ending`` tells whether streams must end, and ``page_s``
    is how long a client may take for what it sends or gets.
    """

    def __init__(
        self,
        jobs: Jobs,
        *,
        refresh: Callable[[str], Awaitable[None]],
        is_ending: Callable[[], bool],
        page_s: float,
    ) -> None:
        self._jobs, self._refresh = jobs, refresh
        self._is_ending, self._page_s = is_ending, page_s
        self._streams = ConnectionShare(_MOST_STREAMS, each=None)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the addresses of jobs."""
        one = JOBS_PATH + "/{id}"
        router.add_post(JOBS_PATH, self._submit)
        router.add_get(JOBS_PATH, self._all)
        router.add_get(one, self._one)
        router.add_delete(one, self._cancel)
        router.add_get(f"{one}/events", self._events, allow_head=False)

    async def _submit(self, request: web.Request) -> web.Response:
        kind, checkpoint = _asked(await self._body(request))
        key = request.headers.get("Idempotency-Key")
        if key is not None and _KEY.fullmatch(key) is None:
            raise web.HTTPBadRequest(text="Idempotency-Key takes up to 255 letters, digits and signs.\n")
        job, is_new = await self.take(kind, checkpoint, client=client_of(request.remote or ""), key=key)
        return _answer(job.to_json(), status=201 if is_new else 200, headers={"Location": f"{JOBS_PATH}/{job.id}"})

    async def take(self, kind: JobKind, checkpoint: str, *, client: str, key: str | None = None) -> tuple[Job, bool]:
        """Take a job that a client asks for, and return it and whether it is new; raise the answer if it is refused."""
        if self._jobs.checkpoint(checkpoint) is None:
            await self._refresh(checkpoint)
        if (found := self._jobs.checkpoint(checkpoint)) is None:
            raise web.HTTPNotFound(text="There is no such checkpoint.\n")
        if kind == "verify" and found.source is not None:
            text = "What is at an address can be prefetched only. `shardload verify` of its address here reads it.\n"
            raise web.HTTPUnprocessableEntity(text=text)
        try:
            return await asyncio.to_thread(
                self._jobs.submit, kind, checkpoint, total_bytes=found.n_bytes, client=client, key=key
            )
        except OtherJobError as error:
            text = f"This Idempotency-Key belongs to another job: {error}.\n"
            raise web.HTTPUnprocessableEntity(text=text) from error
        except TooManyJobsError as error:
            raise web.HTTPTooManyRequests(text=f"{error}\n", headers={"Retry-After": "60"}) from error
        except SourceError as error:
            raise web.HTTPServiceUnavailable(text=f"{error}\n") from error

    async def _body(self, request: web.Request) -> bytes:
        if request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="Send JSON: Content-Type: application/json\n")
        body = b""
        try:
            async with asyncio.timeout(self._page_s):
                while len(body) <= _MOST_BODY_BYTES and (part := await request.content.readany()):
                    body += part
        except TimeoutError as error:
            raise web.HTTPRequestTimeout(text="The body did not arrive in time.\n") from error
        if len(body) > _MOST_BODY_BYTES:
            raise web.HTTPRequestEntityTooLarge(_MOST_BODY_BYTES, len(body), text="The body is too long.\n")
        return body

    async def _all(self, request: web.Request) -> web.Response:
        return await asyncio.to_thread(lambda: _answer({"jobs": [job.to_json() for job in self._jobs.all()]}))

    async def _one(self, request: web.Request) -> web.Response:
        return _answer(self._found(request).to_json())

    async def _cancel(self, request: web.Request) -> web.Response:
        return _answer((await self.cancel(request.match_info["id"])).to_json())

    async def cancel(self, number: str) -> Job:
        """Cancel a job, and return it; raise the answer if there is no such job."""
        if (job := await asyncio.to_thread(self._jobs.cancel, number)) is None:
            raise web.HTTPNotFound(text="There is no such job.\n")
        return job

    def _found(self, request: web.Request) -> Job:
        if (job := self._jobs.find(request.match_info["id"])) is None:
            raise web.HTTPNotFound(text="There is no such job.\n")
        return job

    async def _events(self, request: web.Request) -> web.StreamResponse:
        job = self._found(request)
        client = client_of(request.remote or "")
        if not self._streams.take(client):
            raise web.HTTPServiceUnavailable(text="Too many streams are open.\n", headers={"Retry-After": "10"})
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        response = web.StreamResponse(headers=headers)
        try:
            await response.prepare(request)
            await self._follow(response, job)
            await response.write_eof()
        finally:
            self._streams.give_back(client)
        return response

    async def _follow(self, response: web.StreamResponse, job: Job) -> None:
        shown, quiet_s = None, 0.0
        while True:
            if job != shown or quiet_s >= _QUIET_S:
                text = f"event: job\ndata: {json.dumps(job.to_json())}\n\n" if job != shown else ": still here\n\n"
                async with asyncio.timeout(self._page_s):
                    await response.write(text.encode())
                shown, quiet_s = job, 0.0
            if job.is_over or self._is_ending():
                return
            await asyncio.sleep(_LOOK_S)
            job, quiet_s = self._jobs.find(job.id) or job, quiet_s + _LOOK_S


def may_have_body(request: web.Request) -> bool:
    """Whether a request is one of those few that have a body."""
    return request.method == "POST" and request.path == JOBS_PATH


def refuse_pages_of_others(request: web.Request) -> None:
    """Refuse a request that changes something if a browser says that a page of someone else makes it.

    Programs do not send these headers; browsers do, and no page can change them.
    """
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    is_foreign = site not in (None, "same-origin", "none")
    if is_foreign or (origin is not None and _host(origin) != request.host.lower()):
        raise web.HTTPForbidden(text="Pages of other sites may not ask for this.\n")


def _host(origin: str) -> str | None:
    """Return host and port of an origin; ``None`` if it has no such form."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # half of the brackets of an address
        return None


def _asked(body: bytes) -> tuple[JobKind, str]:
    expected = f'{{"kind": {" or ".join(json.dumps(kind) for kind in JOB_KINDS)}, "checkpoint": NAME}}'
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if (
        not isinstance(found, dict)
        or set(found) != {"kind", "checkpoint"}
        or found["kind"] not in JOB_KINDS
        or not isinstance(found["checkpoint"], str)
    ):
        raise web.HTTPBadRequest(text=f"The body must be {expected}.\n")
    return cast("JobKind", found["kind"]), found["checkpoint"]


def _answer(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(text=json.dumps(value) + "\n", content_type="application/json", status=status, headers=headers)
