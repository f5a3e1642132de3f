"""Train, stop, and run again: the second run continues with the next batch.

python examples/save_and_resume.py run 2
python examples/save_and_resume.py run 4
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import grain
import jax
import keras
import numpy as np

jax.config.update("jax_num_cpu_devices", 8)  # without accelerators: simulate eight devices

import shardload
from shardload.callbacks import OrbaxCheckpoint

directory, epochs = sys.argv[1], int(sys.argv[2])

numbers = np.random.default_rng(0)
examples = [(x, x[:8]) for x in numbers.random((256, 64), "float32")]
batches = grain.MapDataset.source(examples).shuffle(seed=1).repeat().batch(32)

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(8)])
model.compile("adam", "mse")

checkpoint = OrbaxCheckpoint(directory, monitor="loss", save_freq=3, max_to_keep=2, resume=True)
data = shardload.data.resumable(batches)  # lets the callback save the position
model.fit(data, epochs=epochs, steps_per_epoch=8, shuffle=False, verbose=2, callbacks=[checkpoint])
