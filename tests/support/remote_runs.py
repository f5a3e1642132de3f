"""Runs that end in an object store, and what a model holds."""

import keras
import numpy as np

from shardload.callbacks import OrbaxCheckpoint

WIDTH = 1024


def build(width=WIDTH, *, compiled=True):
    """With the default width: six arrays of 8 MiB in its state, and some small ones."""
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(2 * width), keras.layers.Dense(width)])
    if compiled:
        model.compile("adam", "mse", metrics=["mae"])
    return model


def train(folder, *, width=WIDTH, epochs=1, **options):
    """A model that was trained on 1x8, and saved its steps to a folder."""
    layouts = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((1, 8), ("batch", "model")))
    layouts[".*kernel"] = (None, "model")
    layouts[".*bias"] = ("model",)
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch"))
    try:
        keras.utils.set_random_seed(0)
        model = build(width)
        x = np.random.default_rng(0).random((8, width), np.float32)
        model.fit(x, x, epochs=epochs, verbose=0, callbacks=[OrbaxCheckpoint(folder, max_to_keep=None, **options)])
    finally:
        keras.distribution.set_distribution(None)
    return model


def state(model):
    optimizer = getattr(model, "optimizer", None)
    optimizer = [] if optimizer is None else optimizer.variables
    return [np.asarray(v.value) for v in [*model.weights, *optimizer]]


def same(one, other):
    one, other = state(one), state(other)
    return len(one) == len(other) and all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))
