"""The arithmetic of REKLS for one matrix, against NumPy float64 and against the PyTorch original.

The values in support/rekls_reference.npz come from NVIDIA Emerging-Optimizers, pull request 175, run in float64:
five steps at epsilon 1/8, betas (0.5, 0.25), factor beta 0.25, weight decay 1/16. Its learning rate is 1e-2 for
decoupled decay and 1e-1 for the other methods.

Eigenvectors have no sign, and none of their own where eigenvalues repeat, so factors and Q diag(λ) Qᵀ are compared.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rekls_by_hand import DECAYS, ByHand, original

from shardload.optimizers import rekls_math
from shardload.optimizers.rekls_math import Moments, Pair, Settings, Sides

OF_ORIGINAL = {"beta_1": 0.5, "beta_2": 0.25, "factor_beta": 0.25, "epsilon": 0.125, "weight_decay": 1 / 16}


def unique(*shapes, square):
    """Return decays and shapes; l2 with the square only.

    On a rectangle one factor has an eigenvalue 0 several times, so its eigenvectors are any basis of that space, where
    the gradient is 0 but the weight, which l2 adds after the factors, is not.
    """
    return [(decay, shape) for decay in DECAYS for shape in shapes if decay != "l2" or shape == square]


def start(weight, value, dtype):
    m, n = weight.shape
    factors = Sides(jnp.zeros((m, m), dtype), jnp.zeros((n, n), dtype))
    pairs = Sides(*(Pair(jnp.full(size, value, dtype), jnp.eye(size, dtype=dtype)) for size in (m, n)))
    return jnp.asarray(weight, dtype), factors, pairs, Moments(jnp.zeros((m, n), dtype), jnp.zeros((m, n), dtype))


def steps(weight, gradients, settings, lr, *, value=0.0, dtype="float32"):
    """Yield weight, factors, pairs and moments after each step."""
    w, factors, old, moments = start(weight, value, dtype)
    for t, gradient in enumerate(np.asarray(gradients, dtype), 1):
        g = rekls_math.l2_gradient(jnp.asarray(gradient), w, settings, when="l2_before_factors", decays=True)
        step = jnp.asarray(t, dtype)
        added = rekls_math.contributions(g, old, settings.epsilon)
        factors = Sides(
            *(rekls_math.blended(f, c, step, settings.factor_beta) for f, c in zip(factors, added, strict=True))
        )
        new = Sides(*map(rekls_math.eigenpairs, factors))
        if t > settings.skip_first_update:
            count = step - settings.skip_first_update
            own = rekls_math.l2_gradient(g, w, settings, when="l2", decays=True)
            moments, direction = rekls_math.moments_and_direction(
                moments, own, (old, new), step=count, settings=settings
            )
            w = rekls_math.moved(w, direction, jnp.asarray(lr, dtype), settings, decays=True)
        old = new
        yield w, factors, new, moments


def whole(pair):
    return np.asarray(pair.vectors * pair.values) @ np.asarray(pair.vectors).T


def learning_rate(decay):
    return 1e-2 if decay == "decoupled" else 1e-1


@pytest.mark.parametrize(("decay", "shape"), unique("8x8", "8x16", "16x8", square="8x8"))
def test_the_values_of_the_original(decay, shape):
    known, lr = original(), learning_rate(decay)
    settings = Settings(**OF_ORIGINAL, decay=decay, skip_first_update=False)
    found = list(steps(known[f"{shape}|start"], known[f"{shape}|gradients"], settings, lr))
    weights = np.array([each[0] for each in found], "float64")
    assert np.abs(weights - known[f"{decay}_{shape}|weights"]).max() <= 2e-4 * lr
    for factor, pair, side in zip(found[-1][1], found[-1][2], ("left", "right"), strict=True):
        expected = known[f"{decay}_{shape}|{side}"]
        np.testing.assert_allclose(factor, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
        np.testing.assert_allclose(whole(pair), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("decay", DECAYS)
def test_the_reference_by_hand_is_the_original(decay):
    known, lr = original(), learning_rate(decay)
    by_hand = ByHand(
        known["8x8|start"], lr=lr, betas=(0.5, 0.25), factor_beta=0.25, eps=0.125, weight_decay=1 / 16, decay=decay
    )
    for gradient, expected in zip(known["8x8|gradients"], known[f"{decay}_8x8|weights"], strict=True):
        by_hand.step(gradient)
        assert np.abs(by_hand.w - expected).max() <= 2e-4 * lr


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(("decay", "shape"), unique((12, 12), (6, 20), (32, 16), square=(12, 12)))
def test_numpy_in_float64(decay, shape, skip):
    """In float64 on both sides: where factors are rank-deficient, float32 rounds to 1e-3 · lr in either library."""
    rng = np.random.default_rng(0)
    weight, gradients = rng.normal(size=shape), rng.normal(size=(5, *shape))
    options = {"weight_decay": 1 / 16, "decay": decay}
    settings = Settings(epsilon=0.125, skip_first_update=skip, **options)
    by_hand = ByHand(weight, eps=0.125, skip=skip, start=0.1, **options)
    with jax.enable_x64(True):
        found = steps(weight, gradients, settings, 1e-2, value=0.1, dtype="float64")
        for gradient, (w, factors, pairs, _) in zip(gradients, found, strict=True):
            by_hand.step(gradient)
            assert np.abs(np.asarray(w) - by_hand.w).max() <= 1e-10
            np.testing.assert_allclose(factors.left, by_hand.left, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(whole(pairs.right), by_hand.right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("decay", DECAYS)
def test_numpy_against_float32(decay):
    rng = np.random.default_rng(0)
    weight, gradients = rng.normal(size=(12, 12)), rng.normal(size=(5, 12, 12))
    options = {"weight_decay": 1 / 16, "decay": decay}
    by_hand = ByHand(weight, eps=0.125, **options)
    settings = Settings(epsilon=0.125, skip_first_update=False, **options)
    for gradient, (w, *_) in zip(gradients, steps(weight, gradients, settings, 1e-2), strict=True):
        by_hand.step(gradient)
        assert np.abs(np.asarray(w, "float64") - by_hand.w).max() <= 2e-4 * 1e-2


def test_a_side_without_a_factor_is_the_identity():
    gradient = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)), "float32")
    eye, right = Pair(jnp.ones(3), jnp.eye(3)), Pair(jnp.arange(5.0, 0, -1), jnp.eye(5)[::-1])
    one = rekls_math.contributions(gradient, Sides(None, right), 1e-8)
    both = rekls_math.contributions(gradient, Sides(eye, right), 1e-8)
    np.testing.assert_allclose(one.right, both.right, rtol=1e-6)
    turned = Sides(None, rekls_math.eigenpairs(one.right))
    there = rekls_math.into_basis(gradient, turned)
    np.testing.assert_allclose(rekls_math.out_of_basis(there, turned), gradient, rtol=1e-5, atol=1e-6)


def test_qr_iteration_converges_to_the_eigenpairs():
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    factor = jnp.asarray(basis * 4.0 ** -np.arange(6) @ basis.T, "float32")
    pair = Pair(jnp.zeros(6), jnp.eye(6))
    for _ in range(30):
        pair = rekls_math.power_iteration(factor, pair)
    np.testing.assert_allclose(pair.values, rekls_math.eigenpairs(factor).values, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(whole(pair), factor, atol=1e-6)


@pytest.mark.parametrize(("routine", "of"), [("syevd", "eigenpairs"), ("geqrf", "power_iteration")])
def test_no_batch_of_matrices_goes_to_lapack(routine, of):
    """A batch hangs where as many simulated devices decompose as there are threads."""
    stack = jnp.stack([jnp.eye(6)] * 4)
    given = (stack,) if of == "eigenpairs" else (stack, Pair(jnp.ones((4, 6)), stack))
    text = jax.jit(getattr(rekls_math, of)).lower(*given).compile().as_text()
    calls = [line for line in text.splitlines() if f"lapack_s{routine}" in line]
    assert calls and not [line for line in calls if "f32[4," in line]


def test_what_is_not_finite_is_found():
    factors = jnp.stack([jnp.eye(3), jnp.full((3, 3), jnp.nan)])
    assert rekls_math.is_finite(jax.jit(rekls_math.eigenpairs)(factors)).tolist() == [True, False]
