"""How REKLS starts: its loss, turn of bases and longest step by `init_factor`, `relative_epsilon`, `limit_updates`.

Two tasks on the text of `rekls_training`: its small Gemma, and a network of dense layers that gets the bits of 16
bytes and predicts the next. "turned" compares the eigenvectors after step 20 with the factors after step 100: the
share of a factor that is beside the diagonal in that basis (in the Frobenius norm; 0 if the basis is frozen), a mean
over all factors. "longest" is the longest step of a weight, in learning rates.

    python -m benchmarks.rekls_start [--steps 300] [--seeds 2] [--rate 1e-2] [--only mlp]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import keras
import numpy as np

from benchmarks.rekls_training import VOCABULARY, Run, Trainer, gemma, next_bytes, text
from shardload.optimizers import REKLS

STARTS: dict[str, dict[str, Any]] = {
    f"{start}, {relative:g}{', limited' * limit}": {
        "init_factor": start,
        "relative_epsilon": relative,
        "limit_updates": limit,
    }
    for start, relative, limit in (
        (0.0, 0.0, False),
        (1e-3, 0.0, False),
        (1e-1, 0.0, False),
        ("rms", 0.0, False),
        ("rms", 1e-4, False),
        ("rms", 1e-2, False),
        ("rms", 1e-1, False),
        (1e-3, 1e-2, False),
        (0.0, 1e-2, False),
        (0.0, 0.0, True),
        ("rms", 1e-2, True),
    )
}
FROM, TO = 20, 100
"""Steps between which the turn of eigenbases is measured."""
LENGTH = 16
"""Bytes that the dense network gets."""


def mlp() -> Any:
    layers = [keras.layers.Dense(192, "relu"), keras.layers.Dense(96, "relu"), keras.layers.Dense(VOCABULARY)]
    return keras.Sequential([keras.Input((7 * LENGTH,)), *layers])


def next_byte(model: Any, weights: Any, tokens: Any) -> tuple[Any, Any]:
    """Return the logits of the dense network, and the last byte of each window."""
    bits = (tokens[:, :-1, None] >> np.arange(7)) & 1
    logits, _ = model.stateless_call(weights, [], 2.0 * bits.reshape(len(tokens), -1) - 1)
    return logits, tokens[:, -1]


TASKS: dict[str, dict[str, Any]] = {
    "gemma": {"build": partial(gemma, 64), "predict": next_bytes, "size": 16, "length": 64},
    "mlp": {"build": mlp, "predict": next_byte, "size": 256, "length": LENGTH},
}


@dataclass(slots=True)
class Turn:
    """Watches a run."""

    optimizer: REKLS
    steps: int = 0
    longest: float = 0.0
    """Step of a weight, in learning rates."""
    shares: list[float] = field(default_factory=list)
    """Of each factor."""
    vectors: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)

    def __call__(self, rate: float, weights: Any, state: Any) -> None:
        self.steps += 1
        before, self.weights = self.weights, list(map(np.asarray, weights))
        for one, other in zip(before, self.weights, strict=bool(before)):
            self.longest = max(self.longest, float(np.abs(other - one).max() / rate))
        if self.steps == FROM:
            self.vectors = self._state(state, "vectors")
        if self.steps == TO:
            self.shares = list(map(share_beside, self.vectors, self._state(state, "factors")))

    def _state(self, state: Any, kind: str) -> list[np.ndarray]:
        place = {id(v): i for i, v in enumerate(self.optimizer.variables)}
        held = [v for side in ("left", "right") for v in getattr(self.optimizer, f"{side}_{kind}")]
        return [np.asarray(state[place[id(v)]], "float64") for v in held if v is not None]


def share_beside(vectors: np.ndarray, factor: np.ndarray) -> float:
    """Return which share of a factor is beside the diagonal in a basis."""
    there = vectors.T @ factor @ vectors
    return float(np.linalg.norm(there - np.diag(np.diag(there))) / np.linalg.norm(there))


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train every task with every start and seed."""
    corpus, found = text(), []
    for task in TASKS:
        for start, given in STARTS.items():
            if options.only in f"{task}: {start}":
                found += runs(task, start, REKLS(1e-3, **given), corpus, options)
    return found


def runs(task: str, start: str, optimizer: REKLS, corpus: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    given = dict(TASKS[task])
    trainer = Trainer(start, optimizer, given.pop("build"), given.pop("predict"))
    found = []
    for seed in range(options.seeds):
        turn = Turn(optimizer)
        run = trainer.run(
            corpus, rate=options.rate, seed=seed, steps=options.steps, warm_up=options.warm_up, watch=turn, **given
        )
        found.append(summary(task, run, turn))
        print(found[-1], file=sys.stderr, flush=True)
    return found


def summary(task: str, run: Run, turn: Turn) -> dict[str, Any]:
    early = float(run.smooth[TO - 20])
    return {
        "task": task,
        "start": run.optimizer,
        "seed": run.seed,
        f"loss at {TO}": early,
        "loss at the end": run.final,
        "turned": float(np.mean(turn.shares)),
        "longest": turn.longest,
        "seconds": run.seconds,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A table for people; seeds next to each other."""
    columns = (f"loss at {TO}", "loss at the end", "turned", "longest")
    lines = [f"{'':<32}" + "".join(f"{column:>20}" for column in columns)]
    for name in dict.fromkeys((row["task"], row["start"]) for row in rows):
        group = [row for row in rows if (row["task"], row["start"]) == name]
        cells = [" ".join(f"{row[column]:.4g}" for row in group) for column in columns]
        lines.append(f"{': '.join(name):<32}" + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Train and print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--warm-up", type=float, default=0.1, help="share of the steps")
    parser.add_argument("--only", default="", help="only those whose 'task: start' contains this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    found = compare(options)
    print(json.dumps(found) if options.json else table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
