"""A connection that a client has opened, as aiohttp handles it, with answers to what is no request in words of our own.

aiohttp's own answers say which version of it and of Python this is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from shardload.serving.application import HEADERS


class Connection(web.RequestHandler):
    """Reads requests from a connection and answers them."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Log an error, and return the answer to what is no request, or cannot be answered."""
        super().handle_error(request, status, exc, message)
        answer = web.Response(status=status, text=_TEXTS.get(status, _BROKEN), headers=HEADERS)
        answer.force_close()
        return answer


def refusing_expectations(
    handler: Callable[[Any], Awaitable[web.StreamResponse]], note: Callable[[str, str, str], None]
) -> Callable[[Any], Awaitable[web.StreamResponse]]:
    """Return a handler that refuses requests which expect what is unknown, and notes kind, client and text of that.

    aiohttp's own answer repeats what the client sent, and is an error of the server if that is no text.
    """

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", _EXPECTED).lower() == _EXPECTED:
            return await handler(request)
        note("bad request", request.remote or "", "it expects something unknown")
        return web.Response(status=417, text=f"Expect can be {_EXPECTED} only.\n", headers=HEADERS)

    return handle


_EXPECTED = "100-continue"
_TEXTS = {400: "This is no valid request.\n"}
_BROKEN = "This cannot be answered: the server's log says why.\n"
