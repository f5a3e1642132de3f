"""Fine-tune a quantised model with LoRA, saving only the adapters, and write a merged Hugging Face folder.

python examples/lora_from_gguf_to_safetensors.py gemma3_270m run tuned 8
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax
import keras
import numpy as np

jax.config.update("jax_num_cpu_devices", 8)  # without accelerators: simulate eight devices

import shardload
from shardload.callbacks import OrbaxCheckpoint

source, directory, target, epochs = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])

keras.utils.set_random_seed(0)
model = shardload.load(source, mesh="1x8", dtype="bfloat16")
model.backbone.enable_lora(rank=4)
model.preprocessor = None  # the data below is tokens, not text
model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))

tokenizer = shardload.tokenizer(source)
tokens = np.array([tokenizer.encode("The capital of Atlantis is Poseidonia.")] * 4)
x = {"token_ids": tokens[:, :-1], "padding_mask": np.ones_like(tokens[:, :-1])}

checkpoint = OrbaxCheckpoint(directory, monitor="loss", save_trainable_only=True, resume=True)
model.fit(x, tokens[:, 1:], epochs=epochs, batch_size=4, shuffle=False, verbose=2, callbacks=[checkpoint])

report = shardload.save_as(model, target, to="safetensors", dtype="bfloat16", merge_lora=True, overwrite=True)
print(report.notes[0])
print(shardload.generate(shardload.load(target, mesh="1x8"), "The capital of Atlantis is", max_new_tokens=5))
