"""What the tests of the TensorParallelKeras proposal name, checked by values, bytes, shardings and collectives.

Each model is compared with its twin on one device: the same seeds, so the same weights. Float32 outputs agree within
1e-4 of the largest one (partial sums are added in another order), losses of a few steps within 1e-4.
"""

import functools

import jax
import keras
import layout_models
import models
import numpy as np
import pytest
from programs import collectives, forward, gradients, gradients_of

import shardload
from shardload.errors import BackendError
from shardload.keras_bridge.binding import binding_of
from shardload.keras_bridge.model_state import slots_of

DEVICES = 4
"""Twelve heads, 96 features and 384 hidden ones divide by it; vocabularies of 257, 258 and 265 do not."""


def twins(name):
    """A model on one device and its twin over four, with a batch and a target."""
    keras.utils.set_random_seed(0)
    plain, x, y = layout_models.LAYOUT_MODELS[name]()
    keras.utils.set_random_seed(0)
    return plain, shardload.TensorParallelKeras(layout_models.LAYOUT_MODELS[name]().model, DEVICES), x, y


@functools.cache
def at_rest(name):
    """Twins with random values everywhere (biases, norms), which nothing trains, and what the plain one answers."""
    plain, wrapped, x, _ = twins(name)
    models.randomise(plain)
    for one, other in zip(plain.weights, wrapped.weights, strict=True):
        other.assign(np.asarray(one.value))
    return plain, wrapped, x, np.asarray(plain.predict(x, verbose=0))


@functools.cache
def trained(name, optimizer="adam", steps=3):
    """Twins after a few steps on one batch, and their losses."""
    plain, wrapped, x, y = twins(name)
    losses = []
    for model in (plain, wrapped):
        model.compile(optimizer, layout_models.loss_for(y))
        losses.append(model.fit(x, y, epochs=steps, shuffle=False, verbose=0).history["loss"])
    return plain, wrapped, losses


def assert_answers_alike(name):
    _, wrapped, x, expected = at_rest(name)
    np.testing.assert_allclose(wrapped.predict(x, verbose=0), expected, atol=1e-4 * np.abs(expected).max())


def assert_as_planned(wrapped):
    """Every shard of every weight has the planned shape, and every device the planned bytes."""
    on_device = dict.fromkeys(wrapped.distribution.devices, 0)
    for weight in wrapped.model.variables:
        layout = wrapped.layouts.of(weight)
        for shard in weight.value.addressable_shards:
            assert shard.data.shape == layout.shard_shape(tuple(weight.shape)), weight.path
            on_device[shard.device] += shard.data.nbytes
    planned = sum(wrapped.layouts.by_id[id(v)].device_bytes for v in wrapped.model.variables)
    assert set(on_device.values()) == {planned}


def assert_trained_alike(name, optimizer="adam"):
    """Losses agree, and so does what the twins answer afterwards."""
    plain, wrapped, losses = trained(name, optimizer)
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert losses[0][-1] < losses[0][0]
    x = at_rest(name)[2]
    expected = plain.predict(x, verbose=0)
    np.testing.assert_allclose(wrapped.predict(x, verbose=0), expected, atol=2e-3 * np.abs(expected).max())


def slot_bytes(model, device=None):
    shards = [s for slot, _ in slots_of(model) for s in slot.value.addressable_shards]
    return sum(s.data.nbytes for s in shards if device in (None, s.device))


# ---- models ---------------------------------------------------------------------------------------


def assert_answers_alike_with(name, exchanged):
    assert_answers_alike(name)
    _, wrapped, x, _ = at_rest(name)
    assert_as_planned(wrapped)
    assert collectives(forward(wrapped.model, x).as_text()) == exchanged


def test_bert_tiny_model():
    """Two all-reduces per layer, one for the classifier, whose 10 classes do not divide, one gather after the table."""
    assert_answers_alike_with("bert", {"all-reduce": 5, "all-gather": 1})


def test_gpt2_model():
    """Two all-reduces per layer; gathers after the table, whose 257 entries do not divide, and for the logits."""
    assert_answers_alike_with("gpt2", {"all-reduce": 4, "all-gather": 2})


def test_roberta_model():
    """As BERT."""
    assert_answers_alike_with("roberta", {"all-reduce": 5, "all-gather": 1})


@pytest.mark.slow
def test_training_with_kerasnlp():
    assert_trained_alike("bert")
    _, wrapped, _ = trained("bert")
    assert_as_planned(wrapped)
    assert wrapped.validate_tensor_parallelism_setup(at_rest("bert")[2])


def einsums():
    """A block of products with several heads, and one without: two pairs."""
    inputs = keras.Input((6, 32))
    heads = keras.layers.EinsumDense("btd,dnh->btnh", (None, 8, 4), bias_axes="nh", name="heads")(inputs)
    merged = keras.layers.EinsumDense("btnh,nhd->btd", (None, 32), bias_axes="d", name="merge")(heads)
    up = keras.layers.EinsumDense("btd,df->btf", (None, 128), bias_axes="f", activation="gelu", name="up")(merged)
    down = keras.layers.EinsumDense("btf,fd->btd", (None, 32), bias_axes="d", name="down")(up)
    x = np.random.default_rng(0).normal(size=(4, 6, 32)).astype("float32")
    return models.randomise(keras.Model(inputs, down)), x


def test_einsum_dense_layers():
    model, x = einsums()
    expected = model.predict(x, verbose=0)
    wrapped = shardload.TensorParallelKeras(model, DEVICES)
    found = {name: str(wrapped.layouts.of(model.get_layer(name).kernel)) for name in ("heads", "merge", "up", "down")}
    assert found == {"heads": "(-, model, -)", "merge": "(model, -, -)", "up": "(-, model)", "down": "(model, -)"}
    np.testing.assert_allclose(wrapped.predict(x, verbose=0), expected, atol=1e-4 * np.abs(expected).max())
    assert collectives(forward(model, x).as_text()) == {"all-reduce": 2}


def mixed():
    """Tokens through an embedding, attention, norms, a pair of Dense layers and a recurrent layer."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((8,), dtype="int32")
    y = keras.layers.Embedding(64, 32)(tokens)
    y = keras.layers.LayerNormalization()(y + keras.layers.GroupQueryAttention(8, 8, 4)(y, y))
    y = y + keras.layers.Dense(32)(keras.layers.Dense(128, activation="relu")(y))
    y = keras.layers.GRU(32)(keras.layers.Conv1D(32, 3)(y))
    return keras.Model(tokens, keras.layers.Dense(8)(y)), np.random.default_rng(0).integers(0, 64, (8, 8))


@pytest.mark.slow
def test_mixed_layer_types():
    (plain, x), (model, _) = mixed(), mixed()
    wrapped, y = shardload.TensorParallelKeras(model, DEVICES), np.eye(8, dtype="float32")
    np.testing.assert_allclose(wrapped.predict(x, verbose=0), plain.predict(x, verbose=0), atol=1e-5)
    losses = []
    for each in (plain, wrapped):
        each.compile("sgd", "mse")
        losses.append(each.fit(x, y, epochs=3, shuffle=False, verbose=0).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert_as_planned(wrapped)


# ---- backends -------------------------------------------------------------------------------------


def test_bert_with_jax_backend():
    plain, _, x, expected = at_rest("bert")
    model = models.randomise(layout_models.LAYOUT_MODELS["bert"]().model)
    wrapped = shardload.TensorParallelKeras(model, DEVICES, distributed_backend="jax")
    assert wrapped.get_parallelism_info()["distributed_backend"] == "jax"
    assert wrapped.count_params() == plain.count_params()
    np.testing.assert_allclose(wrapped.predict(x, verbose=0), expected, atol=1e-4 * np.abs(expected).max())


def assert_refused(name, backend):
    model = layout_models.LAYOUT_MODELS[name]().model
    before = [v.value for v in model.variables]
    with pytest.raises(BackendError, match=f"'{backend}'.*runs on JAX only.*distributed_backend='auto'"):
        shardload.TensorParallelKeras(model, DEVICES, distributed_backend=backend)
    assert binding_of(model) is None
    assert all(v.value is value for v, value in zip(model.variables, before, strict=True))


def test_gpt2_with_pytorch_backend():
    assert_refused("gpt2", "pytorch")


def test_roberta_with_tensorflow_backend():
    assert_refused("roberta", "tensorflow")


def test_training_with_mixed_backends():
    """Those that name JAX train alike, bit for bit; those that do not are refused before anything moves."""
    weights = []
    for backend in ("auto", "jax"):
        keras.utils.set_random_seed(0)
        model, x, y = layout_models.subclassed()
        wrapped = shardload.TensorParallelKeras(model, DEVICES, distributed_backend=backend)
        wrapped.compile("sgd", layout_models.loss_for(y))
        wrapped.fit(x, y, epochs=2, shuffle=False, verbose=0)
        weights.append([np.asarray(v.value) for v in wrapped.weights])
    assert all(np.array_equal(one, other) for one, other in zip(*weights, strict=True))
    for backend in ("horovod", "nccl", "torch"):
        assert_refused("subclassed", backend)


# ---- OPT ------------------------------------------------------------------------------------------


def assert_parts_make_the_whole(plain, wrapped):
    """The shards of each split weight are the slices of the whole value, each there once."""
    for one, other in zip(plain.variables, wrapped.model.variables, strict=True):
        whole, shards = np.asarray(one.value), other.value.addressable_shards
        assert all(np.array_equal(shard.data, whole[shard.index]) for shard in shards), one.path
        if not wrapped.layouts.of(other).is_replicated:
            assert sum(shard.data.size for shard in shards) == whole.size


def test_parameter_sharding():
    plain, wrapped, _, _ = at_rest("opt")
    assert_parts_make_the_whole(plain, wrapped)
    rules = wrapped.layouts.rules
    assert rules["transformer_layer_0/feedforward_intermediate_dense/kernel"] == "column"
    assert rules["transformer_layer_0/feedforward_output_dense/kernel"] == "row"
    assert rules["transformer_layer_0/self_attention/query/kernel"] == "heads out"
    assert rules["embeddings/token_embedding/embeddings"] == "vocabulary"


def test_inference_correctness():
    assert_answers_alike("opt")
    _, wrapped, x, _ = at_rest("opt")
    report = wrapped.validate_tensor_parallelism_setup(x)
    assert report, report
    # Two per layer, one for the tokens looked up in a split vocabulary; logits stay split until they are read.
    assert collectives(forward(wrapped.model, x).as_text()) == {"all-reduce": 5}


@pytest.mark.slow
def test_training_verification():
    assert_trained_alike("opt")


# ---- memory and optimizers ------------------------------------------------------------------------


def test_realistic_memory_savings():
    """Kernels of blocks and a vocabulary that divides are a quarter; norms, biases of rows and positions are whole."""
    _, wrapped, _, _ = at_rest("opt")
    info = wrapped.get_parallelism_info()
    layouts = [wrapped.layouts.by_id[id(v)] for v in wrapped.model.variables]
    whole = sum(found.nbytes for found in layouts if found.layout.is_replicated)
    assert info["weight_bytes_per_device"] == whole + (info["weight_bytes"] - whole) // DEVICES
    assert info["weight_bytes_per_device"] < 0.28 * info["weight_bytes"]


def test_optimizer_state_partitioning():
    """Adam's two slots per weight are split like it: per device twice the bytes of its trainable weights."""
    _, wrapped, _ = trained("subclassed")
    first, second = wrapped.distribution.devices[:2]
    planned = sum(wrapped.layouts.by_id[id(v)].device_bytes for v in wrapped.trainable_variables)
    assert slot_bytes(wrapped.model, first) == slot_bytes(wrapped.model, second) == 2 * planned
    assert slot_bytes(wrapped.model, first) < 2 * sum(v.value.nbytes for v in wrapped.trainable_variables)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "lion", "sgd", "rmsprop"])
def test_sharded_optimizer_states(optimizer):
    _, wrapped, losses = trained("subclassed", optimizer)
    np.testing.assert_allclose(*losses, rtol=1e-4)
    for slot, weight in slots_of(wrapped.model):
        assert slot.value.sharding.is_equivalent_to(weight.value.sharding, slot.ndim), slot.path
        planned = wrapped.layouts.of(weight).shard_shape(tuple(weight.shape))
        assert {s.data.shape for s in slot.value.addressable_shards} == {planned}


def test_optimizer_state_management(tmp_path):
    """Its state is saved, and loaded onto another number of devices: the next step is the same."""
    plain, wrapped, x, y = twins("subclassed")
    other = shardload.TensorParallelKeras(layout_models.subclassed().model, 8)
    for model in (plain, wrapped, other):
        model.compile("adam", layout_models.loss_for(y))
    for model in (plain, wrapped):
        model.fit(x, y, epochs=2, shuffle=False, verbose=0)
    shardload.save(wrapped.model, tmp_path, step=2)
    shardload.restore(other.model, tmp_path)
    assert {len(s.value.sharding.device_set) for s, _ in slots_of(other.model)} == {8}
    losses = [m.fit(x, y, shuffle=False, verbose=0).history["loss"] for m in (plain, wrapped, other)]
    np.testing.assert_allclose(losses, [losses[0]] * 3, rtol=1e-5)


def test_tensor_parallel_optimizer():
    """The optimizer is the one that was given, not a wrapper, and has one set of slots for all devices."""
    plain, wrapped, x, y = twins("subclassed")
    optimizer = keras.optimizers.Adam(1e-2, clipnorm=0.1)
    plain.compile(keras.optimizers.Adam(1e-2, clipnorm=0.1), layout_models.loss_for(y))
    wrapped.compile(optimizer, layout_models.loss_for(y))
    for model in (plain, wrapped):
        model.fit(x, y, epochs=3, shuffle=False, verbose=0)
    assert wrapped.optimizer is optimizer
    for one, other in zip(plain.optimizer.variables, optimizer.variables, strict=True):
        np.testing.assert_allclose(np.asarray(one.value), np.asarray(other.value), atol=1e-6)


# ---- verification ---------------------------------------------------------------------------------


def test_parameter_sharding_verification():
    for name in ("bert", "gpt2"):
        plain, wrapped, _, _ = at_rest(name)
        assert_parts_make_the_whole(plain, wrapped)
        checks = {check.name: check for check in wrapped.validate_tensor_parallelism_setup(at_rest(name)[2]).checks}
        assert checks["shardings"].passed and checks["bytes"].passed and checks["split"].passed


@pytest.mark.parametrize("name", ["subclassed", "opt", "bert"])
def test_inference_numerical_correctness(name):
    assert_answers_alike(name)
    _, wrapped, x, expected = at_rest(name)
    report = wrapped.validate_tensor_parallelism_setup(x)
    assert report and report.max_difference <= 1e-4 * np.abs(expected).max()


def test_gradient_synchronization_verification():
    """Gradients are those of one device, in the layout of their variable, and equal wherever that is replicated."""
    plain, wrapped, x, _ = at_rest("subclassed")
    expected, found = gradients_of(plain, x), gradients_of(wrapped.model, x)
    for one, other, weight in zip(expected, found, wrapped.trainable_variables, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-4 * float(np.abs(one).max()))
        assert other.sharding.is_equivalent_to(weight.value.sharding, other.ndim)
        if other.sharding.is_fully_replicated:
            assert len({np.asarray(shard.data).tobytes() for shard in other.addressable_shards}) == 1
    assert set(collectives(gradients(wrapped.model, x).as_text())) == {"all-reduce"}


def test_optimizer_sharding_verification():
    plain, wrapped, _ = trained("subclassed")
    for (one, _), (other, _) in zip(slots_of(plain), slots_of(wrapped.model), strict=True):
        whole = np.asarray(one.value)
        for shard in other.value.addressable_shards:
            np.testing.assert_allclose(shard.data, whole[shard.index], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_end_to_end_training_verification(tmp_path):
    """Train, evaluate, save, load, and train on: as on one device."""
    plain, wrapped, x, y = twins("bert")
    for model in (plain, wrapped):
        model.compile("adam", layout_models.loss_for(y), metrics=["accuracy"])
        model.fit(x, y, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(plain.evaluate(x, y, verbose=0), wrapped.evaluate(x, y, verbose=0), rtol=1e-4)
    wrapped.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")  # Keras saves no states of dropout
    assert_as_planned(again)
    results = [m.evaluate(x, y, verbose=0) for m in (plain, wrapped, again)]
    np.testing.assert_allclose(results, [results[0]] * 3, rtol=1e-4)
    losses = [m.fit(x, y, shuffle=False, verbose=0).history["loss"] for m in (plain, wrapped)]
    np.testing.assert_allclose(*losses, rtol=1e-3)


def test_einsum_dense_verification():
    """One all-reduce per pair forward, and one backward; the first pair's input needs no gradient."""
    model, x = einsums()
    plain = gradients_of(model, x)
    wrapped = shardload.TensorParallelKeras(model, DEVICES)
    for one, other in zip(plain, gradients_of(model, x), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-4 * float(np.abs(one).max()))
    assert collectives(gradients(model, x).as_text()) == {"all-reduce": 3}
    assert wrapped.validate_tensor_parallelism_setup().max_difference < 1e-4
    assert jax.tree.leaves(wrapped(x))[0].shape == x.shape
