"""The log of a server on stderr, written by a thread: whoever reads it slowly keeps no client waiting.

    requests, jobs, errors, notes ─┐
    warnings of Python ────────────┼─► facts ─► a line of text, or a JSON object ─► stderr
    what libraries log ────────────┘

Lines for which there is no room, as nothing reads stderr, are left out and counted.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Literal

from shardload.reports import printable
from shardload.units import exact_bytes

_MOST_LINES = 10_000
"""Lines that wait to be written; later ones are left out, and counted."""
_END_S = 2.0
_STDERR = 2
"""Its descriptor: the thread must not keep the lock of Python's own stream while no one reads it."""
_REFUSALS = (401, 403, 429)

Level = Literal["info", "warning", "error"]


class RequestLog:
    """Writes facts to stderr, each as a line that ``shown`` makes. Close it to write what waits."""

    def __init__(self, shown: Callable[[dict[str, Any]], str]) -> None:
        self._shown = shown
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_LINES)
        self._n_left_out = 0
        self._thread = threading.Thread(target=self._write_all, name="request log", daemon=True)
        self._thread.start()

    def note(self, facts: dict[str, Any]) -> None:
        """Write facts soon; leave them out if too many wait."""
        try:
            self._waiting.put_nowait({"unix_s": round(time.time(), 3), "level": _level(facts), **facts})
        except queue.Full:
            self._n_left_out += 1

    @contextmanager
    def taking_all(self) -> Iterator[None]:
        """Write warnings of Python, and those lines of libraries that would go to stderr, as lines of this log."""

        def show(message: Warning | str, *_: Any, **__: Any) -> None:
            self.note({"problem": str(message)})

        shown, root, lines = warnings.showwarning, logging.getLogger(), _LibraryLines(self.note)
        warnings.showwarning = show
        root.addHandler(lines)
        try:
            yield
        finally:
            root.removeHandler(lines)
            warnings.showwarning = shown

    def close(self) -> None:
        """Write what waits, unless nothing reads stderr."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
            self._thread.join(_END_S)

    def _write_all(self) -> None:
        while (facts := self._waiting.get()) is not None:
            self._write(facts)
            if n_left_out := self._n_left_out:
                self._n_left_out = 0
                problem = f"{n_left_out} lines were left out: nobody took them"
                self._write({"unix_s": facts["unix_s"], "level": "warning", "problem": problem})

    def _write(self, facts: dict[str, Any]) -> None:
        try:
            text = self._shown(facts)
        except Exception as error:  # of one line: the log must not end with it
            text = f"a line of the log cannot be written: {error!r}"
        line = memoryview(f"{text}\n".encode(errors="backslashreplace"))
        with suppress(OSError):  # a log that cannot be written ends no server
            while line:
                line = line[os.write(_STDERR, line) :]


class _LibraryLines(logging.Handler):
    """What libraries log, at least as a warning."""

    def __init__(self, note: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        """Make facts of a record."""
        found = traceback.format_exception(record.exc_info[1]) if record.exc_info and record.exc_info[1] else []
        text = "\n".join([f"{record.name}: {record.getMessage()}", *found]).rstrip()
        self._note({"level": "error" if record.levelno >= logging.ERROR else "warning", "problem": text})


def _level(facts: dict[str, Any]) -> Level:
    """Return how bad it is: an error is what an operator should look at."""
    status = facts.get("status", 0)
    if status >= 500 or facts.get("state") == "failed" or facts.get("verdict") == "damaged":
        return "error"
    return "warning" if status in _REFUSALS or "problem" in facts or "note" in facts else "info"


def json_line(facts: dict[str, Any]) -> str:
    """Return facts as one JSON object."""
    return json.dumps(facts)


def text_line(facts: dict[str, Any]) -> str:
    """Return facts as a line for people, without anything that a terminal would obey."""
    if "request" in facts:
        asked = f"{facts['method']} {facts['path']}" + (f" {facts['range']}" if "range" in facts else "")
        problem = f" ({facts['problem']})" if "problem" in facts else ""
        spent = f"{exact_bytes(facts['bytes'])}, {facts['seconds']:.3f} s"
        text = f"{facts['request']} {facts.get('client', '-')} {asked}: {facts['status']}{problem}, {spent}"
    elif "job" in facts:
        found = facts.get("verdict") or facts.get("problem") or ""
        text = f"job {facts['job']}: {facts['kind']} {facts['checkpoint']}: {facts['state']} {found}".rstrip()
    elif "event" in facts:
        text = _EVENTS[facts["event"]].format_map(facts)
    elif "note" in facts:
        text = f"note: {facts['note']}"
    else:
        text = f"{facts.get('client', '-')} {facts['problem']}"
    at = datetime.fromtimestamp(facts["unix_s"]).astimezone()
    return f"{at.isoformat(timespec='seconds')} {printable(text)}"


_EVENTS = {
    "started": "started: shardload {version} at {address}",
    "stopping": "stopping: what is being sent may take {grace_s:g} s (requests: {requests})",
    "stopped": "stopped after {seconds:.1f} s",
}
