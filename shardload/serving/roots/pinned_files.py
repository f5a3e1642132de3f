"""Which version of a remote file is served: asked for once, and again when that was some time ago.

The tag of a file is a digest of its address and its version, as the store tells it. So all servers that read it from
the same address give it the same tag, and what one of them fetched is as good for the others.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from shardload.errors import ShardloadError
from shardload.serving.roots.remote_roots import ListedObject
from shardload.stores.answers import ChangedError, OutOfRangeError
from shardload.stores.cached_reads import cached_object
from shardload.stores.event_loop import Fetch
from shardload.stores.objects import Version
from shardload.stores.range_files import CachedObject
from shardload.stores.requests import Requests

_FRESH_S = 30.0
"""For how many seconds a version is served before the store is asked again whether it is still there."""
_PATIENCE_S = 2.0
"""For how long a request waits for that: a store that does not answer must not keep back what is here."""


@dataclass(frozen=True, slots=True, eq=False)
class PinnedFile:
    """A remote file in one version."""

    requests: Requests
    """What reads this version, and raises when another one is there."""
    key: str
    """Its name in the store."""
    path: str
    """Its address below the server's."""
    n_bytes: int
    tag: str
    """Its ETag, without quotes."""
    changed_s: float
    stored: CachedObject | None
    """What it is called in a cache, and by other servers; ``None`` if its store does not tell a version for sure."""

    @property
    def shown(self) -> str:
        """Its address, for messages."""
        return self.requests.shown(self.key)

    async def fetch(self, start: int, stop: int) -> memoryview:
        """Read bytes from the store; raise a `ChangedError` if the file is gone, or has another version."""
        request = Fetch(self.requests.fetch(self.key, start, stop), shown=self.shown)
        found: memoryview | None = await asyncio.wrap_future(request.pending)
        if found is None or len(found) != stop - start:
            raise ChangedError(f"{self.shown} changed while it was read. Load it again once its writer has finished")
        return found


@dataclass(slots=True)
class _Pin:
    """What is known of a file, and since when."""

    file: PinnedFile
    asked_s: float


class PinnedFiles:
    """The versions of remote files. Used by one event loop."""

    def __init__(self, note_error: Callable[[ShardloadError], None]) -> None:
        """``note_error`` is called with errors that no request shows."""
        self._note_error = note_error
        self._pins: dict[tuple[str, str], _Pin] = {}
        self._asking: dict[tuple[str, str], tuple[float, asyncio.Task[PinnedFile | None]]] = {}

    async def get(self, file: ListedObject, *, path: str) -> PinnedFile | None:
        """Return a file in the version that its store has now, or had lately; ``None`` if it is gone.

        ``path`` is its address below the server's.

        Raises:
            ShardloadError: When the store does not answer, and has never told the version.
        """
        name = file.root.url, file.key
        pin = self._pins.get(name)
        if pin is not None and (file.root.is_fixed or time.monotonic() < pin.asked_s + _FRESH_S):
            return pin.file
        began_s, task = self._asking.get(name) or self._begin(name, file, path, None if pin is None else pin.file)
        if pin is None:
            return await asyncio.shield(task)
        await asyncio.wait({task}, timeout=max(0.0, began_s + _PATIENCE_S - time.monotonic()))
        if not task.done() or task.cancelled() or task.exception() is not None:
            return pin.file
        return task.result()

    def forget(self, file: PinnedFile) -> None:
        """Ask for the version of a file again at its next request: it turned out to be another one."""
        for pin in self._pins.values():
            if pin.file is file:
                pin.asked_s = -_FRESH_S

    def _begin(
        self, name: tuple[str, str], file: ListedObject, path: str, before: PinnedFile | None
    ) -> tuple[float, asyncio.Task[PinnedFile | None]]:
        task = asyncio.create_task(_asked(file, path, before))
        self._asking[name] = time.monotonic(), task

        def done(ended: asyncio.Task[PinnedFile | None]) -> None:
            del self._asking[name]
            if ended.cancelled():
                return
            if (error := ended.exception()) is None:
                if (found := ended.result()) is None:
                    self._pins.pop(name, None)
                else:
                    self._pins[name] = _Pin(found, time.monotonic())
            elif isinstance(error, ShardloadError):
                if before is not None:  # else the error ends the requests that wait for it
                    self._note_error(error)
                if (pin := self._pins.get(name)) is not None:
                    pin.asked_s = time.monotonic()  # not each request asks in vain

        task.add_done_callback(done)
        return self._asking[name]


async def _asked(file: ListedObject, path: str, before: PinnedFile | None) -> PinnedFile | None:
    """Ask for a file's version, and read by other requests if it is not that of ``before``."""
    requests = before.requests if before is not None else await asyncio.to_thread(lambda: file.root.requests)
    while True:
        try:
            request = Fetch(requests.fetch(file.key, 0, 1), shown=requests.shown(file.key))
            if await asyncio.wrap_future(request.pending) is None:
                return None
            version = requests.known_version(file.key)
            assert version is not None, file.key
            break
        except OutOfRangeError:  # it is empty, and perhaps was not before
            if (version := requests.known_version(file.key)) is None or not version.size:
                version = Version(0)
                break
        except ChangedError:
            pass
        requests = await asyncio.to_thread(file.root.renewed, requests)
    if before is not None and before.requests is requests:
        return before
    return _pinned(requests, file.key, path, version)


def _pinned(requests: Requests, key: str, path: str, version: Version) -> PinnedFile:
    stored = cached_object(requests, key, version)
    if stored is not None:
        tag = stored.digest.hex()
    elif not version.size:
        tag = hashlib.blake2b(f"empty {requests.shown(key)}".encode(), digest_size=16).hexdigest()
    else:  # no other server can know that it has the same bytes
        tag = secrets.token_hex(16)
    return PinnedFile(requests, key, path, version.size, tag, version.changed_s, stored)
