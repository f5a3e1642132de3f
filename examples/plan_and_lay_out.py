"""Find the smallest mesh that a checkpoint fits on, and lay it out by your own rules.

python examples/plan_and_lay_out.py
"""

import os
import tempfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax
import keras

jax.config.update("jax_num_cpu_devices", 8)  # without accelerators: simulate eight devices

import shardload

RULES = """
default = "auto"  # for variables that no rule matches

[[rule]]
variable = "dense/kernel"
spec = ["model", "-"]  # split the inputs, not the outputs
"""

with tempfile.TemporaryDirectory() as folder:
    source, rules = f"{folder}/model.keras", f"{folder}/rules.toml"
    keras.Sequential([keras.Input((256,)), keras.layers.Dense(1024), keras.layers.Dense(8)]).save(source)
    Path(rules).write_text(RULES)

    plan = shardload.plan(source, mesh="1x1", device_memory_bytes="300KiB")  # from headers, needs no devices
    print(plan)
    mesh = plan.fits.smallest_mesh
    model = shardload.load(source, mesh=mesh, layout=rules)

print(f"{mesh}: {model.layers[0].kernel.value.sharding.spec}")
