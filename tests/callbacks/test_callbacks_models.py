"""Every kind of model, optimizer and way to train comes back bit for bit, into a fresh model on another mesh."""

import keras
import numpy as np
import pytest

import shardload
from benchmarks import keras_callback, keras_callback_cases, keras_callback_tools
from benchmarks.keras_callback_models import BUILDERS, WAYS, Made
from shardload.callbacks import OrbaxCheckpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),
    pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method"),
]


def state(model):
    return [np.asarray(v.value) for v in [*model.weights, *model.optimizer.variables]]


def assert_comes_back(made, folder):
    """Trained on 1x8, restored onto 2x4; compared in Keras' own order, not in ours."""
    with keras_callback_tools.eight_devices():
        model, saved = made.model(seed=1), []
        # Not after ``fit``: an optimizer that averages replaces the weights when it ends, after the last save.
        seen = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: saved.append(state(model)))
        made.fit(model, OrbaxCheckpoint(folder), seen, epochs=2)
    fresh = made.model(seed=2)
    fresh.optimizer.build(fresh.trainable_variables)
    before = state(fresh)
    shardload.restore(fresh, folder, mesh="2x4")
    expected, found = saved[-1], state(fresh)
    assert [a.tobytes() for a in found] == [a.tobytes() for a in expected]
    assert [a.dtype for a in found] == [a.dtype for a in expected]
    assert sum(not np.array_equal(a, b) for a, b in zip(before, found, strict=True)) > len(found) // 4
    assert {len(v.value.sharding.device_set) for v in fresh.weights} == {8}


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [k if k != "Gemma" else pytest.param(k, marks=pytest.mark.slow) for k in BUILDERS])
def test_models_and_ways_to_train(kind, way, tmp_path):
    assert_comes_back(Made(kind, way), tmp_path)


OPTIMIZERS = {
    "ema": lambda: keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=3),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW()),
    "muon": keras.optimizers.Muon,
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 100)),
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(make, tmp_path):
    assert_comes_back(Made("functional", optimizer=make), tmp_path)


@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
def test_precision(policy, tmp_path):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        assert_comes_back(Made("functional"), tmp_path)
    finally:
        keras.config.set_dtype_policy(before)


CASES = keras_callback_cases.STATE | keras_callback_cases.RUN
ELSEWHERE = {"memory while loading", "trained on 1x8, restored on 1 device"}
"""Shown by the tests of memory and by those that start processes."""


@pytest.mark.parametrize("title", [title for title in CASES if title not in ELSEWHERE])
@pytest.mark.filterwarnings("ignore")  # the same lines as for Keras' callback, which warns where ours does not
def test_what_fails_with_keras_callback(title):
    assert keras_callback.failure_of(CASES[title], keras_callback.sides()["shardload"], Made("functional")) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", ["optimizer, auto-named adam_1", "a second fit, new callback", "one flipped bit"])
def test_the_cases_can_fail(title):
    assert keras_callback.failure_of(CASES[title], keras_callback.sides()["keras"], Made("functional"))
