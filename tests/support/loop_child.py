"""One of several processes with a loop of its own, without ``fit``; prints one JSON object a line.

python -m loop_child COUNT INDEX PORT DEVICES MESH DO FOLDER
"""

import json
import sys

import jax
import keras
import numpy as np
from process_child import distribute

import shardload


def built():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(8)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def fill(model, optimizer, *, step):
    """Give every variable values that tell its position, its elements and the step."""
    for i, variable in enumerate([*model.variables, *optimizer.variables]):
        variable.assign(np.arange(int(np.prod(variable.shape))).reshape(variable.shape) + 1000 * i + 100_000 * step)


def parts(named):
    """The parts of arrays that this process has: index ranges and values."""
    return {
        name: [
            [[s.indices(n)[:2] for s, n in zip(shard.index, value.shape, strict=True)], np.asarray(shard.data).tolist()]
            for shard in value.addressable_shards
        ]
        for name, value in named.items()
    }


def state(model, optimizer):
    return parts({str(i): v.value for i, v in enumerate([*model.variables, *optimizer.variables])})


def arrays(folder):
    mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("model")

    def split(name, shape):
        return rows if shape[0] % mesh.size == 0 else jax.sharding.PartitionSpec()

    return {"parts": parts(shardload.load_arrays(f"{folder}/file.safetensors", split, mesh=mesh))}


def save(folder):
    model, optimizer = built()
    with shardload.Checkpointer(f"{folder}/run", max_to_keep=1) as checkpointer:
        for step in (1, 2):
            fill(model, optimizer, step=step)
            checkpointer.save(step, model, optimizer=optimizer, metadata={"tokens": 10 * step})
    return {"parts": state(model, optimizer)}


def restore(folder):
    model, optimizer = built()
    info = shardload.Checkpointer(f"{folder}/run").restore(model, optimizer=optimizer)
    return {"step": info.step, "metadata": info.recorded.metadata, "parts": state(model, optimizer)}


if __name__ == "__main__":
    count, index, port, devices, mesh, do, folder = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))
    distribute(mesh)
    sys.stdout.write(json.dumps({"arrays": arrays, "save": save, "restore": restore}[do](folder)) + "\n")
