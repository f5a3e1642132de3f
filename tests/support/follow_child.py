"""One of several processes that follow a run together, until a step is adopted; prints one JSON object a line.

python -m follow_child COUNT INDEX PORT DEVICES MESH DO SOURCE LAST
"""

import hashlib
import sys

import jax
import numpy as np
import process_child
from jax.experimental import multihost_utils

import shardload


def digest(model):
    """Of all weights, gathered whole: the same for the same weights, whatever mesh they live on."""
    found = hashlib.sha256()
    for variable in model.weights:
        value = variable.value
        if not value.is_fully_addressable:
            value = multihost_utils.process_allgather(value, tiled=True)
        found.update(np.ascontiguousarray(np.asarray(value)).tobytes())
    return found.hexdigest()


def main(count, index, port, devices, mesh, source, last):  # noqa: PLR0917
    jax.config.update("jax_num_cpu_devices", devices)
    if count > 1:
        process_child.join(count, index, port)
    process_child.distribute(mesh)
    model = process_child.model()
    follower = shardload.follow(model, source, every_s=0)
    for step in follower:
        process_child.tell(step=step, digest=digest(model))
        if step >= last:
            return


if __name__ == "__main__":
    words = sys.argv[1:]
    main(*map(int, words[:4]), words[4], words[6], int(words[7]))
