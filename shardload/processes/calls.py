"""Calls of public functions: made by all processes of a run together, or by this process alone.

`Alone` has the methods of a `JointCall`, and neither waits for nor notifies others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeAlias, TypeVar

from shardload import processes
from shardload.processes import agreement
from shardload.processes.exit_reasons import exit_recorder
from shardload.processes.joint_call import JointCall
from shardload.progress import Progress
from shardload.sharding.devices import available

T = TypeVar("T")

OUTSIDE_S = 3.0
"""JAX starts if others have not made the call after this time: one of them may be starting JAX outside of any call,
which waits for this process."""


@contextmanager
def joint(function: str, what: Any, arguments: Mapping[str, Any], *, doing: str = "loading") -> Iterator[JointCall]:
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
    call = JointCall(on_end=recorder.rest)
    try:
        with call.attempt():
            with processes.starting_meanwhile(available, OUTSIDE_S):
                call.require(agreement.call_topics(function, arguments))
            yield call
    finally:
        call.close()
        recorder.rest()


def start_jax() -> None:
    """Start JAX on all processes, before they know what to load.

    Raises:
        MeshError: On all processes, when JAX did not start on one.
    """
    if processes.are_several():
        with joint("load", "its devices", {}) as call:
            call.start_jax()


class Alone:
    """A call that involves this process only."""

    is_alone: ClassVar[bool] = True

    def together(self, do: Callable[[], T], what: str) -> list[T]:
        """Return the result of this process."""
        return [do()]

    def first(self, do: Callable[[], T], what: str) -> T:
        """Return the result of this process."""
        return do()

    def meet(self, what: str) -> None:
        """Do nothing: this process is alone."""

    def require(self, found: Sequence[agreement.Topic]) -> None:
        """Agree."""

    def watched(self, progress: Progress) -> Progress:
        """Return the same progress."""
        return progress

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Let errors inside the block pass."""
        yield

    def try_again(self) -> None:
        """Begin an alternative after an `attempt` that failed."""

    def start_jax(self) -> None:
        """Leave the start of JAX to its first use."""

    def draw_seed(self) -> int | None:
        """Return ``None``: models draw from the user's generators."""
        return None


Call: TypeAlias = JointCall | Alone
"""A call of all processes, or of this one."""
