"""An axis for sequences splits the tokens of inputs: keys and values are gathered for attention."""

import jax
import keras
import numpy as np
import pytest
from collective_bytes import in_plan, in_program
from layout_models import LAYOUT_MODELS, loss_for

import shardload
from shardload.parallel import check_numbers, compile_step, search

BOTH, ALONE = "data=2,context=2,model=2", "data=2,context=4"


def decoder(family, length=64):
    """A decoder without values and without dropout, and the shapes of its inputs."""
    import keras_hub

    hub = keras_hub.models
    sizes = {"vocabulary_size": 256, "num_layers": 2, "num_heads": 8, "hidden_dim": 128, "intermediate_dim": 256}
    with shardload.abstract():
        model = {
            "llama": lambda: hub.Llama3Backbone(256, 2, 8, 128, 256, 4),
            "gemma": lambda: hub.GemmaBackbone(256, 2, 8, 4, 128, 512, 16),
            "gpt2": lambda: hub.GPT2Backbone(**sizes, dropout=0.0, max_sequence_length=length),
        }[family]()
    return model, {key: jax.ShapeDtypeStruct((8, length), "int32") for key in ("token_ids", "padding_mask")}


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("mesh", [ALONE, BOTH])
@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2"])
def test_a_compiled_step_exchanges_the_planned_bytes(family, mesh, remat):
    model, inputs = decoder(family)
    plan = search(model, mesh, inputs=inputs, optimizer="adamw", remat=remat)
    step = compile_step(model, plan, inputs, training="gradients")
    planned, compiled = in_plan(plan), in_program(step)
    assert planned.keys() == compiled.keys() and plan.notes == ()
    # The mask of padding is gathered, too: a few bytes for each token. The plan counts the arrays that weights make.
    mask = 3 * 4 * inputs["padding_mask"].size
    assert all(abs(planned[key] - compiled[key]) <= mask for key in planned)
    # Keys and values are gathered, and no scores.
    scores = max(c.nbytes for c in step.collectives if c.kind == "all-gather")
    assert scores <= 4 * 8 // 2 * 64 * 128


@pytest.mark.parametrize("mesh", [ALONE, BOTH])
@pytest.mark.parametrize("name", ["block", "gemma2", "bert"])
def test_numbers_are_those_of_one_device(name, mesh):
    keras.utils.set_random_seed(1)
    found = LAYOUT_MODELS[name]()
    plan = search(found.model, mesh, inputs=found.inputs, optimizer="adam")
    assert not any("splits nothing" in note for note in plan.notes)
    check = check_numbers(
        found.model, plan, found.inputs, target=found.target, loss=loss_for(found.target), training="adam"
    )
    check.raise_if_wrong()


def test_a_sequence_that_does_not_divide_stays_whole_and_is_noted():
    model, inputs = decoder("llama", length=63)
    plan = search(model, BOTH, inputs=inputs)
    assert "axis 'context' splits nothing: its size divides the length of no sequence" in plan.notes
    assert not any("context" in e.axis for e in plan.exchanges)


@pytest.mark.parametrize("layout", ["auto", "search"])
def test_fit_on_a_mesh_with_an_axis_for_sequences_has_the_losses_of_one_device(layout):
    import keras_hub

    def made():
        keras.utils.set_random_seed(3)
        model = keras_hub.models.Llama3Backbone(64, 2, 4, 16, 32, 4)
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    rng = np.random.default_rng(0)
    inputs = {"token_ids": rng.integers(0, 64, (16, 8)).astype("int32"), "padding_mask": np.ones((16, 8), "int32")}
    target = rng.normal(size=(16, 8, 16)).astype("float32")
    options = {"epochs": 2, "batch_size": 8, "shuffle": False, "verbose": 0}
    expected = made().fit(inputs, target, **options).history["loss"]
    model = made()
    specs = {key: jax.ShapeDtypeStruct((8, 8), "int32") for key in inputs}
    plan = search(model, BOTH, inputs=specs, optimizer="adam") if layout == "search" else layout
    distribution = shardload.AutoShardDistribution(BOTH, plan)
    distribution.shard(model)
    data = distribution.get_data_layout((8, 8)).backend_layout.spec
    assert tuple(data) == ("data", "context")
    np.testing.assert_allclose(model.fit(inputs, target, **options).history["loss"], expected, rtol=2e-4)
    np.testing.assert_allclose(model.predict(inputs, verbose=0), made_after(made, inputs, target, options), atol=2e-4)


def made_after(made, inputs, target, options):
    model = made()
    model.fit(inputs, target, **options)
    return model.predict(inputs, verbose=0)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 7), ("data",)),
        ((8, 8, 3), ("data", "context")),
        ((8, 8, 8, 3), ("data",)),
        ((8,), ("data",)),
        ((3, 8), (None, "context")),
    ],
)
def test_tokens_are_split_where_they_divide_and_images_are_not(shape, spec):
    found = shardload.AutoShardDistribution(BOTH).get_data_layout(shape).backend_layout.spec
    assert tuple(found)[: len(spec)] == spec and not any(tuple(found)[len(spec) :])
