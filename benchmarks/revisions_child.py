"""One side of `benchmarks.revisions`: a process that lasts, and does what it is told on its standard input.

It uses public names of shardload only, so that the same file measures any revision: whichever is on ``PYTHONPATH``.
Each line of the input names a piece of work (a key of `WORK`), and is answered with the wall seconds and the
CPU-seconds that it took. What the work needs, such as a model to save, is made before its first run.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
sys.modules["tensorflow"] = sys.modules["tensorflow_text"] = None  # type: ignore[assignment]

import jax  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import keras  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import shardload  # noqa: E402

FOLDER, SIDE = Path(sys.argv[1]), sys.argv[2]
SAVED_BYTES = 1 << 29
"""Bytes of the weights of the models that are saved; also what a step takes that is restored."""
WARM_BYTES = 1 << 30
"""Host memory touched and freed before each run, which needs about as much; see `benchmarks.measure.warm_memory`."""


@dataclass(frozen=True, slots=True)
class Work:
    """Something to time."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    """What must be done before each run, outside its clock."""


def model(name: str, dtype: str) -> Work:
    """Load a whole model onto eight devices, its layouts chosen."""

    def load() -> object:
        loaded: Any = shardload.load(FOLDER / name, mesh="1x8", dtype=dtype)
        return jax.block_until_ready([v.value for v in loaded.weights])

    return Work(load)


def plan(name: str) -> Work:
    """Plan the same load, without reading any weights."""
    return Work(lambda: shardload.plan(FOLDER / name, mesh="1x8", dtype="bfloat16"))


def arrays(source: str, layout: str, mesh: tuple[int, int] = (1, 8)) -> Work:
    """Load every tensor of a checkpoint as `jax.Array`s: split on ``dim0`` or ``dim1``, or ``transposed`` on dim 0."""
    over = jax.make_mesh(mesh, ("batch", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows, columns = PartitionSpec("model" if mesh[1] > 1 else "batch"), PartitionSpec(None, "model")

    def target(name: str, shape: tuple[int, ...]) -> NamedSharding:
        if len(shape) < 2:
            return NamedSharding(over, PartitionSpec())
        return NamedSharding(over, columns if layout == "dim1" else rows)

    options: dict[str, Any] = {}
    if layout == "transposed":
        options["transpose"] = lambda name, shape: (1, 0) if len(shape) == 2 else None
    return Work(lambda: jax.block_until_ready(shardload.load_arrays(FOLDER / source, target, **options)))


def square_model(width: int) -> Any:
    """A Keras model of `SAVED_BYTES` of float32 kernels of this width, split by columns over eight devices."""
    devices = keras.distribution.DeviceMesh((1, 8), ["batch", "model"], [f"cpu:{i}" for i in range(8)])
    layouts = keras.distribution.LayoutMap(devices)
    layouts[".*kernel"] = (None, "model")
    parallel = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    with parallel.scope():
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        x = inputs = keras.Input((width,))
        for _ in range(SAVED_BYTES // (4 * width * width)):
            x = keras.layers.Dense(width, use_bias=False)(x)
        made = keras.Model(inputs, x)
        made.compile("sgd", "mse")
    return made


def save(width: int) -> Work:
    """Save a verified step, until it is published."""
    made, folder = square_model(width), FOLDER / f"saved-{SIDE}"

    def before() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()

    return Work(lambda: shardload.save(made, folder, step=1), before)


def blocking(width: int) -> Work:
    """Begin to save a step in the background, as long as it keeps the training thread; no other save still runs."""
    made, numbers = square_model(width), itertools.count()
    checkpointer = shardload.Checkpointer(FOLDER / f"blocking-{SIDE}-{width}", max_to_keep=1)
    renewed = jax.jit(lambda values: [value + 1 for value in values])

    def before() -> None:
        checkpointer.wait()
        for variable, value in zip(made.variables, renewed([v.value for v in made.variables]), strict=True):
            variable.assign(value)  # as after a batch: JAX remembers the views that it has given of an array
        os.sync()

    return Work(lambda: checkpointer.save(next(numbers), made), before)


WORK: dict[str, Callable[[], Work]] = {
    "load gemma2-h5, bfloat16": partial(model, "gemma2_preset", "bfloat16"),
    "load gemma3-hf, bfloat16": partial(model, "gemma3_folder", "bfloat16"),
    "load gemma3-hf, float32": partial(model, "gemma3_folder", "float32"),
    "plan gemma3-hf": partial(plan, "gemma3_folder"),
    "arrays, dim0": partial(arrays, "model.safetensors", "dim0"),
    "arrays, dim1": partial(arrays, "model.safetensors", "dim1"),
    "arrays, transposed": partial(arrays, "model.safetensors", "transposed"),
    "restore, 1x8 columns": partial(arrays, "step/1", "dim1"),
    "restore, 2x4 columns": partial(arrays, "step/1", "dim1", (2, 4)),
    "restore, 8x1 rows": partial(arrays, "step/1", "dim0", (8, 1)),
    "save, 8 matrices": partial(save, 4096),
    "save, 128 matrices": partial(save, 1024),
    "blocking, 8 matrices": partial(blocking, 4096),
    "blocking, 128 matrices": partial(blocking, 1024),
}


def timed(work: Work) -> dict[str, float]:
    """Run once; what the work returns is freed after the clock has stopped."""
    work.before()
    gc.collect()
    np.empty(WARM_BYTES, np.uint8)[::4096] = 1
    wall, cpu = time.perf_counter(), time.process_time()
    result = work.run()
    taken = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    del result
    return taken


def main() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints goes to the errors
    ready: dict[str, Work] = {}
    for line in sys.stdin:
        name = line.strip()
        answer: Any = None
        if name == "names":
            answer = list(WORK)
        elif name == "step":  # the one that both sides restore
            shardload.save(square_model(4096), FOLDER / "step", step=1)
        else:
            if name not in ready:
                ready.clear()  # the models of the work before need their memory no longer
                ready[name] = WORK[name]()
            answer = timed(ready[name])
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
