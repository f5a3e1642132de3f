"""Attention whose scores are not stored: memory that grows with the sequence, not with its square."""

import keras
import pytest

from shardload.errors import LayoutError
from shardload.parallel import Hardware, LayoutPlan, search

FUSED = Hardware(fused_attention=True)


def attends(heads=4, width=64):
    """Return one layer of attention, whose only arrays with two dims of tokens are its scores."""
    x = keras.Input((None, width))
    return keras.Model(x, keras.layers.MultiHeadAttention(heads, width // heads, use_bias=False)(x, x))


def activations(model, sequence, hardware=None, mesh="2x2", **options):
    plan = search(model, mesh, batch=4, sequence=sequence, hardware=hardware, **options)
    return plan.device.activations


@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_memory_grows_with_the_sequence_and_not_with_its_square(optimizer):
    model = attends()
    short, long = (activations(model, n, FUSED, optimizer=optimizer) for n in (512, 1024))
    assert long <= 2.01 * short
    short, long = (activations(model, n, optimizer=optimizer) for n in (512, 1024))
    assert long > 3.5 * short


def test_what_is_stored_otherwise_are_scores():
    model, tokens = attends(), 1024
    stored, fused = (activations(model, tokens, hardware, mesh="1x1") for hardware in (None, FUSED))
    scores = 4 * 4 * tokens * tokens * 4  # rows, heads and float32
    # Those of the product and of the softmax, while queries and keys are not needed any more.
    assert 2 * scores < stored < 2 * scores + fused


def test_nothing_changes_without_attention():
    x = keras.Input((None, 64))
    model = keras.Model(x, keras.layers.Softmax()(keras.layers.Dense(64)(x)))
    assert activations(model, 512, FUSED, optimizer="sgd") == activations(model, 512, optimizer="sgd")


def test_scores_of_a_single_token_are_not_taken_for_all_scalars():
    one = {"batch": 1, "sequence": 1, "optimizer": "sgd"}
    fused, stored = (search(attends(heads=1), "1x1", **one, hardware=hardware) for hardware in (FUSED, None))
    assert fused.device == stored.device and fused.step_s == stored.step_s


def test_a_plan_says_what_it_counts():
    model = attends()
    plans = [search(model, "1x2", batch=4, sequence=64, hardware=hardware) for hardware in (None, FUSED)]
    stored, fused = (plan.summary() for plan in plans)
    assert "attention: its scores count as stored" in stored and "--fused-attention" in stored
    assert "attention: a fused kernel runs it" in fused
    assert all(LayoutPlan.from_json(plan.to_json()) == plan for plan in plans)
    old = plans[0].to_json()
    del old["attention"]  # as plans of older versions
    assert "attention:" not in LayoutPlan.from_json(old).summary()


def test_recomputed_scores_are_not_stored_either():
    x = y = keras.Input((None, 64))
    for _ in range(2):
        y = Block()(y)
    model = keras.Model(x, y)
    for mode in ("none", "matmuls", "full"):
        short, long = (activations(model, n, FUSED, optimizer="sgd", remat=mode) for n in (512, 1024))
        assert long <= 2.01 * short, mode


class Block(keras.layers.Layer):
    """Attention with a residual."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = keras.layers.MultiHeadAttention(4, 16)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return x + self.attention(x, x)


def test_a_wrong_flag_is_refused():
    with pytest.raises(LayoutError, match="fused_attention=1: expected True or False"):
        Hardware(fused_attention=1)
