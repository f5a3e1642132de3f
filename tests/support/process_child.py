"""One of several processes that train together, or restore what others saved; prints one JSON object a line.

python -m process_child COUNT INDEX PORT DEVICES MESH DO FOLDER [EPOCHS]
"""

import hashlib
import json
import logging
import os
import signal
import sys
import time

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils

import shardload
from shardload.keras_bridge.binding import binding_of

sys.modules.setdefault("tensorflow", None)  # Keras and KerasHub import it where it is; it is not needed

WIDTH = 256
BATCH = 8


def join(count, index, port):
    """Become one of the processes."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))


def model():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dropout(0.1), keras.layers.Dense(WIDTH)]
    built = keras.Sequential([keras.Input((WIDTH,)), *layers])
    built.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return built


def distribute(mesh):
    sizes = tuple(map(int, mesh.split("x")))
    devices = keras.distribution.DeviceMesh(sizes, ("batch", "model"), keras.distribution.list_devices())
    rules = keras.distribution.LayoutMap(devices)
    rules[".*kernel"] = (None, "model")
    rules[".*bias"] = ("model",)
    found = keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="batch", auto_shard_dataset=False)
    keras.distribution.set_distribution(found)
    return sizes


def data(rows):
    return np.random.default_rng(0).random((rows, WIDTH), np.float32)


def digest(one):
    """Of every value, gathered whole: the same for the same state, whatever mesh it lives on."""
    found = hashlib.sha256()
    for variable in [*one.variables, *one.optimizer.variables]:
        value = variable.value
        if not value.is_fully_addressable:
            value = multihost_utils.process_allgather(value, tiled=True)
        found.update(np.ascontiguousarray(np.asarray(value)).tobytes())
    return found.hexdigest()


def tell(**what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)
        tell(batch=batch)


class Disagreeing(keras.callbacks.Callback):
    """The best epoch is another one on process 1, which gets SIGTERM in the middle of the third one."""

    def on_epoch_end(self, epoch, logs=None):
        self.epoch = epoch
        values = (0.2, 0.5, 0.4) if jax.process_index() == 0 else (0.3, 0.1, 0.2)
        logs["val_loss"] = values[min(epoch, 2)]

    def on_train_batch_end(self, batch, logs=None):
        if jax.process_index() == 1 and getattr(self, "epoch", 0) == 1 and batch == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def train(one, folder, epochs, *, parts, part, do):
    x = data(64).reshape(-1, parts, BATCH // parts, WIDTH)[:, part].reshape(-1, WIDTH)
    options = {"save_freq": 2, "max_to_keep": 3, "resume": do == "resume"}
    others = [Disagreeing()] if do == "best" else []
    saver = shardload.callbacks.OrbaxCheckpoint(folder, **({"save_best_only": True} if do == "best" else options))
    callbacks = [*others, saver, Slow()]
    one.fit(x, x, batch_size=BATCH // parts, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks)


def warmed_up(path, mesh):
    """Load a model of 16 inputs and outputs, train it for a step, and tell what that compiled and gave."""
    x = data(BATCH)[:, :16]
    one = shardload.load(path, mesh=mesh, warm_up={"train": (x, x)})
    binding_of(one).distribution.auto_shard_dataset = False  # else Keras takes TensorFlow's datasets only
    compiled, log = [], logging.getLogger("jax._src.interpreters.pxla")
    log.addHandler(handler := logging.Handler())
    handler.emit = lambda record: compiled.append(record.getMessage())
    log.setLevel(logging.DEBUG)
    losses = one.fit(x, x, batch_size=BATCH, shuffle=False, verbose=0).history["loss"]
    found = any("jit(train_step)" in line for line in compiled)
    return {"compiled": found, "losses": losses, "notes": shardload.report(one).notes}


def main(count, index, port, devices, mesh, do, folder, epochs=2):  # noqa: PLR0917
    jax.config.update("jax_num_cpu_devices", devices)
    if count > 1 or do == "alone":
        join(count, index, port)
    if do == "load":
        tell(read=shardload.report(shardload.load(folder, mesh=mesh)).bytes.read)
        return
    if do == "warm-up":
        tell(**warmed_up(folder, mesh))
        return
    sizes = distribute(mesh)
    one = model()
    tell(pid=os.getpid(), usr=signal.getsignal(signal.SIGUSR1) is not None)
    parts = min(sizes[0], count)
    if do == "restore":
        report = shardload.restore(one, folder)
        tell(
            digest=digest(one), step=int(one.optimizer.iterations), notes=report.notes, needed=report.bytes.needed,
            read=report.bytes.read,
        )  # fmt: skip
        return
    train(one, folder, epochs, parts=parts, part=index * parts // count, do=do)
    tell(digest=digest(one), step=int(one.optimizer.iterations), stopped=one.stop_training)


if __name__ == "__main__":
    words = sys.argv[1:]
    main(*map(int, words[:4]), *words[4:7], *map(int, words[7:]))
