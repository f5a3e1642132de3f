"""One of several processes that load a model with an adapter of PEFT together; prints one JSON object a line.

python -m adapters_child COUNT INDEX PORT DEVICES MESH DO FOLDER
"""

import hashlib
import sys
from pathlib import Path

import jax
import numpy as np
from process_child import join, tell

import shardload


def shards_of(model):
    """A digest of each device's shards of all weights and of LoRA factors, by the device's place in the mesh."""
    found = {}
    for variable in model.weights:
        for shard in variable.value.addressable_shards:
            found.setdefault(shard.device, hashlib.sha256()).update(np.asarray(shard.data).tobytes())
    order = [device for device in jax.devices() if device in found]
    return {str(jax.devices().index(device)): found[device].hexdigest() for device in order}


def loaded(do, folder, mesh):
    """The model with the adapter: merged while read, merged after the load, or kept as LoRA."""
    base, adapter = Path(folder) / ("preset" if do == "late" else "base"), Path(folder) / "adapter0"
    if do != "kept":
        return shardload.load(base, mesh=mesh, dtype="float32", adapter=adapter)
    model = shardload.load(base, mesh=mesh, dtype="float32")
    shardload.load_adapter(model, adapter)
    return model


if __name__ == "__main__":
    count, index, port, devices, mesh, do, folder = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(devices))
    if int(count) > 1:
        join(count, index, port)
    for each in do.split("; "):
        tell(do=each, shards=shards_of(loaded(each, folder, mesh)))
