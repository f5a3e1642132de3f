"""Use shardload in a program with Keras' ModelParallel: only the line that loads the model changes.

python examples/model_parallel.py gemma3_270m
"""

import sys

import jax

import shardload  # before Keras, which then runs on JAX

jax.config.update("jax_num_cpu_devices", 8)  # without accelerators: simulate eight devices
import keras
import numpy as np

mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"], keras.distribution.list_devices())
layouts = keras.distribution.LayoutMap(mesh)
layouts["token_embedding/embeddings"] = ("model", None)
layouts[".*ffw_gating.*/kernel"] = (None, "model")
layouts[".*ffw_linear/kernel"] = ("model", None)
keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch"))

# model = keras_hub.models.CausalLM.from_preset("gemma3_270m")
model = shardload.load(sys.argv[1])

for variable in model.backbone.weights[:5]:
    print(f"{variable.path:<45} {variable.value.sharding.spec}")
model.preprocessor = None  # token ids, not text
model.backbone.enable_lora(4)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
tokens = np.random.default_rng(0).integers(1, 1000, (8, 16))
inputs = {"token_ids": tokens, "padding_mask": tokens > 0}
history = model.fit(inputs, np.roll(tokens, -1, 1), batch_size=8, shuffle=False, verbose=0)
print(f"loss {history.history['loss'][0]:.2f}, on {len(tokens) // 2} examples per row of the mesh")
