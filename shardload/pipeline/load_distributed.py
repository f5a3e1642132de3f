"""A load by all processes of a `jax.distributed` run, or by this one alone: where they meet, and what they say.

    ●0 open headers ●1 start JAX ●2 build, map, plan ●3 read ●4 assign, initialise ●5 account

    0   all make the same call with the same arguments
    1   headers are good everywhere: JAX, whose start waits for all processes, may start
    2   it has, and the mesh gives each process an equal part
    3   all are about to load the same thing (`shardload.pipeline.consistency`)
    4   all have read their part, and old values may go: what follows computes together
    5   all are done

A load onto devices of this process only concerns this process only: it waits for no other and tells none.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import jax

from shardload.distributed import processes
from shardload.distributed.exit_reasons import ExitRecorder
from shardload.distributed.joint_call import JointCall
from shardload.keras_bridge.recording import seeded
from shardload.parallel.current_layout import home
from shardload.pipeline import consistency, filling
from shardload.pipeline.filling import Clock, LoadJob, OnFailure
from shardload.progress import Progress, Silent
from shardload.reports import ByteCounts, HostBytes, LoadReport
from shardload.sharding import devices as placement
from shardload.sharding.devices import MeshDevices
from shardload.stores.fingerprint import Fingerprint

T = TypeVar("T")

LOOK_S = 0.2
"""How often a process that waits for JAX to start looks whether all others still are there."""
OUTSIDE_S = 3.0
"""Where others have not come to a call after so long, JAX starts: one of them may be starting it outside of any call,
which waits for this process."""


@dataclass(frozen=True, slots=True)
class ReadShare:
    """What one process read for its devices."""

    process: int
    bytes: ByteCounts
    host_bytes: HostBytes
    total_s: float
    """Wall clock, seconds."""


class JointLoad:
    """One call of `load`, `load_weights` or `restore`; alone, its meetings cost nothing."""

    def __init__(self, joint: JointCall | None) -> None:
        self._joint = joint

    def first(self, do: Callable[[], T], what: str) -> T:
        """What process 0 makes of something, as JSON has it; without others, what this one does."""
        return do() if self._joint is None else self._joint.first(do, what)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Have what fails inside fail on all processes, each of which may then try something else."""
        try:
            yield
        except BaseException as error:
            if self._joint is None or (cause := self._joint.failure(error)) is error:
                raise
            raise cause from None

    def ready(self) -> None:
        """Headers are read: start JAX, which waits for the other processes."""
        if self._joint is not None:
            self._joint.together(lambda: None, "the start of JAX")
            self._joint.together(self._start, "JAX has started")

    def share(self, place: MeshDevices) -> None:
        """Make sure that the processes can share a mesh.

        Raises:
            MeshError: When they cannot.
        """
        if self._joint is not None:
            placement.check_shares(place)

    @contextmanager
    def seeds(self) -> Iterator[None]:
        """Have all processes draw the same seeds inside, and leave the user's generators as they were."""
        if self._joint is None:
            yield
            return
        with seeded(self._joint.first(self._draw, "the seed")):
            yield

    def fill(
        self,
        job: LoadJob,
        clock: Clock,
        *,
        files: Fingerprint,
        on_failure: OnFailure,
        progress: Progress | None,
        notes: tuple[str, ...],
    ) -> LoadReport:
        """`filling.fill`, once all processes are about to load the same thing; it ends everywhere or nowhere.

        Raises:
            DisagreementError: When they are not.
        """
        if self._joint is not None:
            consistency.require(self._joint, consistency.topics(job))
        shown = progress or Silent()
        return filling.fill(
            job,
            clock,
            files=files,
            on_failure=on_failure,
            progress=shown if self._joint is None else _Watched(shown, self._joint),
            notes=notes,
            on_filled=self._filled,
        )

    def _filled(self) -> None:
        """All is read and in place here: wait until it is everywhere."""
        if self._joint is not None:
            self._joint.together(lambda: None, "the end of the transfer")

    def done(self, report: LoadReport) -> tuple[ReadShare, ...]:
        """Wait until all are done; the share of each, and none where this process was alone."""
        if self._joint is None:
            return ()
        said = self._joint.together(lambda: _account(report), "the account")
        return tuple(
            ReadShare(i, ByteCounts(**word["bytes"]), HostBytes(**word["host_bytes"]), word["total_s"])
            for i, word in enumerate(said)
        )

    def _draw(self) -> int:
        """A seed that goes by the user's own, if one was set, without taking a number from it; another each time."""
        drawn = random.Random()
        drawn.setstate(random.getstate())
        assert self._joint is not None
        return random.Random(f"{drawn.getrandbits(64)} {self._joint.name}").getrandbits(31)

    def _start(self) -> None:
        """Start JAX's backends in another thread: where another process fails to, it takes minutes to notice."""
        assert self._joint is not None
        raised: list[BaseException] = []

        def start() -> None:
            try:
                placement.available()
            except BaseException as error:
                raised.append(error)

        starting = threading.Thread(target=start, name="shardload-start", daemon=True)
        starting.start()
        while starting.is_alive():
            starting.join(LOOK_S)
            try:
                self._joint.check()
            except BaseException:
                if starting.is_alive():
                    processes.heartbeat().abandon()  # JAX would wait for what does not come
                raise
        if raised:
            processes.heartbeat().abandon()
            raise raised[0]


@contextmanager
def joint_load(
    name: str,
    source: Any,
    *,
    mesh: Any = None,
    devices: Sequence[Any] | None = None,
    model: Any = None,
    **arguments: Any,
) -> Iterator[JointLoad]:
    """Make a call together with the other processes, if there are any and it is about their devices, too.

    Args:
        name: Of the function.
        source: What it was given, for messages.
        mesh: As the caller wrote it.
        devices: As the caller gave them.
        model: The one to fill, whose own devices count where neither of them was given.
        **arguments: Those that have to be the same on all processes as they were written.

    Raises:
        DisagreementError: On all processes, when they make different calls.
    """
    if not processes.are_several() or _is_own(mesh, devices, model):
        yield JointLoad(None)
        return
    witness = _witness()
    witness.begin()
    witness.note(f"shardload.{name} was loading {str(source)!r}")
    joint = JointCall(on_end=witness.rest)
    made = JointLoad(joint)
    try:
        with made.attempt():
            with processes.starting_meanwhile(placement.available, OUTSIDE_S):
                consistency.require(joint, consistency.call_topics(name, arguments))
            yield made
    finally:
        joint.close()
        witness.rest()


def start() -> None:
    """Start JAX on all processes, before they know what they will load.

    Raises:
        MeshError: On all of them, when it did not start on one.
    """
    with joint_load("load", "its devices") as made:
        made.ready()


@functools.cache
def _witness() -> ExitRecorder:
    return ExitRecorder()


def _is_own(mesh: Any, devices: Sequence[Any] | None, model: Any) -> bool:
    """Whether all devices that were named belong to this process: where none is, all devices of all are meant."""
    try:
        named = placement.named_devices(mesh, devices)
        if mesh is None and devices is None and model is not None:
            place = home(model)
            named = None if place is None else place.devices
    except Exception:  # of a wrong argument: the call itself says what is wrong with it, to all
        return False
    return bool(named) and all(getattr(d, "process_index", None) == jax.process_index() for d in named or ())


def _account(report: LoadReport) -> dict[str, Any]:
    return {
        "bytes": asdict(report.bytes),
        "host_bytes": asdict(report.host_bytes),
        "total_s": report.seconds.total,
    }


class _Watched:
    """Passes on how far the load has come, and looks whether it failed elsewhere."""

    def __init__(self, shown: Progress, joint: JointCall) -> None:
        self._shown, self._joint = shown, joint

    def start(self, total_bytes: int, description: str) -> None:
        self._shown.start(total_bytes, description)

    def advance(self, n_bytes: int) -> None:
        self._joint.check()
        self._shown.advance(n_bytes)

    def stop(self) -> None:
        self._shown.stop()
