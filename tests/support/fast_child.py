"""One of several processes that call `from_preset` under one distribution; prints one JSON object, with what each
of the places in DO (`inside`, `outside`) gave.

python -m fast_child COUNT INDEX PORT DEVICES MESH DO FOLDER
"""

import contextlib
import hashlib
import json
import sys

import jax
import numpy as np

import shardload


def main(arguments):
    count, index, port, devices, mesh, do, folder = arguments
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
    sys.modules.setdefault("tensorflow", None)  # KerasHub imports it where it is; it is not needed
    import keras
    import keras_hub

    told = {}
    for where in do.split(","):
        keras.backend.clear_session(free_memory=False)  # names count from the start; it forgets the distribution too
        distribute(keras, tuple(map(int, mesh.split("x"))))
        keras.utils.set_random_seed(1)
        with shardload.fast() if where == "inside" else contextlib.nullcontext([]) as report:
            model = keras_hub.models.Backbone.from_preset(folder)
        told[where] = {"digest": digest(model), "why": [call.why for call in report]}
    sys.stdout.write(json.dumps(told) + "\n")


def distribute(keras, sizes):
    rules = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(sizes, ("batch", "model"), jax.devices()))
    rules["token_embedding/embeddings"] = ("model", None)
    rules[".*ffw.*kernel"] = (None, "model")
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="batch"))


def digest(model):
    """Of this process's shards."""
    found = hashlib.sha256()
    for variable in model.variables:
        for shard in variable.value.addressable_shards:
            found.update(f"{variable.path} {shard.index}".encode() + np.asarray(shard.data).tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main(sys.argv[1:])
