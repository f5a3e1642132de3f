"""Output layers in int8 pass gradients on, and compute what Keras computes."""

import jax
import keras
import numpy as np
import pytest

from shardload.keras_bridge.quantised_gradients import int8_gradients

IDS, X = np.arange(6).reshape(2, 3), np.random.default_rng(0).normal(size=(2, 3, 16)).astype("float32")
WEIGHTS = np.random.default_rng(1).normal(size=(2, 3, 40)).astype("float32")


def head(tied, cap, mode=None):
    keras.utils.set_random_seed(3)
    layer = keras.layers.ReversibleEmbedding(40, 16, tie_weights=tied, logit_soft_cap=cap)
    layer(IDS)
    if mode:
        layer.quantize(mode)
    return layer


def gradient(layer):
    return np.asarray(jax.grad(lambda x: (layer(x, reverse=True) * WEIGHTS).sum())(X))


def cosine(one, two):
    return float((one * two).sum() / np.linalg.norm(one) / np.linalg.norm(two))


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_those_of_the_layer_before_it_was_quantised(tied, cap):
    exact, layer = gradient(head(tied, cap)), head(tied, cap, "int8")
    plain = np.asarray(layer(X, reverse=True))
    with int8_gradients():
        assert np.asarray(layer(X, reverse=True)).tobytes() == plain.tobytes()
        assert cosine(gradient(layer), exact) > 0.99
        np.testing.assert_allclose(gradient(layer), exact, atol=0.05 * np.abs(exact).max())
        assert np.array_equal(layer(IDS), head(tied, cap, "int8")(IDS))
    # What this is for: when Keras passes gradients on itself, this fails, and the module can go.
    assert cosine(gradient(layer), exact) < 0.5


def test_gradients_of_int4_need_nothing():
    exact, layer = gradient(head(True, None)), head(True, None, "int4")
    assert cosine(gradient(layer), exact) > 0.9
