"""A process that trains on a 1x8 mesh, saving after every batch, until somebody kills it.

python -m resume_child FOLDER
"""

import sys

import jax
import keras
import numpy as np

import shardload

sys.modules.setdefault("tensorflow", None)  # Keras and KerasHub import it where it is; it is not needed

WIDTH = 512


def model():
    keras.utils.set_random_seed(1)
    built = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dense(WIDTH)])
    built.compile(keras.optimizers.Adam(0.01), "mse")
    return built


def on_mesh(build):
    """What ``build`` makes, spread over eight devices."""
    devices = keras.distribution.DeviceMesh((1, 8), ("batch", "model"), keras.distribution.list_devices()[:8])
    rules = keras.distribution.LayoutMap(devices)
    rules[".*kernel"] = (None, "model")
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="batch"))
    return build()


def main(folder):
    jax.config.update("jax_num_cpu_devices", 8)
    one = on_mesh(model)
    x = np.random.default_rng(0).random((8 * 4096, WIDTH), np.float32)
    saver = shardload.callbacks.OrbaxCheckpoint(folder, save_freq=1, max_to_keep=3, resume=True)
    one.fit(x, x, batch_size=8, epochs=1000, verbose=0, shuffle=False, callbacks=[saver])


if __name__ == "__main__":
    main(sys.argv[1])
