"""Loads into models that stand, and what can be done with a model afterwards."""

import jax
import keras
import models
import numpy as np
import pytest
from classifiers import assert_equal, classifier, data, optimizer_state, train, values

import shardload
from shardload.errors import UsageError
from shardload.keras_bridge.binding import binding_of
from shardload.keras_bridge.model_state import slots_of, state_of
from shardload.keras_bridge.variables import sharding_of, value_of

pytestmark = [
    # Keras' own words where model or checkpoint has an optimizer that never trained; the report repeats them.
    pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning"),
    pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning"),  # norms stay float
]


def devices_of(model):
    return {frozenset(value_of(v).sharding.device_set) for v in state_of(model)}


def spread(model):
    """How many variables are really split over devices."""
    return sum(not value_of(v).sharding.is_fully_replicated for v in state_of(model))


def assert_usable(model, folder):
    """Everything one does with a classifier works, and gives numbers."""
    x, y = data()
    before = model.predict(x, batch_size=8, verbose=0)
    model.save(folder / "again.keras")
    again = keras.saving.load_model(folder / "again.keras")
    np.testing.assert_allclose(again.predict(x, batch_size=8, verbose=0), before, atol=2e-5)
    assert np.isfinite(model.evaluate(x, y, batch_size=8, verbose=0)).all()
    assert np.isfinite(model.train_on_batch(x[:8], y[:8])).all()
    assert all(np.isfinite(train(model).history.history["loss"]))


@pytest.fixture
def checkpoint(tmp_path):
    """A trained classifier's weights, with the classifier."""
    original = train(classifier(seed=1))
    original.save_weights(tmp_path / "model.weights.h5")
    return tmp_path / "model.weights.h5", original


@pytest.fixture(autouse=True)
def nothing_global():
    yield
    assert keras.distribution.distribution() is None


@pytest.mark.slow
def test_a_plain_model_stays_on_its_device_and_stays_plain(checkpoint, tmp_path):
    path, original = checkpoint
    device = jax.devices()[3]
    with jax.default_device(device):
        model = classifier()
    report = shardload.load_weights(model, path)
    assert_equal(model, original)
    assert devices_of(model) == {frozenset({device})}
    assert binding_of(model) is None
    assert all(sharding_of(v) is None for v in state_of(model))
    assert (report.mesh, [d.id for d in report.devices]) == ("batch=1,model=1", [device.id])
    with jax.default_device(device):
        assert_usable(model, tmp_path)


@pytest.mark.slow
def test_a_model_of_the_users_own_distribution_keeps_its_layouts(checkpoint, tmp_path):
    path, original = checkpoint
    mesh = keras.distribution.DeviceMesh((2, 4), ["data", "tensor"], devices=jax.devices())
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["hidden/kernel"] = (None, "tensor")
    layouts["out/kernel"] = ("tensor", None)
    distribution = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="data")
    with distribution.scope():
        model = classifier()
        before = {v.path: value_of(v).sharding for v in model.weights}
        report = shardload.load_weights(model, path)
        assert keras.distribution.distribution() is distribution
        assert_equal(model, original)
        assert {v.path: value_of(v).sharding for v in model.weights} == before
        assert binding_of(model) is None
        assert_usable(model, tmp_path)
    assert (report.mesh, report.layout.sharded) == ("data=2,tensor=4", 6)  # two kernels, each with two slots


@pytest.mark.slow
def test_a_bound_model_is_filled_where_it_is(checkpoint, tmp_path):
    path, original = checkpoint
    model = classifier()
    shardload.load_weights(model, path, mesh="2x4")
    binding, before = binding_of(model), {v.path: value_of(v).sharding for v in model.weights}
    train(model)
    report = shardload.load_weights(model, path)
    assert binding_of(model) is binding
    assert {v.path: value_of(v).sharding for v in model.weights} == before
    assert_equal(model, original)
    assert report.mesh == "batch=2,model=4"
    assert spread(model)
    assert_usable(model, tmp_path)


def test_a_new_mesh_moves_the_optimizer_along(checkpoint, tmp_path):
    path, original = checkpoint
    model = train(classifier())
    shardload.load_weights(model, path, mesh="1x8")
    assert_equal(model, original)
    assert_equal(model, original, pick=optimizer_state)
    shardload.load_weights(model, path, mesh="2x2")
    assert_equal(model, original)
    assert_equal(model, original, pick=optimizer_state)
    assert devices_of(model) == {frozenset(jax.devices()[:4])}
    for slot, weight in slots_of(model):
        assert value_of(slot).sharding == value_of(weight).sharding
    assert_usable(model, tmp_path)


@pytest.mark.slow
def test_weights_alone_keep_the_optimizer_of_a_trained_model(tmp_path):
    donor = classifier(seed=1)
    keras.Model(donor.inputs, donor.outputs).save_weights(tmp_path / "bare.weights.h5")  # never compiled
    model = train(classifier())
    kept = values(optimizer_state(model))
    report = shardload.load_weights(model, tmp_path / "bare.weights.h5")
    assert_equal(model, donor)
    for one, other in zip(values(optimizer_state(model)), kept, strict=True):
        np.testing.assert_array_equal(one, other)
    assert report.initialised == ()
    train(model)


@pytest.mark.slow
def test_training_goes_on_where_the_checkpoint_stopped(checkpoint):
    """The same losses as without stopping, also on a mesh: optimizer, statistics and step count are back."""
    path, original = checkpoint
    twin = train(classifier(seed=2))
    twin.load_weights(path)
    with shardload.abstract():
        resumed = classifier(seed=3)
        resumed.optimizer.build(resumed.trainable_variables)
    shardload.load_weights(resumed, path, mesh="1x8")
    assert int(resumed.optimizer.iterations.value) == int(original.optimizer.iterations.value) == 4
    train(resumed)
    train(twin)
    for one, other in zip(values(resumed.weights), values(twin.weights), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_second_load_replaces_the_first(checkpoint, tmp_path):
    path, _ = checkpoint
    other = train(classifier(seed=5), epochs=2)
    other.save_weights(tmp_path / "other.weights.h5")
    with shardload.abstract():
        model = classifier()
    shardload.load_weights(model, path, mesh="1x4")
    first = shardload.report(model)
    predicted = model.predict(data()[0], verbose=0)
    shardload.load_weights(model, tmp_path / "other.weights.h5")
    assert_equal(model, other)
    assert shardload.report(model) is not first
    assert not np.allclose(model.predict(data()[0], verbose=0), predicted)


@pytest.mark.slow
def test_two_models_on_two_meshes_take_turns(checkpoint):
    path, original = checkpoint
    x, y = data()
    one, two = classifier(), classifier()
    expected = original.predict(x, verbose=0)
    shardload.load_weights(one, path, mesh="1x8")
    shardload.load_weights(two, path, mesh="2x2", devices=jax.devices()[4:])
    for model in (one, two, one, two):
        np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=2e-5)
    for model in (one, two):
        assert np.isfinite(model.train_on_batch(x[:8], y[:8])).all()
    shardload.load_weights(one, path)
    np.testing.assert_allclose(one.predict(x, verbose=0), expected, atol=2e-5)
    assert_equal(one, original)
    assert devices_of(one) == {frozenset(jax.devices())}
    assert devices_of(two) == {frozenset(jax.devices()[4:])}


def test_a_bare_file_with_names_of_its_own(tmp_path):
    from safetensors.numpy import save_file

    original = classifier(seed=1)
    theirs = {v.path: f"net.{i}.{v.name}" for i, v in enumerate(original.weights)}
    save_file({theirs[v.path]: np.asarray(v.value) for v in original.weights}, tmp_path / "x.safetensors")
    model = classifier()
    with pytest.raises(shardload.errors.MismatchError, match=r"(?s)missing from the checkpoint: .*names"):
        shardload.load_weights(model, tmp_path / "x.safetensors")
    names = {tensor: path for path, tensor in theirs.items()}
    shardload.load_weights(model, tmp_path / "x.safetensors", names=names, mesh="1x2")
    assert_equal(model, original)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x1", "2x3"])
def test_an_archive_brings_its_optimizer_back(mesh, tmp_path):
    original = train(classifier(seed=1))
    original.save(tmp_path / "model.keras")
    model = shardload.load(tmp_path / "model.keras", mesh=mesh)
    assert_equal(model, original)
    assert_equal(model, original, pick=optimizer_state)
    assert shardload.report(model).missing == ()
    for slot, weight in slots_of(model):
        assert value_of(slot).sharding == value_of(weight).sharding
    assert_usable(model, tmp_path)


def tokenwise():
    """One of each layer that can be quantised and take LoRA factors."""
    inputs = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(32, 64, name="embed")(inputs)
    x = keras.layers.EinsumDense("btd,dhk->bthk", output_shape=(None, 8, 16), name="heads")(x)
    x = keras.layers.Reshape((4, 128), name="join")(x)
    return models.randomise(keras.Model(inputs, keras.layers.Dense(64, name="out")(x)))


def with_lora(model):
    for name in ("embed", "heads", "out"):
        model.get_layer(name).enable_lora(2)
    return model


def as_int8(model):
    model.quantize("int8")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("changed", [with_lora, as_int8])
@pytest.mark.parametrize("mesh", [None, "2x4"])
def test_models_with_lora_or_int8_load_and_compute_the_same(changed, mesh, tmp_path):
    original = changed(tokenwise())
    if changed is with_lora:
        models.randomise(original, seed=3)
    original.save_weights(tmp_path / "changed.weights.h5")
    model = changed(tokenwise())
    shardload.load_weights(model, tmp_path / "changed.weights.h5", mesh=mesh)
    assert bool(spread(model)) == (mesh is not None)
    assert [v.path for v in model.trainable_variables] == [v.path for v in original.trainable_variables]
    x = np.arange(32, dtype="int32").reshape(8, 4)
    np.testing.assert_allclose(model.predict(x, verbose=0), original.predict(x, verbose=0), atol=1e-5)
    model.compile("adam", "mse")
    before = np.asarray(model.get_layer("embed")._embeddings.value)
    model.fit(x, np.ones((8, 4, 64)), verbose=0)
    np.testing.assert_array_equal(model.get_layer("embed")._embeddings.value, before)  # frozen
    model.save_weights(tmp_path / "again.weights.h5")


@keras.saving.register_keras_serializable("shardload_tests")
class Scaled(keras.layers.Layer):
    """Stores its kernel transposed and halved, under a name of its own, and counts its loads."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8), name="kernel")
        self.bias = self.add_weight(shape=(8,), name="bias")
        self.loads = 0

    def call(self, x):
        return x @ self.kernel + self.bias

    def save_own_variables(self, store):
        store["half"] = np.asarray(self.kernel.value).T / 2
        store["bias"] = np.asarray(self.bias.value)

    def load_own_variables(self, store):
        self.kernel.assign(np.asarray(store["half"]).T * 2)
        self.bias.assign(store["bias"])
        self.loads += 1


def test_a_layer_with_hooks_of_its_own_computes_and_says_so(tmp_path):
    def build(seed):
        keras.utils.set_random_seed(seed)
        return keras.Sequential([keras.Input((16,)), Scaled(name="scaled"), keras.layers.Dense(8)])

    original = build(1)
    original.save_weights(tmp_path / "own.weights.h5")
    model = build(2)
    report = shardload.load_weights(model, tmp_path / "own.weights.h5", mesh="1x8")
    assert_equal(model, original)
    assert model.layers[0].loads == 1
    assert model.layers[0].kernel.path in report.computed
    assert binding_of(model).mesh.size == 8
    x = np.ones((4, 16), "float32")
    np.testing.assert_allclose(model.predict(x, verbose=0), original.predict(x, verbose=0), atol=1e-5)


@pytest.mark.slow
def test_a_task_generates_after_a_load_and_after_another_mesh(tmp_path):
    original = models.randomise(models.causal_lm("gemma1"))
    original.save_weights(tmp_path / "lm.weights.h5")
    prompt = {k: v[:3] for k, v in models.tokens(original, length=10).items()}
    prompt["padding_mask"][:, 6:] = 0
    expected = original.generate(dict(prompt), stop_token_ids=None)["token_ids"]
    with shardload.abstract():
        model = models.causal_lm("gemma1")
    for mesh in ("2x4", "1x3"):
        shardload.load_weights(model, tmp_path / "lm.weights.h5", mesh=mesh)
        found = model.generate(dict(prompt), stop_token_ids=None)["token_ids"]
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_the_report_is_of_the_last_load_and_only_for_loaded_models(checkpoint):
    path, _ = checkpoint
    model = classifier()
    with pytest.raises(shardload.errors.UnsupportedError, match="shardload loaded nothing into it"):
        shardload.report(model)
    report = shardload.load_weights(model, path, mesh="1x2")
    assert shardload.report(model) is report
    assert report.bytes.read == report.bytes.needed == report.weight_bytes
    assert report.devices[0].bytes <= sum(value_of(v).addressable_shards[0].data.nbytes for v in state_of(model))


@pytest.mark.parametrize("items", ["all", "weights"])
def test_the_report_says_that_the_optimizer_s_state_came_too(checkpoint, items):
    path, original = checkpoint
    model = classifier(seed=2)
    model.optimizer.learning_rate = 0.5
    report = shardload.load_weights(model, path, items=items)
    assert_equal(model, original)
    told = [note for note in report.notes if note.startswith("the state of the optimizer was loaded too")]
    if items == "all":
        way_out = "To keep the optimizer as it is, pass items='weights'"
        assert f"its learning rate was 0.5, and is {float(original.optimizer.learning_rate):g}. {way_out}" in told[0]
        assert shardload.report(model).notes == report.notes
    else:
        assert told == [] and float(model.optimizer.learning_rate) == 0.5 and int(model.optimizer.iterations) == 0


def test_other_items_are_refused(checkpoint):
    with pytest.raises(UsageError, match="Cannot use items='optimizer': expected 'all' or 'weights'"):
        shardload.load_weights(classifier(seed=2), checkpoint[0], items="optimizer")
