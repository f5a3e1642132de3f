"""A process that follows a run until a step is adopted, or the run itself; prints one JSON object a line.

python -m follow_child COUNT INDEX PORT DEVICES MESH DO SOURCE LAST
"""

import hashlib
import sys
import time

import jax
import keras
import numpy as np
import process_child
from jax.experimental import multihost_utils

import shardload
from shardload.pipeline import load


def digest(model):
    """Of all weights, gathered whole: the same for the same weights, whatever mesh they live on."""
    found = hashlib.sha256()
    for variable in model.weights:
        value = variable.value
        if not value.is_fully_addressable:
            value = multihost_utils.process_allgather(value, tiled=True)
        found.update(np.ascontiguousarray(np.asarray(value)).tobytes())
    return found.hexdigest()


class Batches(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)


def train(model, folder, **options):
    """Train and save every ten batches, from the last step on, until this process is killed."""
    x = process_child.data(80)
    saver = shardload.callbacks.OrbaxCheckpoint(folder, save_freq=10, max_to_keep=None, resume=True, **options)
    process_child.tell(training=True)
    model.fit(x, x, batch_size=8, epochs=1_000_000, verbose=0, callbacks=[saver, Batches()])


def fail_once_after_loading(follower, model, fails):
    """A step is loaded on all processes, and then one fails: tell whether the weights are the old ones."""
    before, empty_vocabularies = digest(model), load.empty_vocabularies

    def failing(model, source):
        load.empty_vocabularies = empty_vocabularies
        if fails:
            raise MemoryError("none left")
        return empty_vocabularies(model, source)

    load.empty_vocabularies = failing
    adopted = follower.update()
    process_child.tell(adopted=adopted, problem="none left" in (follower.problem or ""), same=digest(model) == before)


def main(count, index, port, devices, mesh, do, source, last):  # noqa: PLR0917
    jax.config.update("jax_num_cpu_devices", devices)
    if count > 1:
        process_child.join(count, index, port)
    process_child.distribute(mesh)
    model = process_child.model()
    if do == "train":
        train(model, source)
    follower = shardload.follow(model, source, every_s=0)
    if do == "fail":
        fail_once_after_loading(follower, model, fails=index == 1)
    for step in follower:
        process_child.tell(step=step, digest=digest(model))
        if step >= last:
            return


if __name__ == "__main__":
    words = sys.argv[1:]
    main(*map(int, words[:4]), *words[4:7], int(words[7]))
