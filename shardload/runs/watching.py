"""Notice new steps at a source: a folder of steps, a bucket, or a server.

state     what changes with every step that is published or removed: a list of names, or one request
find      if the state changed: the step that "latest" or "best" means now, unless it is the known one
settle    that step was taken: nothing is new until the state changes again
fail      that step could not be taken: it is offered again, at growing intervals
rest      after finding failed: a pause, doubled with each failure
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import Any, Literal

from shardload.errors import ShardloadError
from shardload.runs.listing import changes_within, find_step, listed_state
from shardload.runs.remote_store import open_step
from shardload.runs.step import StepInfo
from shardload.stores.remote import remote_place

_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 30.0
"""Seconds until a step that could not be taken is offered again, if nothing else is new: doubled with each failure."""
_LEAST_WAIT_S = 0.01
_LONGEST_REST_S = 1.0
"""Longest pause, in seconds, after a failure to find a step. A larger ``every_s`` makes it longer still."""
_ANNOUNCED_S = 5.0
"""Seconds that a server is asked to wait for a new step: a follower that is stopped ends after it at the latest."""


class StepWatch:
    """Finds the newest or the best step at a source, as soon as it is another one."""

    def __init__(self, source: str | os.PathLike[str], which: Literal["latest", "best"], *, every_s: float) -> None:
        """Raise an `UnsupportedError` if the source is at an address that no store is for."""
        remote_place(source)
        self.source, self._which, self._every_s = source, which, every_s
        self._state: Any = None
        self._settled: Any = None
        self._failed: Any = None
        self._found: StepInfo | None = None
        self._pause_s = self._again_s = self._due_s = self._rest_s = 0.0
        self.is_failing = False
        """Whether the last step that `find` returned could not be taken."""

    @property
    def is_due(self) -> bool:
        """Whether the last look is long enough ago for another one."""
        return time.monotonic() >= self._due_s

    def find(self, known: StepInfo | None) -> StepInfo | None:
        """Return the step to take now; ``None`` if that is ``known``, or if it is not yet to be tried again."""
        self._found, self._due_s = None, time.monotonic() + self._every_s
        found = self._look(known)
        self._rest_s = 0.0
        return found

    def settle(self) -> None:
        """Note that the step that `find` returned was taken."""
        self._settled, self.is_failing, self._pause_s = self._state, False, 0.0

    def fail(self) -> bool:
        """Note that `find` or `wait` failed, or the found step could not be taken; false if it is just gone."""
        found, self._found, self._settled = self._found, None, None
        if found is None:
            self._rest_s = min(_LONGEST_REST_S, max(_LEAST_WAIT_S, 2 * self._rest_s))
            return True
        if _is_gone(found):
            self._due_s = 0.0
            return False  # removed meanwhile: there is a newer one
        self._pause_s = min(_MAX_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
        self.is_failing, self._failed, self._again_s = True, self._state, time.monotonic() + self._pause_s
        return True

    def rest(self, ended: threading.Event) -> None:
        """After a failed `find` or `wait`, pause until ``ended`` at most, so that a loop does not retry at once."""
        if self._rest_s:
            ended.wait(self._rest_s)

    def wait(self, most_s: float, ended: threading.Event) -> None:
        """Wait until another look is due, at most ``most_s`` seconds, or until ``ended``.

        A server that announces steps is asked to say when there is another one; it is due then.
        """
        began_s, asked_s = time.monotonic(), max(1, int(min(most_s, _ANNOUNCED_S)))
        if (changed := changes_within(self.source, self._state, asked_s)) is not None:
            if changed:
                self._due_s = 0.0
            elif not self.is_failing:
                self._due_s = max(self._due_s, time.monotonic() + self._every_s)
            if changed or time.monotonic() - began_s >= asked_s / 2:  # else it does not let more clients wait
                return
        ended.wait(min(most_s, max(_LEAST_WAIT_S, self._due_s - time.monotonic())))

    def _look(self, known: StepInfo | None) -> StepInfo | None:
        self._state = listed_state(self.source)
        if self._state is not None and self._state == self._settled:
            return None
        if self.is_failing and self._state == self._failed and time.monotonic() < self._again_s:
            return None
        found = find_step(self.source, self._which)
        if known is not None and _identity(found) == _identity(known):
            self.settle()
            return None
        self._found = found
        return found


def _identity(info: StepInfo) -> tuple[Any, ...]:
    # A run that was restarted may save another step of the same number.
    return info.step, info.where, info.saved_s, info.run


def _is_gone(info: StepInfo) -> bool:
    """Whether a step was removed, at an address at least its record. Unknown, as without a connection, counts as no."""
    with suppress(ShardloadError, OSError):
        place = remote_place(info.url)
        return not info.path.exists() if place is None else info.ours and open_step(place) is None
    return False
