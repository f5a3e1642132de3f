"""The state of the server's cache, and of its peers, as a page and as JSON.

/ui/cache       folder and limit; of each checkpoint at an address, how much is here; peers
/api/v1/cache   the same as JSON
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from aiohttp import web

from shardload.reports.markup import escaped, escaped_lines
from shardload.serving.metrics import Metrics
from shardload.serving.rack.answers import RemoteFiles
from shardload.serving.rack.blocks import HELD_BYTES
from shardload.serving.roots.scanning import ServedCheckpoint
from shardload.serving.site.job_pages import job_form
from shardload.serving.site.pages import CACHE_PAGE, answer, checkpoint_path, moment, page
from shardload.units import format_bytes, plural

CACHE_PATH = "/api/v1/cache"
_MOST_SHOWN = 200
"""Most checkpoints on the page: a browser asks for it each second."""
_FOUND = {"memory": "in memory", "cache": "in the cache", "peer": "from peers", "miss": "missing"}
_SOURCES = {"source": "from addresses", "cache": "from the cache", "peer": "from peers"}


class CachePages:
    """Answers requests for the state of the cache. ``checkpoints`` returns those that are served."""

    def __init__(
        self, remote: RemoteFiles, metrics: Metrics, checkpoints: Callable[[], Iterable[ServedCheckpoint]]
    ) -> None:
        self._remote, self._metrics, self._checkpoints = remote, metrics, checkpoints

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the addresses of the page and of the JSON."""
        router.add_get(CACHE_PAGE, self._page)
        router.add_get(CACHE_PATH, self._json)

    async def _page(self, request: web.Request) -> web.Response:
        return answer(cache_page(await self._facts(), has_addresses=bool(self._remote.catalogue.roots)))

    async def _json(self, request: web.Request) -> web.Response:
        return web.Response(text=json.dumps(await self._facts()) + "\n", content_type="application/json")

    async def _facts(self) -> dict[str, Any]:
        # No address is listed again for this: a page that stays open asks each second, and lists cost money.
        cache = await asyncio.to_thread(lambda: self._remote.cached.to_json(self._checkpoints()))
        value = self._metrics.value
        return {
            "cache": cache,
            "blocks": {found: value("shardload_blocks_total", found=found) for found in _FOUND},
            "received_bytes": {source: value("shardload_received_bytes_total", source=source) for source in _SOURCES},
            "peers": await self._remote.peers.to_json(),
        }


def cache_page(facts: Mapping[str, Any], *, has_addresses: bool) -> str:
    """Return the page of the cache, whose state is as `CachePages` tells it."""
    lines = ["<div data-live>", *_summary(facts, has_addresses=has_addresses)]
    if (cache := facts["cache"]) is not None:
        lines += ["<h2>Checkpoints at addresses</h2>", *_checkpoints(cache["checkpoints"])]
    if facts["peers"]:
        lines += ["<h2>Peers</h2>", '<ul class="loads">', *map(_peer, facts["peers"]), "</ul>"]
    lines += ["</div>", '<noscript><p class="soft">Reload the page to see what has changed.</p></noscript>']
    return page("Cache", lines, here=CACHE_PAGE)


def _summary(facts: Mapping[str, Any], *, has_addresses: bool) -> Iterator[str]:
    cache, rows = facts["cache"], []
    if cache is None:
        yield f"<p>{_without_cache(has_addresses=has_addresses)}</p>"
    else:
        used, limit = cache["used_bytes"], cache["limit_bytes"]
        text = f"{format_bytes(used)} of {format_bytes(limit)}"
        bar = f'<progress max="{limit}" value="{min(used, limit)}" aria-label="The cache">{text}</progress>'
        rows += [("Folder", escaped(cache["folder"])), ("Used", f"{text} {bar}")]
        rows.append(("Removed to make room", format_bytes(cache["removed_bytes"])))
        if not cache["is_on"]:
            rows.append(("Problem", "it cannot be written to; that is tried again each minute"))
        rows += [("Note", escaped_lines(note)) for note in cache["notes"]]
    if has_addresses:
        rows.append(("Blocks that were needed", _listed(facts["blocks"], _FOUND, "{:,}")))
        rows.append(("Bytes read", _listed(facts["received_bytes"], _SOURCES, format_bytes)))
    if rows:
        yield '<dl class="facts">'
        yield from (f"<dt>{label}</dt><dd>{text}</dd>" for label, text in rows)
        yield "</dl>"


def _listed(counts: Mapping[str, int], names: Mapping[str, str], shown: Any) -> str:
    make = shown.format if isinstance(shown, str) else shown
    return ", ".join(f"{make(counts[key])} {text}" for key, text in names.items())


def _without_cache(*, has_addresses: bool) -> str:
    if not has_addresses:
        return (
            "This server has no cache, and needs none: all of its checkpoints are in folders of its machine. A "
            "<code>--root</code> at an address, such as <code>s3://bucket/models</code>, takes one."
        )
    return (
        f"This server has no cache: it holds the last {format_bytes(HELD_BYTES)} of what it fetches in memory. To keep "
        "more, also over a restart, start it with <code>--cache DIR --cache-size 500GiB</code>."
    )


def _checkpoints(found: list[dict[str, Any]]) -> Iterator[str]:
    if not found:
        yield "<p>There are none.</p>"
        return
    shown = sorted(found, key=lambda each: (-(each["used_s"] or 0.0), each["name"]))
    yield '<ul class="loads">'
    yield from map(_checkpoint, shown[:_MOST_SHOWN])
    yield "</ul>"
    if (rest := len(shown) - _MOST_SHOWN) > 0:
        left_out = f"Without {plural(rest, 'checkpoint')} whose last use is longer ago"
        yield f'<p class="soft">{left_out}: <a href="{CACHE_PATH}">{CACHE_PATH}</a> has all.</p>'


def _checkpoint(found: Mapping[str, Any]) -> str:
    name, most = escaped(found["name"]), max(found["bytes"], 1)
    marks = [text for key, text in (("is_pinned", "pinned"), ("is_in_use", "in use")) if found[key]]
    of = f"{format_bytes(found['cached_bytes'])} of {format_bytes(found['bytes'])}"
    facts = [of, escaped(found["source"])]
    if found["used_s"] is not None:
        facts.append(f"used at {moment(found['used_s'])}")
    spans = "".join(f"<span>{fact}</span>" for fact in facts)
    bar = f'<progress max="{most}" value="{found["cached_bytes"]}" aria-label="{name}">{of}</progress>'
    is_whole = found["cached_bytes"] >= found["bytes"]
    form = "" if is_whole else job_form({found["name"]: found["name"]}, kinds=("prefetch",))
    return (
        f'<li><a class="name" href="{checkpoint_path(found["name"])}">{name}</a>'
        f'<span class="client">{", ".join(marks)}</span>{bar}<span class="facts-line">{spans}</span>{form}</li>'
    )


def _peer(found: Mapping[str, Any]) -> str:
    facts = [f"{plural(found['blocks'], 'block')} sent, {format_bytes(found['bytes'])}"]
    if found["since_s"] is not None:
        facts.insert(0, f"since {moment(found['since_s'])}")
    if found["answered_s"] is not None:
        facts.append(f"answered last at {moment(found['answered_s'])}")
    spans = "".join(f"<span>{fact}</span>" for fact in facts)
    problem = f'<ul class="result bad"><li>{escaped_lines(found["problem"])}</li></ul>' if found["problem"] else ""
    return (
        f'<li><span class="name">{escaped(found["url"])}</span><span class="client">{found["state"]}</span>'
        f'<span class="facts-line">{spans}</span>{problem}</li>'
    )
