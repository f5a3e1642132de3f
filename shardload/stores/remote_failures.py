"""What to say of a store that refuses a request, sends something else, or sends nothing.

TensorStore tells status, code and cause of a failure in its text only, next to text of the server, and nothing of an
answer that is not complete. An HTTP server is asked once more where that explains the failure::

    no answer in time   ─► the same range again, for a moment: a redirect, an error, or how many bytes arrive
    other bytes         ─► what it says of the object's type: a web page, such as one to log in
"""

from __future__ import annotations

import os
import re
from urllib.parse import quote

from shardload.errors import SourceNotFoundError, TransferError
from shardload.stores import redirects
from shardload.units import plural

TIMEOUT_VARIABLE = "SHARDLOAD_REMOTE_TIMEOUT"
ASK_AGAIN_S = 5.0
"""Limit for the answer of a server that is asked once more."""
SHOWN = 300
"""The number of characters of a store's message shown in an error."""
COPY_FIRST = (
    "Copy it to this machine first (aws s3 cp --recursive, gcloud storage cp --recursive, wget --recursive), and "
    "read it there"
)
_LOG_IN = "No password can be given to an HTTP server here: copy the step to this machine first"
_STATUS = re.compile(r"\[HTTP code (\d{3})\]|\[http_response_code='(\d{3})'\]")
_BODY = re.compile(r"\[http_response_body=.*?\](?=\s*\[|$)")
"""Text of the server, in which anything may stand."""
_SENTENCE = re.compile(r"\s*\[http_response_body=.*?\](?=\s*\[|$)|\s*\[source locations.*|\s*\[[a-z_\-]+='[^']*'\]")


class OutOfRangeError(TransferError):
    """The requested range ends after the object."""


def is_http(url: str) -> bool:
    """Whether a folder is on a plain HTTP server."""
    return url.startswith("http")


def failure(url: str, error: BaseException | None, name: str) -> Exception:
    """Build an error for a failed request: the URL, the store's message, and a way to fix it."""
    endpoint = {"s3": aws_endpoint(), "gs": os.environ.get("TENSORSTORE_GCS_HTTP_URL")}.get(_scheme(url))
    where = (f"{url}/{name}" if name else url) + (f" (at {endpoint})" if endpoint else "")
    text = " ".join(str(error).split())
    # What follows the code may be text from the server.
    code = text.partition(":")[0]
    status = status_in(error)
    said = _SENTENCE.sub("", text)[:SHOWN].strip() or type(error).__name__
    said = said if status is None else f"HTTP status {status}, {said}"
    # TensorStore raises a ValueError for most status codes; only the text tells them apart.
    if code == "OUT_OF_RANGE":
        return OutOfRangeError(f"{where} is shorter than it should be: {said}")
    if code == "NOT_FOUND" and not name:
        return SourceNotFoundError(f"There is no bucket or folder {url}: {said}. Check the address")
    if code in ("PERMISSION_DENIED", "UNAUTHENTICATED"):
        return TransferError(f"{where} may not be read: {said}. {_access(url)}")
    if code == "FAILED_PRECONDITION" and "was ignored by server" in said:
        ignored = f"{where} cannot be read in parts: the server ignores range requests. {COPY_FIRST}"
        return web_page(url, name) or TransferError(ignored)
    if status in redirects.REDIRECTS:
        return TransferError(f"{where} cannot be read: {said}, a redirect. Check {_settings(url)}")
    return TransferError(f"{where} cannot be read: {said}. {_check(url)}")


def refused(url: str, name: str, status: int | str) -> TransferError:
    """Build the error for an HTTP server that answered with an error, or could not be reached, when asked again."""
    said = status if isinstance(status, str) else f"HTTP status {status}"
    return TransferError(f"{url}/{name} cannot be read: {said}. {_check(url)}")


def stalled(url: str, name: str, timeout_s: float, answer: redirects.Answer | None = None) -> TransferError:
    """Build the error for a store that sent no complete answer for ``timeout_s``.

    Args:
        url: The folder.
        name: The object in it; may be empty.
        timeout_s: The time limit that passed.
        answer: What an HTTP server sent when it was asked once more.
    """
    found = "its server sent no complete answer"
    if answer is not None and answer.expected_bytes:
        found += f" ({answer.received_bytes:,} of {plural(answer.expected_bytes, 'byte')} when asked again)"
    return TransferError(
        f"{url}/{name}".rstrip("/")
        + f" cannot be read: {found} for {timeout_s:g} s. {_check(url)}; {TIMEOUT_VARIABLE}=SECONDS waits longer"
    )


def web_page(url: str, name: str) -> TransferError | None:
    """Return the error for a web page that an HTTP server sends in place of a file; ``None`` if it sends none."""
    if not is_http(url):
        return None
    address = redirects.web_page(f"{url}/{quote(name)}", timeout_s=ASK_AGAIN_S)
    if address is None:
        return None
    where = "" if address == f"{url}/{quote(name)}" else f", from {address[:SHOWN]}"
    return TransferError(
        f"{url}/{name} cannot be read: the server sent a web page{where}, expected the file. It may be a page to log "
        f"in: {_LOG_IN[0].lower()}{_LOG_IN[1:]}. Check the address"
    )


def status_in(error: BaseException | None) -> int | None:
    """Return the HTTP status in an error of TensorStore, which has it in its text only."""
    found = _STATUS.search(_BODY.sub("", " ".join(str(error).split())))
    return None if found is None else int(found[1] or found[2])


def aws_endpoint() -> str | None:
    """Return the address of S3's server, if the environment sets one."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def _scheme(url: str) -> str:
    return url.partition(":")[0]


def _check(url: str) -> str:
    return f"Check the address, the network and {_settings(url)}"


def _settings(url: str) -> str:
    found = {"s3": "AWS_ENDPOINT_URL and AWS_REGION", "gs": "TENSORSTORE_GCS_HTTP_URL"}
    return found.get(_scheme(url), "whether the server is up")


def _access(url: str) -> str:
    return {
        "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or AWS_NO_SIGN_REQUEST=YES for a "
        "public bucket",
        "gs": "Set GOOGLE_APPLICATION_CREDENTIALS, or run: gcloud auth application-default login",
    }.get(_scheme(url), _LOG_IN)
