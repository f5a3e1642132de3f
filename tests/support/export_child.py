"""Load a small model onto a mesh and export it with TensorFlow: ``python export_child.py FOLDER``."""

import sys

import keras
import numpy as np

BATCHES = (1, 3, 8)


def build():
    inputs = keras.Input((16,))
    return keras.Model(inputs, keras.layers.Dense(8)(keras.layers.Dense(32, activation="relu")(inputs)))


def main(folder):
    import jax
    import tensorflow as tf

    import shardload

    jax.config.update("jax_num_cpu_devices", 8)
    with shardload.abstract():
        model = build()
    shardload.load_weights(model, f"{folder}/model.weights.h5", mesh="2x4")
    model.export(f"{folder}/exported", format="tf_saved_model", verbose=False)
    served, known = tf.saved_model.load(f"{folder}/exported"), np.load(f"{folder}/known.npz")
    for batch in BATCHES:
        np.testing.assert_allclose(served.serve(known["x"][:batch]).numpy(), known["y"][:batch], rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    main(sys.argv[1])
