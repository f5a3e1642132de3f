"""Searched layouts train as one device does: outputs, loss and five steps, on every mesh, with planned bytes."""

import jax
import keras
import pytest
from layout_models import LAYOUT_MODELS, MESHES, loss_for

from shardload.parallel import Hardware, check_numbers, choose, compile_step, search
from shardload.sharding.mesh import MeshSpec

FAST_LINKS = Hardware(latency_s=1e-9, link_bytes_per_s=2e11, reduce_scatter=False)
"""Of models this small, latency would decide everything. XLA for CPU makes no reduce-scatters."""
ALWAYS = {("lstm", "1x3"), ("mixtral", "2x4"), ("resnet", "2x4")}
"""What every run tries; `make test-full` tries all models on all meshes."""


def cases():
    for name in LAYOUT_MODELS:
        for mesh in MESHES:
            mark = pytest.mark.slow if (name, mesh) in ALWAYS else pytest.mark.full
            yield pytest.param(name, mesh, marks=mark, id=f"{name}-{mesh}")


@pytest.mark.parametrize(("name", "mesh"), [*cases()])
def test_five_training_steps_equal_those_of_one_device(name, mesh):
    keras.utils.set_random_seed(0)
    model, inputs, target = LAYOUT_MODELS[name]()
    plan = search(model, mesh, inputs=inputs, optimizer="adam", hardware=FAST_LINKS)
    choice = choose(model, MeshSpec.parse(mesh), plan)
    options = {"target": target, "loss": loss_for(target), "training": "adam", "steps": 5}
    check = check_numbers(model, choice, inputs, **options)
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
"""Of models this small, latency would decide everything. XLA for CPU makes no reduce-scatters."""
MARGIN = 0.1 if jax.__version_info__ < (0, 11) else 0.15
"""How far planned activations are from what XLA allocates, which is a tenth less from JAX 0.11 on."""


@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_a_block_exchanges_what_was_planned_and_needs_what_was_planned(optimizer):
    model, inputs, _ = LAYOUT_MODELS["block"]()
    plan = search(model, MESH, inputs=inputs, optimizer=optimizer, hardware=FAST_LINKS)
    step = compile_step(model, choose(model, MESH, plan), inputs, training="gradients" if optimizer else None)
    assert step.collective_bytes == plan.exchanged_bytes
    assert step.counts == {"all-reduce": 8 if optimizer else 4}
    assert plan.device.activations == pytest.approx(step.temporary_bytes, rel=MARGIN)
    assert plan.device.weights <= 1.6 * 2**20
