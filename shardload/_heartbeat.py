"""Which processes of a run are still there.

    every process, each second      alive/3  = "41 host-b pid 977"
    process 0 reads them all        alive/3 stands still for 15 s ─► lost = "process 3 (host-b, pid 977) …"
    the others read two keys        alive/0 and lost

JAX notices a dead process after 100 s, and then aborts the others; the keys tell within 20, while there is time to
raise, log and write down why. The death of process 0, which holds the keys, makes JAX abort the others at once:
what is written down then is written by `shardload._last_words`.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shardload.errors import ProcessLostError

BEAT_S = 1.0
SILENT_S = 15.0
"""A process that says nothing for so long is taken for lost. A thread of its own speaks, also while XLA compiles."""
LEAVE_S = 10.0
"""For the answer that the thread waits for while the interpreter ends; it comes within milliseconds, or never."""

_ALIVE = "shardload/alive/"
_LOST = "shardload/lost"
_LEFT = "left"


class Heartbeat:
    """Tells that this process is there, and listens whether the others are."""

    def __init__(self, client: Any, *, index: int, beat_s: float = BEAT_S, silent_s: float = SILENT_S) -> None:
        self._client = client
        self._index = index
        self._beat_s, self._silent_s = beat_s, silent_s
        self._title = f"{platform.node()} pid {os.getpid()}"
        self._lost: str | None = None
        self._heard: dict[int, tuple[str, float]] = {}
        """What each said last, and when that was new. Who has not begun yet is not waited for: it may be compiling."""
        self._left: set[int] = set()
        self._told: list[Callable[[str], None]] = []
        self._telling = threading.Lock()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardload-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin, until the interpreter ends."""
        self._say("0")
        self._thread.start()
        atexit.register(self._leave)  # after jax.distributed was set up, so before it is shut down

    @property
    def lost(self) -> str | None:
        """Which process is lost and since when; None while all are there."""
        return self._lost

    def check(self, process: int | None = None) -> None:
        """Make sure that there is somebody to wait for.

        Args:
            process: The one whose word is awaited; any, by default.

        Raises:
            ProcessLostError: When a process was lost, or this one has left.
        """
        if self._lost is not None:
            raise ProcessLostError(f"{self._lost}. Steps saved before are untouched; start all processes again")
        if process in self._left:
            raise ProcessLostError(f"Process {process} has ended while others waited for it to save a step together")

    def when_lost(self, call: Callable[[str], None]) -> None:
        """Have ``call`` told, once, in the thread of the heartbeat; at once when a process is lost already."""
        with self._telling:
            self._told.append(call)
            late = self._lost
        if late is not None:
            call(late)

    def _run(self) -> None:
        number = 0
        while self._lost is None and not self._leaving.wait(self._beat_s):
            number += 1
            try:
                self._say(str(number))
                self._listen()
            except Exception as error:  # of the service
                self._lose(f"Process 0, which holds the coordination service, cannot be reached: {error}")

    def _say(self, word: str) -> None:
        self._client.key_value_set(f"{_ALIVE}{self._index}", f"{word} {self._title}", allow_overwrite=True)

    def _listen(self) -> None:
        now = time.monotonic()
        for process, word in self._words().items():
            if word.startswith(_LEFT):
                self._left.add(process)
            elif word != self._heard.get(process, ("", now))[0]:
                self._heard[process] = (word, now)
        for process, (word, since) in self._heard.items():
            if process not in self._left and now - since > self._silent_s:
                who = word.split(" ", 1)[1]
                self._lose(f"Process {process} ({who}) has said nothing for {now - since:.0f} s and is taken for dead")
        if self._index and (told := self._read(_LOST)) is not None:
            self._lose(told)

    def _words(self) -> dict[int, str]:
        """What those this process listens to said last."""
        if self._index:
            word = self._read(f"{_ALIVE}0")
            return {} if word is None else {0: word}
        found = {int(key.removeprefix(_ALIVE)): word for key, word in self._client.key_value_dir_get(_ALIVE)}
        return {process: word for process, word in found.items() if process}

    def _read(self, key: str) -> str | None:
        with suppress(Exception):  # not there: the usual case
            return str(self._client.key_value_try_get(key))
        return None

    def _lose(self, what: str) -> None:
        if self._lost is not None:
            return
        with self._telling:
            self._lost = what
            told = list(self._told)
        logging.getLogger("shardload").error("%s", what)
        for call in told:
            with suppress(Exception):  # whatever it was, the others are to be told
                call(what)
        if self._index == 0:
            with suppress(Exception):
                self._client.key_value_set(_LOST, what, allow_overwrite=True)

    def _leave(self) -> None:
        """Speak no more, and listen no more: a thread inside the service when the interpreter ends aborts the process.

        Python ends daemon threads where they next take its lock; in C++ code which may not throw, that is an abort.
        """
        self._leaving.set()
        self._thread.join(LEAVE_S)
        with suppress(Exception):
            self._say(_LEFT)
