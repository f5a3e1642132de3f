"""Files of Keras 2 load as Keras' own `load_weights` loads them, bit for bit, and in every layout."""

import h5py
import jax
import keras
import numpy as np
import pytest
from legacy_h5 import write_model, write_variable, write_weights

import shardload
from shardload.errors import MismatchError, UnsupportedError

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5"),
]


class Scaled(keras.Model):
    """A model with a weight of its own and a nested model."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(8192,), name="scale", initializer="random_normal")
        self.inner = keras.Sequential([keras.layers.Dense(8), keras.layers.BatchNormalization()])
        self.last = keras.layers.Dense(8192)

    def build(self, shape):
        self.inner.build(shape)
        self.last.build(shape)
        self.built = True

    def call(self, x):
        return self.last(self.inner(x)) * self.scale


def scaled():
    made = Scaled()
    made.build((None, 8))
    return made


def functional():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Normalization(name="n")(inputs)
    x = keras.layers.Conv2D(8, 3, name="zz")(x)
    x = keras.layers.SeparableConv2D(8, 3, name="aa")(keras.layers.BatchNormalization(name="frozen")(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Reshape((4, 2))(keras.layers.Dropout(0.1)(x))
    x = keras.layers.Bidirectional(keras.layers.LSTM(4))(x)
    made = keras.Model(inputs, keras.layers.Dense(8192, name="Dense")(x))
    made.get_layer("frozen").trainable = False
    return made


MODELS = {"functional": functional, "subclassed": scaled}


def filled(make, seed):
    made = make()
    random = np.random.default_rng(seed)
    for variable in made.variables:
        if variable.dtype == "float32":
            variable.assign(random.random(variable.shape).astype("float32"))
    return made


def write_whole(path, saved):
    """A whole model, also of a class that Keras 2 could not save as one."""
    write_weights(path, saved)
    with h5py.File(path, "r+") as file:
        names = list(file)
        weights = file.create_group("model_weights")
        for name in names:
            file.move(name, f"model_weights/{name}")
        weights.attrs["layer_names"] = file.attrs["layer_names"]
        del file.attrs["layer_names"]
        file.attrs["model_config"] = "{}"
        file["optimizer_weights/iteration"] = np.int64(3)


@pytest.mark.parametrize("write", [write_weights, write_variable, write_whole])
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_keras(tmp_path, name, write):
    make, path = MODELS[name], tmp_path / "m.h5"
    write(path, filled(make, 0))
    reference = filled(make, 1)
    reference.load_weights(path)
    for mesh in ("1x1", "2x4"):
        model = filled(make, 2)
        report = shardload.load_weights(model, path, mesh=mesh)
        assert (report.missing, report.unused) == ((), ())
        for ours, theirs in zip(model.weights, reference.weights, strict=True):
            assert np.asarray(ours.value).tobytes() == np.asarray(theirs.value).tobytes(), ours.path
        if name == "functional":
            assert (
                np.asarray(model.get_layer("n").mean).tobytes() == np.asarray(reference.get_layer("n").mean).tobytes()
            )
        assert mesh == "1x1" or any(not v.value.sharding.is_fully_replicated for v in model.weights)


def dense(*sizes):
    return keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(size) for size in sizes)])


def test_names_do_not_matter(tmp_path):
    saved = dense(8, 8)
    write_weights(tmp_path / "m.h5", saved)
    model = dense(8, 8)
    shardload.load_weights(model, tmp_path / "m.h5")
    assert all(np.array_equal(a.value, b.value) for a, b in zip(saved.weights, model.weights, strict=True))


def test_another_number_of_layers_or_weights(tmp_path):
    write_weights(tmp_path / "m.h5", dense(8, 8))
    for strict in (True, False):
        with pytest.raises(MismatchError, match=r"by order: the file has 2 layers with weights \(dense.*the model 3"):
            shardload.load_weights(dense(8, 8, 8), tmp_path / "m.h5", strict=strict)
        other = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(8, use_bias=False)])
        with pytest.raises(MismatchError, match="differ in their number, 2 in the file and 1 in the model"):
            shardload.load_weights(other, tmp_path / "m.h5", strict=strict)


def test_other_shapes(tmp_path):
    write_weights(tmp_path / "m.h5", dense(8, 8))
    model = dense(8, 4)
    before = np.asarray(model.layers[1].kernel.value)
    with pytest.raises(MismatchError, match=r"has shape \(8, 4\), but tensor .* has shape \(8, 8\)"):
        shardload.load_weights(model, tmp_path / "m.h5")
    report = shardload.load_weights(model, tmp_path / "m.h5", strict=False)
    assert len(report.missing) == 2
    assert np.array_equal(model.layers[1].kernel.value, before)
    reference = dense(8, 4)
    with pytest.warns(UserWarning, match="Skipping loading"):
        reference.load_weights(tmp_path / "m.h5", skip_mismatch=True)
    assert np.array_equal(model.layers[0].kernel.value, reference.layers[0].kernel.value)


def test_arrays_and_inspect(tmp_path):
    saved = dense(8)
    write_weights(tmp_path / "m.h5", saved)
    arrays = shardload.load_arrays(tmp_path / "m.h5", lambda *_: jax.sharding.PartitionSpec(), mesh="1x1")
    assert sorted(value.shape for value in arrays.values()) == [(8,), (8, 8)]
    kernel = next(value for value in arrays.values() if value.ndim == 2)
    assert np.array_equal(kernel, saved.layers[0].kernel.value)
    assert "keras-legacy-h5" in str(shardload.inspect(tmp_path / "m.h5"))


def test_load_says_the_way_out(tmp_path):
    write_model(tmp_path / "m.h5", dense(8))
    with pytest.raises(UnsupportedError, match=r"Build the model yourself, then call shardload\.load_weights"):
        shardload.load(tmp_path / "m.h5")
