"""What the cache of a server has of each checkpoint, counted in its folder at most every ten seconds; and pins.

    CacheFolder ─► stored objects ─► the latest version of each ─► bytes of the checkpoint at or above its address

Other processes may use the folder, too. What they keep there counts as the server's, but they do not know its pins.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from shardload.errors import UsageError
from shardload.serving.roots.remote_roots import RemoteCatalogue
from shardload.serving.roots.scanning import ServedCheckpoint
from shardload.stores.cache_space import latest, stored_objects
from shardload.stores.range_cache import RangeCache
from shardload.stores.range_files import segment_of
from shardload.units import exact_bytes, plural

IN_USE_S = 120.0
"""What was used in the last so many seconds is not removed from the cache: the cache notes uses once a minute."""
_COUNTED_S = 10.0
"""How long a count of what is in the cache is used."""
_MOST_NOTES = 5


@dataclass(slots=True)
class _Content:
    """What the cache has of what is at or below an address."""

    n_bytes: int = 0
    used_s: float = 0.0
    """When some of it was used last, in seconds since 1970."""


class CacheContents:
    """Counts what a cache has of checkpoints; nothing if there is no cache. Thread-safe, waits for the disk."""

    def __init__(self, cache: RangeCache | None) -> None:
        self._cache, self._lock = cache, threading.Lock()
        self._contents: dict[str, _Content] = {}
        """By address: of objects, and of all that is above them."""
        self._counted_s = -_COUNTED_S
        self._used_bytes = 0

    def bytes_of(self, found: ServedCheckpoint) -> int:
        """Return how many bytes of a checkpoint are in the cache."""
        return min(found.n_bytes, self._content_of(found).n_bytes)

    def used_bytes(self) -> int:
        """Return how many bytes are in the cache."""
        if self._cache is not None:
            self._recount(self._cache)
        return self._used_bytes

    def to_json(self, checkpoints: Iterable[ServedCheckpoint]) -> dict[str, Any] | None:
        """Return the state of the cache as a dict for JSON, with these checkpoints; ``None`` if there is none."""
        if (cache := self._cache) is None:
            return None
        self._recount(cache)
        pinned = cache.pinned()
        return {
            "folder": str(cache.folder.path),
            "limit_bytes": cache.limit_bytes,
            "used_bytes": self._used_bytes,
            "removed_bytes": cache.traffic.removed,
            "is_on": cache.is_on,
            "notes": list(cache.traffic.notes[-_MOST_NOTES:]),
            "checkpoints": [self._described(each, pinned) for each in checkpoints if each.source is not None],
        }

    def _described(self, found: ServedCheckpoint, pinned: Collection[str]) -> dict[str, Any]:
        used_s = self._content_of(found).used_s or None
        return {
            "name": found.name,
            "source": found.source,
            "bytes": found.n_bytes,
            "cached_bytes": self.bytes_of(found),
            "used_s": used_s,
            "is_in_use": used_s is not None and time.time() - used_s < IN_USE_S,
            "is_pinned": found.source in pinned,
        }

    def _content_of(self, found: ServedCheckpoint) -> _Content:
        if self._cache is None or found.source is None:
            return _Content()
        self._recount(self._cache)
        return self._contents.get(found.source.rstrip("/")) or _Content()

    def _recount(self, cache: RangeCache) -> None:
        with self._lock:
            if time.monotonic() <= self._counted_s + _COUNTED_S:
                return
            found = stored_objects(cache.folder)
            contents: defaultdict[str, _Content] = defaultdict(_Content)
            for each in latest(found):
                if (described := each.described) is not None:
                    segments = filter(None, (segment_of(name, described.size) for name, _ in each.ranges))
                    n_bytes = sum(stop - start for start, stop in segments)
                    for address in itertools.accumulate(described.address.split("/"), lambda a, b: f"{a}/{b}"):
                        contents[address].n_bytes += n_bytes
                        contents[address].used_s = max(contents[address].used_s, each.used_s)
            self._contents, self._counted_s = dict(contents), time.monotonic()
            self._used_bytes = sum(each.n_bytes for each in found)


def pin(names: Iterable[str], catalogue: RemoteCatalogue, cache: RangeCache | None) -> list[str]:
    """Have a cache keep checkpoints, by their names, however full it is; also those that are found later.

    Returns:
        Names that no checkpoint has now, as an address is not reached yet.

    Raises:
        UsageError: When there is no cache, no such checkpoint at an address, or too little room.
    """
    chosen = list(dict.fromkeys(names))
    if not chosen:
        return []
    shown = ", ".join(chosen)
    if cache is None:
        raise UsageError(f"Cannot pin {shown}: the server has no cache, or no address as a root. Give --cache DIR")
    found = [each for name in chosen if (each := catalogue.checkpoint(name)) is not None]
    missing = sorted(set(chosen) - {each.name for each in found})
    if missing and not catalogue.problems():  # else they may be at an address that is not reached yet
        known = ", ".join(each.name for each in catalogue.checkpoints()) or "none"
        raise UsageError(
            f"Cannot pin {missing[0]}: no checkpoint at an address has this name, expected one of these: {known}"
        )
    if (n_bytes := sum(each.n_bytes for each in found)) > cache.limit_bytes:
        raise UsageError(
            f"Cannot pin {plural(len(found), 'checkpoint')}: together {exact_bytes(n_bytes)}, and the cache keeps "
            f"{exact_bytes(cache.limit_bytes)}. Give a larger --cache-size"
        )
    cache.pinned = lambda: [str(each.source) for name in chosen if (each := catalogue.checkpoint(name)) is not None]
    return missing
