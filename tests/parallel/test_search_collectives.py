"""What compiled programs exchange is what searched plans say: each kind of collective, over each axis, to the byte."""

from collections import Counter

import jax
import keras
import pytest
from layout_models import LAYOUT_MODELS, MESHES

import shardload
from shardload.keras_bridge.model_state import slots_of
from shardload.parallel import Hardware, choose, compile_step, search
from shardload.sharding.mesh import MeshSpec

FAST_LINKS = Hardware(latency_s=1e-9, link_bytes_per_s=2e11)
"""Of models this small, latency would decide everything."""
ALWAYS = {(name, "2x4", "gradients") for name in LAYOUT_MODELS if name not in ("roberta", "opt")} | {
    ("gemma1", "1x8", "forward"),
    ("gpt2", "1x8", "forward"),
    ("mixtral", "8x1", "forward"),
    ("resnet", "1x3", "gradients"),
}
"""What every run compiles; `make test-full` compiles all models on all meshes, forward and backward."""
OTHERWISE = {
    ("gemma1", "1x8", "forward"): (196_608, 152_640),
    ("gemma1", "1x8", "gradients"): (479_236, 409_156),
    ("gemma2", "1x8", "forward"): (433_152, 255_552),
    ("gemma3", "1x8", "forward"): (301_824, 183_936),
    ("gemma3", "1x8", "gradients"): (695_812, 432_004),
    ("lstm", "1x8", "forward"): (602_432, 405_824),
    ("lstm", "1x8", "gradients"): (1_019_904, 585_792),
    ("lstm", "2x4", "forward"): (301_216, 224_416),
    ("lstm", "2x4", "gradients"): (1_062_636, 905_996),
    ("lstm", "1x3", "forward"): (897_024, 325_184),
    ("lstm", "1x3", "gradients"): (1_019_904, 786_320),
    ("unet", "1x8", "forward"): (679_936, 614_400),
    ("unet", "1x8", "gradients"): (1_089_536, 1_237_056),
    ("unet", "2x4", "forward"): (339_968, 339_968),
    ("unet", "2x4", "gradients"): (602_544, 946_624),
    ("mixtral", "1x8", "gradients"): (321_028, 349_700),
    ("mixtral", "2x4", "gradients"): (538_840, 553_176),
}
"""Where XLA does something else: bytes planned, and bytes compiled. Why, see `PARTS`."""
PARTS = {"all-gather", "all-to-all", "collective-permute"}
"""Halves of a split dim (Gemma's rotary embeddings where eight devices share one key), its gates (recurrent layers),
and what joins skip connections (U-Net) need data of other devices. XLA moves each part as it is needed, in several
kinds of instructions; a plan counts a multiple of the whole, as all-gathers. Of Mixtral's keys and values, whose two
groups four or eight devices share, XLA divides the gradients among them and gathers these."""


def cases():
    for name in LAYOUT_MODELS:
        for mesh in MESHES:
            for step in ("forward", "gradients"):
                marks = () if (name, mesh, step) in ALWAYS else pytest.mark.full
                yield pytest.param(name, mesh, step, marks=marks, id=f"{name}-{mesh}-{step}")


def some(*always):
    return [*always, *(pytest.param(name, marks=pytest.mark.full) for name in LAYOUT_MODELS if name not in always)]


def planned(name, mesh, optimizer=None):
    with shardload.abstract():
        found = LAYOUT_MODELS[name]()
    plan = search(found.model, MeshSpec.parse(mesh), inputs=found.inputs, optimizer=optimizer, hardware=FAST_LINKS)
    return found, plan, choose(found.model, plan.mesh, plan)


def in_plan(plan):
    found = Counter()
    for exchange in plan.exchanges:
        found[exchange.kind, exchange.axis] += exchange.nbytes
    return found


def in_program(step):
    found = Counter()
    for collective in step.collectives:
        found[collective.kind, "+".join(collective.axes)] += collective.total_bytes
    return found


@pytest.mark.parametrize(("name", "mesh", "step"), [*cases()])
def test_a_compiled_program_has_the_planned_collectives_and_no_others(name, mesh, step):
    training = "gradients" if step == "gradients" else None
    found, plan, choice = planned(name, mesh, "adamw" if training else None)
    compiled = compile_step(found.model, choice, found.inputs, training=training)
    expected, have = in_plan(plan), in_program(compiled)
    if (name, mesh, step) in OTHERWISE:
        bytes_planned, bytes_compiled = OTHERWISE[name, mesh, step]
        assert expected.total() == bytes_planned and have.total() <= bytes_compiled
        assert {kind for kind, _ in have} - {kind for kind, _ in expected} <= PARTS
    else:
        assert have == expected


def stack(layer):
    y = inputs = keras.Input((8, 8, 16))
    for _ in range(2):
        y = keras.layers.Conv2D(32, 1, activation="relu")(layer()(y))
    return keras.Model(inputs, keras.layers.Dense(8)(keras.layers.GlobalAveragePooling2D()(y)))


CONVOLUTIONS = {
    "depthwise": lambda: keras.layers.DepthwiseConv2D(3, padding="same"),
    "separable": lambda: keras.layers.SeparableConv2D(32, 3),
    "two-filters": lambda: keras.layers.DepthwiseConv2D(3, depth_multiplier=2),
    "grouped": lambda: keras.layers.Conv2D(32, 3, groups=4),
}


@pytest.mark.parametrize("training", [None, "gradients"])
@pytest.mark.parametrize(("name", "mesh"), [*((n, "8x1") for n in CONVOLUTIONS), ("depthwise", "2x4")])
def test_convolutions_in_groups_have_the_planned_collectives(name, mesh, training):
    with shardload.abstract():
        model = stack(CONVOLUTIONS[name])
    x = jax.ShapeDtypeStruct((16, 8, 8, 16), "float32")
    plan = search(model, mesh, inputs=x, optimizer="adamw" if training else None, hardware=FAST_LINKS)
    step = compile_step(model, choose(model, mesh, plan), x, training=training)
    planned_by_kind, compiled_by_kind = Counter(), Counter()  # over both axes at once, XLA adds up what no axis splits
    for (kind, _), nbytes in in_plan(plan).items():
        planned_by_kind[kind] += nbytes
    for (kind, _), nbytes in in_program(step).items():
        compiled_by_kind[kind] += nbytes
    assert planned_by_kind == compiled_by_kind
    assert training is None or planned_by_kind["all-reduce"] > 0


@pytest.mark.parametrize("name", some("block"))
def test_an_optimizer_exchanges_nothing_more(name):
    found, _, choice = planned(name, "2x4", "adam")
    gradients, training = (
        compile_step(found.model, choice, found.inputs, training=kind) for kind in ("gradients", "adam")
    )
    if (name, "2x4", "gradients") in OTHERWISE:  # what XLA divides further, it gathers once more
        assert training.collective_bytes <= 1.07 * gradients.collective_bytes
    else:
        assert in_program(training) == in_program(gradients)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", some("gemma2"))
def test_slots_lie_like_their_variables(name, mesh):
    with shardload.abstract():
        found = LAYOUT_MODELS[name]()
        found.model.compile("adam")
        found.model.optimizer.build(found.model.trainable_variables)
    plan = search(found.model, MeshSpec.parse(mesh), inputs=found.inputs, optimizer="adam", hardware=FAST_LINKS)
    choice = choose(found.model, plan.mesh, plan)
    pairs = [*slots_of(found.model)]
    assert len(pairs) == 2 * len(found.model.trainable_variables)
    assert all(choice.of(slot) == choice.of(variable) for slot, variable in pairs)
