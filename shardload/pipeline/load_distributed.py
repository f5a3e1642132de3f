"""A load by all processes of a `jax.distributed` run, or by this one alone: the points where processes synchronise.

    ●0 open headers ●1 start JAX ●2 build, map, plan ●3 read ●4 assign, initialise ●5 account

    0   all make the same call with the same arguments
    1   headers are valid everywhere: JAX, whose start waits for all processes, may start
    2   JAX has started, and the mesh gives each process an equal part
    3   all are about to load the same thing (`shardload.pipeline.consistency`)
    4   all have read their part, and old values may be released: all later steps compute together
    5   all have finished

A load onto this process's own devices concerns this process only: it neither waits for nor notifies others.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import jax

from shardload.distributed import processes
from shardload.distributed.exit_reasons import exit_recorder
from shardload.distributed.joint_call import JointCall
from shardload.keras_bridge.recording import seeded
from shardload.layouts.current_layout import current_devices
from shardload.pipeline import consistency, filling
from shardload.pipeline.preparing import PreparedLoad
from shardload.pipeline.reporting import Clock
from shardload.pipeline.request import JointRequest, OnFailure
from shardload.progress import Progress
from shardload.reports import ByteCounts, HostBytes, LoadReport
from shardload.sharding import devices as placement
from shardload.sharding.devices import MeshDevices
from shardload.stores.fingerprint import Fingerprint

T = TypeVar("T")

LOOK_S = 0.2
"""Interval at which a process that waits for JAX to start checks that all others are still running."""
OUTSIDE_S = 3.0
"""JAX starts if others have not made the call after this time: one of them may be starting JAX outside of any call,
which waits for this process."""


@dataclass(frozen=True, slots=True)
class ReadShare:
    """Measurements of one process's part of a load."""

    process: int
    bytes: ByteCounts
    host_bytes: HostBytes
    total_s: float
    """Wall clock, seconds."""


class JointLoad:
    """One call of `load`, `load_weights` or `restore`; in a single process, synchronisation costs nothing."""

    def __init__(self, joint: JointCall | None) -> None:
        self._joint = joint

    def first(self, do: Callable[[], T], what: str) -> T:
        """Return the result of ``do`` on process 0, converted through JSON; alone, the result of this process."""
        return do() if self._joint is None else self._joint.first(do, what)

    @property
    def is_alone(self) -> bool:
        """Whether the call involves only this process."""
        return self._joint is None

    def meet(self, what: str) -> None:
        """Wait for all processes; raises on all if one of them failed."""
        if self._joint is not None:
            self._joint.together(lambda: None, what)

    def require(self, found: list[consistency.Topic]) -> None:
        """Check that the processes agree about these topics.

        Raises:
            DisagreementError: On all processes, when they do not.
        """
        if self._joint is not None:
            consistency.require(self._joint, found)

    def watched(self, progress: Progress) -> Progress:
        """Return progress that also raises if another process failed."""
        return progress if self._joint is None else _Watched(progress, self._joint)

    def try_again(self) -> None:
        """Begin an alternative after an `attempt` that failed on all processes."""
        if self._joint is not None:
            self._joint.try_again()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Make an error inside the block fail on all processes, so that each may then try an alternative."""
        try:
            yield
        except BaseException as error:
            if self._joint is None or (cause := self._joint.failure(error)) is error:
                raise
            raise cause from None

    def start_jax(self) -> None:
        """Start JAX once headers are read; this waits for the other processes."""
        if self._joint is not None:
            # Two meetings: none starts JAX before all can, and none goes on before all have.
            self._joint.together(lambda: None, "the start of JAX")
            self._joint.together(self._start, "JAX has started")

    def check_shares(self, devices: MeshDevices) -> None:
        """Check that the processes can share a mesh.

        Raises:
            MeshError: When they cannot.
        """
        if self._joint is not None:
            placement.check_shares(devices)

    @contextmanager
    def seeds(self) -> Iterator[None]:
        """Draw the same seeds on all processes inside the block; leave the user's generators unchanged."""
        if self._joint is None:
            yield
            return
        with seeded(self._joint.first(self._draw, "the seed")):
            yield

    def fill(
        self, prepared: PreparedLoad, clock: Clock, files: Fingerprint, *, progress: Progress, on_failure: OnFailure
    ) -> LoadReport:
        """Run `filling.fill` once all processes are about to load the same thing; it succeeds on all or on none.

        Raises:
            DisagreementError: When they differ.
        """
        if self._joint is not None:
            consistency.require(self._joint, consistency.topics(prepared))
        progress = self.watched(progress)
        return filling.fill(prepared, clock, files, progress=progress, on_failure=on_failure, on_filled=self._filled)

    def _filled(self) -> None:
        """Wait until all values are in place on every process."""
        if self._joint is not None:
            self._joint.together(lambda: None, "the end of the transfer")

    def shares(self, report: LoadReport) -> tuple[ReadShare, ...]:
        """Wait until all processes are done; return the share of each, or nothing in a single process."""
        if self._joint is None:
            return ()
        accounts = self._joint.together(lambda: _account(report), "the account")
        return tuple(
            ReadShare(i, ByteCounts(**account["bytes"]), HostBytes(**account["host_bytes"]), account["total_s"])
            for i, account in enumerate(accounts)
        )

    def _draw(self) -> int:
        """Draw a seed derived from the user's own state without changing that state; differs for each call."""
        # A copy of the generator: two calls in a row draw the same bits from it, which the call's name tells apart.
        drawn = random.Random()
        drawn.setstate(random.getstate())
        assert self._joint is not None
        return random.Random(f"{drawn.getrandbits(64)} {self._joint.name}").getrandbits(31)

    def _start(self) -> None:
        """Start JAX's backends in another thread: if another process fails to start, JAX takes minutes to notice."""
        assert self._joint is not None
        raised: list[BaseException] = []

        def start() -> None:
            try:
                placement.available()
            except BaseException as error:
                raised.append(error)

        # A daemon: a start that hangs must not keep the program from ending.
        starting = threading.Thread(target=start, name="shardload-start", daemon=True)
        starting.start()
        while starting.is_alive():
            starting.join(LOOK_S)
            try:
                self._joint.check()
            except BaseException:
                if starting.is_alive():
                    processes.heartbeat().abandon()  # JAX would wait for processes that do not come
                raise
        if raised:
            processes.heartbeat().abandon()
            raise raised[0]


@contextmanager
def joint_load(request: JointRequest) -> Iterator[JointLoad]:
    """Make a call together with the other processes, if there are any and their devices are involved.

    The request is checked after the processes compared it, so that an error on one is raised on all.

    Raises:
        DisagreementError: On all processes, when their calls differ.
    """
    if not processes.are_several() or _is_local(request):
        request.check()
        yield JointLoad(None)
    else:
        with joint(request.function, request.source, request.compared) as call:
            request.check()
            yield call


def start() -> None:
    """Start JAX on all processes, before they know what to load.

    Raises:
        MeshError: On all processes, when JAX did not start on one.
    """
    if not processes.are_several():
        return
    with joint("load", "its devices", {}) as call:
        call.start_jax()


@contextmanager
def joint(function: str, what: Any, arguments: Mapping[str, Any], *, doing: str = "loading") -> Iterator[JointLoad]:
    """Make a call together with all other processes of this run.

    Args:
        function: Name of the public function.
        what: What it loads or saves, for reports of an unexpected exit.
        arguments: Arguments that must be equal on all processes.
        doing: What the function does.

    Raises:
        DisagreementError: On all processes, when their calls differ.
    """
    # Before the first meeting: if this process is killed from now on, its helper process can say so.
    recorder = exit_recorder()
    recorder.begin()
    recorder.note(f"shardload.{function} was {doing} {str(what)!r}")
    meetings = JointCall(on_end=recorder.rest)
    call = JointLoad(meetings)
    try:
        with call.attempt():
            with processes.starting_meanwhile(placement.available, OUTSIDE_S):
                consistency.require(meetings, consistency.call_topics(function, arguments))
            yield call
    finally:
        meetings.close()
        recorder.rest()


def _is_local(request: JointRequest) -> bool:
    """Whether all named devices belong to this process; if none is named, the call involves all processes' devices."""
    try:
        named = placement.named_devices(request.mesh, request.devices)
        if request.mesh is None and request.devices is None and request.model is not None:
            current = current_devices(request.model)
            named = None if current is None else current.devices
    except Exception:  # a wrong argument: the call itself raises the error, on all processes
        return False
    # No device named means all devices of all processes (`bool(named)` is False), so the call is joint.
    return bool(named) and all(getattr(d, "process_index", None) == jax.process_index() for d in named or ())


def _account(report: LoadReport) -> dict[str, Any]:
    return {
        "bytes": asdict(report.bytes),
        "host_bytes": asdict(report.host_bytes),
        "total_s": report.seconds.total,
    }


class _Watched:
    """Forwards progress, and checks whether the load failed on another process."""

    def __init__(self, shown: Progress, joint: JointCall) -> None:
        self._shown, self._joint = shown, joint

    def start(self, total_bytes: int, description: str) -> None:
        # Each process counts its own bytes.
        self._shown.start(total_bytes, f"{description} on process {processes.index()} of {processes.count()}")

    def advance(self, n_bytes: int) -> None:
        # Called between blocks: here a transfer notices that another process failed.
        self._joint.check()
        self._shown.advance(n_bytes)

    def stop(self) -> None:
        self._shown.stop()
