"""Where a fallback splits features, they are gathered between blocks; elsewhere, nothing is said of activations."""

import jax
import keras
import layout_models
import models
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from programs import collectives, forward

from shardload.keras_bridge.binding import bind
from shardload.parallel import choose
from shardload.sharding.mesh import MeshSpec

MESH = MeshSpec.parse("1x4")
WHOLE = PartitionSpec(PartitionSpec.UNCONSTRAINED)


def program(model, x, *, gathered=True):
    choice = choose(model, MESH)
    activations = choice.activations if gathered else None
    bind(model, mesh=MESH, devices=jax.devices()[:4], layouts=choice.layouts, activations=activations)
    return collectives(forward(model, x).as_text())


def test_models_whose_dims_divide_say_nothing_of_activations():
    assert choose(models.build("llama"), MESH).activations is None
    assert choose(models.build("opt"), MESH).activations is None


def test_tables_and_norms_are_gathered_but_not_those_of_single_heads():
    gathered = choose(models.build("gemma3"), MeshSpec.parse("1x8")).activations  # one key/value head, four query heads
    assert gathered("decoder_block_0/pre_attention_norm/output") == WHOLE
    assert gathered("final_normalization/output") == WHOLE
    assert gathered("decoder_block_0/attention/query_norm/output") is None
    assert gathered("token_embedding/output") is None  # split by its vocabulary
    assert choose(models.build("gpt2"), MESH).activations("token_embedding/output") == WHOLE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("gpt2", 6), ("bert", 6), ("roberta", 6), ("vit", 7)])
def test_it_saves_more_than_half_of_the_collectives(name, most):
    model, x, _ = layout_models.LAYOUT_MODELS[name]()
    before = program(model, x, gathered=False)
    assert sum(program(model, x).values()) <= most < sum(before.values()) / 2


def test_it_changes_no_value_in_eager_calls_either():
    model = models.randomise(models.build("gpt2"))
    x = models.tokens(model)
    expected = np.asarray(model(x))
    program(model, x)
    np.testing.assert_allclose(model(x), expected, atol=1e-4 * np.abs(expected).max())


def test_positions_are_replicated():
    choice = choose(models.build("gpt2"), MESH)
    table = next(v for v in choice.variables if v.path == "position_embedding/embeddings")
    assert (table.rule, table.layout.is_replicated, table.fallback) == ("positions", True, None)


@pytest.mark.parametrize("dims", [1, 2])
def test_a_convolution_in_no_pair_is_gathered_before_a_norm(dims):
    conv = getattr(keras.layers, f"Conv{dims}D")(32, 3, name="conv")
    model = keras.Sequential([keras.Input((*(8,) * dims, 16)), conv, keras.layers.LayerNormalization()])
    assert choose(model, MESH).activations(f"{conv.path}/output") == WHOLE


def test_batch_norms_are_left_alone():
    inputs = keras.Input((64,))
    y = keras.layers.Dense(64, name="up")(inputs)
    y = keras.layers.LayerNormalization(name="over_features")(keras.layers.BatchNormalization(name="over_batch")(y))
    gathered = choose(keras.Model(inputs, keras.layers.Dense(10, name="odd")(y)), MESH).activations
    assert gathered("over_features/output") == WHOLE and gathered("over_batch/output") is None


def test_a_head_that_does_not_divide_does_not_split_the_steps_of_a_recurrence():
    model, x, _ = layout_models.LAYOUT_MODELS["lstm"]()
    recurrence = next(layer for layer in model.layers if isinstance(layer, keras.layers.GRU))
    assert choose(model, MESH).activations(f"{recurrence.path}/output") == WHOLE
    expected = model.predict(x, verbose=0)
    assert set(program(model, x)) == {"all-reduce"}
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-5)
