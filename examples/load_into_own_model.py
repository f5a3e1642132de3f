"""Load weights into your own model, sharded over devices, without initialising random weights first.

python examples/load_into_own_model.py
"""

import os
import tempfile

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax
import keras
import numpy as np

jax.config.update("jax_num_cpu_devices", 8)  # without accelerators: simulate eight devices

import shardload


def build():
    """Two dense layers; any Keras model works."""
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(8)])


x = np.ones((4, 64), "float32")
with tempfile.TemporaryDirectory() as folder:
    path = f"{folder}/model.weights.h5"
    trained = build()
    trained.save_weights(path)

    with shardload.abstract():  # shapes, dtypes and paths; no buffer, no random numbers, no compile
        model = build()
    report = shardload.load_weights(model, path, mesh="1x8")

print(report)
print(model.layers[0].kernel.value.sharding)
np.testing.assert_allclose(model.predict(x, verbose=0), trained.predict(x, verbose=0), atol=1e-6)
