"""Which clients read which checkpoints now, and how far they are: told from the requests that a server answers.

    request of client C for bytes of checkpoint K ─► the load (C, K) ─► bytes sent of all bytes, rate, open requests

A load is what one client reads of one checkpoint, or of one step, without a pause of a minute. The server is not told
more: two processes of one machine that load the same are one load here, and a load that needs half of a checkpoint
ends at half of the bar. Of files that were handed over, it sees that they were opened.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shardload.loaders.orbax.loader import step_number
from shardload.reports.markup import escaped
from shardload.serving.roots.all_roots import AllRoots
from shardload.serving.roots.scanning import ServedCheckpoint
from shardload.serving.site.pages import LOADS_PATH, checkpoint_path, page
from shardload.units import format_bytes, format_rate, plural

_PAUSE_S = 60.0
"""Seconds without a request after which a load has ended."""
_KEPT_S = 900.0
"""Seconds for which a load that has ended is shown."""
_MOST_LOADS = 500
_WINDOW_S = 5.0
"""Seconds over which a rate is averaged."""
_HERE = "this machine"


@dataclass(slots=True)
class LiveLoad:
    """What one client reads of one checkpoint."""

    client: str
    checkpoint: str
    step: int | None
    n_bytes: int
    """Bytes of the checkpoint, or of the step."""
    began_s: float
    sent: int = 0
    handed: int = 0
    """Files that were handed over."""
    running: int = 0
    """Requests that are being answered."""
    last_s: float = 0.0
    recent: deque[tuple[float, int]] = field(default_factory=deque)
    """When how many bytes were sent, for the last seconds: one entry for a tenth of a second."""

    def add(self, n_bytes: int, now_s: float) -> None:
        """Count bytes that were sent."""
        self.sent += n_bytes
        self.last_s = now_s
        if self.recent and now_s - self.recent[-1][0] < 0.1:
            at_s, count = self.recent.pop()
            self.recent.append((at_s, count + n_bytes))
        else:
            self.recent.append((now_s, n_bytes))
        while self.recent[0][0] < now_s - _WINDOW_S:
            self.recent.popleft()

    def is_live(self, now_s: float) -> bool:
        """Whether the load may still go on."""
        return self.running > 0 or now_s - self.last_s < _PAUSE_S

    def to_json(self, now_s: float) -> dict[str, Any]:
        """Return an object for `json.dumps`."""
        sent = sum(count for at_s, count in self.recent if at_s >= now_s - _WINDOW_S)
        rate = sent / min(_WINDOW_S, max(1.0, now_s - self.began_s))
        facts = {
            "client": self.client,
            "checkpoint": self.checkpoint,
            "bytes": self.n_bytes,
            "sent": self.sent,
            "handed_files": self.handed,
            "running_requests": self.running,
            "bytes_per_s": round(rate),
            "seconds": round(max(self.last_s, now_s if self.running else 0.0) - self.began_s, 3),
            "is_live": self.is_live(now_s),
        }
        return facts if self.step is None else facts | {"step": self.step}


class LiveLoads:
    """The loads that a server sees. Used in one thread, that of the event loop."""

    def __init__(self, roots: AllRoots, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns seconds that never go back."""
        self._roots, self._clock = roots, clock
        self._loads: OrderedDict[tuple[str, str], LiveLoad] = OrderedDict()

    @contextmanager
    def reading(self, client: str | None, key: str) -> Iterator[Callable[[int], None]]:
        """Count a request for a file while it is answered; what is returned is called with bytes that were sent."""
        load = self._load(client or "unknown", key)
        if load is None:
            yield lambda n_bytes: None
            return
        load.running += 1
        try:
            yield lambda n_bytes: load.add(n_bytes, self._clock())
        finally:
            load.running -= 1
            load.last_s = self._clock()

    def handed(self, key: str) -> None:
        """Count a file that was handed over."""
        if (load := self._load(_HERE, key)) is not None:
            load.handed += 1

    def to_json(self) -> list[dict[str, Any]]:
        """Return an object for each load, the latest first."""
        now_s = self._clock()
        self._drop(now_s)
        return [load.to_json(now_s) for load in reversed(self._loads.values())]

    def _load(self, client: str, key: str) -> LiveLoad | None:
        found = self._whole(key)
        if found is None:
            return None
        checkpoint, folder, step = found
        now_s, name = self._clock(), (client, folder)
        load = self._loads.get(name)
        if load is None or not load.is_live(now_s):
            n_bytes = checkpoint.n_bytes if step is None else self._bytes(folder)
            load = LiveLoad(client, checkpoint.name, step, n_bytes, now_s, last_s=now_s)
            self._loads.pop(name, None)
            self._loads[name] = load
            self._drop(now_s)
        load.last_s = now_s
        return load

    def _whole(self, key: str) -> tuple[ServedCheckpoint, str, int | None] | None:
        """Return the checkpoint that a file is part of, its folder or that of the step, and the step."""
        name = key
        while name:
            if (found := self._roots.checkpoint(name)) is not None:
                inner = key[len(name) + 1 :].partition("/")[0]
                step = step_number(inner) if found.kind == "run" else None
                return found, name if step is None else f"{name}/{inner}", step
            name = name.rpartition("/")[0]
        return None

    def _bytes(self, folder: str) -> int:
        """Return the bytes of all files in a folder."""
        n_bytes = 0
        for name, is_folder in (self._roots.names(folder) or {}).items():
            key = f"{folder}/{name}"
            file = None if is_folder else self._roots.file(key)
            n_bytes += self._bytes(key) if is_folder else 0 if file is None else file.n_bytes
        return n_bytes

    def _drop(self, now_s: float) -> None:
        """Forget loads that ended long ago, and the oldest ones if there are too many."""
        old = [name for name, load in self._loads.items() if not load.running and now_s - load.last_s > _KEPT_S]
        for name in old:
            del self._loads[name]
        while len(self._loads) > _MOST_LOADS:
            idle = next((name for name, load in self._loads.items() if not load.running), next(iter(self._loads)))
            del self._loads[idle]


def loads_page(loads: list[dict[str, Any]]) -> str:
    """Return the page of loads, which are as `LiveLoads.to_json` has them."""
    live = [load for load in loads if load["is_live"]]
    lines = [
        '<div id="live" data-live>',
        '<h2 class="hidden">Now</h2>',
        '<ul class="loads">',
        *map(_item, live),
        "</ul>",
    ]
    if not live:
        lines.append("<p>Nothing is being read now.</p>")
    ended = [load for load in loads if not load["is_live"]]
    if ended:
        lines += ["<h2>Ended</h2>", '<ul class="loads">', *map(_item, ended), "</ul>"]
    lines += ["</div>", '<noscript><p class="soft">Reload the page to see what has changed.</p></noscript>']
    meaning = "A load is what one address reads of one checkpoint. It may be done before it has read all of it."
    lines.append(f'<p class="soft">{meaning}</p>')
    return page("Loads", lines, here=LOADS_PATH)


def _item(load: dict[str, Any]) -> str:
    name, step = load["checkpoint"], load.get("step")
    shown = escaped(name if step is None else f"{name}, step {step}")
    link = checkpoint_path(name) + ("" if step is None else f"?step={step}")
    of = f"{format_bytes(load['sent'])} of {format_bytes(load['bytes'])}"
    facts = [of, f"{load['seconds']:.0f} s"]
    if load["is_live"]:
        facts.append(format_rate(load["bytes_per_s"] / 1e9))
        facts.append(plural(load["running_requests"], "request"))
    if load["handed_files"]:
        facts.append(f"{plural(load['handed_files'], 'file')} handed over, read without the server")
    most = max(load["bytes"], 1)
    label = f"{shown} by {escaped(load['client'])}"
    bar = f'<progress max="{most}" value="{min(load["sent"], most)}" aria-label="{label}">{of}</progress>'
    spans = "".join(f"<span>{fact}</span>" for fact in facts)
    return (
        f'<li><a class="name" href="{link}">{shown}</a><span class="client">{escaped(load["client"])}</span>{bar}'
        f'<span class="facts-line">{spans}</span></li>'
    )
