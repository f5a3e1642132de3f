"""A compiled model of two wide layers, and layouts that cut across those it was saved in."""

import jax
import keras
import numpy as np

LAYERS = 2
WIDTH = 1024
LAYOUTS = {
    "as saved": ((1, 8), (None, "model")), "rows on 8x1": ((8, 1), ("batch", None)),
    "rows on 1x8": ((1, 8), ("model", None)), "2x4": ((2, 4), ("batch", "model")),
    "columns on 2x4": ((2, 4), (None, "model")), "1x4": ((1, 4), ("model", None)), "1x1": ((1, 1), (None, None)),
}  # fmt: skip


def layouts(shape, kernel):
    devices = np.array(jax.devices()[: shape[0] * shape[1]])
    found = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(shape, ("batch", "model"), devices))
    found[".*kernel"] = kernel
    found[".*bias"] = (None,)
    return found


def build():
    inputs = x = keras.Input((WIDTH,))
    for _ in range(LAYERS):
        x = keras.layers.Dense(WIDTH)(x)
    model = keras.Model(inputs, x)
    model.compile("adam", "mse")
    return model
