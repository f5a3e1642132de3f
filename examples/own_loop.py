"""Save and restore in your own training loop, without `compile` and `fit`. A second run continues on any mesh.

python examples/own_loop.py run 1x8 3
"""

import sys

import jax

import shardload  # before Keras, which then runs on JAX

jax.config.update("jax_num_cpu_devices", 8)  # without accelerators: simulate eight devices
import keras
import numpy as np

directory, sizes, last = sys.argv[1], tuple(map(int, sys.argv[2].split("x"))), int(sys.argv[3])
x, y = np.random.default_rng(0).random((2, 256, 64), "float32")

mesh = keras.distribution.DeviceMesh(sizes, ["batch", "model"], jax.devices())
layouts = keras.distribution.LayoutMap(mesh)
layouts[".*kernel"] = (None, "model")
with keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch").scope():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(64)])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
checkpointer = shardload.Checkpointer(directory, max_to_keep=2)
restored = checkpointer.restore(model, optimizer=optimizer)  # None: nothing was saved yet
loss_of = jax.value_and_grad(lambda weights, x, y: ((model.stateless_call(weights, [], x)[0] - y) ** 2).mean())

variables = [*model.trainable_variables, *optimizer.variables]
weights, slots = [v.value for v in model.trainable_variables], [v.value for v in optimizer.variables]
for step in range(restored.step + 1 if restored else 1, last + 1):
    loss, gradients = jax.jit(loss_of)(weights, x, y)
    weights, slots = jax.jit(optimizer.stateless_apply)(slots, gradients, weights)
    for variable, value in zip(variables, [*weights, *slots], strict=True):
        variable.assign(value)
    checkpointer.save(step, model, optimizer=optimizer, metrics={"loss": loss})
    print(f"step {step}: loss {loss:.4f}, {model.layers[0].kernel.value.sharding}")
checkpointer.wait()
