"""Searched layouts train as one device does: outputs, loss and five steps, on every mesh, with planned bytes."""

import jax
import keras
import pytest
from layout_models import LAYOUT_MODELS, MESHES, loss_for

from shardload.parallel import Hardware, check_numbers, choose, compile_step, search
from shardload.sharding.mesh import MeshSpec

FAST_LINKS = Hardware(latency_s=1e-9, link_bytes_per_s=2e11)
"""Of models this small, latency would decide everything."""
ALWAYS = {("lstm", "1x3"), ("mixtral", "2x4"), ("resnet", "2x4")}
"""What every run tries; `make test-full` tries all models on all meshes."""


def cases():
    for name in LAYOUT_MODELS:
        for mesh in MESHES:
            mark = pytest.mark.slow if (name, mesh) in ALWAYS else pytest.mark.full
            yield pytest.param(name, mesh, marks=mark, id=f"{name}-{mesh}")


def planned_and_trained(name, mesh, seed=0):
    keras.utils.set_random_seed(seed)
    found = LAYOUT_MODELS[name]()
    plan = search(found.model, MeshSpec.parse(mesh), inputs=found.inputs, optimizer="adam", hardware=FAST_LINKS)
    choice = choose(found.model, MeshSpec.parse(mesh), plan)
    options = {"target": found.target, "loss": loss_for(found.target), "training": "adam", "steps": 5}
    check = check_numbers(found.model, choice, found.inputs, **options)
    return found.model, plan, choice, check


@pytest.mark.parametrize(("name", "mesh"), [*cases()])
def test_five_training_steps_equal_those_of_one_device(name, mesh):
    model, plan, choice, check = planned_and_trained(name, mesh)
    check.raise_if_wrong()
    assert set(check.found_device_bytes.values()) == {check.device_bytes}
    planned = {v.path: layout for v, layout in plan.layouts()}
    weights = [v for v in choice.variables if v.path in planned]
    assert sum(v.device_bytes for v in weights) == plan.device.weights
    slots = 2 * sum(choice.by_id[id(v)].device_bytes for v in model.trainable_variables)
    others = check.device_bytes - plan.device.weights - slots
    assert 0 < others <= 16, "two moments of Adam lie like their variable; its counter and rate have 4 bytes each"


# ---- beside what XLA makes of a step -------------------------------------------------------------


MESH = MeshSpec(("batch", "model"), (2, 4))
"""Of models this small, latency would decide everything."""
MARGIN = 0.1 if jax.__version_info__ < (0, 11) else 0.15
"""How far planned activations are from what XLA allocates, which is a tenth less from JAX 0.11 on."""


def planned_and_compiled(name, optimizer):
    found = LAYOUT_MODELS[name]()
    plan = search(found.model, MESH, inputs=found.inputs, optimizer=optimizer, hardware=FAST_LINKS)
    training = "gradients" if optimizer else None
    return plan, compile_step(found.model, choose(found.model, MESH, plan), found.inputs, training=training)


@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_a_block_exchanges_what_was_planned_and_needs_what_was_planned(optimizer):
    plan, step = planned_and_compiled("block", optimizer)
    assert step.collective_bytes == plan.exchanged_bytes
    assert step.counts == {"all-reduce": 8 if optimizer else 4}
    assert plan.device.activations == pytest.approx(step.temporary_bytes, rel=MARGIN)
    assert plan.device.weights <= 1.6 * 2**20
