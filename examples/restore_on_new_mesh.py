"""Save a step on one mesh, and restore it on another.

python examples/restore_on_new_mesh.py run
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax
import keras
import numpy as np

jax.config.update("jax_num_cpu_devices", 8)  # without accelerators: simulate eight devices

import shardload
from shardload.callbacks import OrbaxCheckpoint

directory = sys.argv[1]


def build():
    """A compiled model; its layers have the same order every time."""
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(8)])
    model.compile("adam", "mse")
    return model


trained = build()
trained.fit(np.ones((64, 64)), np.ones((64, 8)), verbose=0, callbacks=[OrbaxCheckpoint(directory)])

with shardload.abstract():
    model = build()
report = shardload.restore(model, directory, mesh="2x4")  # weights, optimizer, metrics and seeds
print(*report.notes, model.layers[0].kernel.value.sharding, sep="\n")
assert np.array_equal(model.layers[0].kernel, trained.layers[0].kernel)
