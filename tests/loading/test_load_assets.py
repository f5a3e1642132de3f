"""Layers with files and hooks of their own: what they saved comes back, and what cannot is an error."""

import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers
from saving_models import Weighing

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import DamagedError, MismatchError, SourceError, UnsafeSourceError, UnsupportedError
from shardload.loaders import keras_archive

X = np.ones((8, 3), "float32")


@keras.saving.register_keras_serializable("test-load-assets")
class Worded(keras.layers.Dense):
    """Keeps words in a file beside its kernel."""

    words = ""

    def save_assets(self, folder):
        (Path(folder) / "words.txt").write_text(self.words)

    def load_assets(self, folder):
        self.words = (Path(folder) / "words.txt").read_text()


@keras.saving.register_keras_serializable("test-load-assets")
class Hooked(keras.layers.Dense):
    """Saves its kernel only."""

    def save_own_variables(self, store):
        store["kernel"] = self.kernel.numpy()

    def load_own_variables(self, store):
        self.kernel.assign(store["kernel"])


@keras.saving.register_keras_serializable("test-load-assets")
class Renamed(Hooked):
    """Its files have another key by now, which it passes over."""

    def load_own_variables(self, store):
        if "weight" in store:
            self.kernel.assign(store["weight"])


@keras.saving.register_keras_serializable("test-load-assets")
class Raising(keras.layers.Layer):
    """Stores nothing itself, and has a hook that fails."""

    def __init__(self, **named):
        super().__init__(**named)
        self.inner = keras.layers.Dense(2)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)

    def load_own_variables(self, store):
        raise RuntimeError("no table of mine")


def model_of(layer):
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((3,)), layer])


def archive(layer, folder):
    model = model_of(layer)
    model.save(folder / "model.keras")
    return model, folder / "model.keras"


def test_an_archive_gives_layers_their_files_back(tmp_path):
    layer = Worded(2)
    layer.words = "cat dog"
    _, path = archive(layer, tmp_path)
    assert shardload.load(path).layers[0].words == "cat dog"


def step(folder):
    layer = Worded(2)
    layer.words = "cat dog" * 1000
    model = model_of(layer)
    model.compile("sgd", "mse")
    model.fit(X, X[:, :2], verbose=0, callbacks=[OrbaxCheckpoint(folder)])
    return layer.words


def test_a_step_gives_layers_their_files_back(tmp_path):
    words = step(tmp_path)
    assert shardload.load(tmp_path).layers[0].words == words


@pytest.mark.parametrize("source", ["model.keras", "1"])
def test_orbax_keeps_the_files_of_layers(tmp_path, source):
    layer = Worded(2)
    layer.words = "cat dog"
    model, _ = archive(layer, tmp_path)
    shardload.save(model, tmp_path, step=1)
    shardload.convert(tmp_path / source, tmp_path / "2", to="orbax")
    shardload.convert(tmp_path / "2", tmp_path / "3", to="orbax")
    assert shardload.load(tmp_path / "3", format="orbax").layers[0].words == "cat dog"


@pytest.mark.parametrize("ending", [".weights.h5", ".weights.json"])
def test_weights_of_layers_with_files_have_no_description_without_them(tmp_path, ending):
    model, path = archive(Worded(2), tmp_path)
    for report in (
        shardload.save_as(model, tmp_path / f"saved{ending}"),
        shardload.convert(path, tmp_path / f"converted{ending}"),
    ):
        assert "json was not written, because layers of the model have files (a vocabulary)" in report.notes[0]
        with pytest.raises(UnsupportedError, match="no description of their model"):
            shardload.load(report.target)
        shardload.load_weights(model_of(Worded(2)), report.target)


def test_a_damaged_file_of_a_step_is_told(tmp_path):
    words = step(tmp_path).encode()
    holding = [path for path in (tmp_path / "1" / "assets").rglob("*") if path.is_file() and words in path.read_bytes()]
    for path in holding:
        path.write_bytes(path.read_bytes().replace(b"dogcat", b"dogcow", 1))
    assert holding
    with pytest.raises(DamagedError, match="assets"):
        shardload.load(tmp_path)


def with_member(path, name, content=b"x"):
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as found:
        found.writestr(name, content)


@pytest.mark.parametrize("name", ["assets/../../escaped.txt", "assets//escaped.txt", "assets/a\\\\..\\\\b.txt"])
def test_a_file_that_would_leave_its_folder_is_refused(tmp_path, name):
    _, path = archive(Worded(2), tmp_path)
    with_member(path, name)
    with pytest.raises(SourceError):
        shardload.load(path)
    assert not list(tmp_path.parent.glob("escaped.txt"))


def test_a_file_that_is_a_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(keras_archive, "ASSET_FLOOR_BYTES", 1 << 16)
    _, path = archive(Worded(2), tmp_path)
    with_member(path, "assets/bomb", bytes(1 << 20))
    with pytest.raises(UnsafeSourceError, match="assets/bomb declares 1048576 bytes"):
        shardload.load(path)


def test_files_a_layer_cannot_read_are_an_error(tmp_path, monkeypatch):
    _, path = archive(Worded(2), tmp_path)
    monkeypatch.setattr(Worded, "load_assets", lambda self, folder: 1 / 0)
    failed = r"Cannot load the files that .*Worded.* saved in .*ZeroDivisionError: division by zero"
    with pytest.raises(SourceError, match=failed):
        shardload.load(path)
    assert shardload.load_weights(model_of(Worded(2)), path).bytes.read > 0  # the way out that the message names


def test_files_that_belong_to_stored_values_come_back_after_them(tmp_path):
    layer = Weighing()
    layer.weights_const = np.asarray([0.25, 2.0], "float32")
    _, path = archive(layer, tmp_path)
    assert shardload.load(path, custom_objects={"Weighing": Weighing}).layers[0].table == {"cat": 0.25, "dog": 2.0}


def test_files_are_read_once_the_weights_are_there(tmp_path, monkeypatch):
    model, path = archive(Worded(2), tmp_path)
    monkeypatch.setattr(Worded, "load_assets", lambda self, folder: setattr(self, "seen", np.asarray(self.kernel)))
    np.testing.assert_array_equal(shardload.load(path).layers[0].seen, model.layers[0].kernel)


def test_weights_that_a_hook_never_saves_stay_as_they_are_made(tmp_path):
    model, path = archive(Hooked(2, bias_initializer="ones"), tmp_path)
    loaded = shardload.load(path)
    np.testing.assert_array_equal(loaded.layers[0].kernel.value, model.layers[0].kernel.value)
    np.testing.assert_array_equal(loaded.layers[0].bias.value, 1)
    assert any("/bias keeps its value" in note for note in shardload.report(loaded).notes)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Renamed(2), r"missing from the checkpoint: .*kernel"),  # it passes over what is stored
        (Raising, r"Raising at .* no table of mine"),  # it fails where nothing is stored for it
    ],
)
def test_a_hook_that_does_not_find_its_weights_is_told(make, says, tmp_path):
    _, path = archive(make(), tmp_path)
    with pytest.raises(MismatchError, match=says):
        shardload.load(path)


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


class Swapping(Deciding):
    """Older versions stored both weights the other way round."""

    def load_own_variables(self, store):
        is_new = self.is_new(store)
        self.a.assign(store["0" if is_new else "1"])
        self.b.assign(store["1" if is_new else "0"])
        self.version.assign(store["2"])


@registered
class BySwapping(Swapping):
    def is_new(self, store):
        return int(np.asarray(store["2"])) >= 2

    def load_own_variables(self, store):
        super().load_own_variables(store)
        self.version.assign(2)


@registered
class ByItem(Swapping):
    def is_new(self, store):
        return np.asarray(store["2"]).item() == 2


@registered
class ByDerivedValue(Swapping):
    def is_new(self, store):
        return (store["2"][()] + 1) > 2


@registered
class ByJax(Swapping):
    def is_new(self, store):
        return keras.ops.convert_to_tensor(store["2"]) >= 2


@registered
class ByIterating(Swapping):
    def is_new(self, store):
        return not all(value == 0 for value in store["0"])


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
