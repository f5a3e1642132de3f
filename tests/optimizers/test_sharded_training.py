"""What an optimizer does besides its update gives the result of one device on every mesh, with spread slots too."""

import functools

import keras
import numpy as np
import pytest
from small_regression import MESHES, on_mesh, regression, slot_bytes, slot_specs, train

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.keras_bridge.optimizer_slots import slots_in

K = keras.optimizers
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
