"""Activations split along their sequence over the axes for weights: same numbers, less memory, planned bytes."""

from functools import partial

import jax
import keras
import numpy as np
import pytest
from collective_bytes import in_plan, in_program
from layout_models import LAYOUT_MODELS, loss_for

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import DoesNotFitError, LayoutError, UsageError
from shardload.keras_bridge.layer_layouts import CallLayouts
from shardload.parallel import Hardware, LayoutPlan, check_numbers, compile_step, search

CPU = Hardware(reduce_scatter=False)
"""XLA for CPU reduces whole results, of which devices then take their part."""
THREE = "data=2,fsdp=2,model=2"
TRIED = [
    (name, mesh, remat)
    for name in ("block", "gpt2", "bert", "llama", "mixtral")
    for mesh, remat in (("2x4", "none"), (THREE, "full"))
]


def decoder(width=256, layers=2):
    """A Llama without values, with sequences that 8 devices can split."""
    import keras_hub

    with shardload.abstract():
        model = keras_hub.models.Llama3Backbone(512, layers, 16, width, 4 * width, 8)
    return model, {key: jax.ShapeDtypeStruct((8, 256), "int32") for key in ("token_ids", "padding_mask")}


def planned(model, mesh, inputs, **options):
    return search(model, mesh, inputs=inputs, optimizer="adamw", hardware=CPU, **options)


@pytest.mark.parametrize("remat", ["none", "matmuls", "full"])
@pytest.mark.parametrize("mesh", ["1x8", "2x4", THREE])
def test_a_compiled_step_exchanges_the_planned_bytes_and_needs_less(mesh, remat):
    model, inputs = decoder()
    whole, split = (planned(model, mesh, inputs, remat=remat, sequence_parallel=on) for on in (False, True))
    assert split.sequence_axes == ("model",) and not whole.sequence_axes and not whole.call_layouts
    steps = [compile_step(model, plan, inputs, training="gradients") for plan in (whole, split)]
    assert [in_program(step) for step in steps] == [in_plan(whole), in_plan(split)]
    assert split.device.activations < whole.device.activations
    assert steps[1].temporary_bytes < steps[0].temporary_bytes


def test_sums_are_cut_before_the_next_layer_reads_them():
    model, inputs = decoder(1024, 4)
    plan = planned(model, "1x8", inputs, remat="matmuls", sequence_parallel=True)
    step = compile_step(model, plan, inputs, training="gradients")
    # With whole sums, which XLA for CPU would keep for the backward pass, it needs 1.10 times the planned, and four
    # layers of Llama 3.1 405B on 512 devices need 1.84 times.
    assert step.temporary_bytes < 1.05 * plan.device.activations


@pytest.mark.parametrize(("name", "mesh", "remat"), TRIED)
def test_numbers_are_those_of_one_device(name, mesh, remat):
    keras.utils.set_random_seed(1)
    found = LAYOUT_MODELS[name]()
    plan = planned(found.model, mesh, found.inputs, remat=remat, sequence_parallel=True)
    assert plan.sequence_axes and plan.call_layouts
    step = compile_step(found.model, plan, found.inputs, training="gradients")
    assert step.collective_bytes == pytest.approx(plan.exchanged_bytes, rel=0.05)
    check = check_numbers(
        found.model, plan, found.inputs, target=found.target, loss=loss_for(found.target), training="adam"
    )
    check.raise_if_wrong()


def test_on_accelerators_sums_are_scattered_and_a_step_is_no_slower():
    model, inputs = decoder()
    whole, split = (
        search(model, "1x8", inputs=inputs, optimizer="adamw", sequence_parallel=on) for on in (False, True)
    )
    kinds = {exchange.kind for exchange in split.exchanges}
    assert "reduce-scatter" in kinds and split.step_s < whole.step_s


def test_sequences_are_split_only_if_a_step_does_not_fit_otherwise(tmp_path):
    model, inputs = decoder()
    find = partial(search, model, "1x8", inputs=inputs, optimizer="adamw", remat="none")
    whole, split = find(sequence_parallel=False), find(sequence_parallel=True)
    assert not find().sequence_axes and not find(device_memory_bytes=2 * whole.device.total).sequence_axes
    limit = (whole.device.total + split.device.total) // 2
    tight = find(device_memory_bytes=limit)
    assert tight.sequence_axes == ("model",) and tight.device.total <= limit
    assert "split along their sequence over model" in tight.summary()
    with pytest.raises(DoesNotFitError, match="It fits with --remat auto --sequence-parallel auto"):
        find(device_memory_bytes=limit, sequence_parallel=False)
    tight.save(tmp_path / "plan.json")
    assert LayoutPlan.load(tmp_path / "plan.json") == tight


@pytest.mark.parametrize(("mesh", "length"), [("8x1", 64), ("1x8", 60)])
def test_what_no_axis_can_split_stays_whole(mesh, length):
    model, _ = decoder(layers=1)
    inputs = {key: jax.ShapeDtypeStruct((8, length), "int32") for key in ("token_ids", "padding_mask")}
    plan = planned(model, mesh, inputs, sequence_parallel=True)
    assert not plan.sequence_axes and not plan.call_layouts
    assert any(note.startswith("no sequence is split between products: either no axis") for note in plan.notes)


def test_what_is_asked_for_without_effect_is_noted():
    model, inputs = decoder(layers=1)
    notes = search(model, "1x8", inputs=inputs, sequence_parallel=True, remat="full").notes
    assert "no sequence is split between products: that is for training steps" in notes
    assert "nothing is recomputed: that is for training steps" in notes
    flat = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    assert "the model repeats no layer" in search(flat, "1x8", optimizer="sgd", remat="full").notes[-1]


def test_an_error_names_the_least_with_small_weights_stored_split():
    inputs = keras.Input((16,))
    y = inputs
    for _ in range(20):
        y = keras.layers.Dense(16, use_bias=False)(y)
    model = keras.Model(inputs, y)
    with pytest.raises(DoesNotFitError) as error:
        search(model, "data=8", optimizer="adamw", device_memory_bytes=8 << 10)
    assert error.value.least_bytes < 20 * 16 * 16 * 4 * 4
    search(model, "data=8", optimizer="adamw", device_memory_bytes=error.value.least_bytes)


def test_no_other_value_is_taken_for_the_option():
    model, inputs = decoder(layers=1)
    with pytest.raises(UsageError, match="expected 'auto', True or False"):
        planned(model, "1x8", inputs, sequence_parallel="yes")


def test_a_plan_for_a_model_that_is_bound_is_that_for_a_new_one():
    keras.utils.set_random_seed(1)
    found = LAYOUT_MODELS["gpt2"]()
    find = partial(planned, found.model, "2x4", found.inputs, remat="full", sequence_parallel=True)
    first = find()
    shardload.AutoShardDistribution("2x4", first).shard(found.model)
    assert find() == first


def small_decoder(plan=None):
    import keras_hub

    keras.utils.set_random_seed(3)
    model = keras_hub.models.Llama3Backbone(64, 2, 4, 16, 32, 4)
    if plan is not None:
        shardload.AutoShardDistribution(plan.mesh, plan).shard(model)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def test_a_run_that_splits_sequences_and_recomputes_goes_on_on_another_mesh(tmp_path):
    rng = np.random.default_rng(0)
    inputs = {"token_ids": rng.integers(0, 64, (16, 8)).astype("int32"), "padding_mask": np.ones((16, 8), "int32")}
    target = rng.normal(size=(16, 8, 16)).astype("float32")
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((16, *x.shape[1:]), x.dtype), inputs)
    expected = small_decoder().fit(inputs, target, epochs=4, shuffle=False, verbose=0).history["loss"]
    losses = []
    for mesh, epochs, remat in (("2x4", 2, "full"), (THREE, 4, "matmuls")):
        plan = planned(small_decoder(), mesh, specs, remat=remat, sequence_parallel=True)
        assert plan.sequence_axes and plan.remat
        callback = OrbaxCheckpoint(tmp_path, resume=True)
        run = small_decoder(plan).fit(inputs, target, epochs=epochs, shuffle=False, verbose=0, callbacks=[callback])
        losses += run.history["loss"]
    assert len(losses) == 4
    np.testing.assert_allclose(losses, expected, rtol=2e-4)


def test_batches_of_other_sizes_run_too():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (19, 8)).astype("int32")
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    target = rng.normal(size=(19, 8, 16)).astype("float32")
    specs = {key: jax.ShapeDtypeStruct((8, 8), "int32") for key in inputs}
    plan = planned(small_decoder(), "2x4", specs, sequence_parallel=True)
    whole, split = small_decoder(), small_decoder(plan)
    # The last batch has three rows, which two devices do not divide; and four do not divide seven tokens.
    losses = [m.fit(inputs, target, batch_size=8, shuffle=False, verbose=0).history["loss"] for m in (whole, split)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-4)
    short = {key: value[:, :7] for key, value in inputs.items()}
    results = [m.predict(short, verbose=0) for m in (whole, split)]
    np.testing.assert_allclose(results[1], results[0], atol=2e-4)


def test_layouts_in_a_file_are_checked():
    with pytest.raises(LayoutError, match="a key or type is wrong"):
        LayoutPlan.from_json({**planned(*bound_arguments()).to_json(), "call_layouts": [["a"]]})


def bound_arguments():
    model, inputs = decoder(layers=1)
    return model, "1x8", inputs


def test_the_rank_tells_calls_of_one_layer_apart():
    assert CallLayouts("embedding", True, (((), ("model",), ()),)).rank == 3
