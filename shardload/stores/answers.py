"""What the answers of remote stores mean: which failures are repeated, and errors that explain the others.

obstore 0.12 raises a kind of error for a few statuses, and tells everything else in the text of the error. The text has
a sentence with the server's own words, then details (``Debug source: …``) that name the cause of a failed connection.
This module alone reads it. Addresses in it are cut off where they may be signed.
"""

from __future__ import annotations

import errno
import html
import http.client
import math
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, unquote

from shardload.errors import SourceNotFoundError, TransferError, WriteError, public_name
from shardload.stores.clients import certificates_file, endpoint_of
from shardload.stores.tokens import TOKENS_VARIABLE, token_advice

TIMEOUT_VARIABLE = "SHARDLOAD_REMOTE_TIMEOUT"
CHARACTERS_SHOWN = 300
"""How many characters of a server's own message an error shows."""
COPY_FIRST = (
    "Copy it to this machine first (aws s3 cp --recursive, gcloud storage cp --recursive, wget --recursive), and "
    "read it there"
)
_ACCESS = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or AWS_NO_SIGN_REQUEST=YES for a public "
    "bucket",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS, or run: gcloud auth application-default login. "
    "GOOGLE_SKIP_SIGNATURE=true reads a public bucket",
    "hf": "For a gated model, accept its terms, and log in: hf auth login, or HF_TOKEN",
}
_SETTINGS = {
    "s3": "AWS_ENDPOINT_URL and AWS_REGION",
    "gs": "STORAGE_EMULATOR_HOST",
    "hf": "HF_ENDPOINT",
}
_STATUS = re.compile(r"Server returned (?:non-2xx status code: |error response: )(\d{3})([^:\n]*):?\s*")
_NO_STORE = re.compile(r"(?:Last-Modified|ETag) Header missing|Got invalid [\w ]*response", re.IGNORECASE)
_DETAILS = "\n\nDebug source:"
_REQUEST = re.compile(r".*?Error performing \S+ \S+ in \S+ - ", re.DOTALL)
"""Matches the beginning of a sentence, with the address, which may be signed."""
_CREDENTIALS = (
    (re.compile(r"(?:PUT|GET) \S+?//[^/]+/latest/(?:api/token|meta-data/iam)"), "this machine's metadata"),
    (re.compile(r"GET \S+?//[^/]+/computeMetadata/"), "this machine's metadata server"),
    (re.compile(r"GET \S+?//169\.254\.170\.2"), "this container's credentials service"),
    (re.compile(r"AssumeRoleWithWebIdentity|read token file"), "the token that AWS_WEB_IDENTITY_TOKEN_FILE names"),
    (re.compile(r"External AWS credential provider"), "the AWS profile"),
    (re.compile(r"performing token request"), "Google's server for tokens"),
)
"""What obstore says when it gets no credentials, so that the store was not asked, and who should have given them."""
_DENIED = re.compile("access ?denied", re.IGNORECASE)
"""Matches what S3 says of an object in the answer to a request that deletes many, whose own status is 200."""
_PASSING = re.compile("<Code>(?:RequestTimeout|NoSuchUpload)</Code>")
"""Matches refusals with a status of the client's that a store means to pass: it did not get the whole body in time; or
does not know an upload in parts, which it has completed, but its answer was lost, or which was removed meanwhile."""
_EXPIRED = re.compile("<Code>(?:ExpiredToken|TokenRefreshRequired|InvalidToken)</Code>")
"""Matches refusals of credentials that were valid once, with status 400 or 403."""
_BAD_NAME = re.compile(r'Encountered object with invalid path: .*?Path "([^"]*)"', re.DOTALL)
"""Matches what obstore says of a list with a name that it cannot take apart, such as ``a//b`` or ``a/../b``."""
_REQUEST_ID = re.compile(r"<RequestId>([^<]{1,100})</RequestId>")
_SAID = re.compile(r"<Message>([^<]*)</Message>")
_CAUSES = (
    re.compile(r'message: "([^"]{1,200})"'),  # of the system: Connection refused
    re.compile(r'error: "([^"]{1,200})"'),  # of the name server
    re.compile(
        r"(InvalidCertificate|InvalidMessage|TooManyRedirects|BadScheme|TimedOut|IncompleteMessage|UnexpectedEof)"
    ),
)
_IN_WORDS = {
    "InvalidCertificate": "its certificate is not trusted; AWS_CA_BUNDLE or SSL_CERT_FILE names a file of your own",
    "InvalidMessage": "it does not answer in TLS; where a server is not encrypted, write http:// instead of https://",
    "TooManyRedirects": "it redirects too often",
    "BadScheme": "it redirects to an address that is not encrypted, or not HTTP",
    "TimedOut": "it sent nothing for too long",
    "IncompleteMessage": "it closed the connection in the middle of an answer",
    "UnexpectedEof": "it closed the connection in the middle of an answer",
}
_CLOSED = ("IncompleteMessage", "UnexpectedEof")
_PERHAPS = {"http": "Perhaps it has a certificate: then write https:// instead of http://. "}
"""Scheme → why a server may close connections without an answer."""
_FINAL = frozenset(
    {
        "InvalidCertificate",
        "InvalidMessage",
        "TooManyRedirects",
        "BadScheme",
        "failed to lookup address information: Name or service not known",
    }
)
"""Causes that another try would only meet again."""
_PROBE_S = 5.0
"""How long to wait for the answer to the one byte that shows how long a busy server asks to wait."""


class OutOfRangeError(TransferError):
    """Raised when a request wants bytes past the end of an object (a file in a store): the object is too short."""


class ForbiddenError(TransferError):
    """Raised when a store refuses access to an object; some stores also answer so if there is no such object."""


class WebPageError(TransferError):
    """Raised when a server sends a web page in place of a file: one to log in, or the list of a folder."""


class ChangedError(TransferError):
    """Raised when an object was replaced after its first bytes were read."""


@dataclass(frozen=True, slots=True)
class FailedTry:
    """Why one try of a request failed."""

    said: str
    """In words, with the server's own; without the address."""
    status: int | None = None
    """HTTP status; ``None`` if no answer came."""
    code: str = ""
    """What obstore says of it: missing, forbidden, expired (credentials), changed, no ranges, no length (of a page),
    bad name (of an object in a list), no credentials; empty for all others."""
    cause: str = ""
    """Of a failed connection, the last cause that obstore names."""
    is_connection: bool = False
    """Whether the connection failed, or broke in the middle of an answer."""
    is_to_repeat: bool = False
    """Whether the store says that the same request may succeed, although its status does not."""
    credentials: str = ""
    """The source of credentials that failed, in words; empty if the store itself was asked."""

    @classmethod
    def of(cls, error: BaseException, *, secrets: Sequence[str] = ()) -> FailedTry:
        """Read what obstore says in an error; ``secrets`` are left out if the server repeats them."""
        from obstore import exceptions

        if isinstance(error, TimeoutError):  # of this package, not of obstore
            return cls(str(error), is_connection=True)
        sentence, _, details = str(error).partition(_DETAILS)
        credentials = next((words for pattern, words in _CREDENTIALS if pattern.search(sentence)), "")
        found = _STATUS.search(sentence)
        status = int(found[1]) if found else None
        body = sentence[found.end() :] if found else ""
        kinds: tuple[tuple[type[BaseException], str], ...] = (
            (FileNotFoundError, "missing"),
            (exceptions.PermissionDeniedError, "forbidden"),
            (exceptions.UnauthenticatedError, "forbidden"),
            (exceptions.PreconditionError, "changed"),
            (exceptions.NotModifiedError, "changed"),
            (exceptions.NotSupportedError, "no ranges"),
        )
        code = next((code for kind, code in kinds if isinstance(error, kind)), "")
        is_to_repeat = bool(_PASSING.search(body))
        if is_to_repeat:
            code = ""
        elif "NotPartial" in details:
            code = "no ranges"
        elif "Content-Length Header missing" in sentence:
            code = "no length"
        elif status == 404:  # of a listing
            code = "missing"
        elif status in (401, 403) or (status is None and not code and _DENIED.search(sentence)):
            code = "forbidden"
        elif name := _BAD_NAME.search(sentence):
            return cls(name[1], code="bad name")
        code = "expired" if _EXPIRED.search(body) else code
        cause = next((match[1] for pattern in _CAUSES if (match := pattern.search(details))), "")
        if found:
            text = f"HTTP status {found[1]}{found[2]}"
            words = _words_of(_without(body, secrets), besides=f"{found[1]}{found[2]}")
            said = f"{text}: {words}" if words else text
            if request := _REQUEST_ID.search(body):
                said += f" (request {request[1]})"
        elif cause:
            said = _IN_WORDS.get(cause, cause)
        else:
            words = _without(_REQUEST.sub("", sentence), secrets)
            said = " ".join(words.split())[:CHARACTERS_SHOWN] or public_name(error)
            if _NO_STORE.search(said):  # of S3 and GCS each has an ETag and a time, or is XML
                said += ": the answers are not those of an object store, but perhaps a web page to log in"
        is_connection = "reqwest" in details
        is_final = bool(code) or not is_connection if status is None else status < 500
        # A refusal by the source of credentials is none by the store.
        code = ("no credentials" if is_final else "") if credentials else code
        options: dict[str, Any] = {"is_to_repeat": is_to_repeat, "credentials": credentials}
        return cls(said, status, code, cause, is_connection=is_connection, **options)

    @property
    def is_passing(self) -> bool:
        """Whether the same request may succeed later: the server is busy or failing, or the connection broke."""
        if self.code:
            return False
        if self.status is not None:
            is_failing = self.status >= 500 and self.status != 501  # not implemented
            return self.is_to_repeat or self.status in (408, 429) or is_failing
        return self.is_connection and self.cause not in _FINAL

    @property
    def is_unanswered(self) -> bool:
        """Whether the server said nothing, not even where else the object is: it may be the wrong one."""
        return self.status is None and self.is_connection and self.cause not in ("TooManyRedirects", "BadScheme")

    @property
    def is_busy(self) -> bool:
        """Whether the server asks for fewer requests, and perhaps says how long to wait."""
        return self.status in (429, 503)


def _without(text: str, secrets: Sequence[str]) -> str:
    """Return a server's words without what nobody else is to see: a token, or a query, which may be a signature."""
    # Before the words are cut to their length, which may leave a part of a secret.
    forms = {form(secret) for secret in secrets if secret for form in (str, unquote, quote, html.escape)}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, "…")
    return text


def _words_of(body: str, *, besides: str) -> str:
    """Return what a server says in the body of a refusal, without what is in the status already."""
    message = _SAID.search(body)
    text = " ".join((message[1] if message else re.sub(r"<[^>]*>", " ", body)).split())
    return " ".join(text.replace(besides, " ").split())[:CHARACTERS_SHOWN].rstrip(".")


def failure(
    url: str,
    name: str,
    found: FailedTry,
    *,
    tries: int = 1,
    spent_s: float = 0.0,
    has_token: bool = False,
    has_answered: bool = True,
) -> Exception:
    """Build the error for a failed request, with its address, the server's message and a way to fix the problem.

    ``has_token`` if a token from the file that SHARDLOAD_TOKENS names was sent, ``has_answered`` if the server has
    answered a request before.
    """
    scheme = url.partition(":")[0]
    endpoint = endpoint_of(scheme)
    where = (f"{url}/{name}" if name else url) + (f" (at {endpoint})" if endpoint else "")
    if found.credentials:
        return TransferError(_without_credentials(where, scheme, found, tries, spent_s))
    if found.status == 416:
        return OutOfRangeError(f"{where} is shorter than it should be: {found.said}")
    match found.code:
        case "missing":
            return SourceNotFoundError(f"There is no {where}: {found.said}. Check the address")
        case "expired" if not has_token:
            return ForbiddenError(f"{where} may not be read: {found.said}. {_RENEW}")
        case "forbidden" | "expired":
            root = "/".join(url.split("/")[:3])
            advice = _access(scheme) if scheme in _ACCESS else token_advice(root, was_sent=has_token)
            return ForbiddenError(f"{where} may not be read: {found.said}. {advice}")
        case "changed":
            return changed(where)
        case "bad name":
            return TransferError(
                f"Cannot list {where}: it has an object named {found.said!r}, expected names without '..' or nothing "
                "between slashes. Rename or delete that object, or give the address of a folder next to it"
            )
        case "no ranges":
            return TransferError(f"{where} cannot be read in parts: the server ignores range requests. {COPY_FIRST}")
    repeated = f", {tries} times in {spent_s:.3g} s" if tries > 1 else ""
    longer = f"; {TIMEOUT_VARIABLE}=SECONDS waits longer" if found.is_passing else ""
    hint = "" if has_answered or found.cause not in _CLOSED else _PERHAPS.get(scheme, "")
    return TransferError(f"{where} cannot be read: {found.said}{repeated}. {hint}{_check(scheme)}{longer}")


def write_failure(
    url: str, name: str, found: FailedTry, *, doing: str, tries: int = 1, spent_s: float = 0.0
) -> WriteError:
    """Build the error for an object that cannot be written or deleted (``doing``), with an ``errno``."""
    scheme = url.partition(":")[0]
    endpoint = endpoint_of(scheme)
    where = (f"{url}/{name}" if name else url) + (f" (at {endpoint})" if endpoint else "")
    if found.credentials:
        made = WriteError(_without_credentials(where, scheme, found, tries, spent_s))
        made.errno = errno.EACCES
        return made
    match found.code:
        case "missing":
            bucket = "/".join(url.split("/")[:3])
            made = WriteError(f"{where} cannot be {doing}: {found.said}. Create the bucket {bucket}, or check its name")
            made.errno = errno.ENOENT
        case "forbidden":
            made = WriteError(f"{where} may not be {doing}: {found.said}. {_access(scheme, to_write=True)}")
            made.errno = errno.EACCES
        case "expired":
            made = WriteError(f"{where} may not be {doing}: {found.said}. {_RENEW}")
            made.errno = errno.EACCES
        case _:
            repeated = f", {tries} times in {spent_s:.3g} s" if tries > 1 else ""
            longer = f"; {TIMEOUT_VARIABLE}=SECONDS waits longer" if found.is_passing else ""
            made = WriteError(f"{where} cannot be {doing}: {found.said}{repeated}. {_check(scheme)}{longer}")
            made.errno = errno.EIO
    return made


def _without_credentials(where: str, scheme: str, found: FailedTry, tries: int, spent_s: float) -> str:
    repeated = f", {tries} times in {spent_s:.3g} s" if tries > 1 else ""
    return (
        f"Cannot get credentials for {where} from {found.credentials}: {found.said}{repeated}. Mend that source, or "
        f"give others. {_ACCESS.get(scheme, COPY_FIRST)}"
    )


_RENEW = (
    "The credentials have expired: log in again, or set new ones; a role of the machine, or an AWS_PROFILE with one, "
    "renews them by itself"
)
_KEYS = {"s3": "AWS_ACCESS_KEY_ID"}
"""Scheme → variable of the environment that has the name of a key, which would be sent."""


def _access(scheme: str, *, to_write: bool = False) -> str:
    """Return the way out of a refusal: other rights for the credentials that were sent, or credentials."""
    if os.environ.get(_KEYS.get(scheme, "")):
        rights = "s3:PutObject and s3:DeleteObject" if to_write else "s3:GetObject and s3:ListBucket"
        return f"The keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY were sent: grant them {rights}, or set others"
    if not to_write:
        return _ACCESS[scheme]
    # Without what concerns public buckets, which nobody may write to.
    return re.sub(r"(, or AWS_NO_SIGN|\. GOOGLE_SKIP).*", "", _ACCESS.get(scheme, "")) + ", and grant it write access"


def changed(where: str) -> ChangedError:
    """Build the error for an object that was replaced while it was read."""
    return ChangedError(
        f"{where} changed while it was read: another version took its place. Load it again once its writer has finished"
    )


def web_page(url: str, name: str) -> WebPageError:
    """Build the error for a server that sent a web page in place of a file, perhaps one to log in."""
    return WebPageError(
        f"{url}/{name} cannot be read: the server sent a web page, expected the file. It may be a page to log "
        f"in: if an HTTP server takes a token, {TOKENS_VARIABLE} gives it one; otherwise copy it to this machine "
        "first. Check the address"
    )


def no_list(url: str, folder: str) -> WebPageError:
    """Build the error for a server that sent a web page in place of the names in a folder."""
    where = f"{url}/{folder}".rstrip("/")
    return WebPageError(
        f"Cannot list {where}: the server sent a web page, expected a list of names. It may be a page to log in to the "
        f"network or a proxy: log in there. {_check(url.partition(':')[0])}"
    )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: an address may be signed."""

    def redirect_request(self, *_: Any) -> None:
        """Return None: the redirect is the answer."""


class _Https(urllib.request.HTTPSHandler):
    """Reads the certificates of the system for a request that needs them, not for each opener: it takes 20 ms."""

    def __init__(self) -> None:
        urllib.request.AbstractHTTPHandler.__init__(self)

    def https_open(self, request: urllib.request.Request) -> Any:
        """Open a connection."""
        context = ssl.create_default_context()  # what SSL_CERT_FILE names is among these
        if (path := certificates_file()) is not None:
            context.load_verify_locations(path)
        return self.do_open(http.client.HTTPSConnection, request, context=context)


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirect(), _Https())


def opened(address: str, *, headers: Mapping[str, str], timeout_s: float) -> Any:
    """Return the open answer of an HTTP server, which may take some time to come; raise for one that refuses."""
    return _opener().open(urllib.request.Request(address, headers=dict(headers)), timeout=timeout_s)


def page_of(address: str, limit: int, *, headers: Mapping[str, str] = MappingProxyType({})) -> bytes | None:
    """Read a web page of at most ``limit`` bytes; ``None`` if it is longer, or cannot be read."""
    try:
        with opened(address, headers=headers, timeout_s=_PROBE_S) as answer:
            found: bytes = answer.read(limit + 1)
            return found if len(found) <= limit else None
    except (OSError, ValueError, http.client.HTTPException):
        return None


def pause_asked(address: str, *, headers: Mapping[str, str] = MappingProxyType({})) -> float:
    """Return how many seconds a busy server asks to wait, by ``Retry-After``; 0 if it does not say.

    obstore does not show the headers of a refusal, so one byte is asked for without it. ``address`` may be signed.
    """
    request = urllib.request.Request(address, headers={**headers, "Range": "bytes=0-0"})
    try:
        with _opener().open(request, timeout=_PROBE_S):
            return 0.0
    except urllib.error.HTTPError as error:
        return _seconds(error.headers.get("Retry-After"))
    except (OSError, ValueError):
        return 0.0


def _seconds(text: Any) -> float:
    """Return the seconds that a ``Retry-After`` means: a number, or a date."""
    if not text:
        return 0.0
    try:
        found = float(text)
    except ValueError:
        try:
            found = parsedate_to_datetime(text).timestamp() - time.time()
        except ValueError:
            return 0.0
    return found if 0 < found < math.inf else 0.0


def _check(scheme: str) -> str:
    return f"Check the address, the network and {_SETTINGS.get(scheme, 'whether the server is up')}"
