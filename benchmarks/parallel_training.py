"""Training on 2x4 simulated devices: our layouts, Keras' ModelParallel with a map written by hand, data parallelism.

    python -m benchmarks.parallel_training [--rounds 9] [--only block] [--json]

The same model with the same initial values and batches on every side; each trains a short epoch per round, in turn,
with Adam and Keras' own ``fit``. ``block`` is transformer blocks of Keras layers, with the map of columns and rows of
Megatron; ``gemma`` is a small KerasHub Gemma, with the map of its own class. All sides have to predict the same, and
to have the same loss after an epoch, before any clock runs.

Eight devices share the cores of this machine, so nothing here is faster than one device: the ratios show what a layout
adds, as work that every device repeats and as bytes between devices. The limit is for CPU-seconds of all threads: each
of eight devices waits for the slowest at every collective, so the clock on the wall shows what else the machine does.
Memory is that of one device: live weights and
slots, and the whole step as XLA compiled it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.measure import Row, Run, interleave, rows_table

MESH, AXES = (2, 4), ("data", "model")
BATCH, LENGTH, BATCHES = 16, 64, 3
NO_SLOWER = 1.03
"""Median of the ratios to the map by hand: "no slower", and 3 % for the clock."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained."""

    name: str
    build: Callable[[], Any]
    by_hand: Callable[[Any], Any]
    """From Keras' mesh to a LayoutMap."""
    inputs: Any
    target: Any
    loss: Any


@dataclass(frozen=True, slots=True)
class Side:
    """A model on its devices, and the scope that it trains in."""

    name: str
    model: Any
    scope: Callable[[], Any]
    layout: Any
    """For `shardload.parallel.choose`."""


def block() -> Task:
    """Two blocks of width 256 with eight heads."""
    import keras
    import numpy as np

    def build() -> Any:
        x = inputs = keras.Input((LENGTH, 256))
        for layer in range(2):
            x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(8, 32)(x, x))
            inner = keras.layers.Dense(1024, activation="gelu", name=f"up_{layer}")(x)
            x = keras.layers.LayerNormalization()(x + keras.layers.Dense(256, name=f"down_{layer}")(inner))
        return keras.Model(inputs, x)

    def by_hand(mesh: Any) -> Any:
        layouts = keras.distribution.LayoutMap(mesh)
        layouts[".*(query|key|value)/kernel"] = (None, "model", None)
        layouts[".*(query|key|value)/bias"] = ("model", None)
        layouts[".*attention_output/kernel"] = ("model", None, None)
        layouts["up_.*/kernel"] = (None, "model")
        layouts["up_.*/bias"] = ("model",)
        layouts["down_.*/kernel"] = ("model", None)
        return layouts

    x = np.random.default_rng(0).normal(size=(BATCH * BATCHES, LENGTH, 256)).astype("float32")
    return Task("block", build, by_hand, x, np.tanh(x), "mse")


def gemma() -> Task:
    """A Gemma of two layers and width 256: eight query heads, four key and value heads, a tied vocabulary."""
    import keras
    import keras_hub
    import numpy as np

    def build() -> Any:
        backbone = keras_hub.models.GemmaBackbone(
            vocabulary_size=1024,
            num_layers=2,
            num_query_heads=8,
            num_key_value_heads=4,
            hidden_dim=256,
            intermediate_dim=1024,
            head_dim=32,
        )
        return keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))

    def by_hand(mesh: Any) -> Any:
        own = keras_hub.models.GemmaBackbone.get_layout_map
        return own(mesh, model_parallel_dim_name="model", data_parallel_dim_name="data")

    tokens = np.random.default_rng(0).integers(1, 1024, (BATCH * BATCHES, LENGTH)).astype("int32")
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Task("gemma", build, by_hand, inputs, np.roll(tokens, -1, axis=1), loss)


TASKS = (block, gemma)


def sides(task: Task) -> Iterator[Side]:
    """Ours by rules and by search, Keras' with the map, and data parallelism over all eight devices."""
    import keras

    import shardload

    devices = keras.distribution.list_devices()[:8]
    mesh = keras.distribution.DeviceMesh(MESH, list(AXES), devices)
    layouts = task.by_hand(mesh)
    by_map = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="data")
    keras.distribution.set_distribution(None)
    for layout in ("auto", "search"):
        keras.utils.set_random_seed(0)
        distribution = shardload.AutoShardDistribution("data=2,model=4", layout)
        model = distribution.build(task.build)
        yield Side(layout, _compiled(model, task), _no_scope, layout)
    for name, found, layout in (
        ("map by hand", by_map, layouts),
        ("data parallel", keras.distribution.DataParallel(devices=devices), "replicated"),
    ):
        keras.utils.set_random_seed(0)
        with found.scope():
            yield Side(name, _compiled(task.build(), task), found.scope, layout)


@contextmanager
def _no_scope() -> Iterator[None]:
    yield


def _compiled(model: Any, task: Task) -> Any:
    import keras

    model.compile(keras.optimizers.Adam(1e-4), task.loss)
    return model


def fit(side: Side, task: Task) -> float:
    """Train one epoch; the loss."""
    with side.scope():
        history = side.model.fit(task.inputs, task.target, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    return float(history.history["loss"][0])


def check_equal(found: list[Side], task: Task) -> None:
    """Raise unless all sides have the same values: outputs, and the loss of the first epoch."""
    import jax
    import numpy as np

    first = jax.tree.map(lambda x: x[:BATCH], task.inputs)
    outputs, losses = [], []
    for side in found:
        with side.scope():
            outputs.append(side.model.predict(first, batch_size=BATCH, verbose=0))
        losses.append(fit(side, task))
    if any(np.abs(one - outputs[0]).max() > 1e-3 for one in outputs) or np.ptp(losses) > 1e-3 * abs(losses[0]):
        raise AssertionError(f"the sides do not train the same model: losses {losses}")


def memory(side: Side, task: Task) -> dict[str, Any]:
    """Bytes on the device with most: weights and slots that are alive, and the step as it was compiled."""
    import jax

    from shardload.layout_checks.placement import bytes_by_device
    from shardload.parallel import choose, compile_step

    variables = {id(v): v for v in (*side.model.variables, *side.model.optimizer.variables)}
    mesh = "data=8,model=1" if side.name == "data parallel" else "data=2,model=4"
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((BATCH, *x.shape[1:]), x.dtype), (task.inputs, task.target))
    choice = choose(side.model, mesh, side.layout)
    step = compile_step(side.model, choice, shapes[0], target=shapes[1], loss=task.loss, training="adam")
    return {
        "name": f"{task.name}, {side.name}",
        "live_bytes": max(bytes_by_device(v.value for v in variables.values()).values()),
        "step_bytes": step.total_bytes,
        "collective_bytes": step.collective_bytes,
        "collectives": dict(step.counts),
    }


def measure(task: Task, *, rounds: int) -> tuple[list[Row], list[dict[str, Any]]]:
    """Train in turn; rows of ratios, and the memory of each side."""
    found = list(sides(task))
    check_equal(found, task)
    runs = interleave({side.name: partial(fit, side, task) for side in found}, rounds=rounds, between=lambda: None)
    pairs = [(ours, peer) for ours in ("auto", "search") for peer in ("map by hand", "data parallel")]
    rows = [Row(f"{task.name}, {ours}", peer, runs[ours], runs[peer]) for ours, peer in pairs]
    busy = {name: tuple(Run(run.cpu_s, run.cpu_s) for run in found) for name, found in runs.items()}
    rows += [
        Row(f"{task.name}, {ours}, CPU-s", peer, busy[ours], busy[peer], NO_SLOWER if peer == "map by hand" else None)
        for ours, peer in pairs
    ]
    return rows, [memory(side, task) for side in found]


def memory_table(found: list[dict[str, Any]]) -> str:
    """A table for people, in MiB per device."""
    lines = [f"{'MiB on each device':<26}{'weights, slots':>16}{'whole step':>12}{'collectives':>13}  instructions"]
    for one in found:
        sizes = (one[name] / (1 << 20) for name in ("live_bytes", "step_bytes", "collective_bytes"))
        live, step, moved = (f"{size:.2f}" for size in sizes)
        kinds = ", ".join(f"{count} {kind}" for kind, count in one["collectives"].items())
        lines.append(f"{one['name']:<26}{live:>16}{step:>12}{moved:>13}  {kinds}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="only the model whose name contains this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    sys.modules.setdefault("tensorflow", None)  # type: ignore[arg-type]  # keras-hub would import it
    sys.modules.setdefault("tensorflow_text", None)  # type: ignore[arg-type]
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for make in TASKS:
        if options.only not in make.__name__:
            continue
        rows, sizes = measure(make(), rounds=options.rounds)
        if options.json:
            print(json.dumps([row.summary() for row in rows] + sizes))
        else:
            print(rows_table(rows), memory_table(sizes), sep="\n\n", end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
