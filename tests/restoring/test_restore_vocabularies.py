"""Vocabularies go into existing models with the weights: the rows of an embedding belong to them."""

from pathlib import Path

import keras
import numpy as np
import pytest

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import DamagedError

pytest.importorskip("tensorflow")  # lookup layers use its tables

IDS = np.zeros((2, 2), "int32")
WORDS = ["[UNK]", "a", "c", "b"]


@keras.saving.register_keras_serializable("test-restore-vocabularies")
class Reader(keras.Model):
    """Looks words up outside of its call, as models on JAX do."""

    def __init__(self, **named):
        super().__init__(name="reader", **named)
        self.words = keras.layers.StringLookup(name="words")
        self.embedding = keras.layers.Embedding(5, 2)

    def call(self, ids):
        return keras.ops.mean(self.embedding(ids), axis=1)

    def get_config(self):
        return {}


def reader(*words):
    model = Reader()
    model(IDS)
    model.compile("sgd", "mse")
    if words:
        model.words.adapt(list(words))
    return model


def train(model, folder, *, epochs=1, **named):
    model.fit(IDS, np.ones((2, 2)), epochs=epochs, verbose=0, callbacks=[OrbaxCheckpoint(folder, **named)])
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(reader("a", "c", "b", "a", "c", "a"), folder)
    return folder


@pytest.mark.parametrize(
    "load",
    [shardload.restore, lambda model, run: shardload.restore(model, run, items="weights"), shardload.load_weights],
    ids=["restore", "weights", "load_weights"],
)
def test_a_model_that_was_not_adapted_gets_the_vocabulary_of_the_step(run, load):
    model = reader()
    report = load(model, run)
    assert model.words.get_vocabulary() == WORDS
    assert not [note for note in report.notes if "vocabulary" in note]


def test_an_archive_gives_it_too(tmp_path):
    reader("a", "c", "b", "a", "c", "a").save(tmp_path / "m.keras")
    model = reader()
    shardload.load_weights(model, tmp_path / "m.keras")
    assert model.words.get_vocabulary() == WORDS


@pytest.mark.parametrize("how", ["restored", "resumed"])
def test_a_run_that_goes_on_keeps_its_vocabulary_on_disk(tmp_path, how):
    train(reader("a", "c", "b", "a", "c", "a"), tmp_path)
    model = reader()
    if how == "restored":
        shardload.restore(model, tmp_path)
    train(model, tmp_path, epochs=2, max_to_keep=1, resume=how == "resumed")
    assert [path.name for path in tmp_path.iterdir() if path.name.isdigit()] == ["2"]
    assert shardload.load(tmp_path).words.get_vocabulary() == WORDS


def test_the_step_replaces_another_vocabulary_and_says_so(run):
    model = reader("x", "y")
    report = shardload.restore(model, run)
    assert model.words.get_vocabulary() == WORDS
    assert any("StringLookup at 'words' (a vocabulary) differed from the stored ones" in note for note in report.notes)
    with pytest.warns(UserWarning, match="StringLookup at 'words' .* differed"):
        train(reader("x", "y"), run, resume=True)


def test_the_same_vocabulary_is_not_loaded_again(run, monkeypatch):
    monkeypatch.setattr(keras.layers.StringLookup, "load_assets", lambda self, folder: 1 / 0)
    report = shardload.restore(reader("a", "c", "b", "a", "c", "a"), run)
    assert not [note for note in report.notes if "vocabulary" in note]


def test_other_items_leave_the_vocabulary(run):
    model = reader("x", "y")
    shardload.restore(model, run, items="optimizer")
    assert sorted(model.words.get_vocabulary()) == ["[UNK]", "x", "y"]


def test_a_layer_that_cannot_load_its_files_is_told(run, monkeypatch):
    monkeypatch.setattr(keras.layers.StringLookup, "load_assets", lambda self, folder: 1 / 0)
    notes = shardload.restore(reader(), run).notes
    assert any("StringLookup at 'words' (a vocabulary) were not loaded: load_assets raised" in note for note in notes)
    assert any("StringLookup at 'words' has no vocabulary" in note for note in notes)


def test_damaged_files_leave_the_model_unchanged(tmp_path):
    train(reader("apple", "apple", "cherry"), tmp_path)
    changed = 0
    for path in (tmp_path / "1" / "assets").rglob("*"):
        if path.is_file() and b"cherry" in (content := path.read_bytes()):
            path.write_bytes(content.replace(b"cherry", b"cheery"))
            changed += 1
    assert changed
    model = reader()
    before = np.asarray(model.embedding.embeddings)
    with pytest.raises(DamagedError, match="assets"):
        shardload.restore(model, tmp_path)
    np.testing.assert_array_equal(model.embedding.embeddings, before)


@pytest.mark.parametrize("source", ["w.weights.h5", "run"])
def test_sources_without_files_are_told(tmp_path, source):
    model = reader("a")
    model.save_weights(tmp_path / "w.weights.h5")
    train(model, tmp_path / "run", save_weights_only=True)
    report = shardload.load_weights(reader(), tmp_path / source)
    assert any("StringLookup at 'words' has no vocabulary, as" in note for note in report.notes)


def test_a_model_that_was_not_adapted_is_saved_with_a_warning_and_loads(tmp_path):
    with pytest.warns(UserWarning, match="StringLookup at 'words' has no vocabulary yet"):
        train(reader(), tmp_path)
    model = shardload.load(tmp_path)
    assert model.words.vocabulary_size() == 1
    assert any("StringLookup at 'words' has no vocabulary" in note for note in shardload.report(model).notes)


def test_an_archive_of_a_model_that_was_not_adapted_loads(tmp_path):
    reader().save(tmp_path / "m.keras")
    assert shardload.load(tmp_path / "m.keras").words.vocabulary_size() == 1


def several(*, mode, adapted):
    text = keras.layers.TextVectorization(output_mode=mode, name="text")
    numbers = keras.layers.IntegerLookup(name="numbers")
    if adapted:
        text.adapt(["the cat sat", "a dog ran far the the"])
        numbers.adapt(np.array([5, 9, 9, -3]))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.text, model.numbers = text, numbers
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("mode", ["int", "tf_idf"])
def test_all_lookup_layers_get_theirs(tmp_path, mode):
    saved, model = several(mode=mode, adapted=True), several(mode=mode, adapted=False)
    shardload.save(saved, tmp_path, step=1)
    shardload.restore(model, tmp_path)
    assert model.text.get_vocabulary() == saved.text.get_vocabulary()
    assert model.numbers.get_vocabulary() == saved.numbers.get_vocabulary()
    np.testing.assert_array_equal(np.asarray(model.text(["the dog"])), np.asarray(saved.text(["the dog"])))
    assert Path(tmp_path / "1" / "assets").is_dir()


def test_a_moved_layer_gets_its_own(tmp_path):
    saved, model = several(mode="int", adapted=True), several(mode="int", adapted=False)
    saved.old = saved.text
    shardload.save(saved, tmp_path, step=1)
    del model.numbers
    report = shardload.restore(model, tmp_path)
    assert any("files of layers that the model does not have were not loaded: numbers" in note for note in report.notes)
