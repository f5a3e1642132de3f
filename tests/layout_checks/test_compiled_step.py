"""A step compiled without weights has the collectives and the memory that can be counted by hand."""

import functools
from unittest.mock import Mock

import jax
import keras
import numpy as np
import pytest
from layout_models import LAYOUT_MODELS, loss_for

import shardload
from shardload.errors import MeshError, UninitialisedError, UsageError
from shardload.keras_bridge.binding import bind, binding_of
from shardload.keras_bridge.variables import has_value
from shardload.optimizers import REKLS
from shardload.parallel import check_numbers, choose, compile_step
from shardload.sharding.mesh import MeshSpec

MIB = 1 << 20
MESH = MeshSpec.parse("2x4", axes="data,model")


@functools.cache
def planned(name="block", mesh="2x4"):
    """A model without values, its layouts, a batch and a target."""
    with shardload.abstract():
        model, inputs, target = LAYOUT_MODELS[name]()
    return model, choose(model, MeshSpec.parse(mesh, axes="data,model")), inputs, target


def device_bytes(choice, variables):
    return sum(choice.by_id[id(v)].device_bytes for v in variables)


def test_a_forward_pass_of_two_blocks_has_four_all_reduces_of_one_mib():
    model, choice, inputs, _ = planned()
    step = compile_step(model, choice, inputs)
    found = [(c.kind, c.nbytes, c.axes, c.group_size) for c in step.collectives]
    assert found == [("all-reduce", MIB, ("model",), 4)] * 4
    assert step.collective_bytes == 4 * MIB
    assert step.argument_bytes == device_bytes(choice, model.variables) + inputs.nbytes // 2
    assert choice.device_bytes <= 1.6 * MIB


def test_a_backward_pass_adds_five_mib_and_the_gradients():
    model, choice, inputs, _ = planned()
    step = compile_step(model, choice, inputs, training="gradients")
    assert step.counts == {"all-reduce": 8}
    over_data = [c for c in step.collectives if c.axes == ("data",)]
    gradients = device_bytes(choice, model.trainable_variables)
    assert [(c.operands, c.nbytes) for c in over_data] == [(32 + 1, gradients + 4)]  # and the loss
    assert sum(c.nbytes for c in step.collectives if c.axes == ("model",)) == 9 * MIB
    assert step.collective_bytes <= 10.6 * MIB


def test_a_training_step_with_slots_reuses_the_memory_of_the_old_state():
    model, choice, inputs, target = planned()
    step = compile_step(model, choice, inputs, target=target, training="adam", loss="mse")
    weights = device_bytes(choice, model.trainable_variables)
    assert step.argument_bytes == 3 * weights + 4 + 4 + (inputs.nbytes + target.nbytes) // 2  # iterations, rate
    assert step.alias_bytes >= 3 * weights and step.collective_bytes <= 10.6 * MIB


@pytest.mark.parametrize("training", ["foo", True, keras.optimizers.Adam])
def test_a_step_of_no_optimizer_is_refused(training):
    model, choice, inputs, _ = planned()
    said = r"Cannot make a step with training=.*: expected None, 'gradients', an optimizer"
    with pytest.raises(UsageError, match=said):
        compile_step(model, choice, inputs, training=training)
    with pytest.raises(UsageError, match=r"Cannot make a step with training="):
        check_numbers(model, choice, inputs, training=training)


def test_nothing_is_allocated_and_an_optimizer_is_left_as_it_was():
    model, choice, inputs, _ = planned()
    optimizer = keras.optimizers.Adam()
    live = len(jax.live_arrays())
    compile_step(model, choice, jax.ShapeDtypeStruct(inputs.shape, inputs.dtype), training=optimizer)
    assert not any(map(has_value, model.variables)) and len(jax.live_arrays()) <= live
    assert not optimizer.built


def test_nothing_is_put_on_devices_which_may_be_those_of_another_machine(monkeypatch):
    monkeypatch.setattr(jax, "device_put", Mock(side_effect=AssertionError("a value was put on a device")))
    model, choice, inputs, _ = planned()
    assert compile_step(model, choice, inputs, training="adamw").kind == "training"


def test_a_bound_model_stays_bound_and_a_distribution_stays_set():
    model, inputs, _ = LAYOUT_MODELS["subclassed"]()
    other = MeshSpec.parse("8x1", axes="data,model")
    bind(model, mesh=other, devices=jax.devices(), layouts=choose(model, other).layouts)
    binding, shardings = binding_of(model), [v.value.sharding for v in model.variables]
    distribution = keras.distribution.DataParallel()
    with distribution.scope():
        step = compile_step(model, choose(model, MESH), inputs)
        assert keras.distribution.distribution() is distribution
    assert step.mesh == MESH and binding_of(model) is binding
    assert [v.value.sharding for v in model.variables] == shardings


def test_activation_layouts_of_a_layout_map_are_honoured():
    with shardload.abstract():
        x = keras.Input((64,))
        model = keras.Model(x, keras.layers.Dense(8, name="down")(keras.layers.Dense(256, name="up")(x)))
    device_mesh = keras.distribution.DeviceMesh((2, 4), ["data", "model"], devices=[f"cpu:{i}" for i in range(8)])
    layout_map = keras.distribution.LayoutMap(device_mesh)
    layout_map["up/kernel"] = (None, "model")
    layout_map["down/kernel"] = ("model", None)
    spec = jax.ShapeDtypeStruct((16, 64), "float32")
    plain = compile_step(model, choose(model, MESH, layout_map), spec)
    layout_map["up/output"] = ("data", None)
    gathered = compile_step(model, choose(model, MESH, layout_map), spec)
    assert plain.counts == {"all-reduce": 1} and plain.collective_bytes == 8 * 8 * 4
    assert gathered.counts == {"all-gather": 1, "all-reduce": 1}
    assert gathered.collectives[0].nbytes == 8 * 256 * 4


def test_nested_inputs_several_outputs_and_keyword_arguments():
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.left, self.right = keras.layers.Dense(32), keras.layers.Dense(64)

        def call(self, inputs, scale=None, mode="sum"):
            left, right = self.left(inputs["a"]["x"]), self.right(inputs["b"][0])
            return {"left": left * scale, "right": [right, keras.ops.mean(right) if mode == "mean" else right]}

    model = Two()
    inputs = {"a": {"x": np.ones((8, 16), "float32")}, "b": [np.ones((8, 16), "float32")]}
    scale = np.ones((8, 1), "float32")
    model(inputs, scale=scale)
    choice = choose(model, MESH)
    forward = compile_step(model, choice, inputs, kwargs={"scale": scale, "mode": "mean"})
    assert forward.argument_bytes == device_bytes(choice, model.variables) + (2 * 16 + 1) * 8 * 4 // 2
    target = {"left": np.ones((8, 32), "float32")}
    options = {"target": target, "loss": {"left": "mse"}, "training": "sgd", "kwargs": {"scale": scale}}
    step = compile_step(model, choice, inputs, **options)
    assert step.alias_bytes >= device_bytes(choice, model.trainable_variables)


def test_the_collectives_of_a_recurrent_layer_count_once_per_time_step():
    model, _, inputs, _ = planned("lstm")
    split = choose(model, MESH, {".*_cell/(recurrent_)?kernel": (None, "model")})  # gates are split: exchanged per step
    step = compile_step(model, split, inputs)
    looped = [c for c in step.collectives if "/while/body/" in c.source]
    assert looped and {c.count for c in looped} == {12} and not any(c.inside for c in step.collectives)
    assert step.collective_bytes == sum(c.nbytes * c.count for c in step.collectives)


@pytest.mark.parametrize("name", ["bert", "gemma2", "resnet"])
def test_arguments_are_the_planned_bytes_and_no_weight_is_gathered(name):
    model, choice, inputs, _ = planned(name)
    step = compile_step(model, choice, inputs)
    batch = sum(x.nbytes for x in jax.tree.leaves(inputs)) // 2
    assert step.argument_bytes == device_bytes(choice, model.variables) + batch
    assert step.counts.get("all-reduce", 0) > 0
    largest = max(v.nbytes for v in choice.variables)
    assert all(c.nbytes < largest for c in step.collectives if c.kind == "all-gather")


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUT_MODELS)
def test_every_model_compiles_for_training(name):
    model, choice, inputs, target = planned(name)
    step = compile_step(model, choice, inputs, target=target, loss=loss_for(target), training="sgd")
    batch = sum(x.nbytes for x in jax.tree.leaves((inputs, target))) // 2
    assert step.argument_bytes == device_bytes(choice, model.variables) + 8 + batch  # iterations, learning rate
    assert step.collective_bytes > 0


def test_a_model_in_bfloat16_is_noted_and_one_in_float32_scaled():
    x = keras.Input((64,))
    in_bf16 = keras.Model(x, keras.layers.Dense(32, dtype="bfloat16")(x))
    assert "16-bit" in compile_step(in_bf16, choose(in_bf16, MESH), np.ones((8, 64), "float32")).notes[0]
    model, choice, inputs, _ = planned()
    full = compile_step(model, choice, inputs)
    half = full.scaled("bfloat16")
    assert (half.collective_bytes, half.argument_bytes) == (2 * MIB, full.argument_bytes // 2)
    assert half.collectives[0].dtype == "bfloat16" and "float32 to bfloat16" in half.summary()


def test_the_state_and_the_update_of_rekls_stay_in_float32():
    x = keras.Input((256,))
    found = {}
    for dtype in ("float32", "bfloat16"):
        model = keras.Model(x, keras.layers.Dense(256, use_bias=False, dtype=dtype)(x))
        found[dtype] = compile_step(model, choose(model, MESH), jax.ShapeDtypeStruct((8, 256), dtype), training=REKLS())
    full, half = found["float32"], found["float32"].scaled("bfloat16")
    assert (
        half.argument_bytes == found["bfloat16"].argument_bytes == full.argument_bytes - 2 * (256 * 256 // 4 + 4 * 256)
    )
    assert half.temporary_bytes > 0.95 * full.temporary_bytes
    gathers = [c for c in half.collectives if c.kind == "all-gather"]
    assert gathers and {c.dtype for c in gathers} == {"f32"}


def test_a_batch_that_does_not_divide_is_replicated_and_noted():
    model, choice, _, _ = planned()
    step = compile_step(model, choice, jax.ShapeDtypeStruct((3, 128, 256), "float32"))
    assert step.argument_bytes == device_bytes(choice, model.variables) + 3 * 128 * 256 * 4
    assert "(3, 128, 256) does not divide over axis 'data'" in step.notes[0]


def test_report_for_people_and_programs():
    model, choice, inputs, _ = planned()
    step = compile_step(model, choice, inputs)
    assert "4 x all-reduce over model: 1.0 MiB f32" in step.summary()
    found = step.to_json()
    assert found["collective_bytes"] == 4 * MIB and found["collectives"][0]["axes"] == ["model"]
    assert found["total_bytes"] == step.total_bytes and step.fits(step.total_bytes) and not step.fits(1)


def test_errors_say_the_way_out():
    model, choice, inputs, _ = planned()
    with pytest.raises(MeshError, match=r"found 4 devices, expected 8.*jax_num_cpu_devices"):
        compile_step(model, choice, inputs, devices=jax.devices()[:4])
    with pytest.raises(UsageError, match="without a target"):
        compile_step(model, choice, inputs, training="gradients", loss="mse")
    with pytest.raises(UninitialisedError, match="not built"):
        compile_step(keras.Sequential([keras.layers.Dense(2)]), choice, inputs)
