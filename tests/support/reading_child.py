"""One of several processes that train together on Grain data and stop in the middle of an epoch, or go on there.

python -m reading_child COUNT INDEX PORT DEVICES MESH DO FOLDER

Each example carries its number, and the model writes down at which batch it was trained on it: what was read is part
of the state that is saved. DO is "global stop", which trains to the end in FOLDER/whole and stops early in
FOLDER/stopped, or "global go-on", or the same with "own", where each process has a dataset of its own.
"""

import sys

import grain
import jax
import keras
import numpy as np
from jax.experimental import multihost_utils
from process_child import WIDTH, digest, distribute, join, tell

import shardload

EXAMPLES = 72
BATCH = 8
STOP_AFTER = 5
"""Batches of the 9 of an epoch; the last step saved is the fourth."""


class Examples:
    def __len__(self):
        return EXAMPLES

    def __getitem__(self, i):
        x = np.random.default_rng(i).random(WIDTH, np.float32)
        x[0] = i
        return x, x[1:9]


@keras.saving.register_keras_serializable("shardload-tests")
class Ledger(keras.layers.Layer):
    """Passes on all but the number of each example, and notes the batch it came in."""

    def build(self, shape):
        self.when = self.add_weight((EXAMPLES,), "zeros", "int32", trainable=False)
        self.batch = self.add_weight((), "zeros", "int32", trainable=False)

    def call(self, x, training=False):
        if training:
            numbers = keras.ops.cast(x[:, :1], "int32")
            self.batch.assign(self.batch + 1)
            batch = keras.ops.broadcast_to(self.batch, (x.shape[0],))
            self.when.assign(keras.ops.scatter_update(self.when, numbers, batch))
        return x[:, 1:]


def model():
    keras.utils.set_random_seed(1)
    built = keras.Sequential([keras.Input((WIDTH,)), Ledger(), keras.layers.Dense(32, "tanh"), keras.layers.Dense(8)])
    built.compile(keras.optimizers.Adam(0.01), "mse")
    return built


def data(kind, *, index, count):
    shuffled = grain.MapDataset.source(Examples()).shuffle(seed=4)
    if kind == "global":
        return shardload.data.resumable(shuffled, global_batch_size=BATCH)
    ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)  # the default is 500 elements
    mine = shuffled.repeat()[index::count].to_iter_dataset(ahead)
    kept = mine.filter(lambda example: int(example[0][0]) % 5 != index)  # so each process stands somewhere else
    return shardload.data.resumable(kept.batch(BATCH // count, drop_remainder=True))


class StopAfter(keras.callbacks.Callback):
    def __init__(self, batches):
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        self.model.stop_training = self.left == 0


def train(kind, folder, *, index, count, stop_after=0):
    """The model after two epochs, or as far as it gets; begins with what the folder holds."""
    one = model()
    saver = shardload.callbacks.OrbaxCheckpoint(folder, save_freq=2, max_to_keep=3, resume=True)
    one.fit(
        data(kind, index=index, count=count), epochs=2,
        steps_per_epoch=None if kind == "global" else EXAMPLES // BATCH, verbose=0, shuffle=False,
        callbacks=[saver, StopAfter(stop_after)],
    )  # fmt: skip
    return one


def ledger(one):
    value = one.layers[0].when.value
    if not value.is_fully_addressable:
        value = multihost_utils.process_allgather(value, tiled=True)
    return np.asarray(value).tolist()


def main(count, index, port, devices, mesh, do, folder):  # noqa: PLR0917
    jax.config.update("jax_num_cpu_devices", devices)
    if count > 1:
        join(count, index, port)
    distribute(mesh)
    kind, _, what = do.partition(" ")
    one = train(kind, folder + "/whole" if what == "stop" else folder, index=index, count=count)
    tell(digest=digest(one), when=ledger(one))
    if what == "stop":
        assert digest(train(kind, folder + "/stopped", index=index, count=count, stop_after=STOP_AFTER)) != digest(one)


if __name__ == "__main__":
    words = sys.argv[1:]
    main(*map(int, words[:4]), *words[4:7])
