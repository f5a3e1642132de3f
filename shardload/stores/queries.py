"""What a store is asked for, once: bytes of an object, the names in a folder, or the web page that shows a folder."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from shardload.stores import answers
from shardload.stores.answers import FailedTry
from shardload.stores.objects import Version
from shardload.stores.pace import Pace
from shardload.stores.windows import body_s
from shardload.units import exact_bytes

if TYPE_CHECKING:
    from obstore import GetOptions

_PAGES = ("text/html", "application/xhtml+xml")
_NAMES_AT_ONCE = 1000
"""How many names S3 and Google Cloud Storage send at once: a list that breaks off has a multiple of this."""
_MAX_PAGE_BYTES = 4 << 20
"""Longest web page that is searched for links to the files of a folder."""


class Objects(Protocol):
    """What a request needs to know of the store that it is sent to (`shardload.stores.requests.Requests`)."""

    url: str
    pace: Pace

    @property
    def can_list(self) -> bool:
        """Whether the store can list the names of its objects; HTTP servers cannot."""
        ...

    def tag(self, name: str) -> str | None:
        """Return the ETag that an answer must have, if the store compares it itself."""
        ...

    def note(self, name: str, found: Version) -> None:
        """Remember an object's version, or raise if an earlier answer came from another one."""
        ...


class Query:
    """Something that a store is asked for."""

    async def send(self, client: Any, path: str) -> Any:
        """Send the request once."""
        raise NotImplementedError


class ObjectBytes(Query):
    """A request for bytes of an object."""

    def __init__(self, store: Objects, name: str, start: int = 0, stop: int | None = None) -> None:
        self._store, self._name, self._start, self._stop = store, name, start, stop

    async def send(self, client: Any, path: str) -> memoryview:
        """Request the bytes once, and return them; raise if the object changed, or a web page came in its place."""
        import obstore

        options: GetOptions = {}
        if self._stop is not None:
            options["range"] = self._start, self._stop
        elif self._start:
            options["range"] = {"offset": self._start}
        if (tag := self._store.tag(self._name)) is not None:
            options["if_match"] = tag
        began_s = time.monotonic()
        try:
            answer = await obstore.get_async(client, path, options=options)
        except Exception as error:
            failed = FailedTry.of(error)
            if failed.code == "no length" or _is_redirect(failed):  # made as it is sent, or elsewhere: no file
                raise answers.web_page(self._store.url, self._name) from None
            if failed.code == "no ranges" or (failed.status == 416 and self._start):
                # Perhaps a web page: shorter than the file, or made for this request.
                whole = await self._whole(client, path)
                self._refuse_page(_is_page(whole))
                if not whole.meta["size"]:  # nginx and others ignore the range of an empty file
                    raise answers.failure(self._store.url, self._name, FailedTry("it is empty", status=416)) from None
            raise
        try:
            self._refuse_page(_is_page(answer))
            self._store.note(self._name, Version.of(answer.meta))
            answered_s = time.monotonic()
            found = memoryview(await _in_time(answer))
        finally:
            del answer  # an error keeps its frames, and an answer that is not read its connection
        body_s = time.monotonic() - answered_s
        self._store.pace.note(latency_s=answered_s - began_s, body_s=body_s, n_bytes=len(found))
        return found

    async def _whole(self, client: Any, path: str) -> Any:
        import obstore

        try:
            return await obstore.get_async(client, path)
        except Exception as error:
            if FailedTry.of(error).code == "no length":
                raise answers.web_page(self._store.url, self._name) from None
            raise

    def _refuse_page(self, is_page: bool) -> None:
        if is_page and not self._store.can_list and not self._name.endswith((".html", ".htm")):
            raise answers.web_page(self._store.url, self._name)


async def _in_time(answer: Any) -> Any:
    """Return the bytes of an answer; raise if they come so slowly that the request counts as stalled."""
    from asyncio import wait_for

    first, last = answer.range
    limit_s = body_s(last - first)  # obstore ends only a connection that sends nothing
    try:
        return await wait_for(answer.bytes_async(), limit_s)
    except TimeoutError:
        raise TimeoutError(f"it sent less than {exact_bytes(last - first)} in {limit_s:.3g} s") from None
    finally:
        del answer


def _is_redirect(failed: FailedTry) -> bool:
    """Whether a server redirects for good, as to the address of a folder with a slash, from one with brackets in it.

    obstore follows no redirect from an address that has one of ``[]{}|^``.
    """
    return failed.status in (301, 308)


def _is_page(answer: Any) -> bool:
    kind: str = answer.attributes.get("Content-Type", "")
    return kind.lower().startswith(_PAGES)


class NameList(Query):
    """A request for the names of objects: of all below a folder (``whole``), or of what is directly in it.

    obstore takes a web page, such as one to log in to a proxy, for a list without names, or for the end of a list. So
    where a list may have ended like this, an object is requested that does not exist: a store answers that there is
    none, and a proxy sends its page again. After the store's answer, the names are requested once more.
    """

    def __init__(self, store: Objects, folder: str, *, whole: bool, trusts_none: bool = False) -> None:
        """With ``trusts_none``, a list without names is not doubted."""
        self._store, self._folder, self._whole, self._trusts_none = store, folder, whole, trusts_none

    async def send(self, client: Any, path: str) -> dict[str, Version | None]:
        """Request the names, and return name → version of an object; ``None`` for a folder."""
        found, count = await self._names(client, path)
        if count % _NAMES_AT_ONCE == 0 and not (count == 0 and self._trusts_none):
            await self._refuse_page(client, path)
            found, _ = await self._names(client, path)
        return found

    async def _names(self, client: Any, path: str) -> tuple[dict[str, Version | None], int]:
        import obstore

        skip = len(path) + 1 if path else 0
        found: dict[str, Version | None] = {}
        if self._whole:
            objects = await obstore.list(client, path or None).collect_async()
        else:
            listed = await obstore.list_with_delimiter_async(client, path or None)
            objects = listed["objects"]
            found |= {folder[skip:].strip("/"): None for folder in listed["common_prefixes"]}
        # Some programs make an object for each folder: what contains other objects is a folder.
        return {meta["path"][skip:]: Version.of(meta) for meta in objects} | found, len(objects) + len(found)

    async def _refuse_page(self, client: Any, path: str) -> None:
        import obstore

        name = f".no-such-object-{secrets.token_hex(4)}"
        try:
            await obstore.get_async(client, f"{path}/{name}" if path else name)
        except FileNotFoundError:
            return
        except Exception as error:
            failed = FailedTry.of(error)
            if failed.code == "forbidden":  # said by stores without the right to read, of what does not exist, too
                return
            if failed.code != "no length":
                raise
        raise answers.no_list(self._store.url, self._folder)


class WebPage(Query):
    """A request for the web page by which an HTTP server shows a folder."""

    def __init__(self, address: str, *, headers: Mapping[str, str]) -> None:
        self._address, self._headers = address, headers

    async def send(self, client: Any, path: str) -> bytes | None:
        """Request the page once, and return it; ``None`` if something else came, or too much."""
        import obstore

        try:
            answer = await obstore.get_async(client, path)
        except Exception as error:
            if (failed := FailedTry.of(error)).code != "no length" and not _is_redirect(failed):
                raise
            return await self._without_length()
        if not _is_page(answer) or answer.meta["size"] > _MAX_PAGE_BYTES:
            return None
        return bytes(await answer.bytes_async())

    async def _without_length(self) -> bytes | None:
        """Read a page that the server makes as it sends it, which obstore cannot."""
        from asyncio import get_running_loop

        read = functools.partial(answers.page_of, self._address, _MAX_PAGE_BYTES, headers=self._headers)
        return await get_running_loop().run_in_executor(None, read)
