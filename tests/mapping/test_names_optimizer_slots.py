"""The state of an optimizer that never trained, loaded with the weights of its model."""

import shutil

import h5py
import keras
import numpy as np
import pytest
from classifiers import assert_equal, classifier, data, optimizer_state, train, values

import shardload
from shardload.errors import LoadInterruptedError, MismatchError
from shardload.keras_bridge.model_state import slots_of
from shardload.keras_bridge.variables import value_of
from shardload.transfer import execution

pytestmark = [
    # Keras' own words where model or checkpoint has an optimizer of another kind; the report repeats them.
    pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model after some steps of training, as an archive and as weights."""
    path = tmp_path_factory.mktemp("trained")
    model = train(classifier(seed=1))
    model.save(path / "model.keras")
    model.save_weights(path / "model.weights.h5")
    return path


def fresh(kind):
    if kind == "live":
        return classifier()
    with shardload.abstract():
        return classifier()


@pytest.mark.parametrize("kind", ["live", "abstract"])
@pytest.mark.parametrize("mesh", [None, "1x4", "2x3"])
@pytest.mark.parametrize("file", ["model.keras", "model.weights.h5"])
def test_a_compiled_model_gets_the_optimizers_state(folder, file, mesh, kind):
    reference = keras.models.load_model(folder / "model.keras")
    model = fresh(kind)
    report = shardload.load_weights(model, folder / file, mesh=mesh)
    assert_equal(model, reference)
    assert_equal(model, reference, pick=optimizer_state)
    assert report.notes == () and model.optimizer.built
    for slot, weight in slots_of(model):
        assert value_of(slot).sharding.is_equivalent_to(value_of(weight).sharding, slot.value.ndim)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "tolerance"), [("1x1", 0), ("1x4", 1e-6)])
def test_training_goes_on_as_in_keras(folder, mesh, tolerance):
    reference, model = keras.models.load_model(folder / "model.keras"), classifier()
    shardload.load_weights(model, folder / "model.keras", mesh=mesh)
    x, y = data()
    for trained in (reference, model):
        trained.train_on_batch(x, y)
    for pick in (lambda m: m.weights, optimizer_state):
        for one, other in zip(values(pick(model)), values(pick(reference)), strict=True):
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_slots_of_wrapped_optimizers_come_along(tmp_path):
    def wrapped():
        model = classifier()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)), loss)
        return model

    original, model = train(wrapped()), wrapped()
    original.save_weights(tmp_path / "model.weights.h5")
    shardload.load_weights(model, tmp_path / "model.weights.h5", mesh="1x2")
    assert_equal(model, original, pick=optimizer_state)
    train(model)


def test_an_optimizer_of_another_kind_starts_afresh_and_the_report_says_so(folder):
    model = classifier()
    model.compile(keras.optimizers.SGD(0.01), "mse")
    report = shardload.load_weights(model, folder / "model.keras", mesh="1x2")
    assert not model.optimizer.built and len(model.optimizer.variables) == 2
    assert any("does not continue with the stored state" in note for note in report.notes)


def test_slots_that_would_fit_by_chance_are_left_alone(tmp_path):
    model, loss = classifier(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    train(model).save(tmp_path / "model.keras")
    model = classifier()
    model.compile("rmsprop", loss)  # as many slots, of the same shapes
    shardload.load_weights(model, tmp_path / "model.keras")
    assert not model.optimizer.built


def state_of(optimizer):
    return {k: list(v) if isinstance(v, list) else v for k, v in vars(optimizer).items()}


def test_a_refused_load_leaves_the_optimizer_as_it_was(folder):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name="out")])
    model.compile("adam", "mse")
    before = state_of(model.optimizer)
    with pytest.raises(MismatchError):
        shardload.load_weights(model, folder / "model.keras")
    assert state_of(model.optimizer) == before
    model.train_on_batch(np.ones((2, 6)), np.ones((2, 3)))


def test_a_failed_load_leaves_the_optimizer_as_it_was(folder, monkeypatch):
    model = classifier()
    before = state_of(model.optimizer)
    monkeypatch.setattr(execution, "execute", lambda *a, **k: (_ for _ in ()).throw(OSError("gone")))
    with pytest.raises(OSError, match="gone"):
        shardload.load_weights(model, folder / "model.keras", mesh="1x2")
    monkeypatch.undo()
    assert state_of(model.optimizer) == before
    train(model)
    shardload.load_weights(model, folder / "model.keras", mesh="1x2")
    assert_equal(model, keras.models.load_model(folder / "model.keras"), pick=optimizer_state)


def counted_in_64_bits(folder, target, *, steps):
    """The same weights as TensorFlow would have saved them: it counts steps in int64."""
    shutil.copy(folder / "model.weights.h5", target)
    with h5py.File(target, "r+") as file:
        del file["optimizer/vars/0"]
        file["optimizer/vars/0"] = np.array(steps, np.int64)
    return target


def test_steps_counted_by_tensorflow_are_taken_over(folder, tmp_path):
    model = classifier()
    report = shardload.load_weights(model, counted_in_64_bits(folder, tmp_path / "tf.weights.h5", steps=7), mesh="1x4")
    assert int(model.optimizer.iterations.value) == 7
    assert [name.rpartition("/")[2] for name in report.computed] == ["iteration"]
    assert_equal(model, keras.models.load_model(folder / "model.keras"))


def test_more_steps_than_fit_are_refused(folder, tmp_path):
    path = counted_in_64_bits(folder, tmp_path / "tf.weights.h5", steps=1 << 40)
    with pytest.raises(LoadInterruptedError, match=r"int64 values from 1099511627776 .* they do not fit in int32"):
        shardload.load_weights(classifier(), path, mesh="1x2")


@pytest.mark.slow
def test_without_strict_slots_of_another_shape_start_afresh(folder):
    model = keras.Model((base := classifier()).inputs, keras.layers.Dense(3, name="out")(base.get_layer("drop").output))
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    report = shardload.load_weights(model, folder / "model.weights.h5", mesh="1x2", strict=False)
    assert any("momentum" in m.variable for m in report.mismatched)
    assert int(model.optimizer.iterations.value) == 0
    assert not any(value.any() for value in values([slot for slot, _ in slots_of(model)]))
    x, y = data()
    model.train_on_batch(x, y % 3)
