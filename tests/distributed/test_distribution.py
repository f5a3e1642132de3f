"""A bound model runs on its own mesh, equals the plain one, and leaves nothing behind."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import jax
import keras
import models
import numpy as np
import pytest

from shardload.errors import LayoutError, MeshError
from shardload.keras_bridge import abstraction
from shardload.keras_bridge.binding import METHODS, bind, binding_of, unbind
from shardload.keras_bridge.model_state import slots_of, state_of, variables_of
from shardload.keras_bridge.variables import value_of
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec

MESHES = ["1x8", "2x4", "1x3"]


def spread(variable, mesh):
    """The last dim that divides by the last axis, else replicated."""
    shape, axis = tuple(variable.shape), mesh.axes[-1]
    for dim in reversed(range(len(shape))):
        if mesh.axis_size(axis) > 1 and shape[dim] % mesh.axis_size(axis) == 0:
            return Layout.split(mesh, len(shape), dim=dim, axis=axis)
    return Layout.replicated(mesh, len(shape))


def put(model, text, *, devices=None):
    mesh = MeshSpec.parse(text)
    layouts = {id(v): spread(v, mesh) for v in variables_of(model)}
    bind(model, mesh=mesh, devices=devices or jax.devices()[: mesh.size], layouts=layouts)
    return model


def classifier(seed=0):
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((6,))
    x = keras.layers.Dense(16, activation="relu")(inputs)
    x = keras.layers.BatchNormalization()(x)
    model = keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Dropout(0.0)(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def data(rows=20):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.integers(0, 4, size=rows)


def weights(model):
    return [np.asarray(v.value) for v in model.weights]


def assert_close(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_fit_evaluate_predict_equal_the_plain_model(mesh):
    x, y = data(rows=21)
    plain, bound = classifier(), put(classifier(), mesh)
    runs = [m.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"] for m in (plain, bound)]
    np.testing.assert_allclose(*runs, atol=1e-5)
    assert_close(weights(plain), weights(bound))
    predicted = [m.predict(x, batch_size=8, verbose=0) for m in (plain, bound)]
    np.testing.assert_allclose(*predicted, atol=2e-5)
    np.testing.assert_allclose(plain.evaluate(x, y, verbose=0), bound.evaluate(x, y, verbose=0), atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2x4", "1x3"])
def test_on_batch_methods_and_calls_equal_the_plain_model(mesh):
    x, y = data(rows=5)
    plain, bound = classifier(), put(classifier(), mesh)
    for run in (
        lambda m: m.train_on_batch(x, y),
        lambda m: m.test_on_batch(x, y),
        lambda m: m.predict_on_batch(x),
        lambda m: np.asarray(m(x)),
    ):
        np.testing.assert_allclose(run(plain), run(bound), atol=2e-5)


def test_nothing_global_is_left_behind():
    model = put(classifier(), "2x4")
    x, y = data()
    model.fit(x, y, verbose=0)
    assert keras.distribution.distribution() is None
    theirs = keras.distribution.DataParallel(devices=jax.devices()[:2])
    keras.distribution.set_distribution(theirs)
    try:
        model.predict(x, verbose=0)
        with pytest.raises(ValueError, match="shape"):
            model.predict(np.zeros((4, 7)), verbose=0)
        assert keras.distribution.distribution() is theirs
    finally:
        keras.distribution.set_distribution(None)


@pytest.mark.slow
def test_models_on_different_meshes_alternate():
    x, y = data()
    plain, one, two = classifier(), put(classifier(), "1x8"), put(classifier(), "2x4")
    three = put(classifier(), "1x3", devices=jax.devices()[4:7])
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    for _ in range(2):
        results = [m.fit(x, y, **options).history["loss"] for m in (plain, one, two, three)]
        np.testing.assert_allclose(results, [results[0]] * 4, atol=1e-5)
    assert {d.id for d in three.weights[0].value.sharding.device_set} == {4, 5, 6}
    assert len(plain.weights[0].value.sharding.device_set) == 1


def test_slots_are_sharded_like_their_variables():
    model = put(classifier(), "1x8")
    x, y = data()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, verbose=0)
    pairs = slots_of(model)
    assert len(pairs) == 2 * len(model.trainable_variables)
    for slot, weight in pairs:
        assert slot.value.sharding.is_equivalent_to(weight.value.sharding, slot.ndim)
    assert any(not slot.value.sharding.is_fully_replicated for slot, _ in pairs)


def test_slots_that_exist_already_follow_their_variables():
    model = classifier()
    model.optimizer.build(model.trainable_variables)
    put(model, "1x8")
    for slot, weight in slots_of(model):
        assert slot.value.sharding.is_equivalent_to(weight.value.sharding, slot.ndim)


def test_every_variable_lives_on_the_mesh_after_fit():
    model = put(classifier(), "1x3")
    model.fit(*data(), verbose=0)
    for variable in state_of(model):
        assert variable.value.sharding.device_set == set(jax.devices()[:3]), variable.path


def test_rebinding_moves_the_model():
    x, _ = data()
    model = classifier()
    expected = model.predict(x, verbose=0)
    for mesh in ("1x8", "2x4", "1x3", "1x1"):
        put(model, mesh)
        np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=2e-5)
        assert binding_of(model).mesh == MeshSpec.parse(mesh)
    unbind(model)
    assert not set(METHODS) & set(vars(model)) and binding_of(model) is None
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=2e-5)


def test_rebinding_moves_replicated_values_off_the_old_mesh():
    model = put(classifier(), "1x8")
    put(model, "2x4")
    for variable in state_of(model):
        assert value_of(variable).sharding.mesh.shape == {"batch": 2, "model": 4}, variable.path


def test_constants_beside_variables_move_with_them():
    x, _ = data()
    layer = keras.layers.Normalization()
    model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(2)])
    layer.adapt(x)
    for mesh, first in (("1x3", 0), ("1x2", 4)):
        devices = jax.devices()[first : first + MeshSpec.parse(mesh).size]
        put(model, mesh, devices=devices)
        assert layer.mean.sharding.device_set == set(devices)
        np.testing.assert_allclose(layer.mean[0], x.mean(axis=0), atol=1e-6)


def test_a_deep_copy_is_on_the_same_mesh_and_by_itself():
    x, y = data()
    model = put(classifier(), "2x4")
    model.fit(x, y, verbose=0)
    copied = copy.deepcopy({"model": model})["model"]
    assert copied is not model and binding_of(copied).mesh == MeshSpec.parse("2x4")
    pairs = list(zip(variables_of(model), variables_of(copied), strict=True))
    pairs += zip(model.optimizer.variables, copied.optimizer.variables, strict=True)
    for one, two in pairs:
        assert two.value.sharding == one.value.sharding, one.path
        np.testing.assert_array_equal(two.value, one.value)
    before = weights(model)
    copied.fit(x, y, verbose=0)
    assert all(np.array_equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(before, weights(copied), strict=True))
    unbind(model)
    assert binding_of(copy.deepcopy(model)) is None


@pytest.mark.slow
def test_saved_pickled_cloned_and_copied_models_are_plain(tmp_path):
    x, y = data()
    model = put(classifier(), "1x8")
    model.fit(x, y, verbose=0)
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "m.keras")
    for other in (keras.saving.load_model(tmp_path / "m.keras"), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert binding_of(other) is None
        np.testing.assert_allclose(other.predict(x, verbose=0), expected, atol=2e-5)
    assert binding_of(keras.models.clone_model(model)) is None


def test_keras_own_load_weights_keeps_the_layout(tmp_path):
    x, _ = data()
    source, model = classifier(1), put(classifier(2), "1x8")
    source.save_weights(tmp_path / "m.weights.h5")
    before = [v.value.sharding for v in model.weights]
    model.load_weights(tmp_path / "m.weights.h5")
    assert [v.value.sharding for v in model.weights] == before
    np.testing.assert_allclose(model.predict(x, verbose=0), source.predict(x, verbose=0), atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_generate_takes_fewer_prompts_than_the_batch_axis(family):
    keras.utils.set_random_seed(0)
    plain = models.causal_lm(family)
    bound = models.causal_lm(family)
    for a, b in zip(plain.weights, bound.weights, strict=True):
        b.assign(a.value)
    for mesh, batch in (("2x4", 1), ("8x1", 3)):
        put(bound, mesh)
        prompt = models.tokens(plain, batch=batch, length=8)
        prompt["padding_mask"][:, 4:] = 0
        expected = plain.generate(prompt, stop_token_ids=None)["token_ids"]
        np.testing.assert_array_equal(bound.generate(prompt, stop_token_ids=None)["token_ids"], expected)


def test_a_task_binds_its_backbone():
    lm = put(models.causal_lm("llama"), "1x8")
    assert binding_of(lm.backbone) is binding_of(lm)
    unbind(lm)
    assert binding_of(lm.backbone) is None


def test_lora_after_binding():
    model = put(classifier(), "1x8")
    model.layers[1].enable_lora(2)
    x, y = data()
    model.fit(x, y, verbose=0)
    assert all(v.value.sharding.device_set == set(jax.devices()) for v in state_of(model))


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")
def test_quantization_after_binding():
    model = put(classifier(), "1x8")
    x, _ = data()
    model.quantize("int8")
    assert model.predict(x, verbose=0).shape == (20, 4)
    kernel = next(v for v in model.weights if v.path.endswith("kernel") and str(v.dtype) == "int8")
    assert len(kernel.value.sharding.device_set) == 8


def test_an_unbuilt_model_builds_on_its_mesh():
    model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    bind(model, mesh=MeshSpec.parse("2x4"), devices=jax.devices(), layouts={})
    x, _ = data()
    model.fit(x, x[:, :1], verbose=0)
    assert all(len(v.value.sharding.device_set) == 8 for v in state_of(model))


def test_threads_keep_their_own_scope():
    one, two = put(classifier(), "1x8"), put(classifier(), "2x4")
    x, y = data()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda model: model.fit(x, y, epochs=3, verbose=0), (one, two)))
    assert_close(weights(one), weights(two))


def test_abstract_model_bound_then_initialised_equals_eager():
    eager = classifier(7)
    keras.utils.set_random_seed(7)
    with abstraction.abstract():
        model = classifier(7)
    put(model, "1x8")
    abstraction.initialise(model)
    assert [w.tobytes() for w in weights(model)] == [w.tobytes() for w in weights(eager)]
    assert any(not v.value.sharding.is_fully_replicated for v in model.weights)


def test_wrong_meshes_and_layouts_are_refused():
    model = classifier()
    mesh = MeshSpec.parse("1x8")
    with pytest.raises(MeshError, match="expected 8 different devices"):
        bind(model, mesh=mesh, devices=jax.devices()[:3], layouts={})
    kernel = model.layers[1].kernel
    with pytest.raises(LayoutError, match="dims divide the shape"):
        bind(model, mesh=mesh, devices=jax.devices(), layouts={id(kernel): Layout.split(mesh, 2, dim=0, axis="model")})
    with pytest.raises(LayoutError, match="got 0 layouts for"):
        bind(model, mesh=mesh, devices=jax.devices(), layouts=[])
    assert binding_of(model) is None
