"""How servers' answers are handled: redirects are followed, and failures become errors that explain them.

TensorStore's driver refuses the redirects of HTTP servers::

    https://host/run/7/digests.json ── 302 ──► https://cdn.host/1f/93?signature=…    at most `_MAX_REDIRECTS` times

The answer of the last address is read like any other: the same limits, and each byte compared with its digest. A
redirect is refused if it leaves HTTP, goes from https to http, or has a user or password. No credentials are sent.

TensorStore's error message contains the status and cause of a failure, mixed with text of the server, but says nothing
about an incomplete answer. In two cases, a second request to an HTTP server explains the failure::

    no answer in time   ─► asks for the same range again: finds a redirect, an error, or how many bytes arrive
    wrong bytes         ─► asks for the object's type: it may be a web page on which to log in
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from shardload.errors import SourceNotFoundError, TransferError
from shardload.units import plural

TIMEOUT_VARIABLE = "SHARDLOAD_REMOTE_TIMEOUT"
ASK_AGAIN_S = 5.0
"""How long to wait for a server that is asked once more, to explain in an error message why a request failed."""
CHARACTERS_SHOWN = 300
"""How many characters of a store's own message an error shows."""
COPY_FIRST = (
    "Copy it to this machine first (aws s3 cp --recursive, gcloud storage cp --recursive, wget --recursive), and "
    "read it there"
)
_LOG_IN = "No password can be given to an HTTP server here: copy the step to this machine first"
_ACCESS = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or AWS_NO_SIGN_REQUEST=YES for a public "
    "bucket",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS, or run: gcloud auth application-default login",
}
_STATUS = re.compile(r"\[HTTP code (\d{3})\]|\[http_response_code='(\d{3})'\]")
_BODY = re.compile(r"\[http_response_body=.*?\](?=\s*\[|$)")
"""Matches the server's own text in TensorStore's message. It is cut out before a status code is looked for, because it
may contain anything."""
_SENTENCE = re.compile(r"\s*\[http_response_body=.*?\](?=\s*\[|$)|\s*\[source locations.*|\s*\[[a-z_\-]+='[^']*'\]")
REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 5
"""Limit on redirects for one file. Hugging Face's hub redirects once or twice; browsers give up after twenty."""
_PIECE = 1 << 16
"""How many bytes `ask_again` reads at a time: between two reads, it looks at the clock."""
_MAX_URL = 1 << 13
"""Limit on the characters of an address; a signed address has one to two thousand."""


class OutOfRangeError(TransferError):
    """Raised when a request wants bytes past the end of an object (a file in a store): the object is too short."""


def is_http(url: str) -> bool:
    """Whether a URL is that of a plain HTTP server, not of an object store."""
    return url.startswith("http")


def failure(url: str, error: BaseException | None, name: str) -> Exception:
    """Build the error for a failed request, with the URL, the store's message and a way to fix the problem."""
    endpoint = {"s3": aws_endpoint(), "gs": os.environ.get("TENSORSTORE_GCS_HTTP_URL")}.get(_scheme(url))
    where = (f"{url}/{name}" if name else url) + (f" (at {endpoint})" if endpoint else "")
    text = " ".join(str(error).split())
    # What follows the code may be text from the server.
    code = text.partition(":")[0]
    status = status_in(error)
    said = _SENTENCE.sub("", text)[:CHARACTERS_SHOWN].strip() or type(error).__name__
    said = said if status is None else f"HTTP status {status}, {said}"
    # TensorStore raises a ValueError for most status codes; only the text tells them apart.
    if code == "OUT_OF_RANGE":
        return OutOfRangeError(f"{where} is shorter than it should be: {said}")
    if code == "NOT_FOUND" and not name:
        return SourceNotFoundError(f"There is no bucket or folder {url}: {said}. Check the address")
    if code in ("PERMISSION_DENIED", "UNAUTHENTICATED"):
        fix = _ACCESS.get(_scheme(url), _LOG_IN)
        return TransferError(f"{where} may not be read: {said}. {fix}")
    if code == "FAILED_PRECONDITION" and "was ignored by server" in said:
        ignored = f"{where} cannot be read in parts: the server ignores range requests. {COPY_FIRST}"
        return web_page(url, name) or TransferError(ignored)
    if status in REDIRECTS:
        return TransferError(f"{where} cannot be read: {said}, a redirect. Check {_settings(url)}")
    return TransferError(f"{where} cannot be read: {said}. {_check(url)}")


def refused(url: str, name: str, status: int | str) -> TransferError:
    """Build the error for an HTTP server that, asked once more, answered with an error or could not be reached."""
    said = status if isinstance(status, str) else f"HTTP status {status}"
    return TransferError(f"{url}/{name} cannot be read: {said}. {_check(url)}")


def stalled(url: str, name: str, timeout_s: float, answer: Answer | None = None) -> TransferError:
    """Build the error for a store that sent no complete answer; ``answer`` is what it sent when asked once more."""
    found = "its server sent no complete answer"
    if answer is not None and answer.expected_bytes:
        found += f" ({answer.received_bytes:,} of {plural(answer.expected_bytes, 'byte')} when asked again)"
    return TransferError(
        f"{url}/{name}".rstrip("/")
        + f" cannot be read: {found} for {timeout_s:g} s. {_check(url)}; {TIMEOUT_VARIABLE}=SECONDS waits longer"
    )


def web_page(url: str, name: str) -> TransferError | None:
    """Ask an HTTP server for a file; return an error if it sends a web page instead, such as a login, else ``None``."""
    if not is_http(url):
        return None
    asked = f"{url}/{quote(name)}"
    try:
        address = follow_redirects(asked, timeout_s=ASK_AGAIN_S)
        with _asked(address, ASK_AGAIN_S) as answer:
            is_page = answer.status < 300 and answer.headers.get_content_type() == "text/html"
    except (OSError, HTTPException, ValueError):
        return None
    if not is_page:
        return None
    where = "" if address == asked else f", from {address[:CHARACTERS_SHOWN]}"
    return TransferError(
        f"{url}/{name} cannot be read: the server sent a web page{where}, expected the file. It may be a page to log "
        f"in: {_LOG_IN[0].lower()}{_LOG_IN[1:]}. Check the address"
    )


def status_in(error: BaseException | None) -> int | None:
    """Return the HTTP status in the text of a TensorStore error, which has no field for it; ``None`` without one."""
    found = _STATUS.search(_BODY.sub("", " ".join(str(error).split())))
    return None if found is None else int(found[1] or found[2])


def aws_endpoint() -> str | None:
    """Return the address of the server to use as S3, if the environment sets one; else ``None``."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def _scheme(url: str) -> str:
    return url.partition(":")[0]


def _check(url: str) -> str:
    return f"Check the address, the network and {_settings(url)}"


def _settings(url: str) -> str:
    found = {"s3": "AWS_ENDPOINT_URL and AWS_REGION", "gs": "TENSORSTORE_GCS_HTTP_URL"}
    return found.get(_scheme(url), "whether the server is up")


class _Unfollowed(urllib.request.HTTPErrorProcessor):
    """Makes urllib return redirects instead of following them, so that each address is checked first."""

    def http_response(self, request: Any, response: Any) -> Any:
        """Return the answer unchanged, even if it is a redirect."""
        return response

    https_response = http_response


_OPENER = urllib.request.build_opener(_Unfollowed)


def follow_redirects(url: str, *, timeout_s: float) -> str:
    """Follow the redirects of an address, and return the last address; without redirects, it is ``url`` itself."""
    found = url
    for _ in range(_MAX_REDIRECTS + 1):
        location = redirect_of(found, timeout_s=timeout_s)
        if location is None:
            return found
        found = _checked(url, found, location)
    raise TransferError(f"Cannot read {url}: it was redirected more than {_MAX_REDIRECTS} times. Check the address")


def redirect_of(url: str, *, timeout_s: float) -> str | None:
    """Return where ``url`` redirects to, as the server writes it (perhaps relative); ``None`` without a redirect."""
    try:
        with _asked(url, timeout_s) as answer:
            # Any other status is told by the request for the bytes.
            return answer.headers.get("Location", "") if answer.status in REDIRECTS else None
    except (OSError, HTTPException, ValueError) as error:
        raise TransferError(f"Cannot read {url}: following its redirect failed: {error}. Check the address") from error


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server sent within a time limit when it was asked once more, to explain why a request failed."""

    status: int | str
    """HTTP status; 0 if no answer came in time; the reason as text if the server could not be asked."""
    received_bytes: int = 0
    expected_bytes: int = 0
    """How many bytes the server announced; 0 if it did not say."""


def ask_again(url: str, wanted: slice | None, *, timeout_s: float) -> Answer:
    """Request a range of an object once more (``None``: all of it), and count the bytes that come in ``timeout_s``."""
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


def _asked(url: str, timeout_s: float, wanted: str = "bytes=0-0") -> Any:
    # One byte, not HEAD: an address may be signed for GET only.
    return _OPENER.open(urllib.request.Request(url, headers={"Range": wanted}), timeout=timeout_s)


def _checked(first: str, found: str, location: str) -> str:
    """Return the address that a redirect from ``found`` to ``location`` leads to; raise if it must not be followed."""
    if not location:
        raise TransferError(
            f"Cannot read {first}: {found[:_MAX_URL]!r} redirects, but to no address. Check the address"
        )
    try:
        target = urljoin(found, location)
        parts, scheme = urlsplit(target), urlsplit(found).scheme
        rules = (
            (len(location) > _MAX_URL, f"has more than {_MAX_URL} characters"),
            (not location.isprintable() or " " in location, "has spaces or characters that cannot be printed"),
            (parts.scheme not in ("http", "https") or not parts.hostname, "is not an address of HTTP"),
            (scheme == "https" and parts.scheme == "http", "is not encrypted, although the first address is"),
            (parts.username is not None or parts.password is not None, "has a user or a password"),
        )
        why = next((text for holds, text in rules if holds), "")
    except ValueError as error:  # such as an invalid IPv6 address
        target, why = location, str(error)
    if why:
        raise TransferError(
            f"Cannot read {first}: {found[:_MAX_URL]!r} redirects to {target[:300]!r}, which {why}. Check the address"
        )
    return parts._replace(fragment="").geturl()
