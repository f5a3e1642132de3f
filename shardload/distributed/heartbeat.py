"""Which processes of a run are still there.

    every process, each second      alive/3  = "41 host-b pid 977"
    process 0 reads them all        alive/3 unchanged for 15 s ─► lost = "process 3 (host-b, pid 977) …"
    the others read two keys        alive/0 and lost

JAX notices a dead process after 100 s, and then aborts the others; the keys tell within 20, while there is time to
raise, log and write down why. The death of process 0, which holds the keys, makes JAX abort the others at once:
`watchdog` writes down why. A process 0 that is stopped answers no request, and requests have no
limit of their own: one thread makes them, another one notices when it does not come back.
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
FIRST_S = 5.0
"""For the first word of this process to be said."""
LINGER_S = 6.0
"""How long process 0, without whose service JAX aborts the others, waits at its end for them to end."""
SETTLE_S = 3.0
"""From a process' last word to its end: Python still takes down what was imported."""
RETURN_S = 1.0
"""For the thread that speaks to come back, where a process is lost and it may never do so."""

_ALIVE = "shardload/alive/"
_LOST = "shardload/lost"
_LEFT = "left"


def _stay() -> None:
    """Release nothing."""


class Heartbeat:
    """Tells that this process is there, and listens whether the others are.

    Args:
        client: Of the coordination service.
        index: Of this process.
        beat_s: From one word to the next.
        silent_s: After so long without one a process is lost.
        let_go: Called as the interpreter ends when the others will not end with it: JAX would wait for them.
    """

    @staticmethod
    def say_left(client: Any, index: int) -> None:
        """Tell that this process ends, which never began a heartbeat."""
        client.key_value_set(f"{_ALIVE}{index}", f"{_LEFT} {platform.node()} pid {os.getpid()}", allow_overwrite=True)

    def __init__(
        self,
        client: Any,
        *,
        index: int,
        beat_s: float = BEAT_S,
        silent_s: float = SILENT_S,
        let_go: Callable[[], None] = _stay,
    ) -> None:
        self._client = client
        self._index = index
        self._beat_s, self._silent_s = beat_s, silent_s
        self._let_go = let_go
        self._title = f"{platform.node()} pid {os.getpid()}"
        self._lost: str | None = None
        self._heard: dict[int, tuple[str, float]] = {}
        """What each said last, and when that was new. Who has not begun yet is not waited for: it may be compiling."""
        self._left: set[int] = set()
        self._told: list[Callable[[str], None]] = []
        self._telling = threading.Lock()
        self._spoken = threading.Event()
        self._leaving = threading.Event()
        self._abandoned = False
        self._rounds = 0
        self._found: dict[str, dict[str, str]] = {}
        self.each_beat: list[Callable[[], None]] = []
        """Called in a thread of their own once a beat; they must not wait for anything."""
        self._thread = threading.Thread(target=self._run, name="shardload-heartbeat", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="shardload-heartbeat-watch", daemon=True)

    def start(self) -> None:
        """Begin, until the interpreter ends."""
        self._thread.start()
        self._spoken.wait(FIRST_S)  # the others miss only those they have heard
        self._watcher.start()
        atexit.register(self._leave)  # after jax.distributed was set up, so before it is shut down

    @property
    def lost(self) -> str | None:
        """Which process is lost and since when; None while all are there."""
        return self._lost

    def check(self, process: int | None = None) -> None:
        """Raise if a process was lost, or if ``process`` has exited.

        Args:
            process: The one whose message is awaited; exits are not checked without it.

        Raises:
            ProcessLostError: When a process was lost, or this one has left.
        """
        if self._lost is not None:
            raise ProcessLostError(f"{self._lost}. Start all processes again; saved steps are untouched")
        if process in self._left:
            error = ProcessLostError(f"Process {process} has ended while others waited for it to take part")
            error.in_order = True
            raise error

    def when_lost(self, call: Callable[[str], None]) -> None:
        """Have ``call`` told, once, in a thread of the heartbeat; at once when a process is lost already."""
        with self._telling:
            self._told.append(call)
            late = self._lost
        if late is not None:
            call(late)

    def ask(self, prefix: str) -> None:
        """Read the keys below ``prefix`` at each beat, until `forget`."""
        self._found[prefix] = {}

    def found(self, prefix: str) -> dict[str, str]:
        """What was read last, by the rest of the key."""
        return self._found.get(prefix, {})

    def forget(self, prefix: str) -> None:
        """Undo `ask`."""
        self._found.pop(prefix, None)

    def abandon(self) -> None:
        """Say that the others may not end together with this process, so that JAX is not to wait for them."""
        self._abandoned = True

    # ---- the thread that makes requests ----------------------------------------------------------

    def _run(self) -> None:
        number = 0
        while self._lost is None and not self._leaving.is_set():
            try:
                self._say(str(number))
                self._listen()
            except Exception as error:  # of the service
                self._lose(f"Process 0, which holds the coordination service, cannot be reached: {error}")
            number += 1
            self._rounds = number
            self._spoken.set()
            self._leaving.wait(self._beat_s)

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
        for prefix in list(self._found):
            found = {key.removeprefix(prefix): word for key, word in self._client.key_value_dir_get(prefix)}
            if prefix in self._found:
                self._found[prefix] = found

    def _words(self) -> dict[int, str]:
        """What those this process listens to said last."""
        if self._index:
            word = self._read(f"{_ALIVE}0")
            return {} if word is None else {0: word}
        return {process: word for process, word in self._all_words().items() if process}

    def _all_words(self) -> dict[int, str]:
        return {int(key.removeprefix(_ALIVE)): word for key, word in self._client.key_value_dir_get(_ALIVE)}

    def _read(self, key: str) -> str | None:
        with suppress(Exception):  # not there: the usual case
            return str(self._client.key_value_try_get(key))
        return None

    # ---- the thread that makes none --------------------------------------------------------------

    def _watch(self) -> None:
        """Count beats, not seconds: a machine that slept has not missed any."""
        seen = still = 0
        while not self._leaving.wait(self._beat_s):
            still = 0 if self._rounds != seen else still + 1
            seen = self._rounds
            if self._lost is None and still * self._beat_s > self._silent_s:
                self._lose(
                    f"Process 0, which holds the coordination service, has not answered for {self._silent_s:.0f} s"
                )
            for call in list(self.each_beat):
                with suppress(Exception):  # the others are to be called as well
                    call()

    def _lose(self, what: str) -> None:
        with self._telling:
            if self._lost is not None:
                return
            self._lost = what
            told = list(self._told)
        logging.getLogger("shardload").error("%s", what)
        for call in told:
            with suppress(Exception):  # the others must be told in any case
                call(what)
        if self._index == 0:
            with suppress(Exception):
                self._client.key_value_set(_LOST, what, allow_overwrite=True)

    # ---- the end ---------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Speak no more, and listen no more: a thread inside the service when the interpreter ends aborts the process.

        Python ends daemon threads where they next take its lock; in C++ code which may not throw, that is an abort. A
        thread that gets no answer from a process 0 that is lost does not return before the end: nothing to wait for.
        """
        self._leaving.set()
        alone = self._lost is not None or self._abandoned
        self._thread.join(RETURN_S if alone else LEAVE_S)
        if not self._thread.is_alive():
            with suppress(Exception):
                self._say(_LEFT)
            if alone and not self._index:
                with suppress(Exception):
                    self.see_off()
        if alone:
            self._let_go()

    def see_off(self) -> None:
        """Wait, on process 0, until those that are still there have ended: JAX aborts who loses its service."""
        expected = {process for process, (_, since) in self._heard.items() if time.monotonic() - since < LINGER_S}
        until = time.monotonic() + LINGER_S
        while time.monotonic() < until:
            gone = {process for process, word in self._all_words().items() if word.startswith(_LEFT)}
            if expected <= gone:
                break
            time.sleep(0.1)
        if expected:
            time.sleep(SETTLE_S)
