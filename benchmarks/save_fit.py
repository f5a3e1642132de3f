"""The callback inside `model.fit`: without any, with ours and with Keras', in turn, on 1x8 with Adam.

    python -m benchmarks.save_orbax --only fit

One model is trained throughout, by one compiled step; how many examples a batch has is chosen first, so that a step
takes as long as wanted. Each `fit` is one epoch and saves to a folder of its own. Its last save falls on its last
batch, as with `save_freq="epoch"`, so `on_train_end` waits for all of it: that counts for both callbacks.

Keras' callback needs an absolute path and a model it can write a configuration of; this one is functional. It does not
tell when a save fails, so that a step is there is looked at afterwards.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

from benchmarks.keras_callback_tools import eight_devices
from benchmarks.measure import Row, Run, interleave, timed, warm_memory

LAYERS = 4
HOOKS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_epoch_end",
    "on_train_end",
)
SHARE_AT_MOST = 0.05
NO_WORSE = 1.0
PROBES = (64, 256)
"""Examples in a batch, to learn how the time of a step depends on them."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What is trained."""

    n_bytes: int
    """Weights and slots."""
    step_s: float
    batches: int
    every: int
    """Batches from one save to the next."""


@dataclass(slots=True)
class Hooks:
    """Time inside the hooks of the callbacks, one callback after the other, each in one ``fit``."""

    folder: Path
    every: int
    seen: dict[str, list[dict[str, Run]]] = field(default_factory=lambda: {"ours": [], "keras": []})
    """By side, of each ``fit`` by hook."""
    _side: str = "none"
    _now: dict[str, Run] = field(default_factory=dict)

    def callbacks(self, side: str) -> list[Any]:
        """What the next ``fit`` is given: nothing, our callback or Keras'."""
        import shardload.callbacks

        self._side, self._now = side, dict.fromkeys(HOOKS, Run(0.0, 0.0))
        if side == "none":
            return []
        kind = shardload.callbacks.OrbaxCheckpoint if side == "ours" else keras.callbacks.OrbaxCheckpoint
        callback = kind(str(self.folder), save_freq=self.every)
        for name in HOOKS:
            setattr(callback, name, self._timed(name, getattr(callback, name)))
        return [callback]

    def take(self) -> None:
        """Keep what the last ``fit`` took, and remove what it saved."""
        if self._side != "none":
            if not [p for p in self.folder.iterdir() if p.name.isdigit()]:
                raise AssertionError(f"fit with {self._side} saved nothing")
            self.seen[self._side].append(self._now)
        self._side = "none"
        shutil.rmtree(self.folder, ignore_errors=True)

    def totals(self, side: str, rounds: int) -> tuple[Run, ...]:
        """All hooks together, of the last so many runs."""
        last = self.seen[side][-rounds:]
        return tuple(Run(sum(r.wall_s for r in f.values()), sum(r.cpu_s for r in f.values())) for f in last)

    def median_s(self, side: str, hook: str, rounds: int) -> float:
        """Of one hook in one ``fit``, over the last so many runs."""
        return statistics.median(f[hook].wall_s for f in self.seen[side][-rounds:])

    def _timed(self, name: str, hook: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **named: Any) -> None:
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                hook(*args, **named)
            finally:
                before = self._now[name]
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                self._now[name] = Run(before.wall_s + wall, before.cpu_s + cpu)

        return run


def made_model(n_bytes: int) -> Any:
    """Square layers whose kernels and Adam's two slots take so many bytes."""
    width = max(8, round((n_bytes / (LAYERS * 3 * 4)) ** 0.5 / 8) * 8)
    x = inputs = keras.Input((width,))
    for _ in range(LAYERS):
        x = keras.layers.Dense(width, "relu")(x)
    model = keras.Model(inputs, x)
    model.compile("adam", "mse")
    return model


def examples(model: Any, count: int) -> Any:
    """Random input, which is what comes out as well."""
    return np.random.default_rng(0).random((count, model.input_shape[1]), np.float32)


def fit(model: Any, x: Any, batch_size: int, callbacks: list[Any]) -> None:
    """One epoch."""
    model.fit(x, x, batch_size=batch_size, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)


def batch_size_for(model: Any, step_s: float) -> int:
    """So many examples that a step takes about so long: a line through two sizes, each timed after one to compile."""
    steps, seconds = 4, []
    for size in PROBES:
        x = examples(model, steps * size)
        fit(model, x, size, [])
        seconds.append(statistics.median(timed(partial(fit, model, x, size, [])).wall_s for _ in range(3)))
    slope = max((seconds[1] - seconds[0]) / steps / (PROBES[1] - PROBES[0]), 1e-6)
    fixed = seconds[0] / steps - slope * PROBES[0]
    return max(8, round((step_s - fixed) / slope / 8) * 8)


def measure_fit(folder: Path, wanted: Fit, *, rounds: int) -> tuple[list[Row], dict[str, float]]:
    """Shares of time inside the hooks, slowdowns against none, ours against Keras'; and how long what took."""
    hooks = Hooks(folder / "run", wanted.every)

    def between() -> None:
        hooks.take()
        os.sync()
        warm_memory(3 * wanted.n_bytes)

    with eight_devices():
        model = made_model(wanted.n_bytes)
        batch_size = batch_size_for(model, wanted.step_s)
        x = examples(model, wanted.batches * batch_size)

        def train(side: str) -> None:
            fit(model, x, batch_size, hooks.callbacks(side))

        sides = {side: partial(train, side) for side in ("none", "ours", "keras")}
        runs = interleave(sides, rounds=rounds, between=between)
    facts = {
        "fit: seconds a step": statistics.median(r.wall_s for r in runs["none"]) / wanted.batches,
        "fit: examples a batch": float(batch_size),
        "fit: saves": float(wanted.batches // wanted.every),
    }
    for side in ("ours", "keras"):
        for hook in ("on_train_batch_end", "on_train_end"):
            facts[f"fit: {side}, seconds in {hook}"] = hooks.median_s(side, hook, rounds)
    return rows(runs, hooks, rounds=rounds), facts


def rows(runs: dict[str, tuple[Run, ...]], hooks: Hooks, *, rounds: int) -> list[Row]:
    """What is wanted of the callback, and the same of Keras' beside it."""
    ours, theirs = hooks.totals("ours", rounds), hooks.totals("keras", rounds)
    return [
        Row("fit: in our hooks", "all of fit", ours, runs["ours"], SHARE_AT_MOST),
        Row("fit: in Keras' hooks", "all of fit", theirs, runs["keras"]),
        Row("fit with ours", "fit without", runs["ours"], runs["none"]),
        Row("fit with Keras'", "fit without", runs["keras"], runs["none"]),
        Row("fit with ours", "fit with Keras'", runs["ours"], runs["keras"], NO_WORSE),
    ]
