"""One of several processes that load quantised folders together; prints one JSON object a line.

python -m quantised_child COUNT INDEX PORT DEVICES MESH DO FOLDER
"""

import sys
from pathlib import Path

import jax
from adapters_child import shards_of
from process_child import join, tell

import shardload

WAYS = {
    "kept": ("packed 4 asymmetric", {"quantized": "keep"}),
    "kept in another order": ("gptq 4 in another order", {"quantized": "keep"}),
    "kept channels": ("int8 asymmetric", {"quantized": "keep"}),
    "floats": ("nvfp4", {}),
    "blocks, packed again": ("fp8 blocks", {"quantize": "int4"}),
    "packed again": ("awq", {"quantize": "int8"}),
}
"""What is asked of `shardload.load`, and the method of the folder, whose name is that of the way."""


def main(*arguments):
    count, index, port, devices, mesh, do, folder = arguments
    jax.config.update("jax_num_cpu_devices", int(devices))
    if int(count) > 1:
        join(count, index, port)
    for way in do.split("; "):
        model = shardload.load(Path(folder) / way, mesh=mesh, dtype="float32", **WAYS[way][1])
        tell(do=way, shards=shards_of(model))
        if int(count) > 1:
            with shardload.Checkpointer(Path(folder) / f"{way}, steps") as saver:
                saver.save(1, model)


if __name__ == "__main__":
    main(*sys.argv[1:])
