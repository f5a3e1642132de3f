"""A connection that a client has opened, as aiohttp handles it, with answers to what is no request in words of our own.

aiohttp's own answers say which version of it and of Python this is.
"""

from __future__ import annotations

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


_TEXTS = {400: "This is no valid request.\n"}
_BROKEN = "This cannot be answered: the server's log says why.\n"
