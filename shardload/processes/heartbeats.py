"""Detect processes of a run that exited or stopped.

    every process, once a second    alive/3  = "41 host-b pid 977"
    process 0 reads all keys        alive/3 unchanged for 15 s ─► lost = "process 3 (host-b, pid 977) …"
    other processes read two keys   alive/0 and lost

JAX notices a dead process after 100 s, and then aborts the other processes. The keys show the death within 20 s, early
enough to raise an error and record the cause. Process 0 runs the key-value store: if it dies, JAX aborts the other
processes at once, and `watchdog` records why. If process 0 is stopped, it does not answer requests, and requests have
no time limit. So one thread makes the requests, and another thread notices if a request does not return.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, ClassVar

from shardload.errors import ProcessLostError

_BEAT_S = 1.0
_SILENT_S = 15.0
"""A process without a heartbeat for this many seconds counts as lost; heartbeats go on while XLA compiles."""
_LEAVE_S = 10.0
"""Seconds to wait at exit for the heartbeat thread to end; its request takes milliseconds, or never returns."""
FIRST_S = 5.0
"""Seconds that `Heartbeat.start` waits for this process's first beat, after which the others can see it."""
LINGER_S = 6.0
"""Seconds that process 0 waits at exit for the others: JAX aborts a process that loses process 0's service."""
SETTLE_S = 3.0
"""Seconds that process 0 gives the others from their last message to their exit, while Python unloads modules."""
RETURN_S = 1.0
"""Seconds to wait at exit for the heartbeat thread to end if a process was lost: its request may then never return."""

_ALIVE = "shardload/alive/"
_LOST = "shardload/lost"
_LEAVING, _LEFT, _ENDING = "leaving", "left", "ending"
"""Last words of a process: it exits after an error, but waits for the others; it exits; it ends at once."""


class Heartbeat:
    """The heartbeat of this process (a message each second that it is alive); also watches those of the others.

    ``let_go`` is called when the interpreter exits while other processes may not: it keeps JAX from waiting for them.
    """

    logs_loss: ClassVar[bool] = True
    """Whether a lost process is logged if no joint call is running, which would raise an error for it."""

    @staticmethod
    def say_left(client: Any, index: int) -> None:
        """Tell the others that this process exits, if it never started a heartbeat: they need not wait for it."""
        client.key_value_set(f"{_ALIVE}{index}", f"{_LEFT} {platform.node()} pid {os.getpid()}", allow_overwrite=True)

    def __init__(
        self,
        client: Any,
        *,
        index: int,
        beat_s: float = _BEAT_S,
        silent_s: float = _SILENT_S,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._index = index
        self._beat_s, self._silent_s = beat_s, silent_s
        self._let_go = let_go
        self._title = f"{platform.node()} pid {os.getpid()}"
        self.lost: str | None = None
        """The message about the lost process; ``None`` while no process is lost."""
        self._heard: dict[int, tuple[str, float]] = {}
        """Each process's last beat, and when it came. A process without an entry (no beat yet) is never lost."""
        self._left: set[int] = set()
        self._seen_off = False
        """On other processes than 0: whether process 0 knows of no lost process, and exits."""
        self._told: list[Callable[[str], None]] = []
        self._telling = threading.Lock()
        self._spoken = threading.Event()
        self._leaving = threading.Event()
        self._abandoned = self._is_leaving = False
        self._rounds = 0
        self._found: dict[str, dict[str, str]] = {}
        self.each_beat: list[Callable[[], None]] = []
        """Functions that the watcher thread calls once per beat, such as `JointCall`'s check; must not block."""
        self._thread = threading.Thread(target=self._run, name="shardload-heartbeat", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="shardload-heartbeat-watch", daemon=True)

    def start(self) -> None:
        """Start the two threads that send and watch heartbeats; they run until the interpreter exits."""
        self._thread.start()
        # A process that was never seen is not missed: wait until the others can see this one.
        self._spoken.wait(FIRST_S)
        self._watcher.start()
        # atexit runs the last function first: this one before JAX's shutdown, which was registered by jax.distributed.
        atexit.register(self._leave)

    def expect(self, processes: Iterable[int]) -> None:
        """Expect heartbeats of these processes from now on: one that sends none counts as lost, too."""
        now = time.monotonic()
        for process in processes:
            if process != self._index and not (self._index and process):  # those that this one watches
                self._heard.setdefault(process, ("0 never heard from", now))

    def check(self, process: int | None = None) -> None:
        """Raise if a process was lost, or if ``process``, whose message is awaited, has exited."""
        if self.lost is not None:
            raise ProcessLostError(f"{self.lost}. Start all processes again; saved steps are untouched")
        if process in self._left:
            error = ProcessLostError(f"Process {process} has ended while others waited for it to take part")
            error.in_order = True
            raise error

    def when_lost(self, call: Callable[[str], None]) -> None:
        """Call ``call`` once when a process is lost, in a heartbeat thread; at once if one is lost already."""
        with self._telling:
            self._told.append(call)
            late = self.lost
        if late is not None:
            call(late)

    def ask(self, prefix: str) -> None:
        """Read the keys below ``prefix`` at each beat, until `forget`: other processes report their failures there."""
        self._found[prefix] = {}

    def values_below(self, prefix: str) -> dict[str, str]:
        """Return the values below ``prefix`` that the last beat read (see `ask`), by the rest of their keys."""
        return self._found.get(prefix, {})

    def forget(self, prefix: str) -> None:
        """Stop reading the keys below ``prefix``, which `ask` has begun."""
        self._found.pop(prefix, None)

    def abandon(self) -> None:
        """Note that other processes may never exit properly, so that JAX does not wait for them when this one exits."""
        self._abandoned = True

    # ---- the thread that makes requests ----------------------------------------------------------

    def _run(self) -> None:
        number = 0
        while self.lost is None and not self._leaving.is_set():
            try:
                self._say(_LEAVING if self._is_leaving else str(number))
                self._listen()
            except Exception as error:  # an error of the coordination service
                self._lose(f"Process 0, which runs the coordination service, cannot be reached: {first_line(error)}")
            number += 1
            self._rounds = number
            self._spoken.set()
            self._leaving.wait(self._beat_s)

    def _say(self, word: str) -> None:
        self._client.key_value_set(f"{_ALIVE}{self._index}", f"{word} {self._title}", allow_overwrite=True)

    def _listen(self) -> None:
        now = time.monotonic()
        # If all processes read all beats, the requests would grow with the square of their number.
        if not self._index:
            words = {process: word for process, word in self._all_words().items() if process}
        else:
            words = {} if (word := self._read(f"{_ALIVE}0")) is None else {0: word}
        for process, word in words.items():
            if word.startswith((_LEAVING, _LEFT, _ENDING)):
                self._left.add(process)
                self._seen_off = self._seen_off or not word.startswith(_LEAVING)
                self._abandoned = self._abandoned or word.startswith(_ENDING)
            # Compare words and this machine's clock: the clocks of other machines may differ.
            elif word != self._heard.get(process, ("", now))[0]:
                self._heard[process] = (word, now)
        for process, (word, since) in self._heard.items():
            if process not in self._left and now - since > self._silent_s:
                who = word.split(" ", 1)[1]
                silent = f"has sent no heartbeat for {now - since:.0f} s and is presumed dead"
                self._lose(f"Process {process} ({who}) {silent}")
        # Process 0 watches all processes; the others learn from it who was lost.
        if self._index and (told := self._read(_LOST)) is not None:
            self._lose(told)
        for prefix in list(self._found):
            found = {key.removeprefix(prefix): word for key, word in self._client.key_value_dir_get(prefix)}
            # Another thread may have called `forget` during the request.
            if prefix in self._found:
                self._found[prefix] = found

    def _all_words(self) -> dict[int, str]:
        return {int(key.removeprefix(_ALIVE)): word for key, word in self._client.key_value_dir_get(_ALIVE)}

    def _read(self, key: str) -> str | None:
        with suppress(Exception):  # a missing key is the usual case
            return str(self._client.key_value_try_get(key))
        return None

    # ---- the thread that makes no requests -------------------------------------------------------

    def _watch(self) -> None:
        """Check once per beat that process 0 answers (requests have no time limit); then call each of ``each_beat``."""
        seen = still = 0
        while not self._leaving.wait(self._beat_s):
            still = 0 if self._rounds != seen else still + 1
            seen = self._rounds
            if self.lost is None and still * self._beat_s > self._silent_s:
                self._lose(
                    f"Process 0, which runs the coordination service, has not answered for {self._silent_s:.0f} s"
                )
            for call in list(self.each_beat):
                with suppress(Exception):  # an error in one must not skip the others
                    call()

    def _lose(self, what: str) -> None:
        with self._telling:
            if self.lost is not None:
                return
            self.lost = what
            told = list(self._told)
        # Outside the lock, which `when_lost` takes as well: a callback may call it.
        if self.logs_loss and not self.each_beat:  # a joint call, which looks at each beat, raises this
            logging.getLogger("shardload").error("%s", what)
        for call in told:
            with suppress(Exception):  # an error in one must not skip the others
                call(what)
        if self._index == 0:
            with suppress(Exception):
                self._client.key_value_set(_LOST, what, allow_overwrite=True)

    # ---- exit ------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Stop the heartbeat at exit: a thread that still makes a request to the service would abort the process.

        At exit, Python ends a daemon thread when it next takes the GIL; inside JAX's C++ code, this aborts the process.
        If process 0 was lost, its answer may never come, so the wait for the thread is short.
        """
        if getattr(sys, "last_value", None) is not None:  # an error, perhaps because another process was killed
            self._await_others()
        self._leaving.set()
        alone = self.lost is not None or self._abandoned
        self._thread.join(RETURN_S if alone else _LEAVE_S)
        if not self._thread.is_alive():
            with suppress(Exception):
                self._say(_LEFT)
            if alone and not self._index:
                with suppress(Exception):
                    self.see_off()
        if alone:
            self._let_go()

    def _await_others(self) -> None:
        """Wait until all processes exit, or one is lost: JAX would wait, too, and notice a loss after a minute only."""
        self._is_leaving = True
        until = time.monotonic() + 2 * self._silent_s
        while self.lost is None and not self._abandoned and time.monotonic() < until:
            if self._seen_off if self._index else self._heard.keys() <= self._left:
                break
            time.sleep(0.1)

    def say_ending(self) -> None:
        """Tell the others that this process ends at once, so that those that wait for its messages go on."""
        self._leaving.set()
        # In another thread: if process 0 was lost, its answer may never come.
        saying = threading.Thread(target=self._say, args=(_ENDING,), daemon=True)
        saying.start()
        saying.join(RETURN_S)

    def see_off(self) -> None:
        """On process 0, wait for live processes to exit first: JAX aborts processes that lose process 0's service."""
        # A process without a recent beat is dead or stopped: do not wait for it.
        expected = {process for process, (_, since) in self._heard.items() if time.monotonic() - since < LINGER_S}
        until = time.monotonic() + LINGER_S
        while time.monotonic() < until:
            gone = {process for process, word in self._all_words().items() if word.startswith((_LEFT, _ENDING))}
            if expected <= gone:
                break
            time.sleep(0.1)
        if expected:
            time.sleep(SETTLE_S)


def first_line(error: BaseException) -> str:
    """Return the first line of an error of the coordination service, without the details of gRPC that follow."""
    return str(error).partition("\n")[0]
