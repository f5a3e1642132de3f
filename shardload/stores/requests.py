"""Requests to remote stores (``s3://``, ``gs://``, ``http(s)://``), sent by TensorStore's drivers.

TensorStore sends, signs and retries the requests; this module adds time limits and readable error messages. A request
raises a `TransferError` if all retries (`RETRIES`) fail, or if the store sends nothing for `timeout_s()` seconds.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from shardload.errors import SourceError, TransferError, UnsafeSourceError, UnsupportedError
from shardload.stores import answers
from shardload.stores.answers import COPY_FIRST, TIMEOUT_VARIABLE, OutOfRangeError, aws_endpoint
from shardload.units import exact_bytes

_DEFAULT_TIMEOUT_S = 120.0
"""Longest wait for a store's response, in seconds; TensorStore would wait forever. 64 MiB at 0.5 MB/s take as long."""
_FIRST_ANSWER_S = 30.0
"""Longest wait for a store's first response, in seconds: it is small, and shows whether the address is right."""
RETRIES: Mapping[str, Any] = {"max_retries": 4, "initial_delay": "250ms", "max_delay": "4s"}
"""How often a failed request is repeated, and after which delays; TensorStore's 32 attempts would take 15 minutes."""
WAIT_S = 0.25
"""How often, in seconds, a waiting thread looks whether the store has answered other requests. If so, its own request
is not stalled, but waits its turn."""
_PROBES = 16
"""How many single bytes are requested at once to find the size of an object (see `Requests.size`)."""
_MOVED_S = 60.0
"""Seconds for which the target of a redirect is used again: few, as signed addresses expire, mostly after minutes."""


class Requests:
    """Sends requests for the objects below a URL. Names of objects are relative to this URL."""

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        self.url = f"{scheme.lower()}://{rest.rstrip('/')}"
        self._progress = _Progress()
        self._spec = _spec(self.url)
        self._moved: dict[str, tuple[Any, float]] = {}

    @functools.cached_property
    def _kv(self) -> Any:
        return self._opened(self._spec)

    def is_object(self) -> bool:
        """Whether the URL itself is that of an object, not of a folder."""
        above, _, name = self.url.rpartition("/")
        if above.endswith("/") or not above.partition("://")[2] or not name:
            return False
        parent = Requests(above)
        parent._progress = self._progress  # a server that stalls is waited for once
        return parent.exists(name)

    def exists(self, name: str) -> bool:
        """Whether there is an object of this name."""
        try:
            return self.read(name, 0, 1) is not None
        except OutOfRangeError:
            return True

    @property
    def can_list(self) -> bool:
        """Whether the store can list the names of its objects; HTTP servers cannot."""
        return not self.url.startswith("http")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Read bytes of an object, all by default; ``None`` if there is no such object."""
        return self.begin(name, start, stop).result()

    def begin(self, name: str, start: int = 0, stop: int | None = None) -> Fetch:
        """Start to read bytes of an object, all by default, and return the pending request."""
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise TransferError(f"{self.url}/{name!a} cannot be read: its name is not valid Unicode") from error
        asked = None if stop is None and not start else slice(start, stop)
        return Fetch(self, name, asked, lambda: self._request(name, asked), self._progress)

    def _request(self, name: str, asked: slice | None) -> Any:
        kv, until_s = self._moved.get(name, (None, 0.0))
        if kv is not None and time.monotonic() < until_s:
            return kv.read("", byte_range=asked)
        if self._progress.redirects:
            return self._redirected(name).read("", byte_range=asked)
        return self._kv.read(name, byte_range=asked)

    def follow(self, error: BaseException, name: str) -> bool:
        """Follow the redirect if a request failed because of one; return whether the request should be sent again."""
        status = answers.status_in(error)
        if self.can_list or status not in answers.REDIRECTS:
            return False
        self._progress.redirects |= status == 308
        self._redirected(name)
        return True

    def _redirected(self, name: str) -> Any:
        """Follow the redirects of an object's address; return a TensorStore store for the last address."""
        first = f"{self.url}/{quote(name)}"
        target = answers.follow_redirects(first, timeout_s=timeout_s(first=not self._progress.answered))
        kv = self._opened({"driver": "http", "base_url": target})
        self._moved[name] = kv, time.monotonic() + _MOVED_S
        return kv

    def check_redirects(self, name: str, asked: slice | None, limit_s: float) -> None:
        """Ask a silent HTTP server once more: do nothing if it redirects, else raise an error that gives the reason.

        TensorStore may look silent for long: it reports a failure, or a redirect by status 308, only after all retries.
        """
        if self.can_list or self._progress.asked_again:
            raise answers.stalled(self.url, name, limit_s)
        self._progress.asked_again = True
        wait_s = min(limit_s / 2, answers.ASK_AGAIN_S)
        answer = answers.ask_again(f"{self.url}/{quote(name)}", asked, timeout_s=wait_s)
        if isinstance(answer.status, str) or answer.status >= 400:
            raise answers.refused(self.url, name, answer.status)
        self._progress.redirects = answer.status in answers.REDIRECTS
        if not self._progress.redirects:
            raise answers.stalled(self.url, name, limit_s, answer)

    def read_small(self, name: str, *, limit: int) -> bytes | None:
        """Read a whole object; return ``None`` if it is missing, and raise if it has more than ``limit`` bytes."""
        try:
            # Ask for the first byte beyond the limit: an object without one is small enough to fetch as a whole.
            beyond = self.read(name, limit, limit + 1)
        except OutOfRangeError:
            return self.read(name)
        if beyond is None:
            return None
        raise UnsafeSourceError(
            f"{self.url}/{name} should have at most {exact_bytes(limit)}, as it is read as a whole, but has more. "
            "It is probably another kind of file. Check the address"
        )

    def version(self, name: str) -> int:
        """Return a number that changes when an object is replaced; 0 if the object is empty or missing."""
        try:
            found = self.begin(name, 0, 1).wait()
        except OutOfRangeError:
            return 0
        return int.from_bytes(found.stamp.generation, "big")

    def size(self, name: str) -> int | None:
        """Return the size of an object; ``None`` if there is no such object.

        TensorStore's Python interface does not return sizes. So bytes are requested at several positions at once, until
        the last one that exists is found: some ten round trips.
        """
        last, beyond = -1, 1 << 50
        probes = [0, *(1 << k for k in range(10, 50, 2))]
        while probes:
            pending = [(at, self.begin(name, at, at + 1)) for at in probes]
            for at, fetch in pending:
                try:
                    if fetch.result() is None:
                        return None
                    last = max(last, at)
                except OutOfRangeError:
                    beyond = min(beyond, at)
            step = max(1, (beyond - last) // _PROBES)
            probes = list(range(last + step, beyond, step))[:_PROBES]
        return beyond

    def names(self, folder: str = "") -> list[str]:
        """Return the names of all objects below a folder, relative to this folder."""
        if not self.can_list:
            raise UnsupportedError(f"Cannot list {self.url}: HTTP servers do not list their files")
        import tensorstore as ts

        prefix = f"{folder}/" if folder else ""
        inside = ts.KvStore.KeyRange(prefix, f"{folder}0") if folder else ts.KvStore.KeyRange()  # "0" follows "/"
        listed = Fetch(self, "", None, lambda: self._kv.list(inside, len(prefix.encode())), self._progress)
        return sorted(key.decode("utf-8", "replace") for key in listed.wait())

    def _opened(self, spec: dict[str, Any]) -> Any:
        import tensorstore as ts  # takes 0.2 s to import

        limit = timeout_s(first=True)
        context = {f"{kind}_request_retries": RETRIES for kind in ("s3", "gcs", "http")}
        # TensorStore's default logs every source that has no credentials.
        if os.environ.get("AWS_NO_SIGN_REQUEST", "").upper() in ("1", "YES", "TRUE"):
            context["aws_credentials"] = {"type": "anonymous"}
        elif os.environ.get("AWS_ACCESS_KEY_ID"):
            context["aws_credentials"] = {"type": "environment"}
        try:
            return ts.KvStore.open(spec, context=ts.Context(context)).result(timeout=limit)
        except TimeoutError as error:
            raise answers.stalled(self.url, "", limit) from error
        except (ValueError, RuntimeError) as error:
            said = str(error)[: answers.CHARACTERS_SHOWN]
            raise SourceError(f"Cannot read from {self.url}: {said}. Check the address") from error


class _Progress:
    """Shows whether a store is silent: when it last responded, to any waiting thread. Also, whether it redirects."""

    def __init__(self) -> None:
        self.at_s = time.monotonic()
        self.answered = False
        self.asked_again = False
        self.redirects = False
        """Whether to ask for redirects before each read: TensorStore takes seconds to report one with status 308."""
        self._waiting = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Record that a thread starts to wait for the store; if it is the only one, the time limit starts now."""
        with self._lock:
            # After an idle time the clock is old, although no request was open.
            if not self._waiting:
                self.at_s = time.monotonic()
            self._waiting += 1

    def restart(self) -> None:
        """Restart the time limit of all waiting threads, because a request was sent once more."""
        with self._lock:
            self.at_s = time.monotonic()

    def end(self, *, answered: bool) -> None:
        """Record that a thread stops waiting. If it was ``answered``, the time limit of other threads starts again."""
        with self._lock:
            self._waiting -= 1
            if answered:
                self.at_s = time.monotonic()
                self.answered = True


class Fetch:
    """A pending request to a store: for bytes of an object, or for a list of names."""

    def __init__(
        self, requests: Requests, name: str, asked: slice | None, request: Callable[[], Any], progress: _Progress
    ) -> None:
        self._requests, self._name, self._asked = requests, name, asked
        self._request, self._progress = request, progress
        self._future = request()
        self._given_up = False

    def cancel(self) -> None:
        """Cancel the request; a thread that waits for it gets a `TransferError`."""
        self._given_up = True
        self._future.cancel()

    def result(self) -> bytes | None:
        """Return the bytes; ``None`` if there is no such object."""
        found = self.wait()
        if found.state == "missing":
            return None
        if found.state != "value":
            raise TransferError(
                f"{self._requests.url}/{self._name} cannot be read: the store neither sent its bytes nor said that it "
                f"is missing (state {found.state!r} in TensorStore). Try again"
            )
        return bytes(found.value)

    @staticmethod
    def is_too_short(error: TransferError) -> bool:
        """Whether the request failed because the object ends before the requested range."""
        return isinstance(error, OutOfRangeError)

    def wait(self) -> Any:
        """Wait for the response and return TensorStore's result."""
        # Importing asyncio takes as long as importing all loaders.
        from asyncio import CancelledError

        # The first response tells whether the address and the network are right, so it gets less time.
        limit = timeout_s(first=not self._progress.answered)
        self._progress.begin()
        answered = followed = False
        try:
            while True:
                if self._given_up:
                    raise TransferError(f"The request for {self._requests.url}/{self._name} was cancelled")
                try:
                    # In short waits: another thread may cancel, and a request that waits its turn is not stalled while
                    # the store answers others.
                    found = self._future.result(timeout=WAIT_S)
                    answered = True
                    return found
                # Raised where `cancel` ended the request; the next round raises the error for it.
                except CancelledError:
                    self._given_up = True
                except TimeoutError as error:
                    if time.monotonic() - self._progress.at_s > limit:
                        self._future.cancel()
                        try:
                            self._requests.check_redirects(self._name, self._asked, limit)
                        except TransferError as failure:
                            raise failure from error
                        self._future = self._request()
                        self._progress.restart()
                except (ValueError, RuntimeError, NotImplementedError, OSError) as error:
                    answered = True
                    if not followed and self._requests.follow(error, self._name):
                        followed, self._future = True, self._request()
                        continue
                    raise answers.failure(self._requests.url, error, self._name) from error
        finally:
            self._progress.end(answered=answered)


def timeout_s(*, first: bool) -> float:
    """Return after how many silent seconds a store counts as stalled; ``first`` if it has never responded."""
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return _FIRST_ANSWER_S if first else _DEFAULT_TIMEOUT_S
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise SourceError(f"{TIMEOUT_VARIABLE} should be a number of seconds, but is {text!r}")
    return found


def _spec(url: str) -> dict[str, Any]:
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    if not bucket:
        raise SourceError(f"{url} names no {'server' if scheme.startswith('http') else 'bucket'}. Check the address")
    # HTTP clients and servers may resolve such parts, and so leave the folder.
    if any(part in (".", "..") for part in path.split("/")) or "\0" in url:
        raise UnsupportedError(f"{url} has '.' or '..' between slashes, which is not a name in a store")
    if scheme.startswith("http"):
        parts = urlsplit(url)
        if parts.query or parts.fragment or parts.username:
            raise UnsupportedError(
                "An HTTP address of a step may not contain a user, '?' or '#': file names are appended to it. "
                + COPY_FIRST
            )
        return {"driver": "http", "base_url": f"{url}/"}
    folder = f"{path}/" if path else ""
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket, "path": folder}
    spec = {"driver": "s3", "bucket": bucket, "path": folder}
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        spec["aws_region"] = region
    if endpoint := aws_endpoint():
        # TensorStore does not read these variables, and requires a region with an endpoint.
        spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or "us-east-1"}
    return spec
