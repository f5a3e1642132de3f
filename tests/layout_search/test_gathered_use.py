"""Weights stored split over the batch axis and gathered for use: same numbers, less memory."""

import copy
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import keras
import numpy as np
import pytest
from layout_models import LAYOUT_MODELS, loss_for

import shardload
from shardload import AutoShardDistribution
from shardload.keras_bridge.gathered_use import Use, gathering
from shardload.parallel import Hardware, check_numbers, choose, compile_step, search
from shardload.sharding.mesh import MeshSpec

MESH = MeshSpec(("batch", "model"), (2, 4))
CPU = Hardware(reduce_scatter=False)
"""XLA for CPU adds up whole gradients, of which devices then take their part."""


def tight(found):
    """A plan with as many weights stored split over the batch axis as the limit takes."""
    find = partial(search, found.model, MESH, inputs=found.inputs, optimizer="adam", hardware=CPU)
    free = find()
    weights = sum(v.nbytes for v in free.variables) * 4 // 8
    limit = int(weights * 1.2) + free.device.activations
    # For weights stored split.
    return find(device_memory_bytes=limit, remat="none", sequence_parallel=False)


@pytest.fixture(scope="module")
def block():
    keras.utils.clear_session()
    return LAYOUT_MODELS["block"](width=512, hidden=2048)


@pytest.fixture(scope="module")
def plan(block):
    return tight(block)


@pytest.fixture(scope="module")
def short(block):
    """Of those blocks one, on 16 positions: enough for numbers."""
    return LAYOUT_MODELS["block"](layers=1, width=512, hidden=2048, length=16)


@pytest.fixture(scope="module")
def short_plan(short):
    plan = tight(short)
    assert sum(bool(v.stored) for v in plan.variables) >= 4
    return plan


def test_large_weights_are_stored_over_both_axes(plan):
    stored = [v for v in plan.variables if v.stored]
    assert len(stored) >= 8 and all(v.stored == ("batch",) for v in stored)
    assert all({"batch"} & set(sum(v.spec, ())) and not {"batch"} & set(sum(v.used, ())) for v in stored)


def test_the_compiled_step_gathers_weights_and_no_activations(block, plan):
    step = compile_step(block.model, choose(block.model, MESH, plan), block.inputs, training="gradients")
    gathered = sum(c.total_bytes for c in step.collectives if c.kind == "all-gather")
    used = sum(v.nbytes // 4 for v in plan.variables if v.stored)
    assert used <= gathered <= 2 * used  # forward, and backward unless XLA keeps one
    assert set(step.counts) <= {"all-gather", "all-reduce", "reduce-scatter", "all-to-all"}
    assert step.collective_bytes <= plan.exchanged_bytes * 1.01


def test_numbers_equal_those_of_one_device(short, short_plan):
    choice, loss = choose(short.model, MESH, short_plan), loss_for(short.target)
    check = check_numbers(short.model, choice, short.inputs, target=short.target, loss=loss, training="adam", steps=2)
    check.raise_if_wrong()
    assert check.found_device_bytes == dict.fromkeys(range(8), check.device_bytes)


def test_fit_and_predict_of_a_sharded_model_give_the_numbers_of_one_device(short, short_plan):
    plain = keras.models.clone_model(short.model)
    plain.set_weights(short.model.get_weights())
    sharded = keras.models.clone_model(short.model)
    sharded.set_weights(short.model.get_weights())
    for model in (plain, sharded):
        model.compile("sgd", "mse")
    AutoShardDistribution("2x4", short_plan).shard(sharded)
    losses = [m.fit(short.inputs, short.target, epochs=2, verbose=0).history["loss"] for m in (plain, sharded)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    predicted = [m.predict(short.inputs, verbose=0) for m in (sharded, plain)]
    np.testing.assert_allclose(*predicted, atol=2e-5)
    stored = {v.path: v.spec for v in short_plan.variables if v.stored}
    for variable in sharded.trainable_variables:
        if variable.path in stored:
            assert variable.value.addressable_shards[0].data.size * 8 == variable.value.size


def mixed(policy="mixed_bfloat16"):
    """A model with weights that are read in bfloat16, and one that is also read in float32."""
    keras.utils.set_random_seed(2)
    tokens = keras.Input((16,), dtype="int32")
    embedding = keras.layers.Embedding(256, 64, dtype=policy)
    y = keras.layers.Dense(256, "gelu", dtype=policy, name="up")(embedding(tokens))
    y = keras.layers.Dense(64, dtype=policy, name="down")(y)

    class Logits(keras.layers.Layer):
        def call(self, x):
            return keras.ops.matmul(x, keras.ops.transpose(embedding.embeddings))

    return keras.Model(tokens, Logits(dtype="float32")(y))


def test_weights_are_gathered_in_the_dtype_in_which_all_operations_read_them():
    model, tokens = mixed(), np.random.default_rng(0).integers(0, 256, (8, 16)).astype("int32")
    plan = search(model, "fsdp=8", inputs=tokens, optimizer="adam")
    stored = {v.path: v.gathered_as for v in plan.variables if v.stored}
    assert stored == {"up/kernel": "bfloat16", "down/kernel": "bfloat16", "embedding/embeddings": ""}
    whole = search(mixed("float32"), "fsdp=8", inputs=tokens, optimizer="adam")
    gathers = [next(e.nbytes for e in p.exchanges if e.kind == "all-gather") for p in (whole, plan)]
    kernels = sum(v.nbytes for v in plan.variables if v.gathered_as)
    assert gathers[0] - gathers[1] == kernels  # half of the bytes, in two passes
    scattered = next(e for e in plan.exchanges if e.kind == "reduce-scatter")
    assert scattered.count >= len(stored)
    target = np.random.default_rng(1).normal(size=(8, 16, 256)).astype("float32")
    check_numbers(model, plan, tokens, target=target, loss="mse", training="adam").raise_if_wrong()
    # As it was stored: a step gives float32 back.
    shardload.AutoShardDistribution("fsdp=8", plan).shard(model)
    model.compile("adam", "mse")
    model.fit(tokens, target, verbose=0)
    assert {str(v.value.dtype) for v in model.trainable_variables} == {"float32"}


def test_gathered_weights_are_not_kept_for_the_backward_pass(short, short_plan):
    step = compile_step(short.model, short_plan, short.inputs, training="gradients")
    gathers = [c for c in step.collectives if c.kind == "all-gather" and c.axes == ("batch",)]
    # Once in each pass that reads a kernel: left to itself, XLA for CPU would merge the two, and keep what it gathered.
    planned = {e.axis: e for e in short_plan.exchanges if e.kind == "all-gather"}["batch"]
    assert sum(c.count for c in gathers) == planned.count > sum(bool(v.stored) for v in short_plan.variables)
    assert sum(c.count * c.nbytes for c in gathers) == planned.nbytes


@pytest.mark.parametrize(("platform", "barrier"), [("cpu", True), ("gpu", True), ("tpu", False)])
def test_on_tpu_no_barrier_keeps_xla_from_fusing(platform, barrier):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    devices = np.array([SimpleNamespace(platform=platform)], object)
    elsewhere = Use(Mock(mesh=SimpleNamespace(devices=devices)), None)
    state = [[v.value for v in model.trainable_variables], []]
    call = gathering(model, {0: elsewhere}, model.stateless_call)
    (equation,) = jax.make_jaxpr(lambda *a: call(*a)[0])(*state, np.ones((2, 4), "float32")).eqns
    assert equation.params["prevent_cse"] is barrier


def test_masks_of_outputs_reach_the_loss():
    tokens = keras.Input((6,), dtype="int32")
    y = keras.layers.Embedding(512, 256, mask_zero=True)(tokens)
    model = keras.Model(tokens, keras.layers.Dense(512)(y))
    x = np.array([[1, 2, 3, 0, 0, 0]] * 8, "int32")
    target = np.random.default_rng(0).normal(size=(8, 6, 512)).astype("float32")
    model.compile("sgd", "mse")
    expected = model.evaluate(x, target, verbose=0)
    before = keras.models.clone_model(model)
    before.set_weights(model.get_weights())
    before.compile("sgd", "mse")
    plain = before.fit(x, target, verbose=0).history["loss"]
    free = search(model, MESH, inputs=x, optimizer="sgd")
    small = search(
        model, MESH, inputs=x, optimizer="sgd", device_memory_bytes=free.device.total * 7 // 10, remat="none"
    )
    assert any(v.stored for v in small.variables)
    AutoShardDistribution("2x4", small).shard(model)
    assert model.evaluate(x, target, verbose=0) == pytest.approx(expected, rel=1e-5)
    assert model.fit(x, target, verbose=0).history["loss"] == pytest.approx(plain, rel=1e-5)


def test_a_deep_copy_gathers_too(block, plan):
    model = keras.models.clone_model(block.model)
    AutoShardDistribution("2x4", plan).shard(model)
    copied = copy.deepcopy(model)
    state = [[v.value for v in group] for group in (copied.trainable_variables, copied.non_trainable_variables)]
    text = jax.jit(lambda *a: copied.stateless_call(*a)[0]).lower(*state, block.inputs).as_text()
    assert text.count("sharding_constraint") >= sum(bool(v.stored) for v in plan.variables)


# ---- tables --------------------------------------------------------------------------------------


def classifier(*, rows=1 << 16, tied=False):
    tokens = keras.Input((16,), dtype="int32")
    embedding = keras.layers.ReversibleEmbedding(rows, 64, name="table")
    y = keras.layers.Dense(64, activation="tanh")(embedding(tokens))
    if tied:
        y = embedding(y, reverse=True)
    return keras.Model(tokens, y), np.arange(8 * 16).reshape(8, 16) * 7 % rows


def table_of(plan):
    return next(v for v in plan.variables if v.path.startswith("table"))


@pytest.mark.parametrize(("mesh", "rows"), [("2x4", ("model", "batch")), ("8x1", ("batch",))])
def test_the_batch_moves_to_the_rows_and_the_program_exchanges_what_is_planned(mesh, rows):
    model, inputs = classifier()
    plan = search(model, MeshSpec.parse(mesh), inputs=inputs, optimizer="adam")
    assert table_of(plan).spec == (rows, ()) and table_of(plan).stored == ()
    assert "the batch is moved to its rows over batch" in plan.why("table/embeddings")
    choice = choose(model, plan.mesh, plan)
    step = compile_step(model, choice, inputs, training="gradients")
    assert step.collective_bytes == plan.exchanged_bytes < table_of(plan).nbytes / 40
    check_numbers(model, choice, inputs, training="adam", steps=2).raise_if_wrong()


@pytest.mark.parametrize("options", [{"rows": 64}, {"tied": True}])
def test_it_does_not_where_the_table_is_small_or_is_multiplied_with_tokens(options):
    model, inputs = classifier(**options)
    plan = search(model, MeshSpec.parse("2x4"), inputs=inputs, optimizer="adam")
    assert not any("batch" in axes for axes in table_of(plan).spec)


def test_it_does_not_for_inference():
    model, inputs = classifier()
    assert "batch" not in table_of(search(model, MeshSpec.parse("2x4"), inputs=inputs)).spec[0]
