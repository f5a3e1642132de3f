"""Tiny models and data for the callbacks' tests, and what a step must hold of a model."""

import json
import os
import signal

import keras
import models
import numpy as np
from orbax.checkpoint import v1 as ocp
from saved_steps import assert_one_to_one

from shardload.keras_bridge.variables import value_of
from shardload.mapping.state_tree import find_stored
from shardload.runs.digests import find_damage

X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")


class Subclassed(keras.Model):
    def __init__(self, **named):
        super().__init__(**named)
        self.blocks = [keras.layers.Dense(8), keras.layers.Dropout(0.1, seed=3), keras.layers.Dense(8)]

    def call(self, x, training=False):
        for block in self.blocks:
            x = block(x, training=training) if isinstance(block, keras.layers.Dropout) else block(x)
        return x


def functional():
    inputs = keras.Input((8,), name="x")
    x = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(8, name="first")(inputs))
    return keras.Model(inputs, keras.layers.Dense(8, name="last")(x), name="whole")


def sequential():
    return keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(8)])


def compiled(build=functional, optimizer="adam"):
    model = build()
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def gemma(optimizer="adam"):
    model = models.causal_lm("gemma1")
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), sampler="greedy")
    return model


def gemma_data():
    inputs = models.tokens(models.build("gemma1"), batch=8, length=6)
    return inputs, inputs["token_ids"]


def fit(model, *callbacks, epochs=1, batch_size=4, **named):
    return model.fit(X, X, epochs=epochs, batch_size=batch_size, verbose=0, callbacks=list(callbacks), **named)


class KillsItself(keras.callbacks.Callback):
    def __init__(self, after):
        super().__init__()
        self.after = after

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.after:
            os.kill(os.getpid(), signal.SIGKILL)


def steps_in(root):
    return sorted(int(path.name) for path in root.iterdir() if path.name != ".staging")


def record(root, step, name="step"):
    return json.loads((root / str(step) / "shardload" / f"{name}.json").read_text())


def assert_holds(folder, model):
    """The step is sound and holds exactly the state the model has now."""
    assert find_damage(folder) == []
    tree = ocp.load_checkpointables(str(folder), {"pytree": None})["pytree"]
    pairing = find_stored(model, json.loads((folder / "shardload" / "structure.json").read_text()))
    assert_one_to_one(pairing)
    for stored, leaf in pairing.pairs:
        held = tree
        for part in stored.path:
            held = held[part]
        assert np.array_equal(np.asarray(held), np.asarray(value_of(leaf.variable))), stored.path


class Batches(keras.callbacks.Callback):
    """Counts batches; calls ``at[n]`` after batch ``n``."""

    def __init__(self, at=()):
        super().__init__()
        self.done, self.at = 0, dict(at)

    def on_train_batch_end(self, batch, logs=None):
        self.done += 1
        if self.done in self.at:
            self.at[self.done]()
