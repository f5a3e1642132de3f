"""Forms of the pages: taken from the server's own pages only, small, and in a few seconds."""

from __future__ import annotations

import asyncio
from typing import NoReturn
from urllib.parse import parse_qs

from aiohttp import web

from shardload.serving.site.pages import FORM_PATHS

_MOST_BODY = 4096
_BODY_S = 10.0
"""Seconds in which a form must arrive."""
_FORM_KIND = "application/x-www-form-urlencoded"


def is_form(request: web.Request) -> bool:
    """Whether a request is one of a form, which has a body."""
    return request.method == "POST" and request.path in FORM_PATHS


def is_from_own_page(request: web.Request) -> bool:
    """Whether a browser says that one of the server's own pages made the request: its ``Origin`` is this server.

    A server without TLS may be behind a proxy that has it.
    """
    own = {f"https://{request.host}".lower()} | (set() if request.secure else {f"http://{request.host}".lower()})
    origins = request.headers.getall("Origin", [])
    return len(origins) == 1 and origins[0].lower() in own


async def form_fields(request: web.Request) -> dict[str, str]:
    """Return the fields of a form; raise if another page sent it, or if it is none."""
    if not is_from_own_page(request):
        _refuse(403, "Forms are taken from this server's own pages only.\n")
    if request.content_type != _FORM_KIND:
        _refuse(415, f"Send a form: {_FORM_KIND}\n")
    body = bytearray()
    async with asyncio.timeout(_BODY_S):
        async for part in request.content.iter_chunked(_MOST_BODY):
            body += part
            if len(body) > _MOST_BODY:
                _refuse(413, "The form is too long.\n")
    try:
        found = parse_qs(body.decode("ascii"), max_num_fields=4, keep_blank_values=True)
    except ValueError:
        _refuse(400, "The form cannot be read.\n")
    return {name: values[0] for name, values in found.items()}


def _refuse(status: int, text: str) -> NoReturn:
    kinds: dict[int, type[web.HTTPException]] = {
        400: web.HTTPBadRequest,
        403: web.HTTPForbidden,
        415: web.HTTPUnsupportedMediaType,
    }
    if status == 413:
        raise web.HTTPRequestEntityTooLarge(_MOST_BODY, text=text)
    raise kinds[status](text=text)
