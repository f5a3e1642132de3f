"""Models with LoRA enabled: files of Keras have no adapters, and Keras' hooks would set both factors to zero."""

import keras
import numpy as np
import pytest
from keras import layers

import shardload
from shardload.errors import MismatchError

X, Y = np.random.default_rng(0).normal(size=(16, 4)).astype("float32"), np.ones((16, 2), "float32")


def base():
    return keras.Sequential([keras.Input((4,)), layers.Dense(8, "relu", name="first"), layers.Dense(2, name="last")])


def adapted(*, train=False):
    model = base()
    model.get_layer("first").enable_lora(2)
    model.get_layer("first").bias.trainable = False
    model.get_layer("last").trainable = False
    return trained(model) if train else model


def trained(model):
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(X, Y, verbose=0)
    return model


def factors(model):
    layer = model.get_layer("first")
    return np.asarray(layer.lora_kernel_a), np.asarray(layer.lora_kernel_b)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("files")
    model = base()
    model.save_weights(found / "m.weights.h5")
    model.save_weights(found / "m.weights.json", max_shard_size=1)
    model.save(found / "m.keras")
    np.save(found / "y.npy", model.predict(X, verbose=0))
    return found


FILES = ["m.weights.h5", "m.keras", "m.weights.json"]


@pytest.mark.parametrize("file", FILES)
def test_new_adapters_are_kept_and_train(folder, file):
    model = adapted()
    a, _ = factors(model)
    report = shardload.load_weights(model, folder / file)
    np.testing.assert_array_equal(factors(model)[0], a)
    np.testing.assert_allclose(model.predict(X, verbose=0), np.load(folder / "y.npy"), atol=1e-6)
    assert "1 LoRA adapter of the model kept as new: they change nothing yet" in report.notes
    assert not report.missing
    assert np.abs(factors(trained(model))[1]).sum() > 0


@pytest.mark.parametrize("file", FILES)
def test_trained_adapters_are_not_mixed_with_other_kernels(folder, file):
    model = adapted(train=True)
    before = factors(model)
    with pytest.raises(MismatchError, match=r"lora_kernel_a[\s\S]*1 layer \(rank 2\)\. Load it before enable_lora"):
        shardload.load_weights(model, folder / file, items="weights")
    report = shardload.load_weights(model, folder / file, items="weights", strict=False)
    for value, kept in zip(factors(model), before, strict=True):
        np.testing.assert_array_equal(value, kept)
    assert any(name.endswith("lora_kernel_a") for name in report.missing)
    assert any("1 trained LoRA adapter kept" in note for note in report.notes)


def test_an_abstract_model_gets_new_adapters(folder):
    with shardload.abstract():
        model = adapted()
    shardload.load_weights(model, folder / "m.weights.h5")
    a, b = factors(model)
    assert np.abs(a).sum() > 0
    assert not b.any()
    np.testing.assert_allclose(model.predict(X, verbose=0), np.load(folder / "y.npy"), atol=1e-6)


def test_an_archive_with_adapters_trains_after_load(tmp_path):
    model = adapted(train=True)
    model.save(tmp_path / "m.keras")
    loaded = shardload.load(tmp_path / "m.keras", compile=False)
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-5)
    if loaded.get_layer("first").lora_enabled:
        assert np.abs(factors(loaded)[0]).sum() > 0


def test_fast_does_as_keras_and_says_so(folder):
    model = adapted()
    with shardload.fast() as report:
        model.load_weights(folder / "m.weights.h5")
    assert not factors(model)[0].any()
    [call] = report.calls
    assert call.load is not None
    assert any("1 LoRA adapter became zero and cannot train" in note for note in call.load.notes)
