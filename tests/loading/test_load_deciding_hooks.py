"""Layers whose ``load_own_variables`` decides by a stored value get what Keras gives them, by every way."""

import keras
import numpy as np
import pytest
from keras import layers

import shardload

registered = keras.saving.register_keras_serializable("deciding_hooks")


class Deciding(layers.Layer):
    """Two weights that differ, and the version of what is stored."""

    def build(self, shape):
        self.a = self.add_weight(shape=(2,), initializer="zeros", name="a")
        self.b = self.add_weight(shape=(2,), initializer="zeros", name="b")
        constant = keras.initializers.Constant(2)
        self.version = self.add_weight(shape=(), dtype="int32", initializer=constant, trainable=False, name="version")

    def call(self, x):
        return x * self.a + self.b


@registered
class BySwapping(Deciding):
    def load_own_variables(self, store):
        keys = ("0", "1") if int(np.asarray(store["2"])) >= 2 else ("1", "0")
        self.a.assign(store[keys[0]])
        self.b.assign(store[keys[1]])
        self.version.assign(2)


@registered
class ByItem(Deciding):
    def load_own_variables(self, store):
        first, second = ("0", "1") if np.asarray(store["2"]).item() == 2 else ("1", "0")
        self.a.assign(store[first])
        self.b.assign(store[second])
        self.version.assign(store["2"])


@registered
class ByDerivedValue(Deciding):
    def load_own_variables(self, store):
        is_new = (store["2"][()] + 1) > 2
        self.a.assign(store["0" if is_new else "1"])
        self.b.assign(store["1" if is_new else "0"])
        self.version.assign(store["2"])


@registered
class ByJax(Deciding):
    def load_own_variables(self, store):
        is_new = keras.ops.convert_to_tensor(store["2"]) >= 2
        self.a.assign(store["0" if is_new else "1"])
        self.b.assign(store["1" if is_new else "0"])
        self.version.assign(store["2"])


@registered
class InTwoSteps(Deciding):
    """Reads the second value only after the first one was right."""

    def load_own_variables(self, store):
        self.a.assign(store["1"])
        self.b.assign(store["0"])
        if int(np.asarray(store["2"])) == 2 and np.asarray(store["0"])[1] == 2:
            self.a.assign(store["0"])
            self.b.assign(store["1"])
        self.version.assign(store["2"])


@registered
class ByIterating(Deciding):
    def load_own_variables(self, store):
        swapped = all(value == 0 for value in store["0"])
        self.a.assign(store["1" if swapped else "0"])
        self.b.assign(store["0" if swapped else "1"])
        self.version.assign(store["2"])


@registered
class Asserting(Deciding):
    def load_own_variables(self, store):
        assert int(np.asarray(store["2"])) == 2
        super().load_own_variables(store)


@registered
class RefusingZeros(Deciding):
    def load_own_variables(self, store):
        if not np.any(np.asarray(store["0"])):
            raise ValueError("weights are all zero")
        super().load_own_variables(store)


@registered
class MultiplyingSometimes(Deciding):
    def load_own_variables(self, store):
        self.a.assign(store["0"])
        self.b.assign(store["1"])
        if np.asarray(store["0"]).max() > 0:
            self.b.assign(self.b * 1.0)
        self.version.assign(store["2"])


@registered
class Negating(Deciding):
    def load_own_variables(self, store):
        stored = np.asarray(store["0"])
        self.a.assign(stored if stored.sum() > 0 else -stored)
        self.b.assign(store["1"])
        self.version.assign(store["2"])


LAYERS = (
    *(BySwapping, ByItem, ByDerivedValue, ByJax, InTwoSteps, ByIterating),
    *(Asserting, RefusingZeros, MultiplyingSometimes, Negating),
)
EXPECTED = [[1, 2], [3, 4], 2]


def model(kind):
    return keras.Sequential([keras.Input((2,)), kind(name="deciding")])


def weights(filled):
    layer = filled.layers[-1]
    return [np.asarray(v.value).tolist() for v in (layer.a, layer.b, layer.version)]


@pytest.fixture(params=LAYERS, ids=lambda kind: kind.__name__)
def kind(request, tmp_path):
    """A kind of layer, of which a model's archive and weights are in the folder."""
    saved = model(request.param)
    for variable, value in zip(saved.layers[-1].weights, EXPECTED, strict=True):
        variable.assign(value)
    saved.save(tmp_path / "m.keras")
    saved.save_weights(tmp_path / "m.weights.h5")
    assert weights(keras.saving.load_model(tmp_path / "m.keras")) == EXPECTED
    return request.param


def test_load_and_load_weights_give_what_keras_gives(kind, tmp_path):
    assert weights(shardload.load(tmp_path / "m.keras")) == EXPECTED
    for name in ("m.keras", "m.weights.h5"):
        filled = model(kind)
        assert shardload.load_weights(filled, tmp_path / name).notes == ()
        assert weights(filled) == EXPECTED


def test_what_convert_writes_has_what_keras_gives(kind, tmp_path):
    shardload.convert(tmp_path / "m.keras", tmp_path / "out.weights.h5")
    filled = model(kind)
    filled.load_weights(tmp_path / "out.weights.h5")
    assert weights(filled) == EXPECTED
    shardload.convert(tmp_path / "m.keras", tmp_path / "orbax", to="orbax")
    assert weights(shardload.load(tmp_path / "orbax")) == EXPECTED


def test_a_hook_that_refuses_a_stored_value_is_refused_before_anything_moves(tmp_path):
    saved = model(Asserting)
    saved.layers[-1].version.assign(3)
    saved.save_weights(tmp_path / "m.weights.h5")
    target = model(Asserting)
    target.layers[-1].a.assign([5, 6])
    with pytest.raises(shardload.errors.MismatchError, match="Cannot load Asserting at 'layers/asserting'"):
        shardload.load_weights(target, tmp_path / "m.weights.h5")
    assert weights(target)[0] == [5, 6]
