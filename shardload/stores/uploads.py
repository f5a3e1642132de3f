"""Write, replace and delete objects in remote stores (``s3://``, ``gs://``), sent by obstore.

    put         one request: the object appears whole, or not at all. ``only_new`` refuses to replace another one
    put_files   several at once; a long file in parts, whose object appears with the last one
    delete      many names per request, where the store can

A request that fails is repeated by itself, as `shardload.stores.requests` does it; of a long file, only the part that
failed. An upload in parts that ends early is aborted, so that no parts stay in the bucket.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from shardload.errors import ShardloadError, UsageError, WriteError
from shardload.stores import answers
from shardload.stores.answers import FailedTry
from shardload.stores.clients import Address, client, is_bucket
from shardload.stores.event_loop import Fetch
from shardload.stores.requests import Requests
from shardload.stores.windows import window_s
from shardload.units import exact_bytes

_T = TypeVar("_T")
_STALLS = 4
_DICE = random.SystemRandom()
"""Not the user's generator, which may be seeded alike on all hosts, and which a load leaves as it is."""
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 4.0
"""As in `shardload.stores.requests`."""
SINGLE_REQUEST_BYTES = 64 << 20
"""Longest file that one request uploads, held in memory as a whole."""
PART_BYTES = 16 << 20
_MOST_PARTS = 9000
"""S3 allows 10,000 parts of one object."""
_PARTS_IN_FLIGHT = 4
_FILES_IN_FLIGHT = 4
"""How many files are uploaded at once: at most 256 MiB are in memory."""
_DELETED_AT_ONCE = 1000
PROBE = ".staging/writable-"
"""How the names of the objects begin by which `Uploads.check` finds out whether it can write and delete."""
_SIGNED_FOR = timedelta(minutes=1)
_LOOK_S = 0.5
"""Seconds between checks, while an upload runs, whether it was given up."""


@dataclass(frozen=True, slots=True)
class Tag:
    """Which version of an object was written or read, by which a later write replaces exactly this version."""

    e_tag: str | None
    version: str | None


class TakenError(WriteError):
    """Raised when an object exists that was to be new, or is no longer the version that was to be replaced."""


class Uploads:
    """Writes objects below a URL; their names are relative to it. Raises `WriteError` for what the store refuses."""

    def __init__(self, url: str, *, most_s: float | None = None) -> None:
        """``most_s`` limits for how many seconds a failing request is repeated."""
        self._most_s = most_s
        self.address = Address.parse(url)
        self.url = self.address.url
        if not is_bucket(self.url):
            raise UsageError(f"Cannot write to {self.url}: expected an address at s3:// or gs://, or a local path")
        self._answered = False

    @functools.cached_property
    def _client(self) -> Any:
        return client(self.address, stall_s=window_s() / _STALLS)

    @functools.cached_property
    def _client_of_parts(self) -> Any:
        return client(self.address, stall_s=window_s() / _STALLS, repeating_s=window_s())

    def shown(self, name: str) -> str:
        """Return the URL of an object, for messages."""
        return f"{self.url}/{name}".rstrip("/")

    def sizes(self, folder: str = "", *, trusts_none: bool = False) -> dict[str, int]:
        """Return name → size in bytes of all objects below a folder, sorted; see `Requests.sizes`."""
        return Requests(self.url).sizes(folder, trusts_none=trusts_none)

    def entries(self) -> dict[str, int | None]:
        """Return name → size in bytes of what is directly below the URL; ``None`` is the size of a folder in it."""
        return Requests(self.url).entries()

    def put(self, name: str, data: bytes, *, only_new: bool = False, replacing: Tag | None = None) -> Tag:
        """Write an object of a few MiB.

        With ``only_new``, raise a `TakenError` if it exists with another content; with ``replacing``, if it is another
        version by now.
        """
        import obstore

        mode: Any = "overwrite"
        if replacing is not None:
            known = {"e_tag": replacing.e_tag, "version": replacing.version}
            mode = {key: value for key, value in known.items() if value is not None}
        elif only_new:
            mode = "create"

        async def send(to: Any, path: str) -> Tag:
            try:
                found = await obstore.put_async(to, path, data, mode=mode, use_multipart=False)
            except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError):
                # An earlier try may have written it, and its answer was lost.
                there = await self._content(to, path)
                if there is None or there[0] != data:
                    raise TakenError(f"{self.shown(name)} exists already, or was replaced meanwhile") from None
                return there[1]
            return Tag(found["e_tag"], found["version"])

        return self._sent(name, send, doing="written")

    def read(self, name: str) -> tuple[bytes, Tag] | None:
        """Return the content of a small object as it is now, and its version; ``None`` if there is no such object."""
        return self._sent(name, self._content, doing="read")

    async def _content(self, to: Any, path: str) -> tuple[bytes, Tag] | None:
        import obstore

        try:
            found = await obstore.get_async(to, path)
        except FileNotFoundError:
            return None
        return bytes(await found.bytes_async()), Tag(found.meta["e_tag"], found.meta["version"])

    def put_files(
        self,
        files: Mapping[str, Path],
        *,
        advance: Callable[[int], None] = lambda n_bytes: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Upload files as the objects of these names, several at once; return when all are there, or raise.

        ``advance`` is called with the size of each uploaded file, and ``check`` now and then: what it raises, like an
        interruption of this thread, ends all uploads.
        """
        given_up = threading.Event()
        # Threads, because each of them reads a file; the requests are sent from the event loop.
        with ThreadPoolExecutor(_FILES_IN_FLIGHT, thread_name_prefix="shardload-upload") as pool:
            waiting: dict[Future[None], Path] = {
                pool.submit(self._put_file, name, path, given_up): path for name, path in files.items()
            }
            try:
                while waiting:
                    check()
                    for one in wait(waiting, timeout=_LOOK_S, return_when=FIRST_COMPLETED).done:
                        one.result()
                        advance(waiting.pop(one).stat().st_size)
            except BaseException:
                given_up.set()
                for one in waiting:
                    one.cancel()
                raise

    def _put_file(self, name: str, path: Path, given_up: threading.Event) -> None:
        if given_up.is_set():
            return
        n_bytes = path.stat().st_size
        if n_bytes <= SINGLE_REQUEST_BYTES:
            self.put(name, path.read_bytes())
            return
        import obstore

        part = max(PART_BYTES, -(-n_bytes // _MOST_PARTS))

        async def send(to: Any, key: str) -> None:
            del to
            blocks = _blocks(path, n_bytes, part, given_up)
            sizes: Any = {"chunk_size": part, "max_concurrency": _PARTS_IN_FLIGHT}
            # From an iterator, which can raise: obstore then aborts the upload.
            await obstore.put_async(self._client_of_parts, key, blocks, use_multipart=True, **sizes)

        self._sent(name, send, doing="written")

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that do not exist are passed over."""
        import obstore

        found = list(names)
        for first in range(0, len(found), _DELETED_AT_ONCE):
            group = found[first : first + _DELETED_AT_ONCE]

            async def send(to: Any, path: str, group: Sequence[str] = group) -> None:
                del path
                try:
                    await obstore.delete_async(to, [self._path(name) for name in group])
                except FileNotFoundError:
                    if len(group) > 1:
                        for name in group:
                            await send(to, "", [name])

            self._sent(group[0], send, doing="deleted")

    def check(self) -> None:
        """Raise `WriteError` unless objects can be written and deleted here: there is a bucket, and access to it."""
        name = f"{PROBE}{_DICE.getrandbits(32):08x}"
        self.put(name, b"")
        self.delete([name])

    def _path(self, name: str) -> str:
        return "/".join(part for part in (self.address.path, name) if part)

    def _sent(self, name: str, send: Callable[[Any, str], Awaitable[_T]], *, doing: str) -> _T:
        found: _T = Fetch(self._repeated(name, send, doing=doing), shown=self.shown(name)).wait()
        return found

    async def _repeated(self, name: str, send: Callable[[Any, str], Awaitable[_T]], *, doing: str) -> _T:
        """Send a request until it succeeds, fails for good, or its time is over."""
        from asyncio import CancelledError, get_running_loop, sleep

        began_s, tries = time.monotonic(), 0
        while True:
            tries += 1
            try:
                found = await send(self._client, self._path(name))
            except (CancelledError, ShardloadError):
                raise
            except Exception as error:  # obstore's kinds, FileNotFoundError, ValueError
                failed = FailedTry.of(error)
                self._answered = self._answered or (failed.status is not None and not failed.is_passing)
                spent_s = time.monotonic() - began_s
                pause_s = _DICE.uniform(0, min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(tries - 1, 10)))
                if failed.is_passing and failed.is_busy:
                    pause_s += await get_running_loop().run_in_executor(None, self._pause_asked, name)
                if not failed.is_passing or spent_s + pause_s > self._window_s():
                    # Not `from error`: its text has the address as it was sent.
                    raise answers.write_failure(
                        self.url, name, failed, doing=doing, tries=tries, spent_s=spent_s
                    ) from None
                await sleep(pause_s)
            else:
                self._answered = True
                return found

    def _window_s(self) -> float:
        found = window_s(first=not self._answered)
        return found if self._most_s is None else min(found, self._most_s)

    def _pause_asked(self, name: str) -> float:
        import obstore

        try:
            return answers.pause_asked(obstore.sign(self._client, "GET", self._path(name), _SIGNED_FOR))
        except Exception:  # some credentials cannot sign addresses; then the random pause must do
            return 0.0


def _blocks(path: Path, n_bytes: int, part: int, given_up: threading.Event) -> Iterator[bytes]:
    """Yield a file's blocks; raise if the upload was given up, or the file is not as long as it was."""
    left = n_bytes
    with path.open("rb") as file:
        while block := file.read(part):
            if given_up.is_set():
                raise WriteError(f"The upload of {path.name} was given up")
            left -= len(block)
            yield block
    if left:
        raise WriteError(f"Cannot upload {path}: its size changed while it was read, expected {exact_bytes(n_bytes)}")
