"""Files of Keras 2 load as Keras' own `load_weights` loads them, bit for bit, and in every layout."""

import copy

import h5py
import jax
import keras
import numpy as np
import pytest
from by_hand import check_same
from legacy_h5 import OLD_CONFIG, OLD_TRAINING, write_described, write_variable, write_weights

import shardload
from shardload.errors import MismatchError, ShardloadError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")


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
        check_same(model, reference)
        if name == "functional":
            ours, theirs = (np.asarray(one.get_layer("n").mean) for one in (model, reference))
            assert ours.tobytes() == theirs.tobytes()
        assert mesh == "1x1" or any(not v.value.sharding.is_fully_replicated for v in model.weights)


def dense(*sizes):
    return keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(size) for size in sizes)])


def test_names_do_not_matter(tmp_path):
    saved, model = dense(8, 8), dense(8, 8)
    write_weights(tmp_path / "m.h5", saved)
    shardload.load_weights(model, tmp_path / "m.h5")
    check_same(model, saved)


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
    assert len(shardload.load_weights(model, tmp_path / "m.h5", strict=False).missing) == 2
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


def same_weights(ours, theirs):
    assert [v.path for v in ours.weights] == [v.path for v in theirs.weights]
    check_same(ours, theirs)


def nested():
    inner = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.BatchNormalization()])
    return keras.Sequential([keras.Input((8,)), inner, keras.layers.Dense(8192, activation="relu")])


@pytest.mark.parametrize("make", [functional, nested], ids=lambda make: make.__name__)
def test_load_of_a_whole_model_equals_keras(tmp_path, make):
    saved = filled(make, 0)
    saved.compile("adam", keras.losses.MeanSquaredError())
    saved.optimizer.build(saved.trainable_variables)
    saved.save(tmp_path / "m.h5")
    reference = keras.saving.load_model(tmp_path / "m.h5")
    for mesh in ("1x1", "2x4"):
        model = shardload.load(tmp_path / "m.h5", mesh=mesh)
        same_weights(model, reference)
        assert type(model) is type(reference)
        assert type(model.optimizer) is type(reference.optimizer)
        assert type(model.loss) is type(reference.loss)
        report = shardload.report(model)
        assert (report.missing, report.unused) == ((), ())
        assert any("the optimizer's state in the file was left out" in note for note in report.notes)
    assert any(not v.value.sharding.is_fully_replicated for v in model.weights)
    assert not shardload.load(tmp_path / "m.h5", mesh="1x1", compile=False).compiled


def old():
    with keras.src.legacy.saving.saving_options.keras_option_scope(use_legacy_config=True):
        return keras.src.legacy.saving.saving_utils.model_from_config(copy.deepcopy(OLD_CONFIG))


@pytest.mark.parametrize("fixed", [False, True])
def test_load_of_a_model_that_keras_2_wrote(tmp_path, fixed):
    write_described(tmp_path / "m.h5", filled(old, 0), training=OLD_TRAINING, fixed=fixed)
    reference = keras.saving.load_model(tmp_path / "m.h5")
    model = shardload.load(tmp_path / "m.h5", mesh="2x4")
    same_weights(model, reference)
    assert (model.optimizer.learning_rate, model.optimizer.momentum) == (0.5, 0.5)
    assert model.loss.reduction == reference.loss.reduction == "sum"
    assert not model.get_layer("last").kernel.value.sharding.is_fully_replicated
    assert "keras-legacy-h5" in str(shardload.plan(tmp_path / "m.h5", mesh="2x4"))


def test_another_dtype(tmp_path):
    write_described(tmp_path / "m.h5", filled(old, 0))
    before = keras.config.dtype_policy().name
    model = shardload.load(tmp_path / "m.h5", mesh="1x1", dtype="bfloat16")
    assert {v.dtype for v in model.weights} == {"bfloat16"}
    assert {layer.compute_dtype for layer in model.layers[1:]} == {"bfloat16"}
    assert keras.config.dtype_policy().name == before


def test_convert(tmp_path):
    saved = filled(old, 0)
    write_described(tmp_path / "m.h5", saved, training=OLD_TRAINING)
    with h5py.File(tmp_path / "m.h5", "r+") as file:
        file["optimizer_weights/iteration"] = np.int64(3)
        file["optimizer_weights/m"] = np.ones((3, 4), np.float32)
    for name, to in {"new.weights.h5": "h5", "step": "orbax"}.items():
        report = shardload.convert(tmp_path / "m.h5", tmp_path / name, to=to)
        assert any("2 tensors of optimizer and metrics left out" in note for note in report.notes)
        same_weights(shardload.load(tmp_path / name, mesh="1x1"), saved)
    reloaded = old()
    reloaded.load_weights(tmp_path / "new.weights.h5")
    same_weights(reloaded, saved)


def test_compile_that_keras_cannot_repeat(tmp_path):
    training = OLD_TRAINING | {"optimizer_config": {"class_name": "SGD", "config": {"lr": 0.5}}}
    write_described(tmp_path / "m.h5", filled(old, 0), training=training)
    with pytest.raises(ValueError, match="lr"):
        keras.saving.load_model(tmp_path / "m.h5")
    with pytest.warns(UserWarning, match="not compiled: its saved configuration does not fit compile"):
        model = shardload.load(tmp_path / "m.h5", mesh="1x1")
    assert not model.compiled


def code(function):
    return {"class_name": "Lambda", "name": "f", "config": {"name": "f", "function": function}}


def sequential(*layers):
    first = {"class_name": "InputLayer", "config": {"batch_input_shape": [None, 8], "name": "in"}}
    return {"class_name": "Sequential", "config": {"name": "s", "layers": [first, *layers]}}


def test_python_code_is_refused(tmp_path):
    function = list(keras.src.utils.python_utils.func_dump(lambda x: x + 1))
    path = write_described(tmp_path / "m.h5", keras.Sequential([keras.Input((8,))]), config=sequential(code(function)))
    with pytest.raises(UnsupportedError, match=r"a `Lambda` layer.*safe_mode=False"):
        shardload.load(path, mesh="1x1")
    model = shardload.load(path, mesh="1x1", safe_mode=False)
    assert np.array_equal(model(np.ones((1, 8))), np.full((1, 8), 2))


def wide(units):
    return sequential({"class_name": "Dense", "config": {"name": "d", "units": units}})


WRONG = {
    "no JSON": ("{", "cannot be read.*does not parse"),
    "no object": ("[1]", "cannot be read.*JSON object"),
    "a key twice": ('{"class_name": "Dense", "class_name": "Lambda"}', "cannot be read.*twice"),
    "nested": ('{"a":' * 2000 + "1" + "}" * 2000, "cannot be read"),
    "empty": ("{}", "no description of their model"),
    "no class": ({"config": {}}, "lacks 'class_name'|from its configuration"),
    "an unknown class": (sequential({"class_name": "Mine", "config": {"name": "m"}}), "Unknown layer: 'Mine'"),
    "no model": ({"class_name": "Dense", "config": {"name": "d", "units": 8}}, "describes a Dense"),
    "a module": (sequential({"class_name": "__builtins__", "config": {"name": "m"}}), "from its configuration"),
    "a wide layer": (wide(1 << 40), r"\(8, 1099511627776\), but tensor"),
    "no units": (wide("many"), "from its configuration"),
    "a list": ({"class_name": "Sequential", "config": [{}]}, "from its configuration"),
}


@pytest.mark.parametrize(("config", "message"), WRONG.values(), ids=WRONG)
def test_configurations_that_are_wrong(tmp_path, config, message):
    write_described(tmp_path / "m.h5", dense(8), config=config)
    with pytest.raises(ShardloadError, match=message):
        shardload.load(tmp_path / "m.h5", mesh="1x1")
    shardload.load_weights(dense(8), tmp_path / "m.h5")


def test_load_of_weights_alone_says_the_way_out(tmp_path):
    write_weights(tmp_path / "m.h5", dense(8))
    with pytest.raises(UnsupportedError, match=r"Build the model yourself, then call shardload\.load_weights"):
        shardload.load(tmp_path / "m.h5")
