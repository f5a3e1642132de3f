"""`REKLS` as a Keras optimizer: its state, and what Keras puts around it."""

import itertools
import json

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from rekls_by_hand import DECAYS, LIMIT, ByHand
from rekls_runs import gradients, same, trained, values, weight

from shardload.optimizers import REKLS, TpRekls
from shardload.optimizers.rekls_setup import SLOTS

X = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
Y = np.tanh(X @ np.random.default_rng(1).normal(size=(8, 4)).astype("float32"))


def build(optimizer=None, *, dtype="float32", **options):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(16, "relu", dtype=dtype), keras.layers.Dense(4, dtype=dtype)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(optimizer or REKLS(1e-2), "mse", **options)
    return model


def fit(model, epochs=1):
    return model.fit(X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0).history["loss"]


# ---- the step ------------------------------------------------------------------------------------


AS_THE_ORIGINAL = {
    "skip_first_update": False, "init_factor": 0, "relative_epsilon": 0, "limit_updates": False, "rank_tolerance": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "by_hand"),
    [(AS_THE_ORIGINAL, {}), ({}, {"skip": True, "start": "rms", "relative": 0.01, "limit": LIMIT})],
    ids=["original", "default"],
)
@pytest.mark.parametrize("decay", DECAYS)
def test_a_matrix_follows_the_reference(decay, options, by_hand):
    variable = weight((12, 12))
    reference = ByHand(np.asarray(variable.value, "float64"), eps=0.125, weight_decay=1 / 16, decay=decay, **by_hand)
    optimizer = REKLS(1e-2, epsilon=0.125, weight_decay=1 / 16, weight_decay_method=decay, **options)
    optimizer.build([variable])
    for gradient in gradients((12, 12)):
        reference.step(gradient.astype("float64"))
        optimizer.apply([gradient], [variable])
    assert np.abs(np.asarray(variable.value, "float64") - reference.w).max() <= 2e-4 * 1e-2


def test_other_variables_follow_adamw():
    bias, twin = weight((6,)), weight((6,))
    theirs = keras.optimizers.AdamW(1e-2, weight_decay=0.5, beta_2=0.95, epsilon=1e-8)
    trained([bias], weight_decay=0.5)
    for gradient in gradients((6,)):
        theirs.apply([gradient], [twin])
    np.testing.assert_allclose(bias.value, twin.value, rtol=1e-4)


def test_the_first_update_finds_the_eigenbases_only():
    first = weight((4, 6))
    optimizer = trained([first], steps=1)
    np.testing.assert_array_equal(first.value, weight((4, 6)).value)
    assert not np.any(optimizer.momentums[0].value) and np.any(optimizer.left_factors[0].value)
    assert not np.array_equal(trained([first], steps=2) and first.value, weight((4, 6)).value)


def test_factors_have_the_scale_of_the_gradients():
    small, large = weight((6, 8)), weight((6, 8))
    one, other = REKLS(), REKLS()
    for gradient in gradients((6, 8)):
        one.apply([gradient], [small])
        other.apply([1024 * gradient], [large])
    for slot in ("left_factors", "right_factors", "left_values"):
        factor, scaled = getattr(one, slot)[0].value, getattr(other, slot)[0].value
        np.testing.assert_allclose(scaled, 1024 * factor, rtol=1e-4, atol=1e-4 * np.abs(scaled).max())


@pytest.mark.parametrize(("frequency", "steps"), [(1, 2), (3, 3)])
def test_a_matrix_whose_first_gradient_is_zero(frequency, steps):
    """Until it is decomposed, both factors get contributions whose mean eigenvalue is the root mean square."""
    variables = [weight((6, 8)), weight((6, 8))]
    optimizer = REKLS(1e-2, precondition_frequency=frequency)
    optimizer.build(variables)
    expected = 0.0
    for number, gradient in enumerate(gradients((6, 8), steps), 1):
        own = gradient if number > 1 else 0 * gradient
        optimizer.apply([gradient, own], variables)
        share = 0.05 / (1 - 0.95**number)
        expected = (1 - share) * expected + share * np.sqrt(np.mean(own**2))
    for slot in ("left_factors", "right_factors"):
        factor = np.asarray(getattr(optimizer, slot)[1].value)
        np.testing.assert_allclose(np.trace(factor) / len(factor), expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "shape"),
    [({}, (6, 8)), ({"init_factor": 0.1}, (6, 8)), ({"decomposition": "qr"}, (6, 6))],
    ids=["default", "init_factor", "qr"],
)
def test_a_matrix_that_starts_late_skips_its_own_first_update(options, shape):
    """A first update would turn the last bits of gradients into steps of whole learning rates."""
    first, *others = gradients(shape, 3)
    noise = 1 + 1e-6 * np.random.default_rng(5).uniform(-1, 1, shape).astype("float32")
    ends = []
    for factor in (np.float32(1), noise):
        variables = [weight(shape), weight(shape, seed=1)]
        optimizer, start = REKLS(1e-2, weight_decay=0.5, **options), np.asarray(variables[1].value)
        optimizer.build(variables)
        for late in (0 * first, factor * others[0]):
            assert not np.any(optimizer.left_factors[1].value)
            np.testing.assert_array_equal(optimizer.left_vectors[1].value, np.eye(6))
            optimizer.apply([first, late], variables)
            np.testing.assert_array_equal(variables[1].value, start)
        assert not np.any(optimizer.velocities[1].value) and np.any(optimizer.velocities[0].value)
        optimizer.apply([first, factor * others[1]], variables)
        ends.append(np.asarray(variables[1].value))
    assert np.abs(ends[0] - start).max() > 1e-3
    np.testing.assert_allclose(ends[1], ends[0], rtol=0, atol=1e-3 * 1e-2)


def test_steps_have_a_limit():
    """With gradients of rank 2, most of the second moment is noise, and the eigenbases turn."""
    rng, longest = np.random.default_rng(0), {}
    given = [rng.normal(size=(24, 2)) @ rng.normal(size=(2, 16)) for _ in range(12)]
    for limit in (True, False):
        variables = [weight((24, 16))]
        optimizer = REKLS(1.0, limit_updates=limit, weight_decay=None)
        lengths = []
        for gradient in given:
            before = np.asarray(variables[0].value)
            optimizer.apply([gradient.astype("float32")], variables)
            lengths.append(np.sqrt(np.mean((np.asarray(variables[0].value) - before) ** 2)))
        longest[limit] = max(lengths)
    assert longest[True] <= LIMIT < 10 < longest[False]


def test_decompositions_every_so_many_steps():
    variables = [weight((6, 8))]
    seen = []
    optimizer = trained(variables, steps=0, precondition_frequency=3)
    for step in range(7):
        optimizer.apply([gradients((6, 8))[step % 5]], variables)
        seen.append(np.asarray(optimizer.left_vectors[0].value).tobytes())
    assert [a == b for a, b in itertools.pairwise(seen)] == [True, True, False, True, True, False]


def test_qr_iteration_starts_from_a_decomposition_and_lowers_the_loss():
    exact, iterated = [trained([weight((6, 8))], steps=1, decomposition=kind) for kind in ("eigh", "qr")]
    assert same(values(exact, []), values(iterated, []))
    model = build(REKLS(1e-2, decomposition="qr"))
    losses = fit(model, epochs=5)
    assert losses[-1] < 0.5 * losses[0]
    vectors = np.asarray(model.optimizer.left_vectors[0].value)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(8), atol=1e-5)


def test_a_long_side_is_the_identity():
    variables = [weight((4, 12)), weight((12, 12), seed=1)]
    optimizer = trained(variables, max_dimension=8)
    assert optimizer.right_factors[0] is None and optimizer.left_factors[0].shape == (4, 4)
    assert optimizer.left_factors[1] is None  # AdamW
    assert all(np.isfinite(v.value).all() for v in variables)


def test_factors_in_bfloat16():
    stored, exact = [trained([weight((6, 8))], steps=2, epsilon=0.125, factor_dtype=d) for d in ("bfloat16", "float32")]
    factor, expected = stored.left_factors[0].value, exact.left_factors[0].value
    assert factor.dtype == jnp.bfloat16 and stored.left_vectors[0].value.dtype == jnp.float32
    np.testing.assert_allclose(factor.astype("float32"), expected, atol=2**-6 * np.abs(expected).max())


def test_weights_in_bfloat16_have_state_in_float32():
    variables = [weight((6, 8), dtype="bfloat16"), weight((8,), dtype="bfloat16")]
    optimizer = trained(variables)
    assert {v.value.dtype for v in variables} == {jnp.dtype("bfloat16")}
    assert {str(getattr(optimizer, s)[0].dtype) for s in SLOTS} == {"float32"} == {optimizer.momentums[1].dtype}


# ---- who is a matrix -----------------------------------------------------------------------------


def test_who_gets_adamw():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(10, 8), keras.layers.Dense(4)])
    for option, matrices in (
        ({}, [False, True, False]),
        ({"adamw_for": []}, [True, True, False]),
        ({"adamw_for": ["dense"]}, [True, False, False]),
        ({"adamw_for": lambda v: v.shape[-1] == 4}, [True, False, False]),
    ):
        optimizer = REKLS(**option)
        optimizer.build(model.trainable_variables)
        assert [factor is not None for factor in optimizer.left_factors] == matrices


def test_row_dims_by_path():
    optimizer = REKLS(row_dims={"kernel": [1, 2]})
    optimizer.build([weight((8, 2, 3))])
    assert optimizer.left_factors[0].shape == (6, 6) and optimizer.right_factors[0].shape == (8, 8)


# ---- what Keras puts around it -------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"clipnorm": 0.1}, {"global_clipnorm": 0.1}, {"clipvalue": 0.01},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3}, {"loss_scale_factor": 128.0},
        {"gradient_accumulation_steps": 2}, {"precondition_frequency": 10},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_options_of_keras_lower_the_loss(options):
    model = build(REKLS(1e-2, **options))
    losses = fit(model, epochs=8)
    assert losses[-1] < 0.8 * losses[0] and model.optimizer.counts().skipped_steps == 0


def test_a_schedule_and_no_compilation():
    schedule = keras.optimizers.schedules.ExponentialDecay(1e-2, 10, 0.9)
    # With a large epsilon: rounding differs between the two, and a small one amplifies it.
    eager = build(REKLS(schedule, epsilon=0.1), jit_compile=False, run_eagerly=True)
    compiled = build(REKLS(schedule, epsilon=0.1))
    np.testing.assert_allclose(fit(eager), fit(compiled), rtol=1e-5)


def test_accumulated_gradients_are_one_step():
    halves, whole = [weight((6, 8))], [weight((6, 8))]
    accumulating, plain = REKLS(1e-2, gradient_accumulation_steps=2), REKLS(1e-2)
    given = gradients((6, 8), 8)
    for gradient in given:
        accumulating.apply([gradient], halves)
    for one, other in zip(given[::2], given[1::2], strict=True):
        plain.apply([(one + other) / 2], whole)
    assert accumulating.counts().steps == plain.counts().steps == 4
    np.testing.assert_allclose(halves[0].value, whole[0].value, atol=1e-5)


def test_loss_scaling_and_mixed_precision():
    optimizer = keras.optimizers.LossScaleOptimizer(REKLS(1e-2), initial_scale=2.0**10)
    losses = fit(build(optimizer, dtype="mixed_float16"), epochs=5)
    assert losses[-1] < losses[0] and optimizer.inner_optimizer.counts().steps > 0


def test_as_one_of_several_optimizers():
    choices = {True: REKLS(1e-2), False: keras.optimizers.SGD(1e-2)}
    losses = fit(build(keras.optimizers.MultiOptimizer(lambda variable: choices[variable.name == "kernel"])), epochs=5)
    assert losses[-1] < losses[0]
    assert choices[True].counts().steps == 20 and len(choices[True].views) == 2


def test_weight_decay_leaves_out_what_is_excluded():
    decayed, spared = weight((6, 8)), weight((6, 8), name="spared")
    optimizer = REKLS(1e-2, weight_decay=0.5, weight_decay_method="independent")
    optimizer.exclude_from_weight_decay(var_names=["spared"])
    for gradient in gradients((6, 8), 3):
        optimizer.apply([gradient, gradient], [decayed, spared])
    assert np.abs(spared.value).sum() > 3 * np.abs(decayed.value).sum()


# ---- configuration -------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("tests")
def is_small(variable):
    return len(variable.shape) < 2


@pytest.mark.parametrize(
    "options", [{"rank_tolerance": 0}, {"adamw_for": is_small, "uneven": "replicate", "row_dims": {"a": (1,)}}]
)
def test_configuration_makes_a_round_trip(options):
    optimizer = REKLS(keras.optimizers.schedules.CosineDecay(1e-2, 10), clipnorm=1.0, decomposition="qr", **options)
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(optimizer)))
    again = keras.saving.deserialize_keras_object(config)
    assert type(again) is REKLS is TpRekls
    assert json.dumps(again.get_config(), sort_keys=True) == json.dumps(optimizer.get_config(), sort_keys=True)
    found, given = again.options.adamw_for, optimizer.options.adamw_for
    assert found == given or tuple(found) == given  # JSON has lists


def test_a_saved_model_goes_on_as_if_nothing_had_happened(tmp_path):
    model = build()
    fit(model)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert fit(model) == fit(again)
    assert same(values(model.optimizer, model.weights), values(again.optimizer, again.weights))
