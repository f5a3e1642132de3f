"""What a strict load refuses, and what one that is not does instead."""

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

import shardload
from shardload.errors import MismatchError
from shardload.keras_bridge.variables import value_of


def network(outputs=8, *, seed=0):
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((6,))
    x = keras.layers.Dense(64, bias_initializer="uniform", name="hidden")(inputs)
    return keras.Model(inputs, keras.layers.Dense(outputs, bias_initializer="uniform", name="out")(x))


def values(model):
    return {v.path: np.asarray(value_of(v)) for v in model.weights}


@pytest.fixture(params=["keras", "h5", "bare"])
def file(request, tmp_path):
    """A network with eight outputs, saved; and what it holds."""
    original = network(seed=1)
    match request.param:
        case "keras":
            original.save(path := tmp_path / "model.keras")
        case "h5":
            original.save_weights(path := tmp_path / "model.weights.h5")
        case _:
            save_file(values(original), path := tmp_path / "model.safetensors")
    return path, values(original)


def test_another_shape_is_refused_with_the_way_out(file):
    with pytest.raises(MismatchError, match=r"(?s)out/kernel' has shape \(64, 3\).* \(64, 8\).*strict=False"):
        shardload.load_weights(network(3), file[0], mesh="1x2")


@pytest.mark.parametrize("built", ["live", "abstractly"])
def test_without_strict_layers_of_another_shape_are_left_alone(file, built):
    path, held = file
    reference = values(network(3))
    if built == "live":
        model = network(3)
    else:
        with shardload.abstract():
            model = network(3)
    report = shardload.load_weights(model, path, mesh="1x2", strict=False)
    found = values(model)
    for name in ("hidden/kernel", "hidden/bias"):
        np.testing.assert_array_equal(found[name], held[name])
    for name in ("out/kernel", "out/bias"):
        np.testing.assert_array_equal(found[name], reference[name])
    assert set(report.missing) == {"out/kernel", "out/bias"}
    assert {(m.variable, m.expected, m.found) for m in report.mismatched} == {
        ("out/kernel", (64, 3), (64, 8)),
        ("out/bias", (3,), (8,)),
    }
    assert set(report.initialised) == (set() if built == "live" else {"out/kernel", "out/bias"})
    assert "64x3, not 64x8" in str(report)


def test_keras_skips_the_same(tmp_path):
    network(seed=1).save_weights(tmp_path / "model.weights.h5")
    ours, theirs = network(3), network(3)
    shardload.load_weights(ours, tmp_path / "model.weights.h5", strict=False)
    with pytest.warns(UserWarning):
        theirs.load_weights(tmp_path / "model.weights.h5", skip_mismatch=True)
    for name, value in values(ours).items():
        np.testing.assert_array_equal(value, values(theirs)[name])


def test_a_strict_load_of_what_fits_lists_nothing(file):
    report = shardload.load_weights(network(), file[0], mesh="1x2")
    assert report.mismatched == report.missing == ()


def integers(path):
    return save_file({n: np.ones(v.shape, np.int32) for n, v in values(network()).items()}, path)


def test_integers_for_floats_are_refused(tmp_path):
    integers(tmp_path / "model.safetensors")
    with pytest.raises(MismatchError, match=r"'hidden/kernel' is float32, but tensor 'hidden/kernel' is int32: with"):
        shardload.load_weights(network(), tmp_path / "model.safetensors")


def test_without_strict_integers_are_cast_and_the_report_says_so(tmp_path):
    integers(tmp_path / "model.safetensors")
    report = shardload.load_weights(model := network(), tmp_path / "model.safetensors", strict=False)
    assert {(c.stored, c.loaded) for c in report.cast} == {("int32", "float32")}
    assert all((value == 1).all() for value in values(model).values())


def test_a_hook_that_takes_integers_itself_may(tmp_path):
    class Counts(keras.layers.Layer):
        def build(self, shape):
            self.counts = self.add_weight(shape=(4,), name="counts")

        def call(self, x):
            return x * self.counts

        def save_own_variables(self, store):
            store["counts"] = np.asarray(self.counts, np.int32)

        def load_own_variables(self, store):
            self.counts.assign(store["counts"])

    original, model = (keras.Sequential([keras.Input((4,)), Counts()]) for _ in range(2))
    original.layers[0].counts.assign([1, 2, 3, 4])
    original.save_weights(tmp_path / "model.weights.h5")
    shardload.load_weights(model, tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(model.layers[0].counts, [1, 2, 3, 4])
