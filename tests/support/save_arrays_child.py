"""One of several processes that save arrays which are sharded over them; prints one JSON object a line.

python -m save_arrays_child COUNT INDEX PORT DEVICES MESH DO SOURCE FOLDER KIND

DO is ``all``, or what goes wrong: ``raise`` or ``kill`` (on process 1, half-way), ``disagree`` (about an array),
``padding`` (of process 1 is not zero), or ``kill-N`` (one process is killed after N writes to FOLDER itself).
"""

import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from process_child import join
from progress_calls import AfterBlocks
from stacked_models import llama_rules, llama_tensors, specs_of, stacked_by_hand
from together_child import tell

import shardload


def go_wrong(kind):
    if kind == "raise":
        raise ValueError("the cable was cut")
    tell(killed=int(kind.partition("-")[2] or 0), error="killed")
    os.kill(os.getpid(), signal.SIGKILL)


def changed(arrays, do, index):
    if do == "disagree":
        return arrays | {"decoder.norm": arrays["decoder.norm"].astype(["uint16", "uint32"][index])}
    if do == "padding" and index:
        value = np.asarray([1], np.uint16)
        old = arrays["token_embedder"]
        shards = [s.data.at[-1, -1].set(value[0]) for s in old.addressable_shards]
        return arrays | {"token_embedder": jax.make_array_from_single_device_arrays(old.shape, old.sharding, shards)}
    return arrays


def main(*arguments):
    count, index, port, devices, mesh, do, source, folder, kind = arguments
    index, folder = int(index), Path(folder)
    jax.config.update("jax_num_cpu_devices", int(devices))
    if int(count) > 1:
        join(count, index, port)
    on = jax.make_mesh(tuple(map(int, mesh.split("x"))), ("batch", "model"))
    rules, expected = llama_rules(), stacked_by_hand(llama_tensors())
    targets = {name: NamedSharding(on, spec) for name, spec in specs_of(expected, on).items()}
    arrays = changed(shardload.load_arrays(source, targets, names=rules), do, index)
    tell(spread=sum(not array.is_fully_addressable for array in arrays.values()))
    path, to = (folder, None if kind == "file" else kind) if int(count) == 1 else (folder / "out", kind)
    wrong = do.startswith("kill") or do == "raise"
    after = int(do.partition("-")[2] or 5)
    progress = AfterBlocks(lambda: go_wrong(do), after) if wrong and (index or int(count) == 1) else None
    try:
        shardload.save_arrays(arrays, path, to=to, names=rules, progress=progress)
    except Exception as error:
        tell(error=f"{type(error).__name__}: {error}")
        raise
    again = shardload.load_arrays(path, targets, names=rules)
    pairs = (
        (a.data, b.data)
        for name in arrays
        for a, b in zip(arrays[name].addressable_shards, again[name].addressable_shards, strict=True)
    )
    tell(equal=all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs))


if __name__ == "__main__":
    main(*sys.argv[1:])
