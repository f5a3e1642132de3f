"""What a plan says of a step of a transformer block beside what XLA makes of it: collectives, and memory."""

import jax
import pytest
from layout_models import LAYOUT_MODELS

from shardload.parallel import Hardware, choose, compile_step, search
from shardload.sharding.mesh import MeshSpec

MESH = MeshSpec(("batch", "model"), (2, 4))
FAST_LINKS = Hardware(latency_s=1e-9, link_bytes_per_s=2e11)
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
