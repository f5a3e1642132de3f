"""Slots of every Keras optimizer follow their weights, and are spread over the batch axis on request."""

import functools
import json
import re

import jax
import keras
import numpy as np
import pytest
from small_regression import MESHES, distribution, on_mesh, regression, slot_bytes, slot_specs, train

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import LayoutError, MeshError, UsageError
from shardload.keras_bridge.optimizer_slots import slots_in, spread_of

K = keras.optimizers
KERNELS = re.compile("kernel")


def two_kinds():
    adam, sgd = K.Adam(0.01), K.SGD(0.01, momentum=0.9)
    return K.MultiOptimizer(lambda variable: adam if KERNELS.search(variable.path) else sgd)


EVERY = {
    "adadelta": (lambda: K.Adadelta(1.0), 2), "adafactor": (lambda: K.Adafactor(0.01), 1),
    "adagrad": (lambda: K.Adagrad(0.01), 1), "adam": (lambda: K.Adam(0.01, amsgrad=True), 3),
    "adamax": (lambda: K.Adamax(0.01), 2), "adamw": (lambda: K.AdamW(0.01), 2), "ftrl": (lambda: K.Ftrl(0.01), 2),
    "lamb": (lambda: K.Lamb(0.01), 2), "lion": (lambda: K.Lion(0.001), 1),
    "loss scale": (lambda: K.LossScaleOptimizer(K.Adam(0.01)), 2), "multi": (two_kinds, None),
    "muon": (lambda: K.Muon(0.01), None), "nadam": (lambda: K.Nadam(0.01), 2),
    "rmsprop": (lambda: K.RMSprop(0.01, momentum=0.9, centered=True), 3),
    "schedule-free": (lambda: K.ScheduleFreeAdamW(0.01), 2), "sgd": (lambda: K.SGD(0.01, momentum=0.9), 1),
}  # fmt: skip
"""How to make it, and its slots for each weight; ``None`` if that differs between weights."""
ABSTRACT = {"Optimizer", "OptimizerMap", "TFOptimizer", "legacy", "schedules", "deserialize", "get", "serialize"}
WEIGHT_BYTES = 4 * (16 * 24 + 24 + 24 * 8) // 4 + 4 * 8
"""On each of four devices along ``model``: the last bias is whole."""


def test_every_optimizer_of_keras_is_here():
    classes = {type(part).__name__ for make, _ in EVERY.values() for part in parts(make())}
    assert classes == {name for name in dir(K) if name[0].isupper()} - ABSTRACT


def parts(optimizer):
    inner = getattr(optimizer, "inner_optimizer", None)
    return [optimizer] if inner is None else [optimizer, inner]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", EVERY)
def test_slots_follow_their_weights_and_can_be_spread(name):
    make, slots = EVERY[name]
    expected = train(regression(make()))
    with distribution("2x4").scope():
        model = regression(make())
        model.optimizer.build(model.trainable_variables)
        assert all(slot.value.sharding == weight.value.sharding for slot, weight in slots_in(model.optimizer))
        before = slot_bytes(model.optimizer)
        assert slots is None or before == slots * WEIGHT_BYTES
        report = shardload.shard_optimizer(model)
        found = train(model)
    assert all(slot.is_spread for slot in report.slots if not slot.why)
    assert slot_bytes(model.optimizer) == before // 2  # still, after training
    assert sum(slot.device_bytes for slot in report.slots if slot.is_spread) == before // 2
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)  # float32: sums of 32 in another order


@pytest.mark.parametrize("name", EVERY)
def test_slots_of_a_bound_model_do_too(name):
    make, _ = EVERY[name]
    model = on_mesh(regression(make()), "2x4")
    report = shardload.shard_optimizer(model)
    specs = slot_specs(model.optimizer)
    assert specs and all("batch" in str(spec) for spec in specs.values())
    assert report.device_bytes_before - report.device_bytes == slot_bytes(model.optimizer)
    shardload.shard_optimizer(model, axis=())
    assert all(slot.value.sharding == weight.value.sharding for slot, weight in slots_in(model.optimizer))


def test_a_step_gathers_each_weight_once_and_no_more():
    found = []
    for axis in ((), None):
        model = on_mesh(regression("adam"), "2x4")
        shardload.shard_optimizer(model, axis=axis)
        optimizer, weights = model.optimizer, model.trainable_variables
        values = ([v.value for v in optimizer.variables], [v.value for v in weights], [v.value for v in weights])
        shardings = jax.tree.map(lambda x: x.sharding, (values[2], values[0]))
        program = jax.jit(optimizer.stateless_apply, out_shardings=shardings).lower(*values).compile()
        kinds = re.findall(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", program.as_text())
        found.append((kinds, program.memory_analysis().argument_size_in_bytes))
    (plain, plain_bytes), (spread, spread_bytes) = found
    assert (plain, spread) == ([], ["all-gather"] * 4)
    assert plain_bytes - spread_bytes == WEIGHT_BYTES  # half of two slots


@pytest.mark.parametrize("mesh", MESHES)
def test_bytes_are_those_of_the_report(mesh):
    model = on_mesh(regression("adam"), mesh)
    report = shardload.shard_optimizer(model)
    assert report.device_bytes == slot_bytes(model.optimizer)
    assert report.device_bytes == report.device_bytes_before // int(mesh[0])
    assert json.loads(json.dumps(report.to_json()))["device_bytes"] == report.device_bytes


def test_the_report_says_what_is_not_spread_and_why():
    model = on_mesh(regression(K.Adafactor(0.01)), "1x8")
    assert str(shardload.shard_optimizer(model, axis="batch")).splitlines()[1].endswith("axis 'batch' has one device")
    odd = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])
    odd.compile(K.Adafactor(0.01), "mse")
    lines = str(shardload.shard_optimizer(on_mesh(odd, "8x1"))).splitlines()
    assert lines[0].endswith("0 of 4 slots spread over batch; 112 B on each device instead of 112 B")
    assert [line.partition(": ")[2].partition(": ")[2] for line in lines[1:]] == [
        "no dim of its 3x5 shard divides by the 8 devices of axis 'batch'",
        "no dim of its 5 shard divides by the 8 devices of axis 'batch'",
        "its shape differs from that of its weight",
    ]


def test_slots_are_spread_as_they_are_created():
    model = on_mesh(regression(optimizer := K.Adam(0.01)), "2x4")
    report = shardload.shard_optimizer(optimizer)
    said = f"{optimizer.name} on no mesh yet: no slots yet; they will be spread over the batch axis as they are created"
    assert (report.slots, str(report)) == ((), said)
    train(model)
    assert slot_specs(optimizer)[f"{model.name}_up_kernel_momentum"] == ("batch", "model")
    assert slot_bytes(optimizer) == WEIGHT_BYTES


def test_slots_follow_the_model_to_another_mesh(tmp_path):
    model = on_mesh(regression("adam"), "2x4")
    shardload.shard_optimizer(model)
    assert slot_bytes(model.optimizer) == WEIGHT_BYTES
    on_mesh(model, "8x1")
    assert slot_bytes(model.optimizer) == 2 * 4 * (16 * 24 + 24 + 24 * 8 + 8) // 8
    assert all(weight.value.sharding.is_fully_replicated for _, weight in slots_in(model.optimizer))


def test_several_axes_and_those_of_a_name():
    model = on_mesh(regression("adam"), "2x4")
    shardload.shard_optimizer(model, axis=("model", "batch"))
    assert slot_specs(model.optimizer)[f"{model.name}_down_bias_momentum"] == (("model", "batch"),)
    with pytest.raises(MeshError, match="has no axis 'data'; it has batch, model"):
        shardload.shard_optimizer(model, axis="data")
    assert spread_of(model.optimizer).axes == ("model", "batch")


def test_a_class_and_a_copy_are_plain():
    model = on_mesh(regression("adam"), "2x4")
    shardload.shard_optimizer(model)
    assert type(model.optimizer) is K.Adam and spread_of(K.Adam()) is None
    assert spread_of(K.Adam.from_config(model.optimizer.get_config())) is None


def test_what_has_no_optimizer_is_refused():
    with pytest.raises(UsageError, match="the model is not compiled"):
        shardload.shard_optimizer(keras.Sequential(name="plain"))
    with pytest.raises(UsageError, match="expected a compiled model or a Keras optimizer"):
        shardload.shard_optimizer(3)


def test_an_optimizer_built_on_no_mesh_is_refused():
    model = regression("adam")
    assert shardload.shard_optimizer(model).mesh is None  # it is not built: a load may put it on a mesh
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(LayoutError, match=r"its weights, such as '\w+/up/kernel', are on no mesh. Load the model"):
        shardload.shard_optimizer(model)


# ---- what an optimizer does besides its update ---------------------------------------------------


TOLERANCE = 1e-6
"""Weights are about 1 in float32, so one unit in the last place is 1.2e-7; sums of 32 are in another order."""
FEATURES = {
    "clipped by global norm": lambda: K.Adam(0.01, global_clipnorm=0.05),
    "clipped by norm": lambda: K.SGD(0.5, momentum=0.9, clipnorm=0.05),
    "averages": lambda: K.Adam(0.01, use_ema=True, ema_momentum=0.5),
    "averages in use": lambda: K.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "accumulated": lambda: K.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.05),
    "loss scale": lambda: K.LossScaleOptimizer(K.Adam(0.01, global_clipnorm=0.05), dynamic_growth_steps=2),
}
PLAIN = {"clipped by norm": lambda: K.SGD(0.5, momentum=0.9)}


@functools.cache
def alone(make):
    model = regression(make())
    return train(model), [np.asarray(v) for v in model.optimizer.variables]


@pytest.mark.parametrize("name", FEATURES)
def test_each_makes_a_difference(name):
    """Otherwise the comparison below would show nothing."""
    plain = alone(PLAIN.get(name, lambda: K.Adam(0.01)))
    found = alone(FEATURES[name])
    assert max(np.abs(a - b).max() for a, b in zip(found[0], plain[0], strict=True)) > 100 * TOLERANCE


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", FEATURES)
def test_the_result_is_that_of_one_device(name, mesh):
    model = on_mesh(regression(FEATURES[name]()), mesh)
    report = shardload.shard_optimizer(model)
    weights, state = train(model), model.optimizer.variables
    expected_weights, expected_state = alone(FEATURES[name])
    for one, other in zip((*weights, *state), (*expected_weights, *expected_state), strict=True):
        np.testing.assert_allclose(one, other, atol=TOLERANCE)
    assert slot_bytes(model.optimizer) == report.device_bytes == report.device_bytes_before // int(mesh[0])


def test_half_precision_scales_its_loss():
    def half():
        return regression(K.SGD(0.1, momentum=0.9), auto_scale_loss=True)

    keras.config.set_dtype_policy("mixed_float16")
    try:
        expected, model = train(half()), on_mesh(half(), "2x4")
    finally:
        keras.config.set_dtype_policy("float32")
    shardload.shard_optimizer(model)
    assert isinstance(model.optimizer, K.LossScaleOptimizer)
    for one, other in zip(train(model), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=4 * 0.1 * 2**-11)  # four updates by gradients of 11 bits, below 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run on 2x4 with spread slots, averages and accumulated gradients, and what it had at its end."""
    directory = tmp_path_factory.mktemp("run")
    model = on_mesh(regression(K.Adam(0.01, use_ema=True, gradient_accumulation_steps=2)), "2x4")
    shardload.shard_optimizer(model)
    train(model, epochs=1, callbacks=[OrbaxCheckpoint(directory, save_freq=1)])
    return directory, [np.asarray(v) for v in model.optimizer.variables]


@pytest.mark.parametrize("build", [True, False])
@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("mesh", [*MESHES, None])
def test_a_step_restores_bit_for_bit_on_any_mesh(saved, mesh, spread, build):
    directory, expected = saved
    model = regression(K.Adam(0.01, use_ema=True, gradient_accumulation_steps=2))
    if spread:
        shardload.shard_optimizer(model)
    if build:
        model.optimizer.build(model.trainable_variables)
    shardload.restore(model, directory, mesh=mesh)
    for one, other in zip(model.optimizer.variables, expected, strict=True):
        assert np.asarray(one).tobytes() == other.tobytes()
    pairs = list(slots_in(model.optimizer))
    parts = int(mesh[0]) if spread and mesh else 1
    assert len(pairs) == 16
    for slot, weight in pairs:
        shards = [v.value.addressable_shards[0].data.nbytes for v in (slot, weight)]
        assert shards[0] * parts == shards[1]


def test_a_resumed_run_keeps_its_slots_spread(saved):
    directory, _ = saved
    model = on_mesh(regression(K.Adam(0.01, use_ema=True, gradient_accumulation_steps=2)), "2x4")
    shardload.shard_optimizer(model)
    before = slot_specs(model.optimizer)
    shardload.restore(model, directory)
    train(model, epochs=1)
    assert slot_specs(model.optimizer) == before


def test_weights_and_averages_change_places():
    """As the callback SwapEMAWeights has it."""
    model = on_mesh(regression(K.Adam(0.01, use_ema=True, ema_momentum=0.5)), "2x4")
    shardload.shard_optimizer(model)
    before = slot_specs(model.optimizer)
    train(model, callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])
    assert slot_specs(model.optimizer) == before
    assert {len(v.value.sharding.device_set) for v in model.weights} == {8}
