"""A small Gemma on real text: steps to the same loss with REKLS, AdamW and Keras' Muon.

The text is the documentation of NumPy, from its docstrings, as bytes. Each optimizer gets a sweep of learning rates
with one seed; the best by its loss at the end gets further seeds. The schedule is the same for all: a linear warm-up
(over a tenth of the steps by default), then a cosine to a tenth of the rate. The loss is the mean of the last steps'
training losses, each of a batch drawn at random.

    python -m benchmarks.rekls_training [--steps 300] [--svg docs/rekls-training.svg] [--json]
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import keras
import numpy as np

from benchmarks.drawing import document
from benchmarks.drawing import text as label
from shardload.optimizers import REKLS
from shardload.stores.local import local_target

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
LOOKS = {
    "REKLS": ("#c0392b", "#ff8a80", "none"),
    "REKLS, rank_tolerance=0": ("#a0560c", "#f0b27a", "2 3"),
    "REKLS, bfloat16 factors": ("#7d3c98", "#c39bd3", "8 3"),
    "REKLS, first update too": ("#806600", "#f4d03f", "8 3 2 3"),
    "AdamW": ("#1f5fae", "#6aa9f0", "6 4"),
    "Muon": ("#1a7a43", "#5fd38d", "10 4"),
}
"""Of a curve: its colour on white, on a dark page, and its dashes."""
OPTIONS: dict[str, dict[str, Any]] = {
    "REKLS": {},
    "REKLS, rank_tolerance=0": {"rank_tolerance": 0},
    "REKLS, bfloat16 factors": {"factor_dtype": "bfloat16"},
    "REKLS, first update too": {"skip_first_update": False},
}
VOCABULARY = 128
SMOOTHED = 20
"""Losses are means over so many steps."""


@dataclass(frozen=True, slots=True)
class Run:
    optimizer: str
    rate: float
    seed: int
    losses: tuple[float, ...]
    """Of each step."""
    seconds: float

    @property
    def smooth(self) -> np.ndarray:
        """Means over the last steps, from step `SMOOTHED` on."""
        return np.convolve(self.losses, np.ones(SMOOTHED) / SMOOTHED, "valid")

    @property
    def final(self) -> float:
        """The mean loss at the end; infinite if it diverged."""
        return float(self.smooth[-1]) if np.isfinite(self.losses).all() else np.inf

    def steps_to(self, loss: float) -> int | None:
        """Steps until the mean loss is as low, ``None`` if it never is."""
        below = np.flatnonzero(self.smooth <= loss)
        return int(below[0]) + SMOOTHED if len(below) else None


def text() -> np.ndarray:
    """The docstrings of NumPy's public functions and modules, each once."""
    found: dict[str, None] = {}
    for module in (np, np.linalg, np.fft, np.random, np.ma, np.polynomial, np.lib, np.char, np.testing):
        for name in sorted(dir(module)):
            if not name.startswith("_") and name != "tests":
                found.setdefault(inspect.getdoc(getattr(module, name, None)) or "")
    return np.frombuffer("\n\n".join(found).encode("ascii", "replace"), np.uint8)


def batches(corpus: np.ndarray, *, steps: int, size: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """Yield windows of the text, (steps, size, length + 1)."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(corpus) - length - 1, size)
        yield corpus[starts[:, None] + np.arange(length + 1)].astype("int32")


def gemma(width: int) -> Any:
    import keras_hub

    return keras_hub.models.GemmaBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=1,
        hidden_dim=width,
        intermediate_dim=4 * width,
        head_dim=width // 4,
    )


def next_bytes(model: Any, weights: Any, tokens: Any) -> tuple[Any, Any]:
    """Return the logits of a Gemma for every byte but the first, and those bytes."""
    inputs = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((1, 1), "int32") + 0 * tokens[:, :-1]}
    hidden, _ = model.stateless_call(weights, [], inputs)
    return hidden @ weights[0].T, tokens[:, 1:]  # weights[0]: the embedding, which Gemma ties to its output


def optimizer_of(name: str) -> Any:
    if name == "AdamW":
        return keras.optimizers.AdamW(1e-3, weight_decay=0.01, beta_2=0.95, epsilon=1e-8)
    if name == "Muon":
        return keras.optimizers.Muon(1e-3, weight_decay=0.01, adam_weight_decay=0.01, adam_beta_2=0.95)
    return REKLS(1e-3, weight_decay=0.01, **OPTIONS[name])


class Trainer:
    """One model and one compiled step for an optimizer; runs differ in rate and seed only."""

    def __init__(
        self, name: str, optimizer: Any, build: Callable[[], Any], predict: Callable[..., Any] = next_bytes
    ) -> None:
        self.name, self.optimizer, self.build, self.predict = name, optimizer, build, predict
        self.model = build()
        optimizer.build(self.model.trainable_variables)
        self.fresh = [np.asarray(v.value) for v in optimizer.variables]
        self.rate_at = next(i for i, v in enumerate(optimizer.variables) if v.name == "learning_rate")
        self.step = jax.jit(self._step)

    def _step(self, weights: Any, state: Any, tokens: Any, rate: Any) -> Any:
        def loss_of(trainable: Any) -> Any:
            logits, targets = self.predict(self.model, trainable, tokens)
            return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(targets, logits, from_logits=True))

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        state = [rate if i == self.rate_at else each for i, each in enumerate(state)]
        weights, state = self.optimizer.stateless_apply(state, gradients, weights)
        return weights, state, loss

    def run(
        self,
        corpus: np.ndarray,
        *,
        rate: float,
        seed: int,
        steps: int,
        size: int,
        length: int,
        warm_up: float,
        watch: Callable[[float, Any, Any], None] = lambda rate, weights, state: None,
    ) -> Run:
        """Train from the start. ``watch`` gets the rate, weights and state of each step."""
        keras.utils.set_random_seed(seed)
        weights = [v.value for v in self.build().trainable_variables]
        state: Any = [jax.numpy.asarray(x) for x in self.fresh]
        losses, began = [], time.perf_counter()
        for at, tokens in enumerate(batches(corpus, steps=steps, size=size, length=length, seed=seed)):
            now = np.float32(rate * schedule(at, steps, warm_up))
            weights, state, loss = self.step(weights, state, tokens, now)
            losses.append(loss)
            watch(now, weights, state)
        found = tuple(map(float, losses))
        return Run(self.name, rate, seed, found, time.perf_counter() - began)


def schedule(at: int, steps: int, warm_up: float) -> float:
    warm = max(1, int(steps * warm_up))
    if at < warm:
        return (at + 1) / warm
    return float(0.1 + 0.45 * (1 + np.cos(np.pi * (at - warm) / (steps - warm))))


def compare(options: argparse.Namespace) -> list[Run]:
    """Sweep, then repeat the best rate of each optimizer with further seeds."""
    corpus, found = text(), []
    given = {"steps": options.steps, "size": options.batch, "length": options.length, "warm_up": options.warm_up}
    for name in options.only or LOOKS:
        trainer = Trainer(name, optimizer_of(name), partial(gemma, options.width))
        sweep = [trainer.run(corpus, rate=rate, seed=0, **given) for rate in options.rates]
        best = min(sweep, key=lambda run: run.final).rate
        found += sweep + [trainer.run(corpus, rate=best, seed=seed, **given) for seed in range(1, options.seeds)]
        for run in found[-len(options.rates) - options.seeds + 1 :]:
            print(
                f"{name} {run.rate:g} seed {run.seed}: {run.final:.4f} {run.seconds:.0f} s", file=sys.stderr, flush=True
            )
    return found


def best_of(runs: list[Run]) -> dict[str, list[Run]]:
    """Return for each optimizer the runs of its best rate, one per seed."""
    trained = [name for name in LOOKS if any(run.optimizer == name for run in runs)]
    best = {name: min((r for r in runs if r.optimizer == name), key=lambda r: r.final).rate for name in trained}
    swept = {name: [r for r in runs if (r.optimizer, r.rate) == (name, rate)] for name, rate in best.items()}
    return {name: sorted(found, key=lambda r: r.seed) for name, found in swept.items()}


def table(runs: list[Run]) -> str:
    """A table for people: final loss, steps to the final loss of AdamW with the same seed."""
    best = best_of(runs)
    peers = best.get("AdamW", next(iter(best.values())))
    lines = [
        f"{'':<26}{'rate':>8}{'final loss (seeds)':>28}{f'steps to that of {peers[0].optimizer}':>28}{'s per run':>11}"
    ]
    for name, found in best.items():
        finals = " ".join(f"{run.final:.3f}" for run in found)
        steps = " ".join(str(run.steps_to(peer.final) or "-") for run, peer in zip(found, peers, strict=True))
        seconds = float(np.median([run.seconds for run in found]))
        lines.append(f"{name:<26}{found[0].rate:>8g}{finals:>28}{steps:>28}{seconds:>11.0f}")
    return "\n".join(lines)


def svg(runs: list[Run]) -> str:
    """The mean curve of each optimizer, between those of its lowest and highest seed."""
    best = best_of(runs)
    width, height, margin = 640, 400, 60
    curves = {name: np.array([run.smooth for run in found]) for name, found in best.items()}
    steps = next(iter(curves.values())).shape[1]
    low, high = min(c.min() for c in curves.values()), max(np.percentile(c, 97) for c in curves.values())

    def at(step: int, loss: float) -> str:
        x = margin + (width - 2 * margin) * step / (steps - 1)
        y = height - margin - (height - 2 * margin) * (min(loss, high) - low) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = []
    shown = range(0, steps, max(1, steps // 150))
    for place, (name, curve) in enumerate(curves.items()):
        mean, kind, y = curve.mean(0), f"curve{place}", margin + 24 * place
        band = [at(s, curve[:, s].max()) for s in shown] + [at(s, curve[:, s].min()) for s in reversed(shown)]
        parts.append(f'<polygon class="{kind} band" points="{" ".join(band)}"/>')
        parts.append(f'<polyline class="{kind} line" points="{" ".join(at(s, mean[s]) for s in shown)}"/>')
        parts.append(f'<polyline class="{kind} line" points="{width - 380},{y - 5} {width - 340},{y - 5}"/>')
        parts.append(label(width - 332, y, f"{name}, rate {best[name][0].rate:g}"))
    for loss in np.linspace(low, high, 5):
        x, y = map(float, at(0, loss).split(","))
        parts.append(label(x - 6, y + 5, f"{loss:.2f}", anchor="end"))
    for step in np.linspace(0, steps - 1, 5).astype(int):
        x = float(at(int(step), low).split(",")[0])
        parts.append(label(x, height - margin + 22, str(step + SMOOTHED), anchor="middle"))
    parts.append(label(width / 2, height - 12, "step", anchor="middle"))
    finals = (f"{name}: {', '.join(f'{run.final:.3f}' for run in found)}" for name, found in best.items())
    told = f"The loss at the end, by seed. {'; '.join(finals)}"
    return document(height, CAPTION, told, parts, width=width, style=curve_style(list(curves)))


CAPTION = f"Mean training loss over {SMOOTHED} steps, by step"


def curve_style(names: Sequence[str]) -> str:
    """Return the style of these curves, in the order of their classes, for both colour schemes."""
    rules = ["svg { font: 16px system-ui, sans-serif; }", ".line { fill: none; stroke-width: 2; }"]
    rules += [".background { fill: #ffffff; }", "text { fill: #1c2330; }", ".band { stroke: none; opacity: 0.15; }"]
    dark = [".background { fill: #1e2129; }", "text { fill: #e6e8eb; }"]
    for place, name in enumerate(names):
        day, night, dashes = LOOKS[name]
        rules.append(f".curve{place}.line {{ stroke: {day}; stroke-dasharray: {dashes}; }}")
        rules.append(f".curve{place}.band {{ fill: {day}; }}")
        dark.append(f".curve{place}.line {{ stroke: {night}; }}")
        dark.append(f".curve{place}.band {{ fill: {night}; }}")
    night_rules = "\n".join(f"  {rule}" for rule in dark)
    return "\n".join(["<style>", *rules, f"@media (prefers-color-scheme: dark) {{\n{night_rules}\n}}", "</style>"])


def main(argv: list[str] | None = None) -> int:
    """Train, print the table, draw the curve."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--warm-up", type=float, default=0.1, help="share of the steps")
    parser.add_argument("--only", action="append", choices=list(LOOKS), help="only this one; can be repeated")
    parser.add_argument("--svg", type=local_target)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    runs = compare(options)
    if options.svg:
        options.svg.write_text(svg(runs))
    print(json.dumps([asdict(run) for run in runs]) if options.json else table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
