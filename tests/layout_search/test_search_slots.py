"""The state of an optimizer counts weight by weight: the arguments of the compiled step are what was planned."""

import keras
import numpy as np
import pytest

import shardload
from shardload.errors import DoesNotFitError, LayoutError
from shardload.optimizers import REKLS, shard_optimizer, state_bytes
from shardload.parallel import choose, compile_step, search, search_smallest_mesh
from shardload.sharding.mesh import MeshSpec

MESH = MeshSpec(("data", "model"), (2, 4))
SCALARS = 256
"""More than the bytes of counters and placeholders."""
OPTIMIZERS = {
    "adamw": lambda: "adamw", "sgd": lambda: keras.optimizers.SGD(0.1), "adafactor": keras.optimizers.Adafactor,
    "muon": keras.optimizers.Muon, "averaged": lambda: keras.optimizers.Adam(use_ema=True),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "rekls": REKLS,
    "rekls for some": lambda: REKLS(adamw_for=lambda v: "up" in v.path),
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    tokens = keras.Input((16,), dtype="int32")
    y = keras.layers.Embedding(512, 128, name="embedding")(tokens)
    y = keras.layers.Dense(128, name="down")(keras.layers.Dense(384, activation="gelu", name="up")(y))
    with shardload.abstract():
        return keras.Model(tokens, keras.layers.Dense(64, name="head")(y))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_planned_slots_are_those_of_the_compiled_step(model, name):
    optimizer, batch = OPTIMIZERS[name](), np.zeros((8, 16), "int32")
    plan = search(model, MESH, inputs=batch, optimizer=optimizer)
    step = compile_step(model, choose(model, MESH, plan), batch, training=OPTIMIZERS[name]())
    scalars = step.argument_bytes - plan.device.weights - plan.device.slots - batch.nbytes // 2
    assert 0 <= scalars < SCALARS
    assert isinstance(optimizer, str) or not optimizer.built


def test_slots_of_rekls_are_what_its_formula_says(model):
    plan = search(model, MESH, batch=8, optimizer=REKLS())
    expected = sum(state_bytes(v.shape, layout.parts, path=v.path) for v, layout in plan.layouts() if v.trainable)
    assert plan.device.slots == expected > 2 * plan.device.weights


def test_the_update_of_rekls_counts_on_every_device(model):
    whole = sum(state_bytes(v.shape, path=v.path) for v in model.trainable_variables if "kernel" in v.path)
    plan = search(model, MESH, batch=8, optimizer=REKLS())
    assert plan.device.activations == 2 * whole and "under any layout" in plan.notes[0]
    with pytest.raises(DoesNotFitError, match="optimizer's update, on any mesh"):
        search(model, MESH, batch=8, optimizer=REKLS(), device_memory_bytes=2 * whole)
    assert search_smallest_mesh(model, 2 * whole, batch=8, optimizer=REKLS()) is None


def test_the_compiled_update_of_rekls_needs_about_as_much():
    inputs = keras.Input((512,))
    model = keras.Model(inputs, keras.layers.Dense(512, use_bias=False)(inputs))
    plan = search(model, "1x8", batch=8, optimizer=REKLS())
    step = compile_step(model, choose(model, "1x8", plan), np.zeros((8, 512), "float32"), training=REKLS())
    assert 0.8 < plan.device.activations / step.temporary_bytes < 1.5


def test_a_layout_that_an_optimizer_refuses_is_not_planned():
    inputs = keras.Input((100,))
    model = keras.Model(inputs, keras.layers.Dense(512, use_bias=False)(inputs))
    kept = {"device_memory_bytes": 8 << 20, "batch": 8, "pins": {".*kernel": (None, ("data", "model"))}}
    assert search(model, MESH, optimizer=REKLS(uneven="replicate"), **kept).device.slots > 0
    said = r"Cannot pin 'dense.*/kernel' to \(-, data\+model\): .*factor of 100 rows.*8 devices.*uneven='replicate'"
    with pytest.raises(LayoutError, match=said):
        search(model, MESH, optimizer=REKLS(), **kept)


def test_slots_that_are_spread_count_as_spread():
    inputs = keras.Input((256,))
    model = keras.Model(inputs, keras.layers.Dense(512, use_bias=False)(inputs))
    optimizer = keras.optimizers.Adam()
    whole = search(model, MESH, batch=8, optimizer=optimizer)
    shard_optimizer(optimizer, axis="data")
    spread = search(model, MESH, batch=8, optimizer=optimizer)
    assert (whole.device.slots, spread.device.slots) == (2 * whole.device.weights, spread.device.weights)


def test_an_optimizer_that_was_built_is_counted_as_it_is():
    inputs = keras.Input((64,))
    model = keras.Model(inputs, keras.layers.Dense(64)(inputs))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    plan = search(model, MESH, batch=8, optimizer=model.optimizer)
    assert plan.device.slots == 2 * plan.device.weights and model.optimizer.built
    assert search(keras.Model(inputs, keras.layers.Dense(8)(inputs)), MESH, batch=8, optimizer=model.optimizer)


def test_a_class_is_no_optimizer(model):
    with pytest.raises(LayoutError, match=r"Cannot plan for the class Adam: .* Create one: Adam\(\)"):
        search(model, MESH, batch=8, optimizer=keras.optimizers.Adam)
