"""A call that all processes of a run make together: a failure on one process is raised on all, with its cause.

    process 0   ──────●━━━━━━━━━━━━━●━━━━━━━━━━━ stops ─►●      ●  a meeting: all processes exchange messages
    process 1   ──────●━━━━━━━━━━━━━●━━━ fails ─────────►●         a process that fails reports it at once, and
    process 2   ──────●━━━━━━━━━━━━━●━━━━━━━━━━━━ stops ►●         the others notice within a second or two

A process that fails still goes to the next meeting, so that all processes raise for the same reason. A process that
cannot come, because its devices wait for other processes, is terminated. Each message names its meeting: if two
processes are at different meetings, that is an error.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, TypeAlias, TypeVar

from shardload import processes
from shardload.errors import DisagreementError, LoadInterruptedError, ProcessFailedError, ProcessLostError, public_name
from shardload.processes import Channel, Word, agreement, parcels
from shardload.processes.exit_reasons import exit_recorder
from shardload.progress import Progress
from shardload.sharding.devices import available

_T = TypeVar("_T")

_LOST_S = 8.0
"""Seconds that this process may wait inside JAX, which nothing can interrupt, after another was lost; then it is
ended."""
_FAILED_S = 12.0
"""Seconds that this process may wait inside JAX, which nothing can interrupt, after another failed; then it is
ended."""
_LOOK_S = 0.2
"""Seconds between two checks that all other processes are still running, while this one waits for JAX to start."""


class JointCall:
    """One process' side of a call that all processes make together. It calls ``on_end`` before it ends this process."""

    is_alone: ClassVar[bool] = False
    numbers: ClassVar[Iterator[int]] = itertools.count()
    """Numbers the joint calls of this process. The n-th calls of all processes find each other by this number."""

    def __init__(self, *, on_end: Callable[[], None] = lambda: None) -> None:
        self._on_end = on_end
        self._channel = Channel(f"call-{next(JointCall.numbers)}")
        self.name = self._channel.name
        self._parcels, self._handed_out = f"{self.name}/parcels/", itertools.count()
        self._beat = processes.heartbeat()
        self._attempts = itertools.count()
        self._flags = self._flags_of_attempt()
        self._heard: BaseException | None = None
        self._from_elsewhere: BaseException | None = None
        self._since: float | None = None
        self._meeting = False
        self._beat.ask(self._flags)
        self._beat.each_beat.append(self._watch)
        # For this thread until `close`: exchanges on other channels also notice when the call fails elsewhere.
        processes.call.name, processes.call.check = self.name, self.check  # type: ignore[method-assign]
        processes.call.channels = itertools.count()

    def close(self) -> None:
        """End the call, whether it succeeded or not: stop looking for failures of other processes."""
        # Back to the defaults of the class: no call, and a check that does nothing.
        processes.call.__dict__.clear()
        self._beat.each_beat.remove(self._watch)
        self._beat.forget(self._flags)
        if processes.is_first():  # the others have passed a later meeting, or the call has failed
            parcels.discard(self._parcels)

    def try_again(self) -> None:
        """Forget a failure that all processes know: else the next `check` would stop an alternative that they try."""
        self._beat.forget(self._flags)
        self._flags = self._flags_of_attempt()
        self._beat.ask(self._flags)
        self._from_elsewhere = self._heard = None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """If the with block fails on one process, raise its error on all. They may then `try_again` in another way."""
        try:
            yield
        except BaseException as error:
            if (cause := self.failure(error)) is error:
                raise
            raise cause from None

    def check(self) -> None:
        """Raise if another process has reported that it failed. It waits for no process, so it can be called often."""
        self._beat.check()
        for process, word in self._failed().items():
            self._from_elsewhere = processes.from_elsewhere(process, word, foreign=ProcessFailedError)
            raise self._from_elsewhere

    def together(self, do: Callable[[], _T], what: str) -> list[_T]:
        """Run ``do`` on every process, at a meeting that all call ``what``; return all results, which must be JSON."""
        with self.attempt():
            # The message names its meeting, so that an answer to another question is not taken for one to this.
            word: Word = {"value": do(), "at": what}
        said = self._exchange(word, hurried=lambda: bool(self._failed()))
        if not all("value" in heard for heard in said.values()) or not said:
            raise self._remember(self._cause(said))
        if len({heard.get("at") for heard in said.values()}) > 1:
            where = ", ".join(f"process {i} at {heard.get('at')!r}" for i, heard in said.items())
            apart = DisagreementError(
                f"Cannot continue this call of several processes: they are at different points of it, {where:.400}. "
                "Run the same versions of shardload and of your code on every process"
            )
            raise self._remember(apart)
        return [heard["value"] for heard in said.values()]

    def first(self, do: Callable[[], _T], what: str) -> _T:
        """Run ``do`` on process 0 only; every process returns its result (JSON), or raises its failure."""
        return self.together(do if processes.is_first() else lambda: None, what)[0]  # type: ignore[return-value]

    def hand_out(self, do: Callable[[], bytes | None], what: str) -> bytes | None:
        """Run ``do`` on process 0 only; every process returns its result: bytes, however many, or ``None``."""
        mine: list[bytes | None] = []
        name = f"{self._parcels}{next(self._handed_out)}"

        def put() -> int | None:
            mine.append(do())
            return None if mine[0] is None else parcels.put(name, mine[0])

        count = self.first(put, what)
        if mine or count is None:
            return mine[0] if mine else None
        with self.attempt():
            return parcels.get(name, count, check=self.check)

    def meet(self, what: str) -> None:
        """Wait until all processes have come to this point, called ``what``; raise on all of them if one failed."""
        self.together(lambda: None, what)

    def require(self, found: Sequence[agreement.Topic]) -> None:
        """Raise on all processes unless they agree about these topics, for example the arguments of the call."""
        agreement.require(self, found)

    def watched(self, progress: Progress) -> Progress:
        """Wrap a progress display, so that each of its updates raises if another process failed."""
        return Watched(progress, self.check)

    def start_jax(self) -> None:
        """Start JAX on all processes; this waits for the others."""
        # Two meetings: none starts JAX before all can, and none goes on before all have.
        self.meet("the start of JAX")
        self.together(self._start, "JAX has started")

    def draw_seed(self) -> int | None:
        """Return a random seed that process 0 draws for all, new in each call; the state of `random` stays as it is."""

        def draw() -> int:
            # A copy of the generator: two calls in a row draw the same bits from it, which the call's name tells apart.
            drawn = random.Random()
            drawn.setstate(random.getstate())
            return random.Random(f"{drawn.getrandbits(64)} {self.name}").getrandbits(31)

        return self.first(draw, "the seed")

    def failure(self, error: BaseException) -> BaseException:
        """Report ``error`` to the other processes; return what to raise: ``error``, or the failure that caused it."""
        if error is self._heard:
            return error
        root = error
        # The reason for an interrupted load is in its cause.
        if isinstance(error, LoadInterruptedError) and error.__cause__ is not None:
            root = error.__cause__
        # The processes have agreed on this failure already, or one can no longer come to a meeting.
        if root is self._heard or self._beat.lost is not None:
            return self._remember(error if root is self._heard else self._lost(error))
        # The others know a failure that came from one of them: say only that this process stopped, too.
        told = root is self._from_elsewhere
        word: Word = {"told": True} if told else processes.error_word(root)
        if not told:
            with suppress(Exception):  # the meeting reports it, too
                processes.post(f"{self._flags}{processes.index()}", word)
        if not isinstance(error, Exception):
            self._beat.abandon()  # after Ctrl-C, do not wait for the others
            return self._remember(error)
        try:
            said = self._exchange(word, hurried=lambda: True)
        except Exception as lost:
            return self._remember(_with_note(lost, error))
        cause = _primary(said)
        # Failures of equal rank: each process raises its own, which names its own files and devices.
        if cause is None or told or cause == processes.index() or _rank(said[cause]) == _rank(word):
            return self._remember(error)
        return self._remember(_with_note(self._cause(said), error))

    # ---- internals -------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start JAX's backends in another thread: if another process fails to start, JAX takes minutes to notice."""

        def look(is_starting: bool) -> None:
            try:
                self.check()
            except BaseException:
                if is_starting:
                    self._beat.abandon()  # JAX would wait for processes that do not come
                raise

        error = processes.run_watched(available, name="shardload-start", every_s=_LOOK_S, look=look)
        if error is not None:
            self._beat.abandon()
            raise error

    def _flags_of_attempt(self) -> str:
        # All processes count the same attempts, as each ends in a meeting.
        return f"{self._channel.name}/failed/{next(self._attempts)}/"

    def _exchange(self, word: Word, *, hurried: Callable[[], bool]) -> dict[int, Word]:
        self._meeting = True
        try:
            said = self._channel.exchange(word, hurried=hurried)
        finally:
            self._meeting = False
        if not said or any("absent" in heard for heard in said.values()):
            # A process that misses the meeting will also miss JAX's shutdown.
            self._beat.abandon()
        return said

    def _failed(self) -> dict[int, Word]:
        found = {int(process): json.loads(word) for process, word in self._beat.values_below(self._flags).items()}
        return {process: word for process, word in sorted(found.items()) if process != processes.index()}

    def _cause(self, said: dict[int, Word]) -> BaseException:
        """Return the exception for a failed meeting: of all failures, the one that caused the others."""
        known = said if _primary(said) is not None else self._failed()
        process = _primary(known)
        if process is not None:
            return processes.from_elsewhere(process, known[process], foreign=ProcessFailedError)
        return ProcessFailedError("Another process failed without reporting a reason")

    def _lost(self, error: BaseException) -> BaseException:
        try:
            self._beat.check()
        except Exception as lost:
            return error if type(lost) is type(error) or error.__cause__ is not None else _with_note(lost, error)
        return error

    def _remember(self, error: BaseException) -> BaseException:
        if isinstance(error, ProcessLostError) and not error.in_order:
            self._beat.abandon()  # even if the heartbeat has not noticed the loss yet
        self._heard = error
        return error

    def _watch(self) -> None:
        """Called once per heartbeat: terminate this process if another one failed and this one is stuck inside JAX."""
        lost = self._beat.lost
        # In a meeting, or once it knows the failure, this process raises by itself.
        if self._heard is not None or self._meeting or (lost is None and not self._failed()):
            self._since = None
            return
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since > (_FAILED_S if lost is None else _LOST_S):
            why = lost or "; ".join(
                str(processes.from_elsewhere(i, word, foreign=ProcessFailedError)) for i, word in self._failed().items()
            )
            self._end(
                f"{why}. This process waited for the others inside JAX, which cannot be interrupted: it was terminated"
            )

    def _end(self, why: str) -> None:
        """Print why this process, which is stuck inside JAX, is terminated, and terminate it."""
        # Past the buffer of sys.stderr: os._exit flushes nothing.
        os.write(2, f"shardload: {why}\n".encode())
        with suppress(Exception):
            sys.stdout.flush()
        with suppress(Exception):
            self._on_end()
            # First, so that a process which waits for a message of this one goes on, and exits.
            self._beat.say_ending()
            if processes.is_first():
                self._beat.see_off()
        # Not sys.exit: in this thread it ends only the thread, and the other one never returns from JAX.
        os._exit(1)


class Watched:
    """A progress display for a joint call: it forwards to another one, and raises as soon as another process failed."""

    def __init__(self, progress: Progress, check: Callable[[], None]) -> None:
        self._progress, self._check = progress, check

    def start(self, total_bytes: int, description: str) -> None:
        """Begin a stage of the load, such as reading; show this process's number with it. Only its own bytes count."""
        self._progress.start(total_bytes, f"{description} on process {processes.index()} of {processes.count()}")

    def advance(self, n_bytes: int) -> None:
        """Raise if another process failed, else add to the bytes of the stage; called after each block is read."""
        self._check()
        self._progress.advance(n_bytes)

    def stop(self) -> None:
        """End the stage that `start` began."""
        self._progress.stop()


def _primary(said: dict[int, Word]) -> int | None:
    """Return the process whose failure likely caused the others'; damage, lost processes and XLA errors come last."""
    failed = [process for process, heard in said.items() if "error" in heard]
    return min(failed, key=lambda process: (_rank(said[process]), process), default=None)


def _rank(word: Word) -> int:
    return {"DamagedError": 1, "ProcessLostError": 2, "JaxRuntimeError": 3, "XlaRuntimeError": 3}.get(word["kind"], 0)


def _with_note(error: Any, own: BaseException) -> Any:
    """Return ``error``, the cause, with a note about ``own``, the error that this process raised."""
    if str(own) not in str(error):
        error.add_note(f"On this process: {public_name(own)}: {own}")
    return error


_OUTSIDE_S = 3.0
"""Seconds that this process waits for the others as a joint call begins, until it starts JAX (`starting_meanwhile`)."""


@contextmanager
def joint(function: str, what: Any, arguments: Mapping[str, Any], *, doing: str = "loading") -> Iterator[JointCall]:
    """Make a call of a public function, such as `load`, together with all other processes of this run.

    ``what`` is the thing loaded or saved, for reports of an unexpected exit. ``arguments`` are equal on all processes.
    """
    # Before the first meeting: if this process is killed from now on, its helper process can say so.
    recorder = exit_recorder()
    recorder.begin()
    recorder.note(f"shardload.{function} was {doing} {str(what)!r}")
    call = JointCall(on_end=recorder.rest)
    try:
        with call.attempt():
            with processes.starting_meanwhile(available, _OUTSIDE_S):
                call.require(agreement.call_topics(function, arguments))
            yield call
    finally:
        call.close()
        recorder.rest()


def start_jax() -> None:
    """Start JAX on all processes of the run together, before a load; do nothing if there is only one process."""
    if processes.are_several():
        with joint("load", "its devices", {}) as call:
            call.start_jax()


class Alone:
    """A call of this process only: it has the methods of a `JointCall`, and neither waits for nor notifies others."""

    is_alone: ClassVar[bool] = True

    def together(self, do: Callable[[], _T], what: str) -> list[_T]:
        """Run ``do``, and return a list with its result only."""
        return [do()]

    def first(self, do: Callable[[], _T], what: str) -> _T:
        """Run ``do``, and return its result."""
        return do()

    def hand_out(self, do: Callable[[], bytes | None], what: str) -> bytes | None:
        """Run ``do``, and return its result."""
        return do()

    def meet(self, what: str) -> None:
        """Do nothing: this process is alone."""

    def require(self, found: Sequence[agreement.Topic]) -> None:
        """Do nothing: there is no other process to disagree with."""

    def watched(self, progress: Progress) -> Progress:
        """Return ``progress`` unchanged."""
        return progress

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run the with block; its errors are raised as they are, as there is no other process to tell."""
        yield

    def try_again(self) -> None:
        """Do nothing: no other process knows of the failure."""

    def start_jax(self) -> None:
        """Do nothing: JAX starts when it is first used."""

    def draw_seed(self) -> int | None:
        """Return ``None``, no seed for all: this process's model draws from the user's own random generators."""
        return None


Call: TypeAlias = JointCall | Alone
"""A call that all processes make together, or that this process makes alone."""
