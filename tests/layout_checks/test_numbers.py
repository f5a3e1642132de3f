"""Sharded models agree with one device to rounding, and what does not agree, or lies elsewhere, is found."""

import functools

import jax
import keras
import numpy as np
import pytest
from layout_models import LAYOUT_MODELS, MESHES, loss_for

import shardload
import shardload.optimizers
from shardload.errors import DisagreementError, LayoutError, UninitialisedError, UsageError
from shardload.keras_bridge.binding import bind
from shardload.layout_checks.comparison import compare
from shardload.parallel import check_numbers, check_placement, choose, compile_step, search
from shardload.sharding.mesh import MeshSpec

MESH = MeshSpec.parse("2x4", axes="data,model")

MODELS = {**LAYOUT_MODELS, "block": functools.partial(LAYOUT_MODELS["block"], length=16)}
"""The weights of the others, on shorter inputs: numbers need no 128 positions."""
IN_TURN = [(name, MESHES[i % len(MESHES)]) for i, name in enumerate(LAYOUT_MODELS)]
"""Every model on one mesh."""
THE_REST = [(name, mesh) for name in LAYOUT_MODELS for mesh in MESHES if (name, mesh) not in IN_TURN]
FULL = [pytest.param(*case, marks=pytest.mark.full) for case in THE_REST]


def checked(name, mesh="2x4", **options):
    keras.utils.set_random_seed(0)
    model, inputs, target = MODELS[name]()
    choice = choose(model, MeshSpec.parse(mesh, axes="data,model"))
    return model, choice, check_numbers(model, choice, inputs, target=target, loss=loss_for(target), **options)


def test_no_steps_are_refused():
    with pytest.raises(UsageError, match="after steps=0: expected a positive number"):
        checked("block", training="sgd", steps=0)


@pytest.mark.parametrize("name", ["gemma2", "resnet", "lstm", "subclassed"])
def test_outputs_loss_and_gradients_agree(name):
    model, choice, check = checked(name)
    assert check.ok and check.raise_if_wrong() is check
    assert {"loss", *(f"gradient of {v.path}" for v in model.trainable_variables)} < {c.name for c in check.comparisons}
    assert all(c.max_rel < 1e-5 for c in check.comparisons if c.name == "loss" or c.name.startswith("output"))
    planned = sum(choice.by_id[id(v)].device_bytes for v in model.variables)
    assert set(check.found_device_bytes.values()) == {planned} == {check.device_bytes}
    assert len(check.found_device_bytes) == 8


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), IN_TURN + FULL)
def test_every_model_agrees_on_every_mesh(name, mesh):
    checked(name, mesh)[2].raise_if_wrong()


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [(name, "2x4") for name in LAYOUT_MODELS][::3] + FULL)
def test_five_training_steps_agree(name, mesh):
    _, _, check = checked(name, mesh, training="adam", steps=5)
    check.raise_if_wrong()
    assert sum(c.name.startswith("loss of step") for c in check.comparisons) == 5


def test_training_steps_compare_weights_slots_and_moving_averages():
    model, _, check = checked("resnet", training=keras.optimizers.SGD(0.01, momentum=0.9), steps=2)
    names = {c.name for c in check.raise_if_wrong().comparisons}
    slots = [n for n in names if "momentum after 2 steps" in n]
    assert len(slots) == len(model.trainable_variables)
    assert any(n.endswith("moving_mean after 2 steps") for n in names)
    assert check.variables == len(model.variables) + len(slots) + 2  # iterations, learning rate


def test_dropout_is_the_same_on_every_mesh():
    x = keras.Input((64,))
    y = keras.layers.Dropout(0.5, seed=1)(keras.layers.Dense(256, activation="relu")(x))
    model = keras.Model(x, keras.layers.Dense(8)(y))
    batch = np.random.default_rng(0).normal(size=(16, 64)).astype("float32")
    assert check_numbers(model, choose(model, MESH), batch).ok


class OtherOnMeshes(keras.layers.Layer):
    """Computes something else under a distribution: what a wrong collective does."""

    def call(self, x):
        return x if keras.distribution.distribution() is None else x * 1.001


def wrong_model():
    x = keras.Input((64,))
    return keras.Model(x, keras.layers.Dense(8, name="head")(OtherOnMeshes()(x)))


def test_a_model_that_computes_otherwise_is_found():
    check = check_numbers(wrong_model, lambda model: choose(model, MESH), np.ones((8, 64), "float32"))
    assert not check.ok and len(check.wrong) == len(check.comparisons) == 4
    assert check.wrong[-1].max_rel == pytest.approx(1e-3, rel=0.1)  # the output
    assert check.movements == 15  # three did not explain it: it might have been rounding across a kink
    assert "DIFFERENT" in check.summary() and not check.to_json()["ok"]
    with pytest.raises(DisagreementError, match=r"4 of 4 results differ from one device by more than rounding"):
        check.raise_if_wrong()


def test_a_difference_in_bfloat16_is_found_too():
    x = keras.Input((64,))
    y = keras.layers.Dense(64, dtype="bfloat16")(x)
    model = keras.Model(x, keras.layers.Dense(16, dtype="bfloat16")(y))
    batch = np.random.default_rng(0).normal(size=(8, 64)).astype("float32")
    output = check_numbers(model, choose(model, MESH), batch).raise_if_wrong().comparisons[0]
    # A sum of four parts without one is found.
    assert output.dtype == "bfloat16" and output.allowed < output.largest / 4


def test_variables_elsewhere_are_found():
    model, inputs, _ = LAYOUT_MODELS["subclassed"]()
    choice = choose(model, MESH)
    assert {found.path for found in check_placement(model, choice)} == {v.path for v in model.variables}
    bind(model, mesh=MESH, devices=jax.devices(), layouts=choice.layouts)
    assert check_placement(model, choice) == ()
    other = choose(model, MESH, "replicated")
    found = check_placement(model, other)
    assert len(found) == choice.sharded and found[0].found_bytes * 4 == found[0].planned_bytes
    with pytest.raises(DisagreementError, match=r"planned \(-, -\) with 16,384 bytes per device, found"):
        check_numbers(model, other, inputs, training=None).raise_if_wrong()


def test_a_model_on_its_mesh_by_another_plan_counts_each_variable_once():
    model, inputs, target = LAYOUT_MODELS["subclassed"]()
    model.compile("adam", "mse")
    other = choose(model, MESH, "replicated")
    bind(model, mesh=MESH, devices=jax.devices(), layouts=choose(model, MESH).layouts)
    check = check_numbers(model, other, inputs, target=target, loss=loss_for(target), training="adam")
    assert check.variables > len(model.variables)
    assert {m.path for m in check.misplaced} <= {v.path for v in model.variables}
    assert 0 < len(check.misplaced) == len({m.path for m in check.misplaced}) and not check.wrong
    plan = search(model, MESH, inputs=inputs).with_checks(numbers=check)
    said = f"equal to one device; {len(check.misplaced)} of {check.variables} variables NOT where planned ("
    assert said in str(plan) and str(plan).count("NOT") == 1


@pytest.mark.parametrize("where", ["weights", "inputs"])
def test_what_is_nan_on_one_device_proves_nothing(where):
    inputs, x = keras.Input((64,)), np.ones((8, 64), "float32")
    model = keras.Model(inputs, keras.layers.Dense(8, name="head")(inputs))
    if where == "weights":
        model.layers[1].kernel.assign(np.full((64, 8), np.nan))
    else:
        x[:4] = np.nan
    check = check_numbers(model, choose(model, MESH), x, training=None)
    (output,) = check.wrong
    assert not check.ok and output.undefined == (64 if where == "weights" else 32) and check.movements == 3
    assert check.summary().startswith("NOT COMPARABLE with one device")
    said = r"1 of 1 result cannot be compared, as they are not finite .*\n.*NaN or"
    with pytest.raises(DisagreementError, match=said):
        check.raise_if_wrong()


def test_what_rounding_makes_infinite_proves_nothing():
    inputs, x = keras.Input((64,)), np.zeros((8, 64), "float32")
    model = keras.Model(inputs, keras.layers.Dense(8, use_bias=False)(inputs))
    kernel = model.layers[1].kernel
    kernel.assign(np.full((64, 8), np.finfo("float32").max / 2))
    x[:4, :2] = 1  # the sum is the largest number, and infinite with one more unit in the last place
    check = check_numbers(model, choose(model, MESH), x, training=None)
    (output,) = check.wrong
    assert 0 < output.undefined <= 32 and np.isfinite(output.allowed) and not output.differs
    assert check.summary().startswith("NOT COMPARABLE with one device")
    kernel.assign(np.full((64, 8), np.finfo("float32").max))  # stays finite where nothing is added
    x[:4, 1] = 0
    assert check_numbers(model, choose(model, MESH), x * 0.5, training=None).ok


def test_differences_count_beside_what_rounding_makes_infinite():
    expected, moved = np.array([1, 3e38, -np.inf], "float32"), np.array([1, np.inf, -np.inf], "float32")
    found = {"right": [1, 0, -np.inf], "wrong": [1e36, 3e38, -np.inf], "mask": [1, 3e38, np.inf]}
    compared = {k: compare(k, np.array(v, "float32"), [moved], expected, eps=2**-23) for k, v in found.items()}
    told = {name: (c.differs, c.undefined) for name, c in compared.items()}
    assert told == {"right": (False, 1), "wrong": (True, 1), "mask": (True, 1)}


def test_masked_logits_may_be_infinite():
    inputs = keras.Input((8,))
    masked = keras.layers.Lambda(lambda y: keras.ops.where(keras.ops.arange(8) < 4, y, -np.inf))
    model = keras.Model(inputs, masked(keras.layers.Dense(8)(inputs)))
    assert check_numbers(model, choose(model, MESH), np.ones((8, 8), "float32"), training=None).ok


def placement(model, choice, _):
    return check_placement(model, choice)


@pytest.mark.parametrize("check", [check_numbers, compile_step, placement])
def test_layouts_of_another_model_object_are_refused(check):
    inputs, x = keras.Input((64,)), np.ones((8, 64), "float32")
    model, again = (keras.Model(inputs, keras.layers.Dense(8)(inputs)) for _ in range(2))
    choice = choose(model, MESH)
    with pytest.raises(LayoutError, match=r"they are for another model object\. Call shardload\.parallel\.choose\("):
        check(again, choice, x)
    model.layers[1].enable_lora(2)
    with pytest.raises(LayoutError, match=r"chosen before 2 weights existed, such as 'dense.*/lora_kernel_a'"):
        check(model, choice, x)
    with pytest.raises(UsageError, match="Cannot take layouts from 'auto': expected a LayoutChoice or a LayoutPlan"):
        check(model, "auto", x)


def test_a_plan_is_as_good_as_the_layouts_chosen_by_it():
    model, inputs, _ = LAYOUT_MODELS["subclassed"]()
    plan = search(model, MESH, inputs=inputs, optimizer="adam")
    choice = choose(model, MESH, plan)
    assert compile_step(model, plan, inputs).collectives == compile_step(model, choice, inputs).collectives
    check = check_numbers(model, plan, inputs, training=None)
    assert check.ok and check.device_bytes == sum(v.device_bytes for v in choice.variables)
    assert {found.path for found in check_placement(model, plan)} == {v.path for v in model.variables}


def test_the_model_stays_as_it_was():
    model, inputs, target = LAYOUT_MODELS["subclassed"]()
    optimizer = keras.optimizers.Adam()
    before = [(v.value, np.asarray(v.value)) for v in model.variables]
    check_numbers(model, choose(model, MESH), inputs, target=target, loss=loss_for(target), training=optimizer)
    pairs = zip(model.variables, before, strict=True)
    assert all(v.value is value and np.array_equal(v.value, copy) for v, (value, copy) in pairs)
    assert not optimizer.built


def test_a_model_without_values_is_refused():
    with shardload.abstract():
        model, inputs, _ = LAYOUT_MODELS["subclassed"]()
    with pytest.raises(UninitialisedError, match=r"No value for 8 variables: .*shardload\.initialise"):
        check_numbers(model, choose(model, MESH), inputs)


def test_slots_spread_over_the_batch_axis_are_where_planned_and_agree():
    keras.utils.set_random_seed(0)
    model, inputs, _ = LAYOUT_MODELS["subclassed"]()
    optimizer = keras.optimizers.Adam()
    shardload.optimizers.shard_optimizer(optimizer)
    plain = check_numbers(model, choose(model, MESH), inputs, training="adam")
    spread = check_numbers(model, choose(model, MESH), inputs, training=optimizer).raise_if_wrong()
    assert spread.device_bytes < plain.device_bytes
    assert set(spread.found_device_bytes.values()) == {spread.device_bytes}


def test_report_for_people_and_programs():
    _, _, check = checked("subclassed")
    assert check.summary().startswith("equal to one device on data=2,model=4: 10 results compared")
    found = check.to_json()
    assert found["ok"] and found["comparisons"][0]["name"] == "output" and found["misplaced"] == []
