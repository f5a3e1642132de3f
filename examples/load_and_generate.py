"""Load a language model onto eight devices, and let it continue a prompt.

python examples/load_and_generate.py gemma3_270m "The capital of France is"
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax

jax.config.update("jax_num_cpu_devices", 8)  # without accelerators: simulate eight devices

import shardload
from shardload.text import generate_text

source, prompt = sys.argv[1:]

model = shardload.load(source, mesh="1x8", dtype="bfloat16")
print(shardload.report(model))  # what went where, and how fast

tokenizer_and_config = shardload.inspect(source)  # reads headers only
print(prompt + generate_text(model, tokenizer_and_config, prompt, max_new_tokens=12))
