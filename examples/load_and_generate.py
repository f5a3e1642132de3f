"""Load a language model onto eight devices, and let it continue a prompt.

python examples/load_and_generate.py gemma3_270m "The capital of France is"
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax

jax.config.update("jax_num_cpu_devices", 8)  # without accelerators: simulate eight devices

import shardload

source, prompt = sys.argv[1:]

model = shardload.load(source, mesh="1x8", dtype="bfloat16")
print(shardload.report(model))  # what went where, and how fast

print(prompt + shardload.generate(model, prompt, max_new_tokens=12))
