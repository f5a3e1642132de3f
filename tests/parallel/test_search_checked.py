"""Plans that are checked by compiling them: the next one is taken where a step is over the limit, and plans say so."""

import jax
import keras
import numpy as np
import pytest

import shardload
from shardload.errors import DoesNotFitError, LayoutError
from shardload.parallel import (
    CompiledStep,
    Hardware,
    LayoutPlan,
    check_numbers,
    choose,
    compile_step,
    search,
    search_compiled,
    search_smallest_mesh,
)
from shardload.parallel.choosing import first_that_fits
from shardload.sharding.mesh import MeshSpec

MIB = 2**20
MESH = MeshSpec(("data",), (8,))
STEP = {"batch": 64, "optimizer": "adamw"}


def mlp():
    y = inputs = keras.Input((256,))
    for _ in range(2):
        y = keras.layers.Dense(512, activation="gelu")(y)
    return keras.Model(inputs, keras.layers.Dense(256)(y), name="mlp")


@pytest.fixture(scope="module")
def model():
    with shardload.abstract():
        return mlp()


def test_a_step_that_fits_is_taken_at_once_and_the_plan_says_what_was_compiled(model):
    plan = search_compiled(model, MESH, device_memory_bytes=64 * MIB, **STEP)
    step = compile_step(model, choose(model, MESH, plan), jax.ShapeDtypeStruct((64, 256), "float32"), training="adamw")
    assert plan.compiled.attempts == () and plan.compiled.platform == "cpu"
    assert plan.compiled.total_bytes == step.total_bytes <= 64 * MIB
    assert plan.compiled.collectives == {"all-reduce": (1, step.collective_bytes)}
    assert "\ncompiled for cpu: " in str(plan) and " of 64.0 MiB; 1 all-reduce of " in str(plan)


def test_over_the_limit_the_next_plan_is_taken(model):
    planned = search(model, MESH, **STEP).device.total
    compiled = search_compiled(model, MESH, **STEP).compiled.total_bytes
    limit = (planned + compiled) // 2
    assert planned < limit < compiled
    plan = search_compiled(model, MESH, device_memory_bytes=limit, **STEP)
    (first,) = plan.compiled.attempts
    assert first.compiled_bytes == compiled > limit >= plan.compiled.total_bytes
    assert plan.device.total < first.planned_bytes and plan.device_memory_bytes == limit
    assert any(v.stored == ("data",) for v in plan.variables)


def test_where_nothing_fits_the_error_says_by_how_much_and_the_way_out(model):
    limit = search(model, MESH, device_memory_bytes=3 * MIB, **STEP).device.total
    said = r"For cpu, a plan for 2.* compiled to .* too much\. Use a larger mesh"
    with pytest.raises(DoesNotFitError, match=said) as error:
        search_compiled(model, MESH, device_memory_bytes=limit, **STEP)
    assert error.value.least_bytes > limit and "search_compiled(devices=...)" in str(error.value)
    why = r"at most 512\.0 KiB per .* size\. Weights and slots alone are too large$"
    with pytest.raises(DoesNotFitError, match=why):
        search_compiled(model, MESH, device_memory_bytes=MIB // 2, **STEP)


def test_numbers_that_are_none_are_refused(model):
    with pytest.raises(LayoutError, match="Cannot plan with batch=0: expected a positive integer"):
        search_compiled(model, MESH, batch=0)
    with pytest.raises(LayoutError, match="Cannot plan with device_memory_bytes=True"):
        search_compiled(model, MESH, batch=8, device_memory_bytes=True)


def test_what_does_not_fit_the_mesh_is_told_before_the_model_is_traced(model):
    wrong = jax.ShapeDtypeStruct((64, 255), "float32")
    with pytest.raises(LayoutError, match="Cannot split the batch over 'nope'"):
        search_compiled(model, MESH, inputs=wrong, batch_axis="nope")
    fast = Hardware(axis_bytes_per_s={"nope": 1e9})
    with pytest.raises(LayoutError, match=r"has a bandwidth for \['nope'\]"):
        search_compiled(model, MESH, inputs=wrong, hardware=fast)
    with pytest.raises(LayoutError, match=r"has a bandwidth for \['nope'\]"):
        search_smallest_mesh(model, MIB, inputs=wrong, hardware=fast)


def test_an_estimate_over_the_limit_is_compiled_where_weights_and_slots_fit(model):
    def searched(limit):
        return search(model, MESH, device_memory_bytes=limit, **STEP)

    def frugal(plan):  # compiles to no activations
        return CompiledStep(MESH, "training", "cpu", plan.device.weights + plan.device.slots, 0, 0, 0, 0, 0, (), 0.0)

    limit = MIB  # the estimate says 2.1 MiB
    found = first_that_fits(searched, frugal, limit)
    assert found.step.fits(limit) and found.plan.compiled.total_bytes <= limit < found.plan.device.total
    assert "per device: 2.1 MiB of 1.0 MiB (2" in str(found.plan)


def test_checks_are_a_part_of_a_saved_plan(tmp_path):
    model = mlp()
    x = np.random.default_rng(0).normal(size=(64, 256)).astype("float32")
    plan = search_compiled(model, MESH, inputs=x, optimizer="sgd")
    checked = plan.with_checks(numbers=check_numbers(model, choose(model, MESH, plan), x, target=x, loss="mse"))
    assert checked.compiled == plan.compiled and checked.numbers.ok
    assert checked.numbers.variables == 6 and checked.numbers.device_bytes == plan.device.weights
    assert "results equal to one device" in str(checked) and "6 variables where planned" in str(checked)
    checked.save(tmp_path / "plan.json")
    assert LayoutPlan.load(tmp_path / "plan.json") == checked != plan


def test_a_wrong_result_is_in_the_plan_too(model):
    own = mlp()
    plan, x = search(own, MESH, batch=64), np.ones((64, 256), "float32")
    check = check_numbers(own, choose(own, MESH, plan), x, training=None)
    wrong = [type(c)(c.name, c.dtype, c.elements, c.largest, 1.0, 0.5) for c in check.comparisons]
    numbers = plan.with_checks(numbers=type(check)(MESH, tuple(wrong), (), 6, 1, {})).numbers
    assert not numbers.ok and numbers.wrong == ("output",) and numbers.largest_share == 2
    assert "1 of 1 result NOT equal to one device (output)" in numbers.line()


def test_a_check_on_another_mesh_is_refused(model):
    plan = search(model, MESH, **STEP)
    other = MeshSpec(("data", "model"), (2, 4))
    step = compile_step(model, choose(model, other), jax.ShapeDtypeStruct((64, 256), "float32"))
    with pytest.raises(LayoutError, match="Cannot add a check on data=2,model=4 to a plan for data=8"):
        plan.with_checks(compiled=step)
