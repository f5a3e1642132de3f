"""Convolutions and scatters that XLA partitions wrong have the numbers of one device in models on a mesh.

Lookups and sums of sliced tokens are in `tests/parallel/test_auto_shard_distribution.py`.
"""

import jax
import keras
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from keras import layers
from programs import gradients_of

import shardload
from shardload.parallel import check_numbers, search

THREE = "data=2,fsdp=2,model=2"
CONVOLUTIONS = {
    "depthwise1d": (lambda: layers.DepthwiseConv1D(3, padding="same"), 1),
    "depthwise2d": (lambda: layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2), 2),
    "separable": (lambda: layers.SeparableConv1D(8, 3, strides=2, padding="same"), 1),
    "groups": (lambda: layers.Conv2D(8, 3, groups=4), 2),
    "transposed": (lambda: layers.Conv1DTranspose(6, 3, strides=2), 1),
    "plain": (lambda: layers.Conv1D(6, 3, dilation_rate=2, padding="same"), 1),
    "strided": (lambda: layers.Conv2D(6, 3, strides=2, padding="same"), 2),
}


def convolving(name):
    keras.utils.set_random_seed(3)
    layer, dims = CONVOLUTIONS[name]
    model = keras.Sequential(
        [keras.Input((*(16,) * dims, 8)), layers.Dense(8), layer(), layers.Activation("tanh"), layers.Dense(3)]
    )
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model


def batches(model, rows):
    made = np.random.default_rng(0)
    return (made.normal(size=(rows, *shape[1:])).astype("float32") for shape in (model.input_shape, model.output_shape))


@pytest.mark.parametrize("layout", ["auto", "replicated"])
@pytest.mark.parametrize("mesh", ["2x4", THREE, "data=2,context=2,model=2", "data=2,context=4"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_kernels_train_as_on_one_device(name, mesh, layout):
    expected, sharded = convolving(name), shardload.AutoShardDistribution(mesh, layout).shard(convolving(name))
    x, y = batches(expected, 12)  # batches of 8 and 4 rows
    for model in (expected, sharded):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for ours, theirs in zip(sharded.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    np.testing.assert_allclose(sharded.predict(x, verbose=0), expected.predict(x, verbose=0), atol=1e-4)


@pytest.mark.parametrize("name", ["depthwise1d", "groups"])
def test_kernels_train_as_on_one_device_without_compiling(name):
    expected, sharded = convolving(name), shardload.AutoShardDistribution("2x4").shard(convolving(name))
    x, y = batches(expected, 8)
    for model in (expected, sharded):
        model.compile(keras.optimizers.SGD(0.5), "mse", run_eagerly=model is sharded)
        model.fit(x, y, batch_size=8, verbose=0)
    for ours, theirs in zip(sharded.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("mesh", ["2x4", THREE])
@pytest.mark.parametrize("name", ["depthwise1d", "depthwise2d", "groups"])
def test_a_training_step_of_ones_own_has_the_gradients_of_one_device(name, mesh):
    distribution = shardload.AutoShardDistribution(mesh, "replicated")
    x = next(batches(convolving(name), 8))
    expected = gradients_of(convolving(name), x)
    found = gradients_of(distribution.shard(convolving(name)), x, P(distribution.batch_axes))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mesh", ["2x4", "data=2,context=2,model=2"])
@pytest.mark.parametrize("name", ["depthwise1d", "plain"])
def test_checked_numbers_of_a_searched_plan_are_right(name, mesh):
    model = convolving(name)
    x, y = batches(model, 8)
    checked = check_numbers(model, search(model, mesh, inputs=x, optimizer="adamw"), x, target=y)
    assert checked.ok, checked


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="says which faults JAX 0.10 has")
def test_plain_jax_has_the_faults():
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    x = np.random.default_rng(0).integers(-3, 4, (8, 16, 8)).astype("float32")

    def wrong(function, split):
        return not np.array_equal(jax.jit(function)(jax.device_put(x, NamedSharding(mesh, split))), function(x))

    def kernel_gradient(groups):
        kernel = np.ones((3, 8 // groups, 8), "float32")
        dims = ("NHC", "HIO", "NHC")

        def loss(kernel, x):
            y = jax.lax.conv_general_dilated(
                x, kernel, (1,), "SAME", dimension_numbers=dims, feature_group_count=groups
            )
            return (y * y).sum()

        return lambda x: jax.grad(loss)(kernel, x)

    assert wrong(kernel_gradient(8), P("a"))
    assert wrong(kernel_gradient(1), P("a", "b"))
    assert not wrong(kernel_gradient(1), P("a"))
    assert wrong(lambda x: jax.ops.segment_sum(x[0, :-1] + 1, np.arange(15) % 4 + 1, 5), P(None, "a"))
