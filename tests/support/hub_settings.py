"""What the layers of a model compute with, besides their weights."""

import numpy as np

from shardload.keras_bridge.saving import saved_objects

IGNORED = ("name", "built", "training", "is_awq_calibrated", "is_gptq_calibrated")
"""Of no consequence: the first call builds SmolLM3's rotary layer, and KerasHub's converter sets ``training`` on it,
which nothing reads; the last two say what quantisation did to a layer, and only some layers have them."""


def settings_of(model):
    """Every plain attribute of every layer; activations by what they compute."""
    found = {}
    for path, layer in saved_objects(model):
        for name, value in vars(layer).items():
            if name in ("activation", "act_layer") and callable(value):
                found[path, name] = np.asarray(value(np.array([-1.0, 0.5], np.float32))).tolist()
            elif not name.startswith("_") and isinstance(value, int | float | str | None) and name not in IGNORED:
                found[path, name] = value
    return found
