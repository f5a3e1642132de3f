"""Messages between the processes of one `jax.distributed` run, through its coordination service.

The messages go through the service's key-value store: JAX runs it in every such run, and a background thread can use it
at any time. (Collectives on devices would have to be ordered with those of training.) `jax.distributed` has no public
API for the store, and no module but this one uses its private API. In a run of one process nothing is sent.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import jax
from jax._src import distributed as _distributed

from shardload import errors
from shardload.errors import MismatchError, ProcessLostError, SaveError, ShardloadError, public_name
from shardload.processes.heartbeats import RETURN_S, Heartbeat, first_line

_T = TypeVar("_T")

_WAIT_MS = 1000
"""Milliseconds that one request for a message waits; between two requests, the caller looks for lost processes."""
_JOIN_S = 18.0
"""Seconds to wait for messages of other processes once one process has failed: longer than the heartbeat takes to
detect a lost process."""
Word = dict[str, Any]
"""A message from one process to the others. Its keys are ``value`` (a result) and ``at`` (name of the meeting); or
``error``, ``kind`` (class) and ``errno`` of a failure; or ``told`` (it stops because another process failed); or
``absent`` (no message came)."""


def count() -> int:
    """Return the number of processes in this run; starts no JAX backend if `jax.distributed` was set up."""
    state = _distributed.global_state
    # jax.process_count() starts the backend, and with it waits for all other processes.
    return int(jax.process_count() if state.client is None else state.num_processes)


def index() -> int:
    """Return the index of this process in the run, from 0 on."""
    state = _distributed.global_state
    return int(jax.process_index() if state.client is None else state.process_id)


def is_first() -> bool:
    """Whether this is process 0, the only one that creates folders and completes saved training steps."""
    return index() == 0


def is_distributed() -> bool:
    """Whether `jax.distributed` was set up, even with a single process."""
    return bool(jax.distributed.is_initialized())


def are_several() -> bool:
    """Whether `jax.distributed` was set up with several processes, so that they can exchange messages."""
    return is_distributed() and count() > 1


def coordinator() -> str:
    """Return ``host:port`` of the coordination service, through which the processes of a run exchange messages."""
    return str(_distributed.global_state.coordinator_address)


@functools.cache
def heartbeat() -> Heartbeat:
    """Return this process's heartbeat, by which others notice if it dies; the first call starts it."""
    made = Heartbeat(run_client(), index=index(), let_go=_let_go)
    made.start()
    return made


def begin(*, by_all: bool = False) -> None:
    """Start the heartbeat, if there are several processes: from now on, the others notice if this process dies.

    ``by_all`` says that all processes call this now, and make a joint call next. A process that does not call it
    counts as lost, too. Losses are not logged, because the joint call raises them.
    """
    if are_several() and not by_all:
        heartbeat()
    elif are_several():
        Heartbeat.logs_loss = False
        heartbeat().expect(range(count()))


# Registered after JAX's shutdown, which waits for the others, so it runs before it.
@atexit.register
def leave_unheard() -> None:
    """At exit, tell the others if this process never started a heartbeat, so that they do not wait for it."""
    if are_several() and not heartbeat.cache_info().currsize:
        with suppress(Exception):  # the service is gone
            Heartbeat.say_left(run_client(), index())


_starting: list[threading.Timer] = []


@contextmanager
def starting_meanwhile(start: Callable[[], Any], after_s: float) -> Iterator[None]:
    """Call ``start``, which starts JAX, in another thread if the with block takes longer than ``after_s`` seconds.

    The block waits for other processes, and JAX in one of them may wait for JAX in this one. Errors of ``start`` are
    ignored, as the next start raises them again.
    """

    def run() -> None:
        with suppress(Exception):
            start()

    # Another process may be starting JAX outside a joint call. That waits for this process, which waits in the block.
    timer = threading.Timer(after_s, run)
    timer.daemon = True
    _starting[:] = [*(one for one in _starting if one.is_alive()), timer]
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# Runs after the heartbeat has stopped, which is registered later, and before JAX's own shutdown.
@atexit.register
def _end_starts() -> None:
    """At exit, shut JAX down if a thread is still starting it: the thread then ends, and does not abort the process."""
    if any(one.is_alive() for one in _starting):
        with suppress(Exception):
            jax.distributed.shutdown()
        for one in _starting:
            one.join(RETURN_S)


def end_stuck(why: str) -> None:
    """At exit after a process was lost, end this one, whose threads wait for that process and cannot be interrupted."""
    # Past the buffer of sys.stderr, which os._exit does not flush.
    os.write(
        2, f"shardload: {heartbeat().lost}. {why}, which cannot be interrupted: this process was terminated\n".encode()
    )
    with suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(1)


class _Call(threading.local):
    """The call that this thread makes together with all other processes (a `JointCall`), if any."""

    name = ""
    channels: Iterator[int] = itertools.count()
    """Numbers the channels that are opened in this call; outside of one, those of the process."""

    def check(self) -> None:
        """Raise if another process failed in this call; outside of a joint call, do nothing."""


call = _Call()
"""The joint call of this thread; while the thread waits for others, ``check`` raises if one of them has failed."""


class Channel:
    """A sequence of message exchanges between processes; all processes make the exchanges in the same order.

    ``members`` are the indices of the processes, by default all. The name is the same on all of them; by default it is
    a number, which matches if they open channels in the same order. In a joint call, it is a number within that call:
    a process on which an earlier call failed before it opened a channel still matches the others.
    """

    def __init__(self, name: str | None = None, *, members: Sequence[int] | None = None) -> None:
        within = f"in-{call.name.rpartition('/')[2]}-" if call.name else ""
        self.name = f"shardload/channel/{f'{within}{next(call.channels)}' if name is None else name}"
        self._members = members
        self._number = 0

    def together(self, do: Callable[[], _T]) -> list[_T]:
        """Run ``do`` on every process; return all results (JSON), in process order, or raise if it failed on one."""
        if len(self._all()) == 1:
            return [do()]
        failure: BaseException | None = None
        try:
            word: Word = {"value": do()}
        except BaseException as error:  # report Ctrl-C to the others, too
            failure, word = error, error_word(error)
        said = self.exchange(word, check=call.check)
        # This process raises its own error, with its traceback, not the copy that the others get.
        if failure is not None:
            raise failure
        raise_failure(said)
        return [heard["value"] for heard in said.values()]

    def first(self, do: Callable[[], _T]) -> _T:
        """Run ``do`` on process 0 only; every process returns its result (JSON), or raises its failure."""
        return self.together(do if is_first() else lambda: None)[0]  # type: ignore[return-value]

    def exchange(
        self,
        word: Word,
        *,
        hurried: Callable[[], bool] = lambda: False,
        check: Callable[[], None] = lambda: None,
    ) -> dict[int, Word]:
        """Send a message; return the messages of all members, and for a lost or silent member one that says so.

        While it waits, it calls ``hurried`` and ``check`` each second. Once ``hurried`` returns True (a process
        failed), the wait is limited to `_JOIN_S`; ``check`` may raise to end the wait.
        """
        beat, client = heartbeat(), run_client()
        base, wait = f"{self.name}/{self._number}", _Wait(beat, hurried, check)
        members = self._all()
        self._number += 1
        try:
            # A star: all send to the first member, which answers with everything. That is 2n messages, not n².
            if index() != members[0]:
                patiently(lambda: client.key_value_set(f"{base}/word/{index()}", json.dumps(word)), beat)
                answer = wait.hear(client, f"{base}/all", of=members[0])
                return {} if answer is None else {int(i): heard for i, heard in json.loads(answer).items()}
            words = {i: word if i == index() else wait.word(client, f"{base}/word/{i}", of=i) for i in members}
            client.key_value_set(f"{base}/all", json.dumps(words))
            # By sending this message, each member has shown that it has read the previous answer.
            if self._number > 1:
                client.key_value_delete(f"{self.name}/{self._number - 2}")
        except jax.errors.JaxRuntimeError as error:
            raise ProcessLostError(
                "Process 0, which runs the coordination service of this run, cannot be reached, most likely because it "
                f"has ended: {first_line(error)}. Start all processes again; saved steps are untouched"
            ) from error
        return words

    def _all(self) -> Sequence[int]:
        return range(count()) if self._members is None else self._members


class _Wait:
    """Waits for the messages of one exchange, with a time limit and checks for failed processes."""

    def __init__(self, beat: Heartbeat, hurried: Callable[[], bool], check: Callable[[], None]) -> None:
        self._beat, self._hurried, self._check = beat, hurried, check
        self._until: float | None = None

    def word(self, client: Any, key: str, *, of: int) -> Word:
        """Return the message of process ``of``, or a message that says why it sent none."""
        try:
            said = self.hear(client, key, of=of)
        except ProcessLostError as error:
            return error_word(error)
        return {"absent": True} if said is None else dict(json.loads(said))

    def hear(self, client: Any, key: str, *, of: int) -> str | None:
        """Wait for a key that process ``of`` sets, and return its value; ``None`` after the time limit."""
        while True:
            try:
                # In slices: neither Ctrl-C nor a lost process interrupts the call itself.
                return str(client.blocking_key_value_get(key, _WAIT_MS))
            except jax.errors.JaxRuntimeError as error:
                # JAX has one class for all errors of the service; only the text tells a timeout from a failure.
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            self._beat.check(of)
            if self._until is None and self._hurried():
                self._until = time.monotonic() + _JOIN_S
            self._check()
            if self._until is not None and time.monotonic() > self._until:
                return None


def run_watched(
    do: Callable[[], Any], *, name: str, every_s: float, look: Callable[[bool], None]
) -> BaseException | None:
    """Run ``do`` in another thread and return its error; call ``look`` at intervals with whether ``do`` still runs.

    If ``look`` raises, this function stops waiting for ``do``, which cannot be cancelled. So ``do`` runs in a daemon
    thread, which does not keep the program from ending.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            do()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(every_s)
        look(thread.is_alive())
    return raised[0] if raised else None


def patiently(request: Callable[[], None], beat: Heartbeat) -> None:
    """Run ``request``, which process 0 answers; raise once process 0 counts as lost, as no answer would ever come."""

    def look(is_waiting: bool) -> None:
        if is_waiting:
            beat.check(0)

    if (error := run_watched(request, name="shardload-word", every_s=_WAIT_MS / 1000, look=look)) is not None:
        raise error


def post(key: str, word: Word) -> None:
    """Set a key of the run's key-value store to a message; other processes read the key with `Heartbeat.ask`."""
    patiently(lambda: run_client().key_value_set(key, json.dumps(word), allow_overwrite=True), heartbeat())


def error_word(error: BaseException) -> Word:
    """Return the message that tells other processes about an error of this one, so that they can raise it, too."""
    word = {"error": str(error), "kind": public_name(error), "errno": getattr(error, "errno", None)}
    # Fields of an error that other processes need besides its class.
    fields = {name: getattr(error, name) for name in ("problem", "other_arguments") if hasattr(error, name)}
    return word | {"in_order": getattr(error, "in_order", False), **fields}


def raise_failure(said: Mapping[int, Word]) -> None:
    """Raise the first failure that the messages of other processes report, if any."""
    for process, heard in said.items():
        if "error" in heard:
            error = from_elsewhere(process, heard, foreign=SaveError)
            if isinstance(error, ProcessLostError) and not error.in_order:
                heartbeat().abandon()  # even if this heartbeat has not noticed the loss yet
            raise error


def from_elsewhere(process: int, heard: Word, *, foreign: type[ShardloadError]) -> ShardloadError:
    """Rebuild an error that another process reported: in its own class if shardload has that, else as ``foreign``."""
    kind = getattr(errors, heard["kind"], None)
    known = isinstance(kind, type) and issubclass(kind, ShardloadError)
    # Its message already names the lost process, which is not the one that reports it.
    if kind is ProcessLostError:
        lost = ProcessLostError(heard["error"])
        lost.in_order = heard["in_order"]
        return lost
    text = f"On process {process}: " + (heard["error"] if known else f"{heard['kind']}: {heard['error']}")
    cls = kind if known and kind is not None else foreign
    made: ShardloadError = cls.__new__(cls, text)  # the constructors of some classes take other arguments
    made.args = (text,)
    if isinstance(made, MismatchError):
        made.problem, made.other_arguments = f"On process {process}: {heard['problem']}", heard["other_arguments"]
    if heard["errno"] is not None and isinstance(made, OSError):
        made.errno = heard["errno"]
    return made


def run_client() -> Any:
    """Return the client of this run's key-value store, through which processes exchange messages; raise without one."""
    client = _distributed.global_state.client
    if client is None:
        raise ProcessLostError(
            "The processes of this run cannot communicate: jax.distributed is not initialized. Call "
            "jax.distributed.initialize() on each process first"
        )
    return client


def _let_go() -> None:
    """Detach from JAX's coordination: at exit, it would wait minutes for processes that do not come, then abort.

    JAX's client waits at shutdown, and also when it is deallocated. So one reference to it is never released.
    """
    state = _distributed.global_state
    for held in (state.client, state.service, state.preemption_sync_manager):
        if held is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    state.client = state.service = state.preemption_sync_manager = None
