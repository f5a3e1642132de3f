"""Layers that recompute in the backward pass give the same values, updates and losses, and keep less."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import shardload
from shardload.keras_bridge.recomputation import block_kinds, recomputing
from shardload.parallel import choose, compile_step, search


class Block(keras.layers.Layer):
    """A block with all that a trace must pass on: dropout, an update, a loss, a mask and a flag."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.up, self.down = keras.layers.Dense(4 * width, activation="gelu"), keras.layers.Dense(width)
        self.norm, self.dropout = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=3)
        self.supports_masking = True

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * shape[-1]))
        self.norm.build(shape)
        self.built = True

    def call(self, x, mask=None, training=False, scale=None):
        y = self.down(self.dropout(self.up(x), training=training))
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(y)))
        if mask is not None:
            y = y * keras.ops.cast(mask, y.dtype)[..., None]
        return self.norm(x + y if scale is None else x + scale * y, training=training)


def blocks(count=3, width=16):
    keras.utils.set_random_seed(0)
    y = tokens = keras.Input((8,), dtype="int32")
    y = keras.layers.Embedding(32, width, mask_zero=True)(y)
    for n in range(count):
        y = Block(width, name=f"block_{n}")(y)
    return keras.Model(tokens, keras.layers.Dense(1, name="head")(y))


TOKENS = np.random.default_rng(0).integers(0, 32, (8, 8)).astype("int32")


def step(model):
    """Return a training step as a pure function: outputs, updates and losses, and the gradients of their sum."""
    trainable, other = (
        [v.value for v in group] for group in (model.trainable_variables, model.non_trainable_variables)
    )

    def loss(trainable):
        outputs, updates, losses = model.stateless_call(trainable, other, TOKENS, training=True, return_losses=True)
        return jnp.mean(jnp.square(outputs)) + sum(losses), (outputs, updates, losses)

    return loss, trainable


@pytest.mark.parametrize("mode", ["full", "matmuls"])
def test_values_updates_losses_and_gradients_are_those_without_recomputation(mode):
    model = blocks()
    loss, trainable = step(model)
    expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(trainable)
    with recomputing(model, {"Block": mode}, {}):
        found = jax.jit(jax.value_and_grad(loss, has_aux=True))(trainable)
        text = str(jax.make_jaxpr(jax.grad(loss, has_aux=True))(trainable))
    assert "remat" in text
    # As compiled, sums may be in another order.
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    assert len(found[0][1][2]) == 3
    assert "remat" not in str(jax.make_jaxpr(jax.grad(loss, has_aux=True))(trainable))


def test_blocks_are_repeated_layers_that_have_layers():
    assert {kind: [layer.name for layer in layers] for kind, layers in block_kinds(blocks()).items()} == {
        "Block": ["block_0", "block_1", "block_2"]
    }
    assert block_kinds(blocks(1)) == {}


@pytest.mark.parametrize("family", ["Llama3", "GPT2", "Mixtral"])
def test_a_model_of_keras_hub_trains_under_a_plan_that_recomputes(family, tmp_path):
    hub = pytest.importorskip("keras_hub").models
    sizes = {"vocabulary_size": 64, "num_layers": 2, "hidden_dim": 32, "intermediate_dim": 64}
    make = {
        "Llama3": lambda: hub.Llama3Backbone(**sizes, num_query_heads=4, num_key_value_heads=2),
        "GPT2": lambda: hub.GPT2Backbone(**sizes, num_heads=4, max_sequence_length=16, dropout=0.0),
        "Mixtral": lambda: hub.MixtralBackbone(
            **sizes, num_query_heads=4, num_key_value_heads=2, num_experts=2, top_k=2
        ),
    }[family]
    tokens = np.random.default_rng(1).integers(0, 64, (8, 16)).astype("int32")
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}

    def trained(layout):
        keras.utils.set_random_seed(0)
        model = make()
        if layout is not None:
            shardload.AutoShardDistribution(layout=layout).shard(model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(inputs, np.zeros((8, 16, 32), "float32"), batch_size=8, epochs=2, verbose=0)
        return history.history["loss"], model

    plan = search(make(), "2x2", inputs=inputs, optimizer="sgd", remat="full")
    assert list(plan.remat.values()) == ["full"]
    plan.save(tmp_path / "plan.json")
    (losses, _), (expected, _) = trained(tmp_path / "plan.json"), trained(None)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


def test_a_plan_says_what_recomputing_saves_and_what_it_exchanges():
    keras.utils.set_random_seed(0)
    y = inputs = keras.Input((64, 64))
    for _ in range(4):
        y = y + keras.layers.MultiHeadAttention(4, 16)(y, y)
    model = keras.Model(inputs, y)
    plans = {mode: search(model, "2x2", batch=8, optimizer="adam", remat=mode) for mode in ("none", "matmuls", "full")}
    steps = {}
    for mode, plan in plans.items():
        shape = jax.ShapeDtypeStruct((8, 64, 64), "float32")
        steps[mode] = compile_step(model, choose(model, plan.mesh, plan), shape, training="gradients")
        assert steps[mode].collective_bytes == plan.exchanged_bytes
    planned, compiled = plans["full"].device.activations, steps["full"].temporary_bytes
    assert planned < 0.5 * plans["none"].device.activations
    assert compiled < 0.7 * steps["none"].temporary_bytes
    assert plans["full"].device.activations <= plans["matmuls"].device.activations
    # Without the limit, nothing is recomputed; with a tight one, what is needed.
    assert search(model, "2x2", batch=8, optimizer="adam").remat == {}
    limit = plans["none"].device.total - (1 << 20)
    assert search(model, "2x2", batch=8, optimizer="adam", device_memory_bytes=limit).remat
