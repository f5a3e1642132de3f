"""State of REKLS saved in mid-training and restored on other meshes."""

import jax
import keras
import numpy as np
import pytest
from rekls_runs import gradients, same, values

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import MismatchError
from shardload.keras_bridge.binding import bind
from shardload.optimizers import REKLS, state_bytes
from shardload.optimizers.rekls_setup import SLOTS
from shardload.parallel import choose
from shardload.sharding.mesh import MeshSpec

X = np.random.default_rng(0).random((48, 32)).astype("float32")


def parts_of(variable):
    whole, shard = variable.shape, variable.value.addressable_shards[0].data.shape
    return [a // b for a, b in zip(whole, shard, strict=True)]


def build(seed=0, **options):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(16)])
    model.compile(REKLS(1e-2, **options), "mse")
    return model


def on(model, mesh):
    spec = MeshSpec.parse(mesh)
    bind(model, mesh=spec, devices=jax.devices()[: spec.size], layouts=choose(model, spec).layouts)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model trained on 1x8, and the folder of a step in the middle of its epoch."""
    model, root = on(build(), "1x8"), tmp_path_factory.mktemp("steps")
    stop = keras.callbacks.LambdaCallback(on_train_batch_end=lambda n, logs: setattr(model, "stop_training", n == 2))
    model.fit(X, X[:, :16], batch_size=8, verbose=0, callbacks=[OrbaxCheckpoint(root, save_freq=3), stop])
    return model, root


def next_step(model):
    """Take a step with gradients that do not depend on the mesh, as a model's own do."""
    weights = model.trainable_variables
    model.optimizer.apply([gradients(tuple(v.shape))[0] for v in weights], weights)
    return values(model.optimizer, []), [np.asarray(v.value) for v in weights]


@pytest.fixture(scope="module")
def after(saved):
    """What the next step makes of the state and the weights on 1x8."""
    again = build(seed=7)
    shardload.restore(again, saved[1], step=3, mesh="1x8")
    return next_step(again)


@pytest.mark.parametrize("mesh", ["2x4", "1x1"])
def test_saved_on_1x8_and_restored(saved, mesh):
    model, root = saved
    again = build(seed=5)
    shardload.restore(again, root, step=3, mesh=mesh)
    assert again.optimizer.counts().steps == 3
    assert same(values(model.optimizer, model.weights), values(again.optimizer, again.weights))
    assert {len(v.value.sharding.device_set) for v in again.optimizer.variables} == {8 if mesh == "2x4" else 1}
    for variable, *state in zip(again.trainable_variables, *(getattr(again.optimizer, s) for s in SLOTS), strict=True):
        held = sum(v.value.addressable_shards[0].data.nbytes for v in state if v is not None)
        assert held == state_bytes(variable.shape, parts_of(variable))


@pytest.mark.parametrize("mesh", ["2x4", "1x1"])
def test_the_next_step_is_that_of_the_mesh_it_was_saved_on(saved, after, mesh):
    """The same bits on any mesh of eight. One device runs another program: the step and W are rounded differently.

    From JAX 0.11 on, XLA also fuses the last addition to W differently on another mesh.

    These gradients are unlike those of training, so steps are up to 100 learning rates long.
    """
    again = build(seed=5)
    shardload.restore(again, saved[1], step=3, mesh=mesh)
    before = [np.asarray(v.value) for v in again.trainable_variables]
    state, weights = next_step(again)
    assert same(state, after[0])
    is_exact = mesh == "2x4" and jax.__version_info__ < (0, 11)
    for one, other, start in zip(weights, after[1], before, strict=True):
        ulps = np.spacing(np.abs(other).max()) + np.spacing(np.abs(other - start).max())
        np.testing.assert_allclose(one, other, rtol=0, atol=0 if is_exact else ulps)


def test_training_on_two_meshes():
    """Gradients differ in their last bits. Where the second moment is noise, steps do too, within their limit."""
    x = np.random.default_rng(0).normal(size=(8 * 128, 32)).astype("float32")
    models = [on(build(), mesh) for mesh in ("1x8", "2x4")]
    losses = [m.fit(x, x[:, :16], batch_size=128, shuffle=False, verbose=0).history["loss"][-1] for m in models]
    np.testing.assert_allclose(*losses, rtol=1e-3)
    for one, other in zip(*(model.weights for model in models), strict=True):
        np.testing.assert_allclose(np.asarray(one.value), np.asarray(other.value), atol=8 * 1e-2)


def filled(options, *, start):
    """A model whose optimizer has a different number in each variable."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(16, name="dense"), keras.layers.Dense(16, name="head")]
    model = keras.Sequential([keras.Input((32,)), *layers], name="net")
    model.compile(REKLS(1e-2, **options), "mse")
    model.optimizer.build(model.trainable_variables)
    for number, variable in enumerate(model.optimizer.variables, start):
        variable.assign(np.full(variable.shape, number, variable.dtype))
    return model


def state_of_weight(model, path):
    name = path.replace("/", "_")
    found = {v.name.removeprefix(f"{name}_"): np.asarray(v.value) for v in model.optimizer.variables if name in v.name}
    assert found
    return found


@pytest.mark.parametrize("mesh", [None, "1x8"])
@pytest.mark.parametrize(("before", "now"), [({}, {"adamw_for": ["net/dense/kernel"]}), ({"max_dimension": 24}, {})])
@pytest.mark.parametrize("is_turned", [False, True])
def test_the_state_of_a_weight_with_other_factors_begins(before, now, is_turned, mesh, tmp_path):
    """Second moments belong to the eigenbases of the factors: without one of them, they are other quantities."""
    if is_turned:
        before, now = now, before
    source, target, new = filled(before, start=1), filled(now, start=100), filled(now, start=100)
    shardload.save(source, tmp_path, step=1)
    with pytest.raises(MismatchError, match="Only the optimizer differs"):
        shardload.restore(target, tmp_path, mesh=mesh)
    report = shardload.restore(target, tmp_path, mesh=mesh, strict=False)
    assert "step and model have other slots for 1 weight: these begin as in a new optimizer" in report.notes
    begun = state_of_weight(target, "dense/kernel")
    for name, value in state_of_weight(new, "dense/kernel").items():
        start = np.eye(len(value)) if name.endswith("eigenvectors") else 0
        np.testing.assert_array_equal(begun[name], np.broadcast_to(start, value.shape), err_msg=name)
    for path in ("dense/bias", "head/kernel", "head/bias"):
        for name, value in state_of_weight(source, path).items():
            np.testing.assert_array_equal(state_of_weight(target, path)[name], value, err_msg=name)
    assert int(target.optimizer.steps) == int(source.optimizer.steps)
