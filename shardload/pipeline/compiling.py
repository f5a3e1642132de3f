"""Compile a model's first step while its weights are read, as the argument ``warm_up`` requests.

    bound to its mesh ─► transfer ───────────────► initialise ─► wait ─► report
                    └──► thread: trace, lower ─► compile ────────┘
                                             ▲ from here on, the thread uses nothing of the model

Shapes, dtypes and shardings of all variables are known before the first byte is read, and compiling needs nothing else
(`shardload.keras_bridge.compiled_steps`). The thread runs no program, so processes that load together do not wait for
each other in it. A failure in it is a note in the report: the first call then compiles, as it would without.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from shardload.errors import ShardloadError, UnsupportedError, public_name
from shardload.keras_bridge.compiled_steps import LoweredStep, build_for_training, has_derived_values, lower_step
from shardload.keras_bridge.recording import InThread
from shardload.mapping.layer_hooks import has_keras_hook
from shardload.pipeline.warm_up import WarmUp

if TYPE_CHECKING:
    from shardload.pipeline.preparing import PreparedLoad
    from shardload.pipeline.reporting import Clock

Lower: TypeAlias = "Callable[[PreparedLoad, Any], LoweredStep]"
"""Function that traces and lowers a step of a prepared model, for what ``warm_up`` gives under the step's name."""


class Warming:
    """Compiles steps of a model in a thread: from `running`, whose block fills the model, to `notes`."""

    def __init__(self, warm_up: WarmUp, lower: Mapping[str, Lower], *, has_files: bool = False) -> None:
        """Prepare to compile; ``lower`` has a function for each step that is not Keras' own.

        ``has_files``: whether layers load files after the weights, such as vocabularies, which a step may contain.
        """
        self._steps, self._lower, self._has_files = warm_up.steps, lower, has_files
        self._notes: list[str] = []
        self._ready: list[tuple[str, Any]] = []
        self._lowered = threading.Event()
        self._thread: InThread[None] | None = None
        self._stopped = False

    @contextmanager
    def running(self, prepared: PreparedLoad, clock: Clock) -> Iterator[None]:
        """Compile during the block, which fills the model; its end waits until the thread uses the model no more."""
        for name, example in self._steps.items():
            with self._noting(name):
                self._check(prepared)
                if name == "train":
                    build_for_training(prepared.model, example)
                self._ready.append((name, example))
        if self._ready:
            self._thread = InThread(lambda: self._run(prepared), name="shardload-warm-up")
        try:
            yield
        except BaseException:
            self._stopped = True
            raise
        finally:
            if self._thread is not None:
                with clock("warm_up"):
                    self._lowered.wait()

    def notes(self, clock: Clock) -> tuple[str, ...]:
        """Wait until everything is compiled; return a note for each step that could not be."""
        if self._thread is not None:
            with clock("warm_up"):
                self._thread.result()
        return tuple(self._notes)

    def _run(self, prepared: PreparedLoad) -> None:
        try:
            steps = list(self._lowered_steps(prepared))
        finally:
            self._lowered.set()
        for name, step in steps:
            with self._noting(name):
                step.compile()

    def _lowered_steps(self, prepared: PreparedLoad) -> Iterator[tuple[str, LoweredStep]]:
        for name, example in self._ready:
            if self._stopped:
                return
            with self._noting(name):
                lower = self._lower.get(name)
                yield name, lower(prepared, example) if lower else lower_step(prepared.model, name, example)  # type: ignore[arg-type]

    def _check(self, prepared: PreparedLoad) -> None:
        """Raise if values that are no variables may become part of the compiled step before the load sets them."""
        custom = (step.saveable for step in prepared.mapping.steps if step.saveable is not None)
        if self._has_files or has_derived_values(prepared.model) or not all(map(has_keras_hook, custom)):
            raise UnsupportedError("its layers also compute with what they load besides variables")

    @contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        try:
            yield
        # Of any kind: tracing runs the user's code, and the load itself is fine.
        except Exception as error:
            reason = str(error) if isinstance(error, ShardloadError) else f"{public_name(error)}: {error}"
            self._notes.append(f"not compiled during the load: {name}: {reason:.300}")
