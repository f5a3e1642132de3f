"""A model whose ``compile`` does not take what was stored is loaded with a warning that says how to go on."""

import warnings

import keras
import numpy as np
import pytest

import shardload
from shardload.callbacks import OrbaxCheckpoint

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = X[:, :2]


def halved(wanted, found):
    """A loss that nobody registered."""
    return keras.ops.mean(keras.ops.square(wanted - found)) / 2


class SelfCompiled(keras.Sequential):
    """As tasks of KerasHub: compiled with defaults when it is made; its ``compile`` is its own."""

    def __init__(self, layers=None, **named):
        super().__init__(layers, **named)
        self.compile()

    def compile(self, optimizer="adam", **named):
        super().compile(optimizer, "mse", **named)


def trained(*, loss=halved, kind=keras.Sequential, optimizer="rmsprop", callbacks=()):
    keras.utils.set_random_seed(1)
    model = kind([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
    model.compile(optimizer, **({"loss": loss} if kind is keras.Sequential else {}))
    model.fit(X, Y, verbose=0, callbacks=list(callbacks))
    return model


@pytest.fixture(params=["archive", "step"])
def saved(request, tmp_path):
    """A model trained with that loss, and where it is saved."""
    if request.param == "step":
        return trained(callbacks=[OrbaxCheckpoint(tmp_path / "run")]), tmp_path / "run"
    model = trained()
    model.save(tmp_path / "model.keras")
    return model, tmp_path / "model.keras"


def same(variables, others):
    return all(np.array_equal(a.value, b.value) for a, b in zip(variables, others, strict=True))


def test_an_unregistered_loss_is_a_warning_and_a_note(saved):
    model, source = saved
    with pytest.warns(UserWarning, match="The model is not compiled: .*Could not locate function 'halved'") as caught:
        loaded = shardload.load(source)
    assert caught[0].filename == __file__
    assert same(model.weights, loaded.weights)
    assert not loaded.compiled
    assert any("compile=False (--no-compile)" in note for note in shardload.report(loaded).notes)


@pytest.mark.filterwarnings("ignore:The model is not compiled")
def test_what_the_warning_says_brings_the_optimizer_back(saved):
    model, source = saved
    loaded = shardload.load(source)
    loaded.compile("rmsprop", halved)
    shardload.load_weights(loaded, source)
    assert same(model.optimizer.variables, loaded.optimizer.variables)


@pytest.mark.parametrize("options", [{"compile": False}, {"custom_objects": {"halved": halved}}])
def test_no_warning_where_it_is_not_wanted_or_not_needed(saved, options):
    model, source = saved
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = shardload.load(source, **options)
    assert same(model.weights, loaded.weights)
    if options.get("compile", True):
        assert same(model.optimizer.variables, loaded.optimizer.variables)
    else:
        assert not loaded.compiled


@pytest.mark.filterwarnings("ignore:`compile\\(\\)` was not called")
def test_an_optimizer_of_defaults_gets_nothing_of_the_stored_one(tmp_path):
    """Two variables each: by their number alone, the learning rate of SGD would become that of Adam."""
    model = trained(kind=SelfCompiled, optimizer=keras.optimizers.SGD(0.5))
    model.save(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match="is compiled with the defaults of its class: .*overrides compile"):
        loaded = shardload.load(tmp_path / "model.keras", custom_objects={"SelfCompiled": SelfCompiled})
    assert same(model.weights, loaded.weights)
    assert float(loaded.optimizer.learning_rate.value) == pytest.approx(0.001)


@pytest.mark.slow
def test_a_task_of_keras_hub_that_refuses_its_own_configuration(tmp_path):
    import keras_hub

    encoder = keras_hub.models.ResNetBackbone(
        [64], [7], [64, 64, 64, 64], [1, 1, 1, 1], [1, 2, 2, 2], "basic_block", image_shape=(64, 64, 3)
    )
    backbone = keras_hub.models.RetinaNetBackbone(encoder, 3, 4, False, image_shape=(64, 64, 3))
    model = keras_hub.models.RetinaNetObjectDetector(backbone, num_classes=2, pre_logits_num_conv_layers=1)
    model.compile(keras.optimizers.SGD(0.5))
    model.save(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match="defaults of its class: .*multiple values for keyword argument 'loss'"):
        loaded = shardload.load(tmp_path / "model.keras")
    assert same(model.weights, loaded.weights)
    assert type(loaded.optimizer) is keras.optimizers.Adam
    loaded.compile(keras.optimizers.SGD(0.1))
    shardload.load_weights(loaded, tmp_path / "model.keras")
    assert float(loaded.optimizer.learning_rate.value) == 0.5
