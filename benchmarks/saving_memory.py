"""What recomputation and split sequences cost in time, and save in memory: real training steps on simulated devices.

    python -m benchmarks.saving_memory [--rounds 3] [--only llama] [--mesh 1x8] [--json]

For each model and mesh, six plans (``remat`` times ``sequence_parallel``) train with the same layouts of weights,
initial values and batch, in turn, with AdamW and Keras' own ``fit``. Numbers are ratios to the plan that saves nothing:
the median of the rounds, with the lowest and the highest. Losses of all steps are compared.

    plan ─► AutoShardDistribution.build ─► fit, one step in each round ─► seconds, losses
       └──► compile_step ─► bytes of temporaries

XLA for CPU removes the barriers of `jax.checkpoint`: a step then recomputes, but so early that it saves no memory. So
this module sets ``XLA_FLAGS=--xla_disable_hlo_passes=cse_barrier_expander``, as `compile_step` does.

Eight devices share the cores and the memory of this machine: an exchange is a copy, and what all devices compute alike
costs eight times. Times are therefore also planned with the rates of `Hardware.simulated`. Compare these with
CPU-seconds of user code: those of the system go into fresh pages for temporaries, which the process gives back after
each step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.measure import interleave

BATCH, LENGTH = 8, 512
VOCABULARY, LAYERS, WIDTH, HEADS = 2048, 4, 512, 8
MESHES = ("1x8", "2x4")
KEEP_BARRIERS = "--xla_disable_hlo_passes=cse_barrier_expander"
HEAD = (
    "recomputed; sequences",
    "user CPU-s",
    "all CPU-s",
    "wall clock",
    "planned: no reduce-scatter",
    "simulated",
    "accelerator",
    "activations planned",
    "temporaries compiled",
    "loss",
)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, what it estimates, and the bytes that XLA allocates for it."""

    plan: Any
    name: str
    seconds: dict[str, float]
    """Of a step: with the rates of a TPU but no reduce-scatters, with `Hardware.simulated`, and with all of a TPU."""
    activation_bytes: int
    temporary_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """One call of ``fit`` with one batch."""

    loss: float
    user_s: float
    cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class Saved:
    """What one plan costs and saves, as ratios to the plan that saves nothing."""

    model: str
    mesh: str
    name: str
    measured: dict[str, tuple[float, float, float]]
    """For each clock: the median, the lowest and the highest ratio of a round."""
    seconds: dict[str, float]
    """For each clock: the median of a step."""
    planned: dict[str, float]
    activations: float
    temporaries: float
    temporary_bytes: int
    """On each device."""
    loss_difference: float
    """Largest relative difference of a step's loss."""

    def line(self) -> str:
        """Return a row in Markdown."""
        clocks = ["{:.2f} ({:.2f}-{:.2f})".format(*self.measured[clock]) for clock in ("user_s", "cpu_s", "wall_s")]
        planned = [f"{ratio:.2f}" for ratio in (*self.planned.values(), self.activations)]
        compiled = f"{self.temporaries:.2f} ({self.temporary_bytes / 2**20:.0f} MiB)"
        return f"| {' | '.join((self.name, *clocks, *planned, compiled, f'{self.loss_difference:.0e}'))} |"


def llama() -> Any:
    """Build a Llama with logits."""
    import keras_hub

    return _trained(keras_hub.models.LlamaBackbone(VOCABULARY, LAYERS, HEADS, WIDTH, 3 * WIDTH, HEADS))


def gemma2() -> Any:
    """Build a Gemma 2 with logits: soft caps, and four norms in each block."""
    import keras_hub

    backbone = keras_hub.models.GemmaBackbone(
        VOCABULARY, LAYERS, HEADS, HEADS, WIDTH, 6 * WIDTH, 64, query_head_dim_normalize=True, use_post_ffw_norm=True,
        use_post_attention_norm=True, final_logit_soft_cap=30, attention_logit_soft_cap=50,
    )  # fmt: skip
    return _trained(backbone)


MODELS: tuple[Callable[[], Any], ...] = (llama, gemma2)


def _trained(backbone: Any) -> Any:
    import keras

    model = keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))
    model.compile(keras.optimizers.AdamW(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def plans(build: Callable[[], Any], mesh: str) -> list[Planned]:
    """Plan and compile a step in six ways, first the one that saves nothing.

    All have the same layouts of weights. None is pinned: a pin says how a weight is stored, and a search may then
    gather it for use, which it otherwise does under a limit only.
    """
    import jax

    import shardload
    from shardload.parallel import Hardware, compile_step, search

    with shardload.abstract():
        model = build()
    inputs = {key: jax.ShapeDtypeStruct((BATCH, LENGTH), "int32") for key in ("token_ids", "padding_mask")}
    rates = {
        "no_reduce_scatter": Hardware(reduce_scatter=False),  # XLA for CPU makes none
        "simulated": Hardware.simulated(),
        "accelerator": Hardware(),
    }
    found, weights = [], set()
    for split in (False, True):
        for remat in ("none", "matmuls", "full"):
            options = {"optimizer": "adamw", "remat": remat, "sequence_parallel": split}
            searched = {
                name: search(model, mesh, inputs=inputs, hardware=one, **options) for name, one in rates.items()
            }
            weights |= {repr(plan.partition_specs()) for plan in searched.values()}
            plan = searched["no_reduce_scatter"]
            compiled = compile_step(model, plan, inputs, training="gradients")
            seconds = {key: one.step_s for key, one in searched.items()}
            name = f"{remat}; {'split' if split else 'whole'}"
            found.append(Planned(plan, name, seconds, plan.device.activations, compiled.temporary_bytes))
    assert len(weights) == 1, f"{len(weights)} layouts of weights on {mesh}, expected one"
    return found


def train(build: Callable[[], Any], found: list[Planned], *, rounds: int) -> dict[str, list[Step]]:
    """Train with each plan, in turn, and return its steps; the first one compiles."""
    import keras
    import numpy as np

    import shardload

    tokens = np.random.default_rng(0).integers(1, VOCABULARY, (BATCH, LENGTH)).astype("int32")
    inputs, target = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}, np.roll(tokens, -1, axis=1)
    steps: dict[str, list[Step]] = {one.name: [] for one in found}

    def step(name: str, model: Any) -> None:
        wall, used = time.perf_counter(), os.times()
        history = model.fit(inputs, target, batch_size=BATCH, shuffle=False, verbose=0).history
        wall, now = time.perf_counter() - wall, os.times()
        user = now.user - used.user
        steps[name].append(Step(history["loss"][0], user, user + now.system - used.system, wall))

    work = {}
    for one in found:
        keras.utils.set_random_seed(0)
        model = shardload.AutoShardDistribution(one.plan.mesh, one.plan).build(build)
        work[one.name] = partial(step, one.name, model)
    interleave(work, rounds=rounds, between=lambda: None)
    return steps


def compared(model: str, mesh: str, found: list[Planned], steps: dict[str, list[Step]]) -> list[Saved]:
    """Divide each plan's numbers by those of the first."""
    first, rows = found[0], list[Saved]()
    for one in found:
        pairs = list(zip(steps[one.name], steps[first.name], strict=True))
        measured, seconds = {}, {}
        for clock in ("user_s", "cpu_s", "wall_s"):
            ratios = [getattr(a, clock) / getattr(b, clock) for a, b in pairs[1:]]
            measured[clock] = statistics.median(ratios), min(ratios), max(ratios)
            seconds[clock] = statistics.median(getattr(a, clock) for a, _ in pairs[1:])
        planned = {rates: one.seconds[rates] / first.seconds[rates] for rates in one.seconds}
        activations, temporaries = (
            getattr(one, nbytes) / getattr(first, nbytes) for nbytes in ("activation_bytes", "temporary_bytes")
        )
        difference = max(abs(a.loss / b.loss - 1) for a, b in pairs)
        rows.append(
            Saved(
                model, mesh, one.name, measured, seconds, planned, activations, temporaries,
                one.temporary_bytes, difference,
            )
        )  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="only the model whose name contains this")
    parser.add_argument("--mesh", choices=MESHES, help="only this mesh")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {KEEP_BARRIERS}"
    sys.modules.setdefault("tensorflow", None)  # type: ignore[arg-type]  # keras-hub would import it
    sys.modules.setdefault("tensorflow_text", None)  # type: ignore[arg-type]
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for build in (build for build in MODELS if options.only in build.__name__):
        for mesh in (options.mesh,) if options.mesh else MESHES:
            found = plans(build, mesh)
            rows = compared(build.__name__, mesh, found, train(build, found, rounds=options.rounds))
            if options.json:
                print(json.dumps([asdict(row) for row in rows]), flush=True)
                continue
            base = ", ".join(f"{seconds:.1f} {clock}" for clock, seconds in rows[0].seconds.items())
            print(f"\n{build.__name__} on {mesh}; a step of the first plan: {base}\n")
            print(f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|", *(row.line() for row in rows), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
