"""One of several processes that save a model which is sharded over them; prints one JSON object a line.

python -m save_as_child COUNT INDEX PORT DEVICES MESH DO SOURCE FOLDER

DO is ``all`` (every format, LoRA too), or what goes wrong: ``raise`` or ``kill`` (on process 1, half-way), ``disagree``
(about an argument), ``wrong`` (an argument of process 1), ``apart`` (folders that are not shared).
"""

import os
import signal
import sys
from pathlib import Path

import jax
import keras
from process_child import join
from progress_calls import AfterBlocks
from together_child import tell

import shardload


def go_wrong(kind):
    tell(wrong=kind)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("the cable was cut")


def save_all(model, folder, mesh):
    reports = [shardload.save_as(model, folder / to, to=to) for to in ("safetensors", "preset")]
    reports.append(shardload.save_as(model, folder / "one.weights.h5"))
    keras.utils.set_random_seed(1)  # the same factors on all processes
    model.backbone.enable_lora(2)
    for variable in model.trainable_variables:
        variable.assign(variable.value + 0.01)
    reports.append(shardload.save_as(model, folder / "lora", to="safetensors", merge_lora=True))
    alone = shardload.load(folder / "preset", devices=jax.local_devices())
    if not jax.process_index():
        shardload.save_as(alone, folder / "alone", to="preset")  # concerns this process only
    tell(tensors=[report.tensors for report in reports], notes=[report.notes for report in reports])


def main(*arguments):
    count, index, port, devices, mesh, do, source, folder = arguments
    index, folder = int(index), Path(folder)
    jax.config.update("jax_num_cpu_devices", int(devices))
    join(count, index, port)
    model = shardload.load(source, mesh=mesh)
    tell(spread=sum(not v.value.is_fully_addressable for v in model.variables))
    if do == "all":
        save_all(model, folder, mesh)
        return
    if do == "apart":
        folder = folder / f"host-{index}"
        folder.mkdir()
    options = {"dtype": ["float32", "float16"][index]} if do == "disagree" else {}
    if do == "wrong" and index:
        options["host_memory_bytes"] = "much"  # not compared
    progress = AfterBlocks(lambda: go_wrong(do), 5) if do in ("raise", "kill") and index else None
    try:
        shardload.save_as(model, folder / "out", to="preset", progress=progress, **options)
    except Exception as error:
        tell(error=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
