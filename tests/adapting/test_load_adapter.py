"""Adapters of PEFT on models in memory: kept as LoRA of Keras, or merged, on any mesh; as PyTorch and PEFT compute."""

import keras
import numpy as np
import peft_folders
import pytest
from transformers_cross import adapters, folders, running

import shardload
from shardload.errors import MismatchError, UnsupportedError, UsageError
from shardload.keras_bridge.lora import lora_layers

FIXTURES = folders.read_family(adapters.FAMILY, adapters.FIXTURES)
MESHES = ("1x8", "2x4", "1x3", "1x1")


def given(fixture, made):
    return made[0] if len(made) == 1 else dict(zip(made, fixture["weights"], strict=True))


@pytest.fixture
def built(tmp_path):
    return lambda name: adapters.build(FIXTURES[name], tmp_path)


@pytest.mark.parametrize(("name", "mesh"), [(name, MESHES[i % 4]) for i, name in enumerate(FIXTURES)])
def test_merged_into_a_live_model_it_computes_what_peft_does(name, mesh, built):
    base, made = built(name)
    model = shardload.load(base, mesh=mesh, dtype="float32")
    shardings = [v.value.sharding for v in model.weights]
    report = shardload.load_adapter(model, given(FIXTURES[name], made), merge=True)
    assert report.layers and not lora_layers(model)
    found = running.compare(model, FIXTURES[name])
    assert found.kind == "equal", found
    assert [v.value.sharding for v in model.weights] == shardings


KEPT = {name: fixture for name, fixture in FIXTURES.items() if len(fixture["adapters"]) == 1}
REFUSED = {
    **dict.fromkeys(("llama, every linear", "llama, ranks and alphas", "llama, rank-stabilised"), "more elements than"),
    "llama, bfloat16": "more elements than", "gpt2, transposed": "more elements than",
    "llama, embedding and head": "Cannot put LoRA onto 'token_embedding/reverse_embeddings', which is 'lm_head.weight'",
}  # fmt: skip
"""Adapters that Keras' factors cannot have, and what the error says."""


@pytest.mark.parametrize(("name", "mesh"), [(name, MESHES[(i + 1) % 4]) for i, name in enumerate(KEPT)])
def test_kept_as_lora_it_computes_what_peft_does(name, mesh, built):
    base, [adapter] = built(name)
    model = shardload.load(base, mesh=mesh, dtype="float32")
    before = [v.path for v in model.weights]
    try:
        report = shardload.load_adapter(model, adapter)
    except UnsupportedError as error:
        assert REFUSED.get(name, "none") in str(error) and "merge=True" in str(error), error
        assert [v.path for v in model.weights] == before and not lora_layers(model)
        return
    assert name not in REFUSED
    assert len(lora_layers(model)) == report.layers
    found = running.compare(model, FIXTURES[name])
    assert found.kind == "equal", found
    lora = [v for v in model.trainable_variables if "lora_" in v.path]
    assert len(lora) == 2 * report.layers and len(model.trainable_variables) >= len(lora)


@pytest.mark.parametrize("mesh", ["1x8", "1x3"])
@pytest.mark.parametrize("name", ["llama, every linear", "gemma3_text, every linear", "llama, two adapters"])
def test_a_base_with_keras_names_gets_it_after_the_load(name, mesh, built, tmp_path):
    base, made = built(name)
    shardload.convert(base, tmp_path / "preset", to="preset")
    model = shardload.load(tmp_path / "preset", mesh=mesh, adapter=given(FIXTURES[name], made))
    found = running.compare(model, FIXTURES[name])
    assert found.kind == "equal", found
    assert any("adapters merged after the load" in note for note in shardload.report(model).notes)
    shardload.convert(tmp_path / "preset", tmp_path / "tuned", to="safetensors", adapter=given(FIXTURES[name], made))
    assert running.compare(shardload.load(tmp_path / "tuned"), FIXTURES[name]).kind == "equal"


def test_an_adapter_of_another_size_is_refused_before_weights_are_read(built, tmp_path):
    base = folders.build(folders.read_family("llama")["llama, untied"], tmp_path / "other")
    shardload.convert(base, tmp_path / "preset", to="preset")
    _, [adapter] = built("llama, every linear")
    with pytest.raises(MismatchError, match="that of the base has"):
        shardload.load(tmp_path / "preset", adapter=adapter)
    model = shardload.load(tmp_path / "preset")
    before = [v.numpy() for v in model.weights]
    for merge in (True, False):
        with pytest.raises(MismatchError, match="that of the base has"):
            shardload.load_adapter(model, adapter, merge=merge)
    assert not lora_layers(model)
    assert all(np.array_equal(a, v.numpy()) for a, v in zip(before, model.weights, strict=True))


def test_what_cannot_be_done_is_told(built):
    base, [adapter] = built("gemma3_text, every linear")
    model = shardload.load(base, dtype="float32")
    with pytest.raises(UsageError, match="several adapters as LoRA"):
        shardload.load_adapter(model, [adapter, adapter])
    with pytest.raises(UsageError, match="adapter=None"):
        shardload.load_adapter(model, None)
    with pytest.raises(UsageError, match="merge="):
        shardload.load_adapter(model, adapter, merge="yes")
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    with pytest.raises(UnsupportedError, match="expected a model of KerasHub"):
        shardload.load_adapter(plain, adapter)
    with shardload.abstract():
        empty = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match=r"has no value\. Load the base model first"):
        shardload.load_adapter(empty, adapter)
    shardload.load_adapter(model, adapter)
    with pytest.raises(UnsupportedError, match="which has LoRA"):
        shardload.load_adapter(model, adapter, merge=True)


def test_an_adapter_takes_the_place_of_one_of_the_same_form(built):
    base, [adapter] = built("gemma3_text, every linear")
    model = shardload.load(base, dtype="float32", mesh="2x4")
    shardload.load_adapter(model, adapter)
    for v in model.trainable_variables:
        v.assign(np.ones(v.shape))
    report = shardload.load_adapter(model, adapter)
    assert any("had before is replaced" in note for note in report.notes)
    assert running.compare(model, FIXTURES["gemma3_text, every linear"]).kind == "equal"


def test_lora_elsewhere_is_not_frozen_silently(built, tmp_path):
    base, [adapter] = built("gemma3_text, every linear")
    model = shardload.load(base, dtype="float32")
    shardload.load_adapter(model, adapter)
    narrow = peft_folders.write(tmp_path / "narrow", base, ("down_proj",))
    with pytest.raises(UnsupportedError, match="already have LoRA, which would stay, frozen"):
        shardload.load_adapter(model, narrow)


def test_what_was_saved_for_peft_is_kept_with_its_own_rank(built, tmp_path):
    base, _ = built("gemma3_text, every linear")
    model = shardload.load(base, dtype="float32")
    model.backbone.enable_lora(3)
    for number, v in enumerate(model.trainable_variables):
        v.assign(np.random.default_rng(number).normal(size=v.shape))
    shardload.save_as(model, tmp_path / "own", to="peft")
    again = shardload.load(base, dtype="float32", mesh="2x4")
    report = shardload.load_adapter(again, tmp_path / "own")
    assert not report.notes
    for one, two in zip(model.trainable_variables, again.trainable_variables, strict=True):
        assert one.path == two.path and one.shape == two.shape
    tokens = running.feed(again.backbone, {"input_ids": np.arange(6, 18).reshape(2, 6)})
    one, two = (m.predict(tokens, verbose=0) for m in (model, again))
    np.testing.assert_allclose(one, two, atol=2e-5 * np.abs(one).max())
