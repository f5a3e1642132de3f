"""Saving a training step against Orbax v1, a plain copy and a plain write: how long, how long training waits for it.

    save      a verified, durable step (Orbax uncompressed, a digest per MiB, fsync, rename), until it stands
              against Orbax' default (zstd), against the storage options of ours, and against one plain file with fsync
    blocking  how long one hook of the callback holds the training thread, against copying the state once
    fit       the callback in `model.fit`, against none and against Keras' (`benchmarks.save_fit`)

    python -m benchmarks.save_orbax [--only save|blocking|fit] [--gb 1.07] [--pairs 7] [--folder FOLDER] [--json]

In Orbax' own saves TensorStore flushes the array data to the disk; the other files and the names of folders are not.
Before every run, outside its clock, what the last one wrote is removed, all that is dirty goes to the disk, and
memory for the state, its copies and the page cache is touched. The first save of a process imports Orbax, and
TensorFlow where it is installed (Keras does, to write a configuration): shown by itself, no part of any median.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.measure import Row, interleave, rows_table, timed, warm_memory
from shardload.stores.local import local_target

WIDTHS = 4096, 1024
"""Of the matrices whose save blocks: 64 MiB and 4 MiB each, on eight devices."""
SAVE_AT_MOST = 1.10
BLOCKING_AT_MOST, BLOCKING_SLACK_S = 1.1, 0.020
PARTS = ("blocking", "save", "fit")
"""In the order of running: the first save of the process is one of `blocking`."""


def local_shards(tree: Any) -> list[Any]:
    """The bytes of this process, each once, as NumPy views of the devices' memory."""
    import jax
    import numpy as np

    arrays = [a for a in jax.tree.leaves(tree) if isinstance(a, jax.Array)]
    return [np.asarray(s.data) for a in arrays for s in a.addressable_shards if s.replica_id == 0]


def size_of(tree: Any) -> int:
    """Bytes that a save of ``tree`` holds."""
    return sum(shard.nbytes for shard in local_shards(tree))


def like_weights(n_bytes: int) -> dict[str, Any]:
    """As trained weights are: bfloat16, normally distributed around zero, so that zstd finds something to squeeze."""
    import jax
    import jax.numpy as jnp

    from benchmarks.restore_orbax import state

    def normal(a: Any) -> Any:
        return (0.02 * jax.scipy.special.ndtri(jnp.clip(a, 1e-6, 1 - 1e-6))).astype(jnp.bfloat16)

    made: dict[str, Any] = jax.block_until_ready(jax.tree.map(jax.jit(normal), state(2 * n_bytes)))
    return made


# ---- a verified save ------------------------------------------------------------------------------------


def model_of(tree: dict[str, Any]) -> Any:
    """A Keras model with these matrices as kernels: what shardload saves."""
    import keras

    first = next(iter(tree.values()))["kernel"]
    inputs = keras.Input((first.shape[0],))
    policy = str(first.dtype)
    outputs = [keras.layers.Dense(first.shape[1], use_bias=False, name=n, dtype=policy)(inputs) for n in tree]
    model = keras.Model(inputs, outputs)
    for name, matrix in tree.items():
        model.get_layer(name).kernel.assign(matrix["kernel"])
    return model


def ours(model: Any, folder: Path, tree: Any) -> None:
    """One step by the public function, until it is published."""
    import shardload

    del tree
    shardload.save(model, folder, step=1)


def orbax_default(folder: Path, tree: Any) -> None:
    """As Orbax saves when nothing is said."""
    from orbax.checkpoint import v1 as ocp

    ocp.save_checkpointables(folder / "1", {"pytree": tree})


def orbax_plain(folder: Path, tree: Any) -> None:
    """With the storage options of ours."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_ocdbt = True
    context.array.saving.use_zarr3 = True
    context.array.saving.use_compression = False
    with context:
        ocp.save_checkpointables(folder / "1", {"pytree": tree})


def one_file(folder: Path, tree: Any) -> None:
    """The limit: the same bytes, one after the other, flushed."""
    folder.mkdir()
    with (folder / "bytes").open("wb", buffering=0) as file:
        for shard in local_shards(tree):
            rest = memoryview(shard.reshape(-1).view("uint8"))
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def measure_saves(folder: Path, n_bytes: int, *, pairs: int) -> list[Row]:
    """All four of each state."""
    from benchmarks.restore_orbax import state

    rows = []
    for title, make in (("float32, random", state), ("bfloat16, weights", like_weights)):
        rows += saves_of(folder, title, make(n_bytes), pairs=pairs)
    return rows


def saves_of(folder: Path, title: str, tree: Any, *, pairs: int) -> list[Row]:
    """Ours, and the three it is compared with, in turn."""
    size, place = size_of(tree), folder / "run"

    def between() -> None:
        shutil.rmtree(place, ignore_errors=True)
        os.sync()
        warm_memory(3 * size)

    kinds: dict[str, Callable[[Path, Any], None]] = {
        "shardload": partial(ours, model_of(tree)),
        "Orbax, default (zstd)": orbax_default,
        "Orbax, uncompressed": orbax_plain,
        "one file + fsync": one_file,
    }
    runs = interleave({name: partial(work, place, tree) for name, work in kinds.items()}, rounds=pairs, between=between)
    limits = {"Orbax, default (zstd)": SAVE_AT_MOST}
    name = f"save, {title}"
    return [Row(name, peer, runs["shardload"], runs[peer], limits.get(peer)) for peer in kinds if peer != "shardload"]


# ---- what training waits for ----------------------------------------------------------------------------


def square_model(n_bytes: int, width: int) -> Any:
    """A Keras model of so many bytes of float32 kernels, and next to no optimizer state."""
    import keras

    x = inputs = keras.Input((width,))
    for _ in range(max(1, n_bytes // (4 * width * width))):
        x = keras.layers.Dense(width, use_bias=False)(x)
    model = keras.Model(inputs, x)
    model.compile("sgd", "mse")
    return model


def measure_blocking(folder: Path, n_bytes: int, *, pairs: int) -> tuple[list[Row], dict[str, float]]:
    """Few large matrices and many small ones, of as many bytes; and how long the first save of all blocks."""
    rows: list[Row] = []
    facts: dict[str, float] = {}
    for width in WIDTHS:
        row, first_s = blocking_of(folder / str(width), square_model(n_bytes, width), pairs=pairs)
        rows.append(row)
        facts.setdefault("blocking: seconds, the first save", first_s)
    return rows, facts


def blocking_of(folder: Path, model: Any, *, pairs: int) -> tuple[Row, float]:
    """The hook that saves, called as `fit` calls it after a batch, against `np.copyto` of every local shard.

    Before each of them the variables get new arrays, as from a batch: JAX remembers the views it has given.
    """
    import jax
    import numpy as np

    from shardload.callbacks import OrbaxCheckpoint

    callback = OrbaxCheckpoint(folder, save_freq=1)
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    targets = [np.ones_like(shard) for shard in local_shards([v.value for v in model.variables])]
    batches, renewed = count(), jax.jit(lambda values: jax.tree.map(jax.numpy.copy, values))
    shards: list[Any] = []

    def between() -> None:
        callback.wait_until_finished()
        shards.clear()
        for variable, value in zip(model.variables, renewed([v.value for v in model.variables]), strict=True):
            variable.assign(value)
        shards.extend(local_shards(renewed([v.value for v in model.variables])))
        os.sync()
        warm_memory(3 * sum(target.nbytes for target in targets))

    def hook() -> None:
        callback.on_train_batch_end(next(batches), {"loss": 0.0})

    def copy() -> None:
        for target, shard in zip(targets, shards, strict=True):
            np.copyto(target, shard)

    between()
    first_s = timed(hook).wall_s
    runs = interleave({"hook": hook, "copy": copy}, rounds=pairs, between=between)
    callback.on_train_end()
    name = f"blocking, {len(model.layers) - 1} matrices"
    return Row(name, "np.copyto", runs["hook"], runs["copy"], BLOCKING_AT_MOST, BLOCKING_SLACK_S), first_s


# ---- all of it ------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    options = parsed(argv)
    os.environ["KERAS_BACKEND"] = "jax"
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    with tempfile.TemporaryDirectory(prefix="shardload-bench-", dir=options.folder) as folder:
        rows, facts = measure(Path(folder), options)
    if options.json:
        print(json.dumps({"facts": facts, "rows": [row.summary() for row in rows]}))
    else:
        print(rows_table(rows))
        for name, value in facts.items():
            print(f"{name}: {value:.4g}")
    return 0


def measure(folder: Path, options: argparse.Namespace) -> tuple[list[Row], dict[str, float]]:
    """The chosen parts, and what there is to know about them."""
    from benchmarks.keras_callback_tools import eight_devices
    from benchmarks.save_fit import Fit, measure_fit

    n_bytes = int(options.gb * 1e9)
    require_room(folder, 3 * max(n_bytes, int(options.fit_mb * 1e6)) + (1 << 30))
    rows: list[Row] = []
    facts: dict[str, float] = {}
    for part in [part for part in PARTS if part in (options.only or PARTS)]:
        place = folder / part
        place.mkdir()
        if part == "save":
            rows += measure_saves(place, n_bytes, pairs=options.pairs)
            continue
        if part == "blocking":
            with eight_devices():
                found, more = measure_blocking(place, n_bytes, pairs=options.pairs)
        else:
            wanted = Fit(int(options.fit_mb * 1e6), options.step_s, options.batches, options.every)
            found, more = measure_fit(place, wanted, rounds=options.pairs)
        rows += found
        facts |= more
    return rows, facts


def require_room(folder: Path, n_bytes: int) -> None:
    """End if the disk cannot take it."""
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        sys.exit(f"{folder} has {free / 1e9:.1f} GB free, but {n_bytes / 1e9:.1f} GB are needed; choose a --folder")


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="may be given more than once; all by default")
    parser.add_argument("--gb", type=float, default=1.074, help="state of the parts save and blocking")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--folder", type=local_target, help="on the measured disk; temporary by default")
    parser.add_argument("--fit-mb", type=float, default=200, help="weights and slots of the model that is trained")
    parser.add_argument("--step-s", type=float, default=0.55, help="how long a batch of `fit` should take")
    parser.add_argument("--batches", type=int, default=24, help="batches of one `fit`")
    parser.add_argument("--every", type=int, default=4, help="batches from one save to the next")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
