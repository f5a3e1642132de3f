"""A small classifier with every kind of state, and how two of them compare."""

import keras
import numpy as np

from shardload.keras_bridge.variables import value_of


def classifier(seed=0):
    """A compiled classifier with every kind of state: weights, batch statistics, seeds, slots."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((6,))
    x = keras.layers.Dense(64, activation="relu", name="hidden")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.Dropout(0.0, name="drop")(x)
    model = keras.Model(inputs, keras.layers.Dense(8, name="out")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def data(rows=32):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.integers(0, 8, size=rows)


def train(model, *, epochs=1):
    model.fit(*data(), batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return model


def values(variables):
    return [np.asarray(value_of(v)) for v in variables]


def assert_equal(model, reference, *, pick=lambda m: m.weights):
    ours, theirs = values(pick(model)), values(pick(reference))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def optimizer_state(model):
    return model.optimizer.variables
