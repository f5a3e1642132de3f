"""Whether names were added to folders, or taken from them, since a scan listed them: one call of the system for each.

A path is that by which the scan came to a folder, so that a link which leads elsewhere since counts, too. Only folders
that a scan has listed are looked at, also if a client asks for others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

_TICK_NS = 20_000_000
"""Two changes of a folder in this time may get the same time: clocks of file systems are that coarse."""


class FolderTimes:
    """How folders were just before they were listed."""

    def __init__(self, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._now_ns = now_ns
        self._seen: dict[str, tuple[int, ...] | None] = {}

    def note(self, path: Path) -> None:
        """Note how a folder is; to be called before it is listed."""
        found = _state(path)
        is_new = bool(found) and 0 <= self._now_ns() - found[-1] < _TICK_NS
        self._seen[str(path)] = None if is_new else found  # what is added next might not show

    def have_changed(self, root: Path, names: Iterable[str]) -> bool:
        """Whether a folder or those below it that lead to a name have changed, as far as they were listed."""
        for path in _along(root, names):
            if (key := str(path)) not in self._seen:
                break
            if (seen := self._seen[key]) is None or seen != _state(path):
                return True
        return False


def _along(root: Path, names: Iterable[str]) -> Iterable[Path]:
    yield root
    for name in names:
        root = root / name
        yield root


def _state(path: Path) -> tuple[int, ...]:
    """Return what differs between two folders of a path, and last when names in it changed; empty if it is gone."""
    with suppress(OSError, ValueError):
        facts = path.stat()
        return facts.st_dev, facts.st_ino, facts.st_mtime_ns
    return ()
