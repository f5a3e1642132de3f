"""The log of a server's requests on stderr, written by a thread: whoever reads it slowly keeps no client waiting."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shardload.reports import printable
from shardload.units import exact_bytes

_MOST_LINES = 10_000
"""Lines that wait to be written; later ones are left out, and counted."""
_END_S = 2.0
_STDERR = 2
"""Its descriptor: the thread must not keep the lock of Python's own stream while no one reads it."""


class RequestLog:
    """Writes the facts of requests to stderr, each as a line that ``shown`` makes. Close it to write what waits."""

    def __init__(self, shown: Callable[[dict[str, Any]], str]) -> None:
        self._shown = shown
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_LINES)
        self._n_left_out = 0
        self._thread = threading.Thread(target=self._write_all, name="request log", daemon=True)
        self._thread.start()

    def note(self, facts: dict[str, Any]) -> None:
        """Write facts soon; leave them out if too many wait."""
        try:
            self._waiting.put_nowait({"unix_s": round(time.time(), 3), **facts})
        except queue.Full:
            self._n_left_out += 1

    def close(self) -> None:
        """Write what waits, unless nobody takes it."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
            self._thread.join(_END_S)

    def _write_all(self) -> None:
        while (facts := self._waiting.get()) is not None:
            self._write(facts)
            if n_left_out := self._n_left_out:
                self._n_left_out = 0
                self._write(
                    {"unix_s": facts["unix_s"], "problem": f"{n_left_out} lines were left out: nobody took them"}
                )

    def _write(self, facts: dict[str, Any]) -> None:
        line = memoryview(f"{self._shown(facts)}\n".encode(errors="backslashreplace"))
        with suppress(OSError):  # a log that cannot be written ends no server
            while line:
                line = line[os.write(_STDERR, line) :]


def json_line(facts: dict[str, Any]) -> str:
    """Return facts as one JSON object."""
    return json.dumps(facts)


def text_line(facts: dict[str, Any]) -> str:
    """Return facts as a line for people, without anything that a terminal would obey."""
    if "request" in facts:
        asked = f"{facts['method']} {facts['path']}" + (f" {facts['range']}" if "range" in facts else "")
        problem = f" ({facts['problem']})" if "problem" in facts else ""
        spent = f"{exact_bytes(facts['bytes'])}, {facts['seconds']:.3f} s"
        text = f"{facts['request']} {facts['client']} {asked}: {facts['status']}{problem}, {spent}"
    elif "job" in facts:
        found = facts.get("verdict") or facts.get("problem") or ""
        text = f"job {facts['job']}: {facts['kind']} {facts['checkpoint']}: {facts['state']} {found}".rstrip()
    else:
        text = f"{facts.get('client', '-')} {facts['problem']}"
    return f"{time.strftime('%H:%M:%S', time.localtime(facts['unix_s']))} {printable(text)}"
