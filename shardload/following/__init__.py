"""Follow a training run: load each new step into a model that is in use, and swap it in as a whole.

    source ─► a new step? ─► read and verify it next to the old weights ─► wait until nobody holds them ─► assign all
                 ▲                              │ any failure: the old weights stay
                 └───────── again later ◄───────┘

docs/design/0044-follow.md tells why users hold the weights, and why several processes update together.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal

from shardload import processes
from shardload.errors import (
    BackendError,
    DisagreementError,
    LayoutError,
    MeshError,
    MismatchError,
    ProcessLostError,
    UsageError,
    suggests_arguments,
)
from shardload.following.gate import Gate, StoppedError
from shardload.interrupts import defer_interrupt
from shardload.keras_bridge.model_state import plain_model
from shardload.pipeline.load import is_joint
from shardload.pipeline.request import RestoreRequest
from shardload.restoring import adopt
from shardload.runs.step import StepInfo
from shardload.runs.watching import StepWatch
from shardload.typing import PathLike
from shardload.units import check_choice, is_real

_log = logging.getLogger("shardload")
_WRONG_CALL = (UsageError, BackendError, DisagreementError, ProcessLostError)
"""Errors that do not pass by themselves."""
_WRONG_MODEL = (MismatchError, MeshError, LayoutError)
"""Errors that do not pass by themselves if no step could ever be loaded into the model."""
_WAIT_S = 60.0
"""Seconds of one wait for a new step, of several processes together."""
_FAILED_S = 1.0
"""Seconds that the background thread waits after an error of a wrong call."""


@dataclass(frozen=True, slots=True)
class _Adopted:
    info: StepInfo
    staleness_s: float


@suggests_arguments
def follow(
    model: Any,
    source: PathLike,
    *,
    which: Literal["latest", "best"] = "latest",
    every_s: float = 2.0,
    host_memory_bytes: int | str | None = None,
) -> Follower:
    """Keep a model's weights at the newest, or the best, step of a training run.

    Each new step is read and verified next to the old weights, in the model's own layout, which may be another than
    the trainer's, and then swapped in as a whole. So devices need memory for the weights twice. The optimizer is left
    alone. Nothing is read before the first `Follower.update`, step of a loop, or `Follower.start`.

    Examples:
        ```python
        follower = shardload.follow(model, "checkpoints")
        if (step := follower.update()) is not None:
            print(f"now with the weights of step {step}")
        ```

    Args:
        model: A built Keras model, with or without values.
        source: The folder of the steps, or its address: in a bucket, or on an HTTP server such as `shardload serve`.
        which: ``"latest"``, or ``"best"`` by the metric that the trainer monitors.
        every_s: Least seconds between two checks for a new step. With 0, each `Follower.update` checks.
        host_memory_bytes: As for `load_weights`.

    Raises:
        UsageError: If an argument is of the wrong kind, or ``model`` is not a Keras model.
        UnsupportedError: If the source is at an address that steps are not read from.
    """
    return Follower(model, source, which=which, every_s=every_s, host_memory_bytes=host_memory_bytes)


class Follower:
    """Loads each new step of a run into a model; `follow` makes one.

    There are three ways to use it; several processes that share a mesh have the first two:

    * ``follower.update()`` loads a new step now, and returns its number, or ``None`` if there is none.
    * ``for step in follower:`` waits for each new step.
    * ``with follower:``, or ``start()`` and ``stop()``, updates in a background thread.

    A thread that uses the weights while another one updates needs `held`: all of the block sees one step.

    Examples:
        ```python
        with shardload.follow(model, "checkpoints") as follower:  # updates in the background
            with follower.held() as step:
                predictions = model.predict(x)
        ```
    """

    @suggests_arguments
    def __init__(
        self,
        model: Any,
        source: PathLike,
        *,
        which: Literal["latest", "best"] = "latest",
        every_s: float = 2.0,
        host_memory_bytes: int | str | None = None,
    ) -> None:
        if not isinstance(source, str | os.PathLike) or not os.fspath(source):
            raise UsageError(f"Cannot follow {source!r:.60}: expected the folder of the steps, or its address")
        check_choice("which", which, ("latest", "best"))
        if not (is_real(every_s) and 0 <= every_s < float("inf")):
            raise UsageError(f"Cannot use every_s={every_s!r:.60}: expected a number of seconds, 0 or more")
        self._ended = threading.Event()
        self._request = RestoreRequest(
            model=plain_model(model),
            directory=source,
            step=which,
            items="weights",
            atomic=True,
            host_memory_bytes=host_memory_bytes,
            progress=_Stoppable(self._ended),
        )
        self._request.check()
        self._watch = StepWatch(source, which, every_s=float(every_s))
        self._gate, self._updating = Gate(self._ended), threading.Lock()
        self._adopted: _Adopted | None = None
        self._problem: str | None = None
        self._thread: threading.Thread | None = None

    @property
    def step(self) -> int | None:
        """The number of the step that the weights are from; ``None`` if none was loaded yet."""
        return None if self._adopted is None else self._adopted.info.step

    @property
    def staleness_s(self) -> float | None:
        """Seconds from when the trainer began to save this step until it was swapped in, by the clocks of both."""
        return None if self._adopted is None else self._adopted.staleness_s

    @property
    def problem(self) -> str | None:
        """Why there may be a newer step than the loaded one, and the way out; ``None`` if all is well."""
        return self._problem

    @contextmanager
    def held(self) -> Iterator[int | None]:
        """Keep the weights as they are for the with block, and yield the number of their step.

        Any number of threads may hold them at once. A new step waits for all of them, and those who come later wait for
        the new step, so hold them for one batch, not for good. A function that takes the weights as arguments needs
        them held only while it is given them: arrays do not change.
        """
        with self._gate.held():
            yield self.step

    def update(self) -> int | None:
        """Load the newest or best step if it is not the loaded one, and return its number; else return ``None``.

        It looks for a new step if the last look was ``every_s`` ago, so it may be called with each batch.
        Of several processes that share the model's mesh, all call it at the same point of their program, and load the
        same step. A failure to find or read a step leaves the old weights, is told by `problem` and in the log, and is
        tried again by a later call.

        Raises:
            UsageError: If this thread holds the weights, or a background thread updates them.
            MismatchError: If the first step does not fit the model; the model is unchanged.
            DisagreementError: If several processes do not make the same call.
            ProcessLostError: If another process of the run ended.
        """
        self._check_alone()
        self._ended.clear()
        return self._update(0.0)

    def __iter__(self) -> Iterator[int]:
        """Wait for each new step, load it, and yield its number; end once `stop` was called, also before the loop.

        Raises:
            UsageError: If a background thread updates the weights.
        """
        self._check_alone()
        while not self._ended.is_set():
            if (number := self._update(_WAIT_S)) is not None:
                yield number

    def start(self) -> Follower:
        """Load the step that is there, if any, then go on in a background thread until `stop`.

        Raises:
            UsageError: If several processes share the model's mesh: each would swap at another point of its program.
            MismatchError: If the step does not fit the model.
        """
        if is_joint(self._request):
            raise UsageError(
                "Cannot follow in the background: several processes share the model's mesh, and each would change its "
                "weights at another moment. Call update() at the same point of the program on every process"
            )
        if self._thread is None:
            self.update()
            if self._ended.is_set():  # another thread has stopped it meanwhile
                return self
            self._thread = threading.Thread(target=self._run, name="shardload-follow", daemon=True)
            self._thread.start()
            atexit.register(self.stop)  # before JAX ends, which the thread uses
        return self

    def stop(self) -> None:
        """End the background thread, and each loop over the steps; a step that is not swapped in yet is given up.

        Any thread may call it, also one that holds the weights. The follower stays stopped, so that a loop that begins
        later ends at once, until `update` or `start` is called.
        """
        self._gate.end()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
            atexit.unregister(self.stop)

    def __enter__(self) -> Follower:
        """Start the background thread."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the background thread."""
        self.stop()

    def _check_alone(self) -> None:
        if self._thread is not None:
            raise UsageError(
                "Cannot update: a background thread does so, since start(). Read follower.step in a held() block, or "
                "call stop() first"
            )

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._update(_WAIT_S)
            except Exception as error:  # the thread must not end without a word, and a later step may be right
                self._note(error)
                self._ended.wait(_FAILED_S)

    def _update(self, wait_s: float) -> int | None:
        if self._gate.is_held_here:
            raise UsageError("Cannot update inside of held(): the new weights would wait for the end of its with block")
        with self._updating:
            try:
                found = adopt(
                    self._request, partial(self._choose, wait_s), looks=self._gate.swapping, swap=self._swapping
                )
            except _WRONG_CALL:
                raise
            except StoppedError:
                return None
            except Exception as error:  # any other error, such as too little memory, leaves the old weights in place
                if self._adopted is None and isinstance(error, _WRONG_MODEL):
                    raise
                if self._watch.fail():
                    self._note(error)
                return None
            if found is not None:
                self._watch.settle()
            if not self._watch.is_failing:
                self._problem = None
            return None if found is None else found.info.step

    def _choose(self, wait_s: float) -> StepInfo | None:
        """Return the step to load, on the process that decides; ``None`` if there is no new one for so long."""
        until_s = time.monotonic() + wait_s
        if wait_s:
            self._watch.rest(self._ended)
        while not self._ended.is_set():
            known = None if self._adopted is None else self._adopted.info
            found = self._watch.find(known) if self._watch.is_due else None
            left_s = until_s - time.monotonic()
            if found is not None or left_s <= 0:
                return found
            self._watch.wait(left_s, self._ended)
        return None

    @contextmanager
    def _swapping(self, info: StepInfo) -> Iterator[None]:
        # Without a Ctrl-C between the new weights and the number of their step.
        with self._gate.swapping(), defer_interrupt(after_errors=True):
            yield
            self._adopted = _Adopted(info, time.time() - info.saved_s)

    def _note(self, error: Exception) -> None:
        stays = "The model has no step yet" if self.step is None else f"The weights of step {self.step} stay"
        text = f"Cannot follow {self._watch.source}: {str(error).rstrip('.')}. {stays}; a later try may succeed."
        # Once, not at each try, and by one of the processes that have it together.
        if text != self._problem and (processes.is_first() or not is_joint(self._request)):
            _log.warning("%s", text)
        self._problem = text


class _Stoppable:
    """Progress that shows nothing, and gives a load up once an event is set."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended

    def start(self, total_bytes: int, description: str) -> None:
        """Do nothing."""

    def advance(self, n_bytes: int) -> None:
        """Raise if the event is set."""
        if self._ended.is_set():
            raise StoppedError

    def stop(self) -> None:
        """Do nothing."""
