"""What the processes of one `jax.distributed` run tell each other, through its coordination service.

Collectives over devices would have to take turns with those of training. The service's key-value store (JAX has it in
every such run, and Orbax uses it too) does not, so a thread in the background may use it at any time.

    together    every process does its part and says what came of it ─► process 0 puts the words together
                ─► every process gets them all, or raises what failed anywhere

A `Channel` numbers what is done together, so all processes must do it in the same order. In a run of one process
nothing is sent at all.

`jax.distributed` has no public door to the store: this is the only module that takes the private one.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import jax
from jax._src import distributed as _distributed

from shardload import errors
from shardload.distributed.heartbeat import RETURN_S, Heartbeat
from shardload.errors import ProcessLostError, SaveError, ShardloadError

T = TypeVar("T")

WAIT_MS = 1000
"""After so long without an answer the heartbeat is asked whether there still is somebody to wait for."""
JOIN_S = 18.0
"""How long a process that failed waits for the others to come and say what they know: longer than the heartbeat takes
to miss one."""
Word = dict[str, Any]
"""What a process says: ``value``, and ``at`` which meeting of a call; or ``error``, ``kind`` and ``errno``; ``told``
when it stopped because another one failed; ``absent`` when it did not come."""


def count() -> int:
    """How many processes take part; starts no backend of JAX where `jax.distributed` was set up."""
    state = _distributed.global_state
    return int(jax.process_count() if state.client is None else state.num_processes)


def index() -> int:
    """Which of them this is; 0 makes folders and publishes."""
    state = _distributed.global_state
    return int(jax.process_index() if state.client is None else state.process_id)


def is_first() -> bool:
    """Whether this is the process that makes folders and publishes; the only one is."""
    return index() == 0


def is_distributed() -> bool:
    """Whether `jax.distributed` was set up, if only with one process."""
    return bool(jax.distributed.is_initialized())


def are_several() -> bool:
    """Whether `jax.distributed` was set up with several processes, which can tell each other something."""
    return is_distributed() and count() > 1


def coordinator() -> str:
    """``host:port`` of the coordination service."""
    return str(_distributed.global_state.coordinator_address)


@functools.cache
def heartbeat() -> Heartbeat:
    """The heartbeat of this process, which begins with the first call."""
    made = Heartbeat(_client(), index=index(), let_go=_let_go)
    made.start()
    return made


@atexit.register  # JAX is imported, so this comes before its shutdown, which waits for the others
def leave_unheard() -> None:
    """A program that ends before its first joint call, with an error most likely, is not waited for."""
    if are_several() and not heartbeat.cache_info().currsize:
        with suppress(Exception):  # the service is gone
            Heartbeat.say_left(_client(), index())


_starting: list[threading.Timer] = []


@contextmanager
def starting_meanwhile(start: Callable[[], Any], after_s: float) -> Iterator[None]:
    """Start JAX in another thread when what is inside takes longer; the next caller that starts it gets its failure."""

    def run() -> None:
        with suppress(Exception):
            start()

    timer = threading.Timer(after_s, run)
    timer.daemon = True
    _starting[:] = [*(one for one in _starting if one.is_alive()), timer]
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@atexit.register  # after the heartbeat's last word, before JAX's own shutdown
def _end_starts() -> None:
    """Have threads that still wait for others inside JAX return: one that does so after Python's end aborts."""
    if any(one.is_alive() for one in _starting):
        with suppress(Exception):
            jax.distributed.shutdown()
        for one in _starting:
            one.join(RETURN_S)


class _Call(threading.local):
    """The joint call that a thread makes, if it makes one."""

    name = ""

    def check(self) -> None:
        """Raise what failed on another process."""


call = _Call()
"""Called each time this thread waits for other processes: one that failed does not arrive."""


class Channel:
    """A line of things done together, in the same order on every process.

    Args:
        name: What the others call it, too; by default its number, which is the same on all processes as they open
            their channels in the same order.
        members: The processes that use it; all by default.
    """

    _numbers = itertools.count()

    def __init__(self, name: str | None = None, *, members: Sequence[int] | None = None) -> None:
        self.name = f"shardload/channel/{next(Channel._numbers) if name is None else name}"
        self._members = members
        self._number = 0

    def together(self, do: Callable[[], T]) -> list[T]:
        """Do something on every process, and wait until all have.

        Args:
            do: The part of this process; what it returns must be JSON.

        Returns:
            What it returned on each process, in their order.

        Raises:
            ProcessLostError: When a process has ended or went silent.
            ShardloadError: Of the class that was raised where it failed first; on that process, the very error.
        """
        if len(self._all()) == 1:
            return [do()]
        failure: BaseException | None = None
        try:
            word: Word = {"value": do()}
        except BaseException as error:  # the others must hear of Ctrl-C as well
            failure, word = error, described(error)
        said = self.exchange(word, check=call.check)
        if failure is not None:
            raise failure
        raise_failure(said)
        return [heard["value"] for heard in said.values()]

    def first(self, do: Callable[[], T]) -> T:
        """Do something on process 0 only; every process gets its JSON, or its failure."""
        return self.together(do if is_first() else lambda: None)[0]  # type: ignore[return-value]

    def exchange(
        self,
        word: Word,
        *,
        hurried: Callable[[], bool] = lambda: False,
        check: Callable[[], None] = lambda: None,
    ) -> dict[int, Word]:
        """Say a word and hear those of all members.

        Args:
            word: The word of this process.
            hurried: Asked each second: whether something failed, after which it waits `JOIN_S` at most.
            check: Called each second; ends the exchange when it raises.

        Returns:
            The words by process. Of one that was lost or did not come, what says so.

        Raises:
            ProcessLostError: When the first member, which puts them together, was lost.
        """
        beat, client = heartbeat(), _client()
        base, wait = f"{self.name}/{self._number}", _Wait(beat, hurried, check)
        members = self._all()
        self._number += 1
        try:
            if index() != members[0]:
                _patiently(lambda: client.key_value_set(f"{base}/word/{index()}", json.dumps(word)), beat)
                answer = wait.hear(client, f"{base}/all", of=members[0])
                return {} if answer is None else {int(i): heard for i, heard in json.loads(answer).items()}
            words = {i: word if i == index() else wait.word(client, f"{base}/word/{i}", of=i) for i in members}
            client.key_value_set(f"{base}/all", json.dumps(words))
            if self._number > 1:  # the sender of this message has read the answer before it
                client.key_value_delete(f"{self.name}/{self._number - 2}")
        except jax.errors.JaxRuntimeError as error:
            raise ProcessLostError(
                "Process 0, which holds the coordination service of this run, cannot be reached, most likely as it has "
                f"ended: {error}. Start all processes again; saved steps are untouched"
            ) from error
        return words

    def _all(self) -> Sequence[int]:
        return range(count()) if self._members is None else self._members


class _Wait:
    """The patience of one exchange."""

    def __init__(self, beat: Heartbeat, hurried: Callable[[], bool], check: Callable[[], None]) -> None:
        self._beat, self._hurried, self._check = beat, hurried, check
        self._until: float | None = None

    def word(self, client: Any, key: str, *, of: int) -> Word:
        """The word of a process, or what says why there is none."""
        try:
            said = self.hear(client, key, of=of)
        except ProcessLostError as error:
            return described(error)
        return {"absent": True} if said is None else dict(json.loads(said))

    def hear(self, client: Any, key: str, *, of: int) -> str | None:
        """The value of a key once it exists; None after the time limit."""
        while True:
            try:
                return str(client.blocking_key_value_get(key, WAIT_MS))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            self._beat.check(of)
            if self._until is None and self._hurried():
                self._until = time.monotonic() + JOIN_S
            self._check()
            if self._until is not None and time.monotonic() > self._until:
                return None


def _patiently(request: Callable[[], None], beat: Heartbeat) -> None:
    """Make a request that process 0 answers at once, or never when it is stopped."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            request()
        except BaseException as error:
            raised.append(error)

    made = threading.Thread(target=run, name="shardload-word", daemon=True)
    made.start()
    while made.is_alive():
        made.join(WAIT_MS / 1000)
        if made.is_alive():
            beat.check(0)
    if raised:
        raise raised[0]


def post(key: str, word: Word) -> None:
    """Leave a word where those look who `Heartbeat.ask` for it."""
    _patiently(lambda: _client().key_value_set(key, json.dumps(word), allow_overwrite=True), heartbeat())


def described(error: BaseException) -> Word:
    """An error as the others hear of it."""
    word = {"error": str(error), "kind": type(error).__name__, "errno": getattr(error, "errno", None)}
    return word | {"in_order": getattr(error, "in_order", False)}


def raise_failure(said: Mapping[int, Word]) -> None:
    """Raise what failed first on another process, if anything did."""
    for process, heard in said.items():
        if "error" in heard:
            error = from_elsewhere(process, heard, foreign=SaveError)
            if isinstance(error, ProcessLostError) and not error.in_order:
                heartbeat().abandon()  # also where this heartbeat has not missed it yet
            raise error


def from_elsewhere(process: int, heard: Word, *, foreign: type[ShardloadError]) -> ShardloadError:
    """The error of another process, in its own class where that is a class of shardload, else as ``foreign``."""
    kind = getattr(errors, heard["kind"], None)
    known = isinstance(kind, type) and issubclass(kind, ShardloadError)
    if kind is ProcessLostError:  # it names the process itself
        lost = ProcessLostError(heard["error"])
        lost.in_order = heard["in_order"]
        return lost
    text = f"On process {process}: " + (heard["error"] if known else f"{heard['kind']}: {heard['error']}")
    cls = kind if known and kind is not None else foreign
    made: ShardloadError = cls.__new__(cls, text)  # some make their text from other arguments
    made.args = (text,)
    if heard["errno"] is not None and isinstance(made, OSError):
        made.errno = heard["errno"]
    return made


def _client() -> Any:
    client = _distributed.global_state.client
    if client is None:
        raise ProcessLostError(
            "Several processes take part, but jax.distributed was not set up by jax.distributed.initialize(), so they "
            "cannot tell each other anything"
        )
    return client


def _let_go() -> None:
    """Keep JAX from waiting for processes that will not come, for minutes, only to abort this one then.

    Its client would do so when it is shut down, and also when nothing refers to it any more: something does, for good.
    """
    state = _distributed.global_state
    for held in (state.client, state.service, state.preemption_sync_manager):
        if held is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    state.client = state.service = state.preemption_sync_manager = None
