"""Weights that have no gradient do not move: Adam would turn rounding noise into whole learning rates.

The exact answer is 0, which NumPy in float64 confirms. Ways are in learning rates.
"""

import jax
import numpy as np
import pytest
from rekls_by_hand import LIMIT, ByHand
from rekls_runs import mesh_of, same, weight

from shardload.optimizers import REKLS

SHAPE, STEPS, RATE = (24, 16), 30, 1e-2
MODES = {
    "eigh": {}, "qr": {"decomposition": "qr"}, "every third step": {"precondition_frequency": 3},
    "qr, every third step": {"decomposition": "qr", "precondition_frequency": 3},
    "columns only": {"max_dimension": 20},
    "original start": {"init_factor": 0, "relative_epsilon": 0, "skip_first_update": False},
    "bfloat16": {"factor_dtype": "bfloat16"}, "bfloat16, qr": {"factor_dtype": "bfloat16", "decomposition": "qr"},
}  # fmt: skip


def moved(*given, mesh=None, spec=(), **options):
    """Return the way of one weight for each of these lists of gradients."""
    variables = [weight(gradients[0].shape, mesh=mesh, spec=spec) for gradients in given]
    start = [np.asarray(variable.value, "float64") for variable in variables]
    optimizer = REKLS(RATE, weight_decay=None, **options)
    optimizer.build(variables)
    step = jax.jit(optimizer.stateless_apply)
    state, weights = [v.value for v in optimizer.variables], [v.value for v in variables]
    for gradients in zip(*given, strict=True):
        weights, state = step(state, [np.asarray(gradient, "float32") for gradient in gradients], weights)
    return [(np.asarray(w, "float64") - before) / RATE for w, before in zip(weights, start, strict=True)]


def exact(gradients):
    """Return the way in NumPy float64."""
    start = np.asarray(weight(gradients[0].shape).value, "float64")
    by_hand = ByHand(start, lr=RATE, weight_decay=0, skip=True, start="rms", relative=0.01, limit=LIMIT)
    for gradient in gradients:
        by_hand.step(gradient)
    return (by_hand.w - start) / RATE


def rank_one():
    """Return gradients along u vᵀ, and the two projectors."""
    rng = np.random.default_rng(0)
    u, v = (x / np.linalg.norm(x) for x in (rng.normal(size=n) for n in SHAPE))
    return [size * np.outer(u, v) for size in rng.normal(size=STEPS)], np.outer(u, u), np.outer(v, v)


def without(where, *, seed=0):
    """Return gradients that are always zero there."""
    found = np.random.default_rng(seed).normal(size=(STEPS, *SHAPE))
    found[:, *where] = 0
    return list(found)


def tokens(*, seed=0):
    """Return gradients of an embedding: a step has three tokens of twelve, and twelve are never used."""
    rng = np.random.default_rng(seed)
    found = np.zeros((STEPS, *SHAPE))
    for gradient in found:
        gradient[2 * rng.integers(0, 12, 3)] = rng.normal(size=(3, SHAPE[1]))
    return list(found)


@pytest.mark.parametrize("mode", MODES)
def test_what_has_no_gradient_does_not_move(mode):
    given, rows, columns = rank_one()
    one, row, column, embedding = moved(given, without((3,)), without((slice(None), 3)), tokens(), **MODES[mode])
    # A side without a factor has the identity as its eigenbasis, in which u has many elements.
    rows = np.eye(24) if "max_dimension" in MODES[mode] else rows
    # Factors in bfloat16 turn the direction itself, by their precision.
    limit = 0.02 if "bfloat16" in mode else 1e-3
    assert np.linalg.norm(one - rows @ one @ columns) < limit and np.abs(one).max() > 1
    assert np.abs(row[3]).max() < 1e-4 and np.abs(row[4]).max() > 1
    assert np.abs(column[:, 3]).max() < 1e-4 and np.abs(column[:, 4]).max() > 1
    assert np.abs(embedding[1::2]).max() < 1e-4 and np.abs(embedding[::2]).max() > 1


@pytest.mark.parametrize("mode", ["qr", "qr, every third step"])
def test_noise_of_dependent_images_reaches_no_weight(mode):
    """Images of eigenvectors depend on each other in any place of the order, with other gradients in another one."""
    seeds = range(1, 5)
    found = moved(*(without((3,), seed=n) for n in seeds), *(tokens(seed=n) for n in seeds), **MODES[mode])
    rows, embeddings = found[: len(seeds)], found[len(seeds) :]
    assert all(np.abs(row[3]).max() < 1e-4 and np.abs(row[4]).max() > 1 for row in rows)
    assert all(np.abs(each[1::2]).max() < 1e-4 and np.abs(each[::2]).max() > 1 for each in embeddings)


def test_the_way_is_that_of_float64():
    (found,), expected = moved(rank_one()[0]), exact(rank_one()[0])
    assert np.abs(found - expected).max() < 1e-3


def test_the_original_moves_what_has_no_gradient():
    given, rows, columns = rank_one()
    one, row = moved(given, without((3,)), rank_tolerance=0)
    assert np.linalg.norm(one - rows @ one @ columns) > 50 and np.abs(row[3]).max() > 1


@pytest.mark.parametrize("spec", [("model", None), (None, "model")])
def test_on_a_mesh(spec):
    """With the same bits for both ways to split it."""
    given, rows, columns = rank_one()
    (one,), (whole,) = (moved(given, mesh=mesh_of(8), spec=each) for each in (spec, ()))
    assert same([one], [whole]) and np.linalg.norm(one - rows @ one @ columns) < 1e-3


def test_a_row_that_starts_late_moves_from_then_on():
    given = without((3,))
    for gradient in given[STEPS // 2 :]:
        gradient[3] = gradient[4]
    (before,) = moved(given[: STEPS // 2])
    (after,) = moved(given)
    assert np.abs(before[3]).max() < 1e-4 and np.abs(after[3]).max() > 1
