"""Staleness: seconds from when a trainer begins to save a step until a replica computes with it.

A trainer of 100 MB of weights saves every ten batches. Two replicas on other meshes, 1x8 and 2x4, follow its folder,
which they look at every two seconds, or the server that it starts. Each process simulates its devices on this machine.

    python -m benchmarks.following [--steps 10] [--width 2240] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

MESHES = ("1x8", "2x4")
WAYS = ("folder", "server")
LAYERS = 5


def model(mesh: str, width: int) -> Any:
    """A model whose kernels are divided over all devices."""
    import jax

    rows, columns = map(int, mesh.split("x"))
    jax.config.update("jax_num_cpu_devices", rows * columns)
    import keras

    devices = keras.distribution.DeviceMesh((rows, columns), ("batch", "model"), keras.distribution.list_devices())
    layout = keras.distribution.LayoutMap(devices)
    layout[".*kernel"] = (None, "model")
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch"))
    keras.utils.set_random_seed(0)
    found = keras.Sequential([keras.Input((width,)), *(keras.layers.Dense(width) for _ in range(LAYERS))])
    found.compile("sgd", "mse")
    return found


def train(way: str, folder: str, width: int) -> None:
    """Train and save until this process is ended; print the address to follow."""
    import keras
    import numpy as np

    from shardload.callbacks import OrbaxCheckpoint

    saver = OrbaxCheckpoint(
        folder, save_freq=10, max_to_keep=4, save_weights_only=True, serve="127.0.0.1:0" if way == "server" else False
    )

    class Address(keras.callbacks.Callback):  # type: ignore[misc]
        is_told = False

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not self.is_told and (way == "folder" or saver.serving):
                self.is_told = True
                print(json.dumps({"source": folder if way == "folder" else saver.serving}), flush=True)

    trained, x = model("1x1", width), np.zeros((8 * 20, width), np.float32)
    trained.fit(x, x, batch_size=8, epochs=1_000_000, verbose=0, callbacks=[saver, Address()])


def follow(source: str, mesh: str, steps: int, width: int) -> None:
    """Follow, and print how old each step was when it was adopted."""
    import shardload

    follower = shardload.follow(model(mesh, width), source)
    for _, step in zip(range(steps), follower, strict=False):
        print(json.dumps({"step": step, "staleness_s": follower.staleness_s}), flush=True)


def run(way: str, steps: int, width: int) -> list[dict[str, Any]]:
    """One run: a trainer and two replicas; return what these told."""

    def start(*words: object) -> subprocess.Popen[str]:
        environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "benchmarks.following", "--child", *map(str, words)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    with tempfile.TemporaryDirectory() as folder:
        trainer = start("train", way, f"{folder}/run", width)
        replicas = []
        try:
            assert trainer.stdout is not None
            source = json.loads(trainer.stdout.readline())["source"]
            replicas = [start("follow", source, mesh, steps, width) for mesh in MESHES]
            told = [replica.communicate()[0].splitlines() for replica in replicas]
        finally:
            for process in (trainer, *replicas):
                process.kill()
                process.wait()
    return [{"mesh": mesh, **json.loads(line)} for mesh, lines in zip(MESHES, told, strict=True) for line in lines]


def main() -> None:
    """Run both ways, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=2240)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {way: run(way, options.steps, options.width) for way in WAYS}
    if options.json:
        print(json.dumps(found))
        return
    print(f"weights: {LAYERS * (options.width + 1) * options.width * 4 / 1e6:.0f} MB")
    for way, lines in found.items():
        for mesh in MESHES:
            ages = sorted(line["staleness_s"] for line in lines if line["mesh"] == mesh)
            numbers = f"{statistics.median(ages):.2f} s ({ages[0]:.2f} to {ages[-1]:.2f})"
            print(f"{way}, replica on {mesh}: {numbers}, {len(ages)} steps adopted")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        what, *words = sys.argv[2:]
        if what == "train":
            train(words[0], words[1], int(words[2]))
        else:
            follow(words[0], words[1], int(words[2]), int(words[3]))
    else:
        main()
