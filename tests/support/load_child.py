"""One of two processes that load together; prints one JSON object a line.

python -m load_child COUNT INDEX PORT DEVICES MESH DO FOLDER
"""

import hashlib
import json
import sys

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils

import shardload
from shardload.errors import UninitialisedError

sys.modules.setdefault("tensorflow", None)  # Keras and KerasHub import it where it is; it is not needed


def abstract(*, seed, do, index):
    """A model with a layer that has a seed of its own, which weights on disk need not hold; or with a new head."""
    if seed is not None:
        keras.utils.set_random_seed(seed)
    with shardload.abstract():
        kernel = {
            "unseeded-head": keras.initializers.RandomNormal(),
            "zeros-or-not": "zeros" if index else keras.initializers.RandomNormal(seed=5),
            "in-a-program": lambda shape, dtype: jax.jit(lambda: jax.numpy.ones(shape, dtype) * (2.0 + index))(),
        }.get(do)
        more = [keras.layers.Dense(16, kernel_initializer=kernel, name="head")] if kernel else []
        more = more or [keras.layers.Dropout(0.1)]
        return keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(8), *more])


def load(folder, mesh, *, seed, do, index):
    model = abstract(seed=seed, do=do, index=index)
    report = shardload.load_weights(model, folder, mesh=mesh, strict=False)
    own = {v.path: v.value for v in model.variables}
    return report, own


def digest(value):
    """Of the whole value; one collective at a time, as each is waited for."""
    whole = np.asarray(multihost_utils.process_allgather(value, tiled=True))
    return hashlib.sha256(np.ascontiguousarray(whole).tobytes()).hexdigest()


def main(*arguments):
    count, index, port, devices, mesh, do, folder = arguments
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))
    seed = None if do.startswith("unseeded") else 7
    try:
        report, own = load(folder, mesh, seed=seed, do=do, index=int(index))
    except UninitialisedError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return
    values = {path: digest(value) for path, value in own.items()}
    sys.stdout.write(json.dumps({"initialised": report.initialised, "values": values}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
