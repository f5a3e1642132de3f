"""Layouts of whole models: every transformer family pairs as Megatron does, divides evenly, and reports the rest."""

import functools

import keras
import keras_hub
import models
import numpy as np
import pytest
from layout_models import LAYOUT_MODELS, MESHES, loss_for

import shardload
from shardload.keras_bridge.model_state import state_of
from shardload.keras_bridge.recording import record_variables
from shardload.keras_bridge.variables import has_value
from shardload.parallel import choose, fit, smallest_mesh
from shardload.sharding.mesh import MeshSpec


@functools.cache
def family(name):
    """Built without values: a layout is arithmetic."""
    with record_variables():
        return models.build(name)


def choice(name, mesh, **named):
    return choose(family(name), MeshSpec.parse(mesh, **named))


def layout(found, ending):
    (spec,) = {str(v.layout) for v in found.variables if v.path.endswith(ending)}
    return spec


@pytest.mark.parametrize("name", ["gemma2", "llama", "mistral", "qwen3", "phi3"])
def test_decoders_split_by_heads_features_and_vocabulary(name):
    found = choice(name, "4x2")
    assert found.fallbacks == ()
    assert "model" in layout(found, "query/kernel").split(",")[0 if name == "gemma2" else 1]
    assert layout(found, "attention_output/kernel") == "(model, -, -)"
    assert layout(found, "token_embedding/embeddings") == "(model, -)"
    rows = [v for v in found.variables if v.rule == "row"]
    columns = [v for v in found.variables if v.rule == "column"]
    assert (len(rows), len(columns)) == (2, 4)  # gate and up to a down, in each of two blocks


@pytest.mark.parametrize("name", ["gpt2", "opt", "bert", "roberta"])
def test_attention_layers_of_keras_split_by_heads_with_their_biases(name):
    found = choice(name, "2x4")
    assert layout(found, "query/kernel") == "(-, model, -)"
    assert layout(found, "query/bias") == "(model, -)"
    assert layout(found, "attention_output/bias") == "(-)"
    assert layout(found, "feedforward_intermediate_dense/bias") == "(model)"
    assert layout(found, "feedforward_output_dense/kernel") == "(model, -)"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gemma1", "1 head does not divide by 8; its 64 input features are split instead"),
        ("gemma2", "4 heads do not divide by 8; its 72 input features are split instead"),
        ("gemma3", "4 heads do not divide by 8; its 40 output features are split instead"),
        ("gpt2", "257 vocabulary entries do not divide by 8; its 96 features are split instead"),
    ],
)
def test_what_does_not_divide_is_a_fallback(name, why):
    assert why in {f.why for f in choice(name, "1x8").fallbacks}


def test_a_fallback_says_what_was_wanted_and_what_came():
    found = {f.variable: f for f in choice("gemma2", "1x8").fallbacks}
    fallback = found["decoder_block_0/attention/key/kernel"]
    assert (fallback.wanted, fallback.got) == ("(model, -, -)", "(-, model, -)")
    assert "decoder_block_0/attention/query/kernel" not in found


@pytest.mark.parametrize("name", models.BUILDERS)
@pytest.mark.parametrize("mesh", ["1x8", "2x4", "1x3", "8x1", "1x1"])
def test_every_layout_divides_and_every_variable_has_one(name, mesh):
    found = choice(name, mesh)
    by_id = {id(v): v for v in state_of(family(name))}
    assert found.layouts.keys() == by_id.keys()
    assert all(found.layouts[k].divides(tuple(v.shape)) for k, v in by_id.items())
    assert sum(v.device_bytes for v in found.variables) == found.device_bytes <= found.nbytes


@pytest.mark.parametrize("name", [*models.DECODERS, *models.ENCODERS])
@pytest.mark.parametrize("mesh", ["1x8", "2x4"])
def test_devices_hold_their_share(name, mesh):
    found = choice(name, mesh)
    positions = sum(v.nbytes for v in found.variables if v.rule == "positions")  # replicated on purpose
    share = (found.device_bytes - positions) * found.mesh.sizes[-1]
    assert share < 1.07 * (found.nbytes - positions)  # norms and seeds of tiny models


def test_a_mesh_without_an_axis_for_weights_splits_nothing_and_says_so():
    found = choice("gemma2", "8x1")
    assert found.sharded == 0 and found.fallbacks == found.replicated_large == ()
    assert "no axis to split weights over" in found.summary()


def test_axes_in_the_middle_split_a_second_dim():
    found = choice("llama", "2x2x2", axes="data,fsdp,model")
    assert layout(found, "query/kernel") == "(fsdp, model, -)"
    assert layout(found, "feedforward_output_dense/kernel") == "(model, fsdp)"
    assert layout(found, "token_embedding/embeddings") == "(model, fsdp)"
    assert found.device_bytes * 4 < 1.05 * found.nbytes


def test_large_variables_left_whole_are_listed():
    found = choose(keras.Sequential([keras.Input((601,)), keras.layers.Dense(601, name="odd")]), MeshSpec.parse("1x8"))
    (path,) = found.replicated_large
    assert path.endswith("odd/kernel") and f"replicated though large: {path}" in found.summary()


def test_replicated_is_what_it_says():
    found = choose(family("gemma2"), MeshSpec.parse("1x8"), "replicated")
    assert found.sharded == 0 and found.fallbacks == found.replicated_large == ()
    assert set(found.rules.values()) == {"replicated"}


def test_the_summary_groups_fallbacks():
    text = choice("gemma2", "1x8").summary()
    assert "decoder_block_0/attention/key/kernel and 3 more: 4 heads do not divide by 8" in text


def test_the_smallest_mesh_leaves_a_margin():
    model = family("llama")
    whole = choose(model, MeshSpec.parse("1x1")).nbytes
    assert str(smallest_mesh(model, 2 * whole).mesh) == "batch=1,model=1"
    assert str(smallest_mesh(model, whole).mesh) == "batch=1,model=2"
    assert smallest_mesh(model, whole // 3).device_bytes <= 0.9 * whole // 3
    assert not fit(model, MeshSpec.parse("1x2"), whole // 3).fits


def test_a_mesh_that_saves_nothing_is_not_the_last_one_tried():
    # On four devices the second kernel is whole again: 2 x 309 columns and 511 rows do not divide by four.
    inputs = [keras.Input((512,)), keras.Input((511,))]
    layers = [keras.layers.Dense(n, use_bias=False) for n in (1024, 618)]
    model = keras.Model(inputs, [layer(x) for layer, x in zip(layers, inputs, strict=True)])
    needs = [choose(model, MeshSpec.parse(f"1x{n}")).device_bytes for n in (2, 4, 8)]
    assert needs[2] < needs[0] < needs[1]
    assert smallest_mesh(model, int(1.02 * needs[2] / 0.9)).mesh.size == 8


def test_no_mesh_is_small_enough_for_no_memory():
    assert smallest_mesh(family("llama"), 1024) is None


@pytest.mark.parametrize("mesh", ["fsdp=4,tp=1", "tp=1,fsdp=4", "zero=4", "data=1,fsdp=4,model=1"])
def test_an_fsdp_axis_splits_every_weight_wherever_it_stands(mesh):
    found = choice("gemma2", mesh)
    axis = mesh.partition("=4")[0].rpartition(",")[2]
    kernels = [v for v in found.variables if len(v.shape) > 1]
    assert kernels and all(axis in str(v.layout) for v in kernels)
    assert found.fallbacks == () and found.idle_axes == ()
    assert found.device_bytes < 0.3 * found.nbytes


def test_tensor_parallelism_comes_before_fsdp_in_any_order():
    one, other = choice("gemma2", "tp=2,fsdp=2"), choice("gemma2", "fsdp=2,tp=2")
    assert [str(v.layout) for v in one.variables] == [str(v.layout) for v in other.variables]
    assert layout(one, "attention_output/kernel") == "(tp, -, fsdp)"


def test_an_axis_for_data_splits_no_weight_wherever_it_stands():
    for mesh in ("data=8", "model=1,dp=8"):
        found = choice("gemma2", mesh)
        assert found.sharded == 0 and found.fallbacks == () and found.idle_axes == ()
        assert "splits the batch: this mesh has no axis to split weights over" in found.summary()


def test_an_axis_for_experts_splits_stacked_matrices():
    sizes = {"num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 32, "intermediate_dim": 64}
    with record_variables():
        mixtral = keras_hub.models.MixtralBackbone(vocabulary_size=64, num_layers=1, num_experts=4, top_k=2, **sizes)
    found = choose(mixtral, MeshSpec.parse("expert=2,model=2"))
    experts = {v.path.rsplit("/", 1)[-1]: str(v.layout) for v in found.variables if "expert" in str(v.layout)}
    prefix = "expert_feedforward"
    assert experts == {
        f"{prefix}_gate_dense": "(expert, -, model)",
        f"{prefix}_intermediate_dense": "(expert, -, model)",
        f"{prefix}_output_dense": "(expert, model, -)",
    }
    assert layout(found, "attention_output/kernel") == "(model, -, -)"


def test_an_axis_that_splits_nothing_is_named_where_there_is_something_to_split():
    model = keras.Sequential([keras.Input((1009,)), keras.layers.Dense(1013)])  # primes: nothing divides
    found = choose(model, MeshSpec.parse("data=2,tp=4"))
    (note,) = found.idle_notes
    assert note.startswith("axis 'tp' of the mesh data=2,tp=4 splits no weight") and note in found.summary()
    small = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])
    assert choose(small, MeshSpec.parse("data=2,tp=4")).idle_notes == ()
    assert choose(model, MeshSpec.parse("data=2,tp=4"), "replicated").idle_notes == ()


def test_what_an_unknown_axis_is_used_for_is_said():
    found = choice("gemma2", "x=2,y=4")
    assert [note.split(";")[0] for note in found.guess_notes] == [
        "axis 'x' of the mesh is used as the batch axis because of its position",
        "axis 'y' of the mesh is used as the model axis because of its position",
    ]
    assert choice("gemma2", "2x4").guess_notes == ()


def test_an_expert_axis_that_does_not_divide_the_experts_splits_each_of_them():
    with shardload.abstract():
        moe = keras_hub.models.QwenMoeBackbone(
            100, 1, 4, 4, 64, 128, moe_intermediate_dim=32, shared_expert_intermediate_dim=32, num_experts=6, top_k=2
        )
    found = choose(moe, MeshSpec.parse("data=2,expert=4"))
    kernels = [v for v in found.variables if "/experts/" in v.path]
    assert len(kernels) == 2 and all(v.layout.parts[0] == 1 and v.device_bytes == v.nbytes // 4 for v in kernels)
    assert [v.fallback.why.split(";")[0] for v in kernels] == ["6 matrices do not divide by 4"] * 2
    others = [v for v in found.variables if "/experts/" not in v.path]
    assert all(v.layout.is_replicated and v.fallback is None for v in others)
    divided = choose(moe, MeshSpec.parse("data=2,expert=2"))
    assert divided.fallbacks == () and divided.variables[0].layout.is_replicated


# ---- the reduced models themselves ---------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUT_MODELS)
def test_model_is_built_without_values_and_gets_a_layout_on_every_mesh(name):
    with shardload.abstract():
        model = LAYOUT_MODELS[name]().model
    choices = [choose(model, MeshSpec.parse(mesh)) for mesh in MESHES]
    assert model.variables and not any(map(has_value, model.variables))
    assert any(choice.sharded for choice in choices if choice.mesh.sizes != (8, 1))


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUT_MODELS)
def test_a_training_step_lowers_the_loss_of_the_batch(name):
    keras.utils.set_random_seed(0)
    model, inputs, target = LAYOUT_MODELS[name]()
    model.compile(keras.optimizers.SGD(0.03), loss_for(target))
    before, after = (model.train_on_batch(inputs, target, return_dict=True)["loss"] for _ in range(2))
    assert np.isfinite(before) and after < before
