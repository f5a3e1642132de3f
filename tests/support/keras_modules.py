"""What our plugins for Keras' own tests share: eight devices, functions to exchange in Keras, results to write."""

import json
import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import keras
from keras.src.applications import efficientnet

jax.config.update("jax_num_cpu_devices", 8)

results: dict[str, dict[str, dict]] = {}


def keep(report, **more):
    """Keep what became of a test, for `write`."""
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        file, _, name = report.nodeid.partition("::")
        why = str(getattr(crash, "message", ""))
        results.setdefault(file, {})[name] = {"outcome": report.outcome, "why": why, **more}


def write():
    Path(os.environ["KERAS_SUITE_RESULTS"]).write_text(json.dumps(results))


def put_in_place(module, name, make):
    """Exchange a function of Keras wherever Keras holds it."""
    theirs = getattr(module, name)
    ours = make(theirs)
    for other in [m for m in sys.modules.values() if getattr(m, "__name__", "").split(".")[0] == "keras"]:
        for attribute in [a for a, held in vars(other).items() if held is theirs]:
            setattr(other, attribute, ours)


def make_efficientnet_quick():
    """Put `quick_efficientnet` in place."""
    put_in_place(efficientnet, "EfficientNetB0", quick_efficientnet)


def quick_efficientnet(_):
    """Its tests cut weights into shards of 10 MB; XLA takes a minute to compile it. This makes three, too."""

    def model(weights, input_shape):
        sizes = [keras.layers.Dense(1500) for _ in range(4)]
        pooled = [keras.layers.AveragePooling2D(32), keras.layers.Flatten()]
        return keras.Sequential([keras.Input(input_shape), *pooled, *sizes])

    return model
