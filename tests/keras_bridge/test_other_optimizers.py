"""Optimizers that a model holds besides the one it was compiled with, as a GAN does."""

import keras
import numpy as np
import pytest
from saved_steps import save_step

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import MismatchError
from shardload.keras_bridge.model_state import other_optimizers, slots_of
from shardload.mapping.optimizer_pairs import UNTRAINED

X = np.ones((8, 4), "float32")


class Plain(keras.Model):
    """Two parts, and no optimizers of their own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.generator = keras.layers.Dense(4)
        self.discriminator = keras.layers.Dense(1)

    def build(self, shape):
        self.generator.build(shape)
        self.discriminator.build(shape)
        self.built = True

    def call(self, x):
        return self.discriminator(self.generator(x))


class Gan(Plain):
    """As Keras' examples have it: each part with its own optimizer, given to ``compile``."""

    def compile(self, d_optimizer, g_optimizers, *, build=True, **options):
        super().compile(**options)
        self.d_optimizer = d_optimizer
        self.g_optimizers = g_optimizers
        if build:
            d_optimizer.build(self.discriminator.trainable_variables)
            g_optimizers[0].build(self.generator.trainable_variables)


def gan(*, kind=Gan, value=None, wrap=lambda optimizer: optimizer, **options):
    keras.utils.set_random_seed(0)
    model = kind()
    model.build((None, 4))
    if kind is Gan:
        adam = keras.optimizers.Adam
        model.compile(wrap(adam(1e-3)), [wrap(adam(1e-4))], **{"optimizer": "adam", "loss": "mse", **options})
    else:
        model.compile("adam", "mse")
    for place, variable in enumerate(own_state(model) if value is not None else ()):
        variable.assign(np.full(variable.shape, value + place, variable.dtype))
    return model


def own_state(model):
    return [*model.d_optimizer.variables, *model.g_optimizers[0].variables]


def values(model):
    return [np.asarray(v) for v in (*own_state(model), *model.optimizer.variables, *model.weights)]


def assert_same(one, other):
    for mine, its in zip(values(one), values(other), strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained GAN and the folder with its step."""
    model, folder = gan(value=3), tmp_path_factory.mktemp("gan") / "run"
    model.fit(X, X[:, :1], verbose=0, callbacks=[OrbaxCheckpoint(folder)])
    return model, folder


@pytest.mark.parametrize("mesh", [None, "1x4"])
@pytest.mark.parametrize("build", [True, False])
def test_they_come_back(run, build, mesh):
    model, folder = run
    target = gan(build=build)
    report = shardload.restore(target, folder, mesh=mesh)
    assert_same(model, target)
    told = [note for note in report.notes if "optimizer" in note]
    assert len(told) == 2 and all("learning rate was" in note for note in told)
    for slot, weight in slots_of(target):
        assert slot.value.sharding.is_equivalent_to(weight.value.sharding, slot.value.ndim)


def test_those_of_a_model_that_is_not_compiled_come_back(tmp_path):
    def free():
        model = gan(kind=Plain)
        model.optimizer = None
        model.own = {"d": keras.optimizers.Adam()}
        model.own["d"].build(model.discriminator.trainable_variables)
        return model

    model, target = free(), free()
    for place, variable in enumerate(model.own["d"].variables):
        variable.assign(np.full(variable.shape, place + 2, variable.dtype))
    save_step(model, tmp_path, 3)
    shardload.restore(target, tmp_path, items="optimizer")
    for mine, its in zip(model.own["d"].variables, target.own["d"].variables, strict=True):
        np.testing.assert_array_equal(mine, its)


def test_wrapped_ones_come_back(tmp_path):
    wrap = keras.optimizers.LossScaleOptimizer
    model, target = gan(value=2, wrap=wrap), gan(wrap=wrap)
    save_step(model, tmp_path, 3)
    shardload.restore(target, tmp_path)
    assert_same(model, target)


def test_a_step_without_their_state_leaves_them_as_they_are_and_says_so(tmp_path):
    save_step(gan(kind=Plain), tmp_path, 3)
    model = gan(value=4)
    before = [np.asarray(v) for v in own_state(model)]
    report = shardload.restore(model, tmp_path)
    assert [n for n in report.notes if "state of the optimizer" in n] == [
        "the step has no state of the optimizer d_optimizer: the model's is unchanged",
        "the step has no state of the optimizer g_optimizers/adam: the model's is unchanged",
    ]
    for value, variable in zip(before, own_state(model), strict=True):
        np.testing.assert_array_equal(value, variable)
    with pytest.warns(UserWarning, match="starts again|no state of the optimizer d_optimizer") as told:
        gan().fit(X, X[:, :1], verbose=0, callbacks=[OrbaxCheckpoint(tmp_path, resume=True)])
    assert any("no state of the optimizer d_optimizer" in str(one.message) for one in told)


def test_a_model_without_them_leaves_their_state_and_says_so(run):
    report = shardload.restore(gan(kind=Plain), run[1])
    assert "the model has no optimizer d_optimizer; its state in the step is not used" in report.notes


def test_those_that_had_not_trained_leave_slots_as_they_are_and_say_so(tmp_path):
    save_step(gan(build=False), tmp_path, 3)
    assert f"the optimizer d_optimizer: {UNTRAINED}" in shardload.restore(gan(value=4), tmp_path).notes


def test_another_kind_of_optimizer_is_refused(run):
    target = gan()
    target.d_optimizer = keras.optimizers.SGD()
    target.d_optimizer.build(target.discriminator.trainable_variables)
    with pytest.raises(MismatchError, match="d_optimizer"):
        shardload.restore(target, run[1])


def test_weights_alone_leave_them(run):
    target = gan(value=4)
    shardload.restore(target, run[1], items="weights")
    assert all(np.all(np.asarray(v) == 4 + place) for place, v in enumerate(own_state(target)))


@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # Orbax's, as Keras asks for no placement
def test_keras_takes_none_of_them_for_the_compiled_one(run):
    """Its loader goes by the paths of variables, whichever optimizer they belong to."""
    target = gan(kind=Plain)
    target.compile(keras.optimizers.Adam(name=run[0].d_optimizer.name), "mse")
    target.load_weights(str(run[1]))
    assert int(target.optimizer.iterations) == 0


class Second(Plain):
    """With an optimizer that no configuration mentions."""

    def __init__(self, **options):
        super().__init__(**options)
        self.second = keras.optimizers.Adam()


@pytest.mark.filterwarnings("ignore:.*compile\\(\\):UserWarning")  # Keras' own words, and the report's
@pytest.mark.filterwarnings("ignore:The model is not compiled:UserWarning")
@pytest.mark.filterwarnings("ignore:Skipping variable loading:UserWarning")
@pytest.mark.parametrize("kind", [Gan, Second])
def test_an_archive_with_their_state_loads_and_says_that_it_is_not_used(tmp_path, kind):
    model = gan(kind=kind)
    if kind is Second:
        model.second.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    loaded = shardload.load(tmp_path / "model.keras", custom_objects={kind.__name__: kind})
    np.testing.assert_array_equal(loaded.generator.kernel, model.generator.kernel)
    name = "second" if kind is Second else "d_optimizer, g_optimizers/adam"
    assert any(f"state of optimizers that the model has not built: {name}" in n for n in shardload.report(loaded).notes)


def frozen_base(kind):
    """A model of its own optimizer, that was trained, below a new head."""
    base = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    base.compile(kind, "mse")
    base.fit(X, np.ones((8, 3)), verbose=0)
    base.trainable = False
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(1)(base(inputs)))
    model.compile("adam", "mse")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
def test_the_idle_optimizer_of_an_inner_model_refuses_no_step(kind, tmp_path):
    model = frozen_base("adam")
    model.fit(X, np.ones((8, 1)), verbose=0, callbacks=[OrbaxCheckpoint(tmp_path)])
    loaded = shardload.load(tmp_path / "1")
    again = frozen_base(kind)
    report = shardload.restore(again, tmp_path)
    for other in (loaded, again):
        for mine, theirs in zip(model.weights, other.weights, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_array_equal(model.optimizer.iterations, other.optimizer.iterations)
    assert any("/optimizer; the model's is unchanged" in note for note in report.notes) == (kind != "adam")


def test_a_wrapped_optimizer_is_not_another_one(tmp_path):
    """A model keeps the optimizer that it is compiled with, which Keras wraps for loss scaling."""
    models = []
    for _ in range(2):
        models.append(Second(dtype="mixed_float16"))
        models[-1].build((None, 4))
        models[-1].compile(models[-1].second, "mse")
    models[0].fit(X, np.ones((8, 1)), verbose=0, callbacks=[OrbaxCheckpoint(tmp_path)])
    shardload.restore(models[1], tmp_path)
    first, second = ([np.asarray(v) for v in model.optimizer.variables] for model in models)
    assert len(first) == len(second) and all(map(np.array_equal, first, second))


class NestedOptimizers(Plain):
    def compile(self, optimizers, **options):
        super().compile(**options)
        self.optimizers = optimizers
        optimizers["each"][0].build(self.trainable_variables)


def test_optimizers_in_containers_of_containers_come_back(tmp_path):
    models = []
    for _ in range(2):
        models.append(NestedOptimizers())
        models[-1].build((None, 4))
        models[-1].compile({"each": [keras.optimizers.Adam()]}, optimizer="adam", loss="mse")
    model, again = models
    model.optimizers["each"][0].iterations.assign(7)
    save_step(model, tmp_path, 1)
    shardload.restore(again, tmp_path)
    assert again.optimizers["each"][0].iterations == 7
    model.save_weights(tmp_path / "nested.weights.h5")
    again.optimizers["each"][0].iterations.assign(0)
    shardload.load_weights(again, tmp_path / "nested.weights.h5")
    assert again.optimizers["each"][0].iterations == 7


def test_a_list_that_holds_itself_is_walked_once():
    model = gan()
    model.again = {"adam": [keras.optimizers.Adam()]}
    model.again["adam"].append(model.again["adam"])
    model.again["adam"][0].build(model.generator.trainable_variables)
    assert len(other_optimizers(model)) == 3
