"""What layers save besides variables comes back from a training step; what a step lacks is told."""

import json

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers
from saved_steps import edited_structure
from saving_models import Weighing

import shardload
from shardload.errors import SourceError, UnsupportedError
from shardload.mapping import stored_values


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


@keras.saving.register_keras_serializable("not_in_steps")
class Copying(layers.Dense):
    """Copies its variables to NumPy, which needs their values, and saves a number too."""

    count = 0

    def save_own_variables(self, store):
        store["0"], store["1"], store["count"] = np.array(self.kernel), np.array(self.bias), self.count

    def load_own_variables(self, store):
        self.kernel.assign(store["0"])
        self.bias.assign(store["1"])
        self.count = int(store["count"])


@keras.saving.register_keras_serializable("not_in_steps")
class CountingOnDevice(Counting):
    """Computes what it saves with JAX, but not from its variables."""

    count = jnp.asarray(0)

    def save_own_variables(self, store):
        super(Counting, self).save_own_variables(store)
        store["count"] = self.count + 1


@keras.saving.register_keras_serializable("not_in_steps")
class Noting(layers.Layer):
    """Saves texts, numbers of several types, and an array without elements."""

    def __init__(self, **named):
        super().__init__(**named)
        self.saved = {}

    def call(self, x):
        return x

    def save_own_variables(self, store):
        for key, value in self.saved.items():
            store[key] = value

    def load_own_variables(self, store):
        self.saved = dict(store)


def counting(count=0, kind=Counting):
    model = keras.Sequential([keras.Input((2,)), kind(name="one")])
    model.layers[0].count = count
    return model


def as_saved_before(folder):
    """Remove from a step what steps of earlier versions lack."""
    with edited_structure(folder / "0") as structure:
        del structure["values"]


@pytest.mark.filterwarnings("error")
def test_a_counter_comes_back_from_a_step(tmp_path):
    model = counting(7)
    shardload.save(model, tmp_path, step=0)
    saved = np.array(model.layers[0].a.value)
    model.layers[0].a.assign(saved + 1)
    loaded, restored, filled = shardload.load(tmp_path), counting(), counting()
    shardload.restore(restored, tmp_path)
    shardload.load_weights(filled, tmp_path)
    for found in (loaded, restored, filled):
        assert found.layers[0].count == 7
        np.testing.assert_array_equal(found.layers[0].a, saved)
        assert not any("'count'" in note for note in shardload.report(found).notes)


def test_each_step_of_a_training_has_the_values_of_its_time(tmp_path):
    model = counting()
    with shardload.Checkpointer(tmp_path, max_to_keep=None) as checkpointer:
        for step in range(3):
            model.layers[0].count = step * 10
            checkpointer.save(step, model)
    assert [shardload.load(tmp_path, step=step).layers[0].count for step in range(3)] == [0, 10, 20]


def test_restoring_other_items_leaves_a_counter_alone(tmp_path):
    model = counting(7)
    model.compile("sgd", "mse")
    shardload.save(model, tmp_path, step=0)
    model.layers[0].count = 9
    shardload.restore(model, tmp_path, items="optimizer")
    assert model.layers[0].count == 9


def test_a_counter_that_jax_computes_comes_back(tmp_path):
    shardload.save(counting(jnp.asarray(7), CountingOnDevice), tmp_path, step=0)
    assert shardload.load(tmp_path).layers[0].count == 8


def test_a_hook_that_needs_the_values_of_variables_loses_no_number(tmp_path):
    model = keras.Sequential([keras.Input((2,)), Copying(3)])
    model.layers[0].count = 7
    shardload.save(model, tmp_path, step=0)
    loaded = shardload.load(tmp_path)
    assert loaded.layers[0].count == 7
    np.testing.assert_array_equal(loaded.layers[0].kernel, model.layers[0].kernel)
    structure = json.loads((tmp_path / "0/shardload/structure.json").read_text())
    assert list(structure["values"]["layers/copying"]) == ["count"]  # the step has the kernel once


def test_texts_and_numbers_keep_their_types(tmp_path):
    model = keras.Sequential([keras.Input((2,)), Noting(), layers.Dense(2)])
    saved = {"text": "größer", "bytes": b"abc", "wide": np.float64(1) / 3, "none": np.zeros((0, 4), "int8"),
             "flags": np.asarray([True, False]), "half": jnp.asarray([1.5], "bfloat16"), "lost": object()}  # fmt: skip
    model.layers[0].saved = saved
    with pytest.warns(UserWarning, match="A step cannot store 'lost', which save_own_variables of Noting at 'layers/"):
        shardload.save(model, tmp_path, step=0)
    found = shardload.load(tmp_path).layers[0].saved
    assert set(found) == set(saved) - {"lost"}
    for key, value in found.items():
        expected = np.asarray(saved[key])
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)


def test_values_too_large_for_json_are_told(tmp_path):
    model = keras.Sequential([keras.Input((2,)), Noting(), layers.Dense(2)])
    model.layers[0].saved = {"small": 1, "large": np.zeros((1 << 23) + 1, "uint8")}
    with pytest.warns(UserWarning, match=r"cannot store 'large', .* at most 8 MiB together\. Keras' model\.save_wei"):
        shardload.save(model, tmp_path, step=0)
    assert shardload.load(tmp_path).layers[0].saved == {"small": 1}


def test_a_hook_that_refuses_its_values_is_an_error_unless_told_otherwise(tmp_path, monkeypatch):
    shardload.save(counting(7), tmp_path, step=0)
    monkeypatch.setattr(Counting, "load_own_variables", lambda self, store: store["other"])
    model = counting(1)
    with pytest.raises(SourceError, match=r"Cannot load 'count', which a layer at 'layers/counting' saved besides"):
        shardload.restore(model, tmp_path)
    report = shardload.restore(model, tmp_path, strict=False)
    assert any("was not loaded: load_own_variables of Counting raised KeyError" in note for note in report.notes)


@pytest.mark.parametrize("entry", [7, {"dtype": "O", "shape": [], "base64": "AAAAAAAAAAA="},
                                   {"dtype": "<i8", "shape": [2], "base64": "AAAAAAAAAAA="},
                                   {"dtype": "<i8", "shape": [-1], "base64": "AAAAAAAAAAA="},
                                   {"dtype": "<i8", "shape": [], "base64": "*"}])  # fmt: skip
def test_values_that_are_not_valid_are_refused_before_the_model_changes(entry, tmp_path):
    shardload.save(counting(7), tmp_path, step=0)
    with edited_structure(tmp_path / "0") as structure:
        structure["values"] = {"layers/counting": {"count": entry}}
    model = counting(1)
    before = np.asarray(model.layers[0].a)
    with pytest.raises(SourceError, match=r"values of layers in its structure\.json are not valid"):
        shardload.restore(model, tmp_path)
    np.testing.assert_array_equal(model.layers[0].a, before)


def test_a_step_of_an_earlier_version_is_read_with_a_note(tmp_path):
    shardload.save(counting(7), tmp_path, step=0)
    as_saved_before(tmp_path)
    loaded, restored = shardload.load(tmp_path), counting()
    note = "the step lacks 'count', which save_own_variables of Counting at 'layers/counting' saves besides variables"
    for report in (shardload.report(loaded), shardload.restore(restored, tmp_path)):
        assert note in report.notes


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
    assert not any("besides variables" in note for note in shardload.report(loaded).notes)
    assert "values" not in json.loads((tmp_path / "0/shardload/structure.json").read_text())
    np.testing.assert_array_equal(loaded.layers[0].kernel, model.layers[0].kernel)


def weighing():
    model = keras.Sequential([keras.Input((2,)), Weighing(), layers.Dense(2)])
    model.layers[0].weights_const = np.asarray([0.25, 2.0], "float32")
    return model


@pytest.mark.filterwarnings("error")
def test_files_that_belong_to_stored_values_come_back_with_them(tmp_path):
    shardload.save(weighing(), tmp_path, step=0)
    assert shardload.load(tmp_path).layers[0].table == {"cat": 0.25, "dog": 2.0}


def test_files_that_belong_to_values_that_an_older_step_lacks_are_explained(tmp_path):
    shardload.save(weighing(), tmp_path, step=0)
    as_saved_before(tmp_path)
    lacks = r"the step lacks what save_own_variables of Weighing at 'layers/weighing' saves besides variables\. B"
    with pytest.raises(SourceError, match=lacks):
        shardload.load(tmp_path)


class Folding(layers.Layer):
    """Assigns a variable while it saves, if the other one has changed, as KerasHub's DINOv2 does."""

    def build(self, shape):
        self.a, self.b = (self.add_weight(shape=(shape[-1],), name=name, initializer="ones") for name in "ab")

    def call(self, x):
        return x * self.b

    def save_own_variables(self, store):
        if float(keras.ops.sum(self.b)) > 0:
            self.a.assign(self.b * 2)
        super().save_own_variables(store)


def test_a_save_changes_no_variable(tmp_path):
    model = keras.Sequential([keras.Input((4,)), Folding(), Copying(2)])
    before = [np.array(weight) for weight in model.weights]
    shardload.save(model, tmp_path, step=0)
    assert all(np.array_equal(one, two) for one, two in zip(before, model.weights, strict=True))


@pytest.mark.parametrize("source", ["run", "m.keras"])
@pytest.mark.parametrize("kind", [Counting, Copying])
def test_a_conversion_keeps_them(tmp_path, kind, source):
    model = keras.Sequential([keras.Input((4,)), kind() if kind is Counting else kind(2)])
    model.layers[0].count = 7
    shardload.save(model, tmp_path / "run", step=0)
    model.save(tmp_path / "m.keras")
    assert shardload.convert(tmp_path / source, tmp_path / "converted", to="orbax").notes == ()
    loaded = shardload.load(tmp_path / "converted", mesh="1x1").layers[0]
    assert loaded.count == 7
    for one, two in zip(loaded.weights, model.layers[0].weights, strict=True):
        np.testing.assert_array_equal(one.value, two.value)


def test_a_conversion_says_what_it_leaves_out(tmp_path, monkeypatch):
    model = keras.Sequential([keras.Input((4,)), Counting()])
    model.layers[0].count = 7
    model.save(tmp_path / "m.keras")
    monkeypatch.setattr(stored_values, "LIMIT_BYTES", 4)
    [lost] = shardload.convert(tmp_path / "m.keras", tmp_path / "converted", to="orbax").notes
    assert lost.startswith("A step cannot store 'count', which save_own_variables of Counting at 'layers/counting'")
