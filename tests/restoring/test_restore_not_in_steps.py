"""What layers save besides variables is not in a training step: saving warns, loading and restoring say so."""

import keras
import numpy as np
import pytest
from keras import layers
from saving_models import Weighing

import shardload
from shardload.errors import SourceError, UnsupportedError


@keras.saving.register_keras_serializable("not_in_steps")
class Counting(layers.Layer):
    """Saves a Python number next to its weight."""

    count = 0

    def build(self, shape):
        self.a = self.add_weight(shape=(shape[-1],), name="a")

    def call(self, x):
        return x * self.a

    def save_own_variables(self, store):
        super().save_own_variables(store)
        store["count"] = self.count

    def load_own_variables(self, store):
        self.count = int(np.asarray(store["count"]))
        self.a.assign(store["0"])


@keras.saving.register_keras_serializable("not_in_steps")
class Halving(layers.Dense):
    """Saves nothing but what follows from its variables."""

    def save_own_variables(self, store):
        store["0"], store["1"] = self.kernel / 2, self.bias

    def load_own_variables(self, store):
        self.kernel.assign(store["0"] * 2)
        self.bias.assign(store["1"])


LACKS = "step stores variables only: it lacks 'count', which save_own_variables of Counting at 'layers/counting' saves"


def counting(count=0):
    model = keras.Sequential([keras.Input((2,)), Counting(name="one")])
    model.layers[0].count = count
    return model


def test_saving_a_step_warns_of_what_it_lacks_and_reading_notes_it(tmp_path):
    with pytest.warns(UserWarning, match=f"A {LACKS} besides them. Keras' model"):
        shardload.save(counting(7), tmp_path, step=0)
    loaded, restored = shardload.load(tmp_path), counting()
    for report in (shardload.report(loaded), shardload.restore(restored, tmp_path)):
        assert any(LACKS in note for note in report.notes)


def test_save_as_recommends_what_saves_everything(tmp_path):
    model = counting(7)
    with pytest.raises(UnsupportedError, match=r"Call Keras' model\.save_weights\(path\)$"):
        shardload.save_as(model, tmp_path / "m.weights.h5")
    model.save_weights(tmp_path / "m.weights.h5")
    other = counting()
    shardload.load_weights(other, tmp_path / "m.weights.h5")
    assert other.layers[0].count == 7


def test_convert_recommends_what_saves_everything(tmp_path):
    counting(7).save(tmp_path / "m.keras")
    with pytest.raises(UnsupportedError, match=r"Call model = shardload\.load\(source\), then Keras"):
        shardload.convert(tmp_path / "m.keras", tmp_path / "m.weights.h5")
    shardload.load(tmp_path / "m.keras").save_weights(tmp_path / "m.weights.h5")
    other = counting()
    other.load_weights(tmp_path / "m.weights.h5")
    assert other.layers[0].count == 7


@pytest.mark.filterwarnings("error")
def test_a_layer_that_saves_what_follows_from_its_variables_loses_nothing(tmp_path):
    model = keras.Sequential([keras.Input((2,)), Halving(2)])
    shardload.save(model, tmp_path, step=0)
    loaded = shardload.load(tmp_path)
    assert not any("variables only" in note for note in shardload.report(loaded).notes)
    np.testing.assert_array_equal(loaded.layers[0].kernel, model.layers[0].kernel)


def test_files_that_belong_to_values_that_a_step_lacks_are_explained(tmp_path):
    model = keras.Sequential([keras.Input((2,)), Weighing(), layers.Dense(2)])
    model.layers[0].weights_const = np.asarray([0.25, 2.0], "float32")
    with pytest.warns(UserWarning, match="it lacks 'idf_weights', which save_own_variables of Weighing"):
        shardload.save(model, tmp_path, step=0)
    with pytest.raises(SourceError, match=r"A step stores variables only, no other values of a layer\. Build"):
        shardload.load(tmp_path)
