"""The arithmetic of REKLS for one matrix, against NumPy float64 and against the PyTorch original.

The values in support/rekls_reference.npz come from NVIDIA Emerging-Optimizers, pull request 175, run in float64:
five steps at epsilon 1/8, betas (0.5, 0.25), factor beta 0.25, weight decay 1/16. Its learning rate is 1e-2 for
decoupled decay and 1e-1 for the other methods.

Eigenvectors have no sign, and none of their own where eigenvalues repeat, so factors and Q diag(λ) Qᵀ are compared.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rekls_by_hand import DECAYS, LIMIT, ByHand, original

from shardload.errors import UsageError
from shardload.optimizers import rekls_math, state_bytes
from shardload.optimizers.dealing import deal
from shardload.optimizers.matrices import MatrixRules
from shardload.optimizers.rekls_math import Eigenpairs, Moments, Settings, Sides

OF_ORIGINAL = {"beta_1": 0.5, "beta_2": 0.25, "factor_beta": 0.25, "epsilon": 0.125, "weight_decay": 1 / 16}
SHAPES = [(12, 12), (6, 20), (32, 16)]


def is_unique(decay, shape):
    """Whether the steps are: not for l2 with a rectangle.

    There, one factor has the eigenvalue 0 several times, so its eigenvectors are any basis of that space, where the
    gradient is 0 but the weight, which l2 adds after the factors, is not. Factors do not depend on that.
    """
    return decay != "l2" or shape[0] == shape[1]


def start(weight, value, dtype):
    m, n = weight.shape
    factors = Sides(jnp.zeros((m, m), dtype), jnp.zeros((n, n), dtype))
    pairs = Sides(*(Eigenpairs(jnp.full(size, value, dtype), jnp.eye(size, dtype=dtype)) for size in (m, n)))
    return jnp.asarray(weight, dtype), factors, pairs, Moments(jnp.zeros((m, n), dtype), jnp.zeros((m, n), dtype))


def steps(weight, gradients, settings, lr, *, value=0.0, dtype="float32"):
    """Yield weight, factors, pairs and moments after each step."""
    w, factors, old, moments = start(weight, value, dtype)
    for t, gradient in enumerate(np.asarray(gradients, dtype), 1):
        g = rekls_math.l2_gradient(jnp.asarray(gradient), w, settings, when="l2_before_factors", decays=True)
        step = jnp.asarray(t, dtype)
        added = rekls_math.contributions(g, old, settings)
        pairs = zip(factors, added, strict=True)
        factors = Sides(*(rekls_math.blended(f, c, step, settings.factor_beta) for f, c in pairs))
        new = Sides(*map(rekls_math.eigenpairs, factors))
        if t > settings.skip_first_update:
            count = step - settings.skip_first_update
            own = rekls_math.l2_gradient(g, w, settings, when="l2", decays=True)
            given = (moments, own, (old, new))
            moments, direction = rekls_math.moments_and_direction(*given, step=count, settings=settings)
            w = rekls_math.moved(w, direction, jnp.asarray(lr, dtype), settings, decays=True)
        old = new
        yield w, factors, new, moments


def whole(pair):
    return np.asarray(pair.vectors * pair.values) @ np.asarray(pair.vectors).T


def learning_rate(decay):
    return 1e-2 if decay == "decoupled" else 1e-1


def range_of(factor):
    """Return the projector onto what is not the null space of a factor."""
    values, vectors = np.linalg.eigh(factor)
    kept = vectors[:, values > 1e-3 * values.max()]
    return kept @ kept.T


def five_steps(decay, shape, dtype):
    """Return the steps of the original's case, in float32 or float64."""
    known, settings = original(), Settings(**OF_ORIGINAL, decay=decay, skip_first_update=False)
    with jax.enable_x64(dtype == "float64"):
        start, gradients = known[f"{shape}|start"], known[f"{shape}|gradients"]
        return list(steps(start, gradients, settings, learning_rate(decay), dtype=dtype))


def weights_of(found):
    return np.array([weight for weight, *_ in found], "float64")


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("shape", ["8x8", "8x16", "16x8"])
def test_the_values_of_the_original(decay, shape):
    known, found = original(), five_steps(decay, shape, "float64")
    error = weights_of(found) - known[f"{decay}_{shape}|weights"]
    if not is_unique(decay, known[f"{shape}|start"].shape):  # the first step, where the factors are not 0
        left, right = map(range_of, found[0][1])
        error = left @ error[:1] @ right
    assert np.abs(error).max() <= 2e-4 * learning_rate(decay)
    assert_factors(found, decay, shape)


def assert_factors(found, decay, shape):
    for factor, pair, side in zip(found[-1][1], found[-1][2], ("left", "right"), strict=True):
        expected = original()[f"{decay}_{shape}|{side}"]
        np.testing.assert_allclose(factor, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
        np.testing.assert_allclose(whole(pair), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("shape", ["8x8", "8x16", "16x8"])
def test_what_float32_rounds(decay, shape):
    """The values of the original have an error of their own, up to 1.4e-4 learning rates: see the test above."""
    known, rounded, exact = original(), five_steps(decay, shape, "float32"), five_steps(decay, shape, "float64")
    if is_unique(decay, known[f"{shape}|start"].shape):
        assert np.abs(weights_of(rounded) - weights_of(exact)).max() <= 2e-4 * learning_rate(decay)
    assert_factors(rounded, decay, shape)


@pytest.mark.parametrize("decay", DECAYS)
def test_the_reference_by_hand_is_the_original(decay):
    known, lr = original(), learning_rate(decay)
    options = {"betas": (0.5, 0.25), "factor_beta": 0.25, "eps": 0.125, "weight_decay": 1 / 16}
    by_hand = ByHand(known["8x8|start"], lr=lr, decay=decay, **options)
    for gradient, expected in zip(known["8x8|gradients"], known[f"{decay}_8x8|weights"], strict=True):
        by_hand.step(gradient)
        assert np.abs(by_hand.w - expected).max() <= 2e-4 * lr


@pytest.mark.parametrize(
    "start",
    [{}, {"skip": True, "start": 0.1}, {"skip": True, "start": "rms", "relative": 0.01, "limit": LIMIT}],
    ids=["original", "init_factor", "default"],
)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_numpy_in_float64(decay, shape, start):
    """In float64 on both sides. Where the steps are not unique, NumPy takes and checks our eigenvectors."""
    rng = np.random.default_rng(0)
    weight, gradients = rng.normal(size=shape), rng.normal(size=(5, *shape))
    by_hand = ByHand(weight, eps=0.125, weight_decay=1 / 16, decay=decay, **start)
    with jax.enable_x64(True):
        found = steps(weight, gradients, settings_of(decay, **start), 1e-2, value=value_of(**start), dtype="float64")
        for gradient, (w, factors, pairs, _) in zip(gradients, found, strict=True):
            ours = tuple(np.asarray(pair.vectors) for pair in pairs)
            by_hand.step(gradient, (None, None) if is_unique(decay, shape) else ours)
            assert np.abs(np.asarray(w) - by_hand.w).max() <= 1e-10
            np.testing.assert_allclose(factors.left, by_hand.left, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(whole(pairs.right), by_hand.right, rtol=1e-9, atol=1e-9)


def settings_of(decay, *, skip=False, start=0.0, relative=0.0, limit=None):
    return Settings(
        epsilon=0.125, weight_decay=1 / 16, decay=decay, skip_first_update=skip, starts_at_rms=start == "rms",
        relative_epsilon=relative, limits_updates=limit is not None,
    )  # fmt: skip


def value_of(*, start=0.0, **_):
    return 0.0 if start == "rms" else start


@pytest.mark.parametrize(("decay", "shape"), [(d, shape) for d in DECAYS for shape in SHAPES if is_unique(d, shape)])
def test_numpy_against_float32(decay, shape):
    """Rounding is larger where one factor has no full rank in the first steps."""
    rates = 2e-4 if shape == (12, 12) else 1e-3
    rng = np.random.default_rng(0)
    weight, gradients = rng.normal(size=shape), rng.normal(size=(5, *shape))
    by_hand = ByHand(weight, eps=0.125, weight_decay=1 / 16, decay=decay)
    for gradient, (w, *_) in zip(gradients, steps(weight, gradients, settings_of(decay), 1e-2), strict=True):
        by_hand.step(gradient)
        assert np.abs(np.asarray(w, "float64") - by_hand.w).max() <= rates * 1e-2


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_root_mean_square_of_any_scale(scale):
    found = rekls_math.root_mean_square(jnp.asarray([[3.0, -4.0], [0.0, 0.0]], "float32") * scale)
    np.testing.assert_allclose(found, 2.5 * scale, rtol=1e-6)
    assert rekls_math.root_mean_square(jnp.zeros((2, 3))) == 0


def updates(gradients, settings):
    """Yield Adam's U for numbers."""
    moments = Moments(0.0, 0.0)
    for step, gradient in enumerate(gradients, 1):
        moments, update = rekls_math.adam(moments, gradient, step, settings)
        yield float(np.abs(update))


@pytest.mark.parametrize(("betas", "expected"), [((0.9, 0.95), LIMIT), ((0.0, 0.75), 2.0), ((0.9, 0.8), np.inf)])
def test_the_largest_update(betas, expected):
    """Some gradients reach it, none exceeds it."""
    settings = Settings(*betas, epsilon=1e-30)
    np.testing.assert_allclose(settings.largest_update, expected, rtol=1e-6)
    worst = [(betas[0] / betas[1]) ** k for k in reversed(range(100))]  # where Cauchy and Schwarz have equality
    for gradients in (worst, np.random.default_rng(0).normal(size=100), np.geomspace(1e-9, 1e9, 100)):
        assert max(updates(gradients, settings)) <= expected * (1 + 1e-5)
    assert expected == np.inf or max(updates(worst, settings)) >= 0.99 * expected


def test_least_divisors():
    values, gradient = jnp.asarray([3.0, 0.96, 0.04, 0.0]), jnp.full((4, 4), 2.0)
    least = rekls_math.divisors(values, gradient, Settings(epsilon=0.01, relative_epsilon=0.1, starts_at_rms=True))
    np.testing.assert_allclose(least, [3, 0.96, 0.1, 0.1], rtol=3e-3)
    np.testing.assert_allclose(rekls_math.divisors(values, gradient, Settings(epsilon=0.5)), [3, 0.96, 0.5, 0.5])
    np.testing.assert_allclose(rekls_math.divisors(0 * values, gradient, Settings(starts_at_rms=True)), [2, 2, 2, 2])


def test_a_side_without_a_factor_is_the_identity():
    gradient = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)), "float32")
    eye, right = Eigenpairs(jnp.ones(3), jnp.eye(3)), Eigenpairs(jnp.arange(5.0, 0, -1), jnp.eye(5)[::-1])
    one = rekls_math.contributions(gradient, Sides(None, right), Settings())
    both = rekls_math.contributions(gradient, Sides(eye, right), Settings())
    np.testing.assert_allclose(one.right, both.right, rtol=1e-6)
    turned = Sides(None, rekls_math.eigenpairs(one.right))
    there = rekls_math.into_basis(gradient, turned)
    np.testing.assert_allclose(rekls_math.out_of_basis(there, turned), gradient, rtol=1e-5, atol=1e-6)


def test_qr_iteration_converges_to_the_eigenpairs():
    basis, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))
    factor = jnp.asarray(basis * 4.0 ** -np.arange(6) @ basis.T, "float32")
    pair = Eigenpairs(jnp.zeros(6), jnp.eye(6))
    for _ in range(30):
        pair = rekls_math.power_iteration(factor, pair)
    # In the order of the columns that it started from.
    values = jnp.sort(pair.values, descending=True)
    np.testing.assert_allclose(values, rekls_math.eigenpairs(factor).values, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(whole(pair), factor, atol=1e-6)


@pytest.mark.parametrize(("routine", "of"), [("syevd", "eigenpairs"), ("geqrf", "power_iteration")])
def test_no_batch_of_matrices_goes_to_lapack(routine, of):
    """A batch hangs where as many simulated devices decompose as there are threads."""
    stack = jnp.stack([jnp.eye(6)] * 4)
    given = (stack,) if of == "eigenpairs" else (stack, Eigenpairs(jnp.ones((4, 6)), stack))
    text = jax.jit(getattr(rekls_math, of)).lower(*given).compile().as_text()
    calls = [line for line in text.splitlines() if f"lapack_s{routine}" in line]
    assert calls and not [line for line in calls if "f32[4," in line]


def test_what_is_not_finite_is_found():
    factors = jnp.stack([jnp.eye(3), jnp.full((3, 3), jnp.nan)])
    assert rekls_math.is_finite(jax.jit(rekls_math.eigenpairs)(factors)).tolist() == [True, False]


# ---- weights as matrices -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "rows", "sides"),
    [
        ((64, 128), (0,), (64, 128)), ((64, 8, 4), (0,), (64, 32)), ((8, 64, 4), (1,), (64, 32)),
        ((8, 4, 64), (0, 1), (32, 64)), ((3, 3, 16, 32), (0, 1, 2), (144, 32)),
    ],
)  # fmt: skip
def test_an_array_as_a_matrix_and_back(shape, rows, sides):
    view = MatrixRules().view("kernel", shape)
    array = np.arange(np.prod(shape)).reshape(shape)
    matrix = view.matrix(array)
    assert (view.rows, view.sides, matrix.shape) == (rows, sides, sides)
    np.testing.assert_array_equal(view.array(matrix), array)
    np.testing.assert_array_equal(matrix, np.moveaxis(array, rows, range(len(rows))).reshape(sides))


@pytest.mark.parametrize("shape", [(), (8,), (1, 8), (8, 1), (20_000, 30_000)])
def test_shapes_that_are_no_matrix(shape):
    assert MatrixRules().view("kernel", shape) is None


def test_one_long_side_and_paths():
    assert MatrixRules().view("head/kernel", (64, 20_000)).factor_sides == (64, None)
    assert MatrixRules().view("Token_Embedding/embeddings", (64, 64)) is None
    assert MatrixRules(row_dims={"qkv": (0, 2)}).view("qkv/kernel", (2, 64, 4)).sides == (8, 64)


@pytest.mark.parametrize("dims", [(), (0, 1), (2,), (0, 0)])
def test_row_dims_that_are_wrong(dims):
    with pytest.raises(UsageError, match=r"Cannot form rows of 'kernel' of shape \(4, 6\) from the dims"):
        MatrixRules(row_dims={"kernel": dims}).view("kernel", (4, 6))


@pytest.mark.parametrize("path", ["attention/query/bias", "gru/gru_cell/bias", "bias"])
def test_biases_are_no_matrices_whatever_their_dims(path):
    assert MatrixRules().view(path, (8, 64)) is None
    assert MatrixRules().view("debias/kernel", (8, 64)) is not None


@pytest.mark.parametrize(
    "arguments", [((4, -4),), ((0, 8),), ((4.0, 4),), (5,), (("4", 4),), ((4, 4), 8), ((4, 4), (8,)), ((4, 4), (1, 3))]
)
def test_state_of_what_cannot_be(arguments):
    with pytest.raises(UsageError, match="expected"):
        state_bytes(*arguments)


def test_state_bytes():
    square = 8 * (64 * 128 + 64 * 64 + 128 * 128) + 4 * (64 + 128)
    assert state_bytes((64, 128)) == square
    assert state_bytes((64, 128), (1, 8)) == state_bytes((64, 128), (2, 4)) == square // 8
    assert state_bytes((64, 128), factor_bytes=2) == square - 2 * (64 * 64 + 128 * 128)
    assert state_bytes((64, 128), path="embedding/embeddings") == state_bytes((64 * 128,)) == 8 * 64 * 128
    assert state_bytes((64, 128), max_dimension=64) == 8 * (64 * 128 + 64 * 64) + 4 * 64
    assert state_bytes((64, 12), (8, 1)) == 64 * 12 + 64 * 64 + 32 + 8 * 12 * 12 + 4 * 12  # 12 / 8: replicated


def test_state_bytes_needs_neither_jax_nor_keras():
    code = "import sys; from shardload.optimizers import state_bytes; print({'jax', 'keras'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_decompositions_are_dealt_evenly(devices):
    groups = deal([64] * 6 + [32] * 3 + [128], devices)
    assert sorted(i for group in groups for i in group.factors) == list(range(10))
    for group in groups:
        counts = [len(hand) for hand in group.hands]
        assert max(counts) - min(counts) <= 1
        assert sorted(i for hand in group.hands for i in hand) == list(range(len(group.factors)))
    load = [sum(len(group.hands[d]) * group.size**3 for group in groups) for d in range(devices)]
    assert max(load) - min(load) <= 128**3
