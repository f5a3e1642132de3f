"""A process that trains and saves every batch to a bucket, resuming if there is a step.

python -m bucket_child URL BATCHES [OPTION=JSON …]
"""

import hashlib
import json
import sys

import keras
import numpy as np

import shardload

sys.modules.setdefault("tensorflow", None)  # Keras and KerasHub import it where it is; it is not needed

WIDTH = 64
BATCH = 8


def model():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dropout(0.1), keras.layers.Dense(WIDTH)]
    built = keras.Sequential([keras.Input((WIDTH,)), *layers])
    built.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return built


def digest(one):
    found = hashlib.sha256()
    for variable in [*one.variables, *one.optimizer.variables]:
        found.update(np.ascontiguousarray(np.asarray(variable.value)).tobytes())
    return found.hexdigest()


class Batches:
    """Batches whose position is stored with each step."""

    def __init__(self, count):
        self.at, self.count = 0, count

    def __iter__(self):
        x = np.random.default_rng(0).random((self.count, BATCH, WIDTH), np.float32)
        while self.at < self.count:
            self.at += 1
            yield x[self.at - 1]

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def train(url, count, **options):
    """A loop that saves every batch; return the model."""
    one, batches = model(), Batches(count)
    with shardload.Checkpointer(url, **{"max_to_keep": 2, "save_on_background": False, **options}) as saver:
        last = saver.restore(one, iterator=batches)
        step = last.step if last else 0
        for x in batches:
            step += 1
            loss = float(one.train_on_batch(x, x)[0])
            saver.save(step, one, iterator=batches, metrics={"loss": loss})
    return one


def main(url, count, *options):
    one = train(url, int(count), **{name: json.loads(value) for name, _, value in (o.partition("=") for o in options)})
    sys.stdout.write(json.dumps({"digest": digest(one)}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
