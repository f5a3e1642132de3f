"""Follow the redirects of HTTP servers, which TensorStore's driver refuses.

    https://host/run/7/digests.json ── 302 ──► https://cdn.host/1f/93?signature=…    at most `MAX_REDIRECTS` times

The answer of the last address is read like any other: the same limits, and each byte compared with its digest. A
redirect is refused if it leaves HTTP, goes from https to http, or has a user or password. No credentials are sent.
"""

from __future__ import annotations

import contextlib
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urljoin, urlsplit

from shardload.errors import TransferError

REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_REDIRECTS = 5
"""A file on the hub of Hugging Face takes one or two; browsers give up after twenty."""
_PIECE = 1 << 16
"""Most bytes read at once while they are counted."""
MAX_URL = 1 << 13
"""Characters of an address; signed ones have one to two thousand."""


class _Unfollowed(urllib.request.HTTPErrorProcessor):
    """Returns every answer, so that each address is checked before the next request."""

    def http_response(self, request: Any, response: Any) -> Any:
        """Return the answer."""
        return response

    https_response = http_response


_OPENER = urllib.request.build_opener(_Unfollowed)


def follow(url: str, *, timeout_s: float) -> str:
    """Return the address to which an object's address is redirected; its own without a redirect.

    Raises:
        TransferError: If a redirect is refused, there are too many, or a server does not respond.
    """
    found = url
    for _ in range(MAX_REDIRECTS + 1):
        location = location_of(found, timeout_s=timeout_s)
        if location is None:
            return found
        found = _checked(url, found, location)
    raise TransferError(f"Cannot read {url}: it was redirected more than {MAX_REDIRECTS} times. Check the address")


def location_of(url: str, *, timeout_s: float) -> str | None:
    """Return where an address redirects to; ``None`` if it does not."""
    try:
        with _asked(url, timeout_s) as answer:
            # Any other status is told by the request for the bytes.
            return answer.headers.get("Location", "") if answer.status in REDIRECTS else None
    except (OSError, HTTPException, ValueError) as error:
        raise TransferError(f"Cannot read {url}: following its redirect failed: {error}. Check the address") from error


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server sent within a time limit."""

    status: int | str
    """0 if it sent none in time; text if it could not be asked."""
    received_bytes: int = 0
    expected_bytes: int = 0
    """Bytes that it announced; 0 if it did not say."""


def ask(url: str, wanted: slice | None, *, timeout_s: float) -> Answer:
    """Request bytes of an object, all by default, and count what arrives; a redirect is not followed."""
    start, stop = (wanted.start or 0, wanted.stop) if wanted is not None else (0, None)
    until_s = time.monotonic() + timeout_s
    try:
        with _asked(url, timeout_s, f"bytes={start}-{'' if stop is None else stop - 1}") as answer:
            expected, received = int(answer.headers.get("Content-Length") or 0), 0
            with contextlib.suppress(TimeoutError, HTTPException):
                while (piece := answer.read1(_PIECE)) and time.monotonic() < until_s:
                    received += len(piece)
            return Answer(int(answer.status), received, expected)
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        return Answer(0 if isinstance(reason, TimeoutError) else str(reason))


def web_page(url: str, *, timeout_s: float) -> str | None:
    """Return the address of the web page that a server sends for an object; ``None`` if it sends none, or nothing."""
    try:
        found = follow(url, timeout_s=timeout_s)
        with _asked(found, timeout_s) as answer:
            is_page = answer.status < 300 and answer.headers.get_content_type() == "text/html"
    except (OSError, HTTPException, ValueError):
        return None
    return found if is_page else None


def _asked(url: str, timeout_s: float, wanted: str = "bytes=0-0") -> Any:
    # One byte, not HEAD: an address may be signed for GET only.
    return _OPENER.open(urllib.request.Request(url, headers={"Range": wanted}), timeout=timeout_s)


def _checked(first: str, found: str, location: str) -> str:
    """Return the address that ``found`` redirects to, if it may be followed."""
    if not location:
        raise TransferError(f"Cannot read {first}: {found[:MAX_URL]!r} redirects, but to no address. Check the address")
    try:
        target = urljoin(found, location)
        parts = urlsplit(target)
        why = _objection(urlsplit(found).scheme, parts, location)
    except ValueError as error:  # such as an invalid IPv6 address
        target, why = location, str(error)
    if why:
        raise TransferError(
            f"Cannot read {first}: {found[:MAX_URL]!r} redirects to {target[:300]!r}, which {why}. Check the address"
        )
    return parts._replace(fragment="").geturl()


def _objection(scheme: str, parts: Any, location: str) -> str:
    rules: tuple[tuple[Callable[[], bool], str], ...] = (
        (lambda: len(location) > MAX_URL, f"has more than {MAX_URL} characters"),
        (lambda: not location.isprintable() or " " in location, "has characters that no address has"),
        (lambda: parts.scheme not in ("http", "https") or not parts.hostname, "is not an address of HTTP"),
        (lambda: scheme == "https" and parts.scheme == "http", "is not encrypted, although the first address is"),
        (lambda: parts.username is not None or parts.password is not None, "has a user or a password"),
    )
    return next((why for holds, why in rules if holds()), "")
