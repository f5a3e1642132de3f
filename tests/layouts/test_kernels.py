"""Kernels that follow each other in a functional model are pairs: one all-reduce each, and at most one backward."""

import jax
import keras
import numpy as np
import pytest
from programs import collectives, forward, gradients

import shardload
from shardload.parallel import autoconfig

L = keras.layers
WIDTH = 64


def sequence(shape, *layers):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(shape), *layers])
    return model, np.random.default_rng(0).normal(size=(4, *shape)).astype("float32")


def dense(*units, activation="relu"):
    return sequence((WIDTH,), *(L.Dense(n, activation=activation) for n in units))


def convolutions():
    first = L.Conv2D(32, 3), L.BatchNormalization(), L.ReLU(), L.MaxPooling2D(), L.SpatialDropout2D(0.1)
    return sequence((16, 16, 8), *first, L.Conv2D(32, 3), L.BatchNormalization())


def mobile():
    first = L.Conv2D(64, 1), L.BatchNormalization(), L.ReLU(), L.DepthwiseConv2D(3), L.BatchNormalization()
    return sequence((16, 16, 8), *first, L.Conv2D(8, 1))


def einsums(first, shape, second):
    return sequence((8, WIDTH), L.EinsumDense(first, shape), L.EinsumDense(second, (None, WIDTH)))


def attention(layer):
    inputs = keras.Input((8, WIDTH))
    return keras.Model(inputs, layer(inputs, inputs)), np.ones((4, 8, WIDTH), "float32")


PAIRS = {
    "dense": (lambda: dense(256, WIDTH), 1, 1),
    "square": (lambda: dense(WIDTH, WIDTH, WIDTH, WIDTH), 2, 3),
    "classifier": (lambda: dense(128, 32, 12), 1, 2),
    "einsum": (lambda: einsums("btd,df->btf", (None, 64), "btf,fd->btd"), 1, 1),
    "heads": (lambda: einsums("btd,dnh->btnh", (None, 4, 16), "btnh,nhd->btd"), 1, 1),
    "multi_head_attention": (lambda: attention(L.MultiHeadAttention(4, 16)), 1, 1),
    "grouped_query_attention": (lambda: attention(L.GroupQueryAttention(16, 8, 4)), 1, 1),
    "convolutions": (convolutions, 1, 1),
    "mobile": (mobile, 1, 1),
    "separable": (lambda: sequence((16, 16, 8), L.SeparableConv2D(32, 3), L.SeparableConv2D(8, 3)), 1, 2),
    "transposed": (lambda: sequence((16, 16, 8), L.Conv2D(32, 3), L.Conv2DTranspose(8, 3)), 1, 1),
}
"""A model, the all-reduces of its forward pass, and those of its gradients: each pair but the first, whose input needs
no gradient, and each column before it adds one backward."""


@pytest.mark.parametrize("name", PAIRS)
def test_one_all_reduce_per_pair_and_nothing_else(name):
    make, ahead, both = PAIRS[name]
    model, x = make()
    expected = model.predict(x, verbose=0)
    shardload.TensorParallelKeras(model, 4)
    assert collectives(forward(model, x).as_text()) == {"all-reduce": ahead}
    assert collectives(gradients(model, x).as_text()) == {"all-reduce": both}
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-4 * np.abs(expected).max())


def test_vectors_between_follow_the_channels():
    model, _ = mobile()
    choice = autoconfig(model, 4)
    first, norm, _, depthwise, other, last = model.layers
    assert [str(choice.of(v)) for v in norm.variables] == ["(model)"] * 4
    assert [str(choice.of(v)) for v in depthwise.variables] == ["(-, -, model, -)", "(model)"]
    assert choice.by_id[id(other.gamma)].rule == f"features follows {first.kernel.path}"
    assert (str(choice.of(last.kernel)), choice.by_id[id(last.kernel)].rule) == ("(-, -, model, -)", "row")


@pytest.mark.parametrize("between", [L.LayerNormalization, L.Flatten, lambda: L.BatchNormalization(axis=1), L.Softmax])
def test_what_needs_all_features_ends_a_chain(between):
    model, _ = sequence((8, WIDTH), L.Dense(WIDTH), between(), L.Dense(WIDTH))
    assert autoconfig(model, 4).rules[model.layers[-1].kernel.path] == "column"


def test_an_activation_over_features_ends_a_chain():
    model, _ = dense(WIDTH, WIDTH, activation="softmax")
    assert autoconfig(model, 4).rules[model.layers[-1].kernel.path] == "column"


def test_a_kernel_whose_output_is_read_twice_or_returned_is_in_no_pair():
    inputs = keras.Input((WIDTH,))
    y = L.Dense(WIDTH, name="one")(inputs)
    twice = keras.Model(inputs, L.Dense(WIDTH, name="two")(y) + y)
    for model in (twice, keras.Model(inputs, [y, twice.get_layer("two")(y)])):
        assert autoconfig(model, 4).rules == dict.fromkeys(("one/kernel", "two/kernel"), "column") | {
            "one/bias": "bias follows one/kernel",
            "two/bias": "bias follows two/kernel",
        }


def test_a_gated_block_stays_one():
    inputs = keras.Input((WIDTH,))
    gate, up = (L.Dense(256, name=name)(inputs) for name in ("gate", "up"))
    down = L.Dense(WIDTH, name="down")(L.Multiply()([gate, up]))
    rules = autoconfig(keras.Model(inputs, L.Dense(8, name="last")(L.Dense(32, name="next")(down))), 4).rules
    assert [rules[f"{name}/kernel"] for name in ("gate", "up", "down", "next", "last")] == [
        *("column", "column", "row"),
        *("column", "row"),
    ]


def test_rules_of_the_user_come_first():
    model, _ = dense(256, WIDTH)
    first, second = model.layers
    choice = autoconfig(model, 4, {first.kernel.path: ("model", None)})
    assert (str(choice.of(first.kernel)), str(choice.of(second.kernel))) == ("(model, -)", "(model, -)")


@pytest.mark.parametrize("layer", [L.LSTM, L.GRU])
def test_gates_are_replicated_as_each_device_would_have_one_of_them(layer):
    model, x = sequence((8, WIDTH), layer(WIDTH))
    expected = model.predict(x, verbose=0)
    wrapped = shardload.TensorParallelKeras(model, 4)
    assert {wrapped.layouts.rules[v.path] for v in wrapped.trainable_variables} == {"gates"}
    assert collectives(forward(model, x).as_text()) == collectives(gradients(model, x).as_text()) == {}
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-6)


def test_units_of_a_simple_recurrence_are_split_and_gathered_once_per_step():
    model, x = sequence((8, WIDTH), L.SimpleRNN(WIDTH))
    wrapped = shardload.TensorParallelKeras(model, 4)
    cell = model.layers[0].cell
    assert [str(wrapped.layouts.of(v)) for v in cell.trainable_variables] == ["(-, model)", "(-, model)", "(model)"]
    assert collectives(forward(model, x).as_text()) == {"all-gather": 1}
    assert jax.tree.leaves(wrapped(x))[0].shape == (4, WIDTH)
