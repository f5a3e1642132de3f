"""What loading sets on layers, and arguments that KerasHub does not serialise: what comes back from which file."""

import json
import re
import shutil
from pathlib import Path

import hub_folders
import jax
import keras
import keras_hub
import numpy as np
import pytest
import small_folders
from by_hand import check_same
from hub_folders import settings_of
from safetensors.numpy import load_file, save_file
from saved_steps import let_save

import shardload
from shardload.converting.source import some
from shardload.errors import SourceError, UnsupportedError
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.saving import saved_objects

WRITTEN = ("preset", "m.weights.h5", "m.weights.json", "step", "orbax")
FOLDERS = {
    "qwen3": {"rms_norm_eps": 1e-6},  # KerasHub's norms of queries and keys have a constant epsilon
    "bert": {"hidden_act": "gelu", "layer_norm_eps": 1e-6},
    "llama": {"tie_word_embeddings": True},
}


def write(model, folder, to):
    if to == "step":
        shardload.save(model, folder / to, step=0)
    elif to == "orbax":
        shardload.convert(write(model, folder, "preset"), folder / to, to=to)
    else:
        shardload.save_as(model, folder / to, to=None if "." in to else to)
    return folder / to


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    written = {name: small_folders.write(folder / name, name, **entries) for name, entries in FOLDERS.items()}
    return {name: shardload.load(path, mesh="1x1") for name, path in written.items()}


@pytest.mark.parametrize("name", ["m.weights.h5", "m.weights.json"])
def test_a_task_comes_back_as_a_task(name, tmp_path):
    folder = small_folders.write(tmp_path / "hf", "gpt2", architectures=["GPT2LMHeadModel"])
    shardload.convert(folder, tmp_path / name)
    model = shardload.load(tmp_path / name, mesh="1x1")
    assert type(model) is keras_hub.models.GPT2CausalLM
    model.load_weights(tmp_path / name)


@pytest.mark.parametrize("to", WRITTEN)
@pytest.mark.parametrize("family", FOLDERS)
def test_a_model_comes_back_with_its_settings(family, to, models, tmp_path):
    found = shardload.load(write(models[family], tmp_path, to), mesh="1x1")
    assert type(found) is type(models[family])
    assert settings_of(found) == settings_of(models[family])


def test_outputs_are_equal(models, tmp_path):
    tokens = small_folders.TOKENS
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    found = shardload.load(write(models["qwen3"], tmp_path, "preset"), mesh="1x1")
    one, two = (np.asarray(jax.jit(model)(inputs)) for model in (models["qwen3"], found))
    assert one.tobytes() == two.tobytes()


def test_a_second_copy_has_the_settings_too(models, tmp_path):
    write(shardload.load(write(models["bert"], tmp_path, "preset"), mesh="1x1"), tmp_path / "again", "step")
    assert settings_of(shardload.load(tmp_path / "again/step", mesh="1x1")) == settings_of(models["bert"])


@pytest.mark.parametrize("to", ["preset", "step", "m.weights.h5"])
def test_values_in_a_model_with_other_settings_are_reported(to, models, tmp_path):
    path = write(models["bert"], tmp_path, to)
    other = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(models["bert"]))
    report = shardload.restore(other, path) if to == "step" else shardload.load_weights(other, path)
    assert [note for note in report.notes if "layers of this model have another activation, epsilon" in note]


IN_LAYERS = {
    "bert": ({"hidden_act": "gelu", "layer_norm_eps": 1e-6}, {"hidden_act": "gelu_new", "layer_norm_eps": 1e-12}),
    "gpt2": ({"activation_function": "gelu", "layer_norm_epsilon": 1e-6}, {"activation_function": "gelu_new"}),
    "gemma": ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-5}),
    "qwen3": ({"rms_norm_eps": 1e-6}, {"rms_norm_eps": 1e-6}),
}
"""Fields that are set on layers; what is left of them in a file of Keras."""


@pytest.mark.parametrize("family", IN_LAYERS)
def test_config_json_says_what_the_layers_have(family, tmp_path):
    set_on_layers, usual = IN_LAYERS[family]
    task = {} if family == "bert" else {"architectures": ["ForCausalLM"]}
    model = shardload.load(small_folders.write(tmp_path / "hf", family, **task, **set_on_layers), mesh="1x1")
    model.save(tmp_path / "m.keras")
    for source, wanted in ((write(model, tmp_path, "step"), set_on_layers), (tmp_path / "m.keras", usual)):
        report = shardload.convert(source, tmp_path / f"from {source.stem}", to="safetensors")
        assert json.loads((Path(report.target) / "config.json").read_text()).items() >= wanted.items()
        one, two = (settings_of(shardload.load(path, mesh="1x1")) for path in (source, report.target))
        differ = one != two
        assert differ == any("in config.json, but " in note for note in report.notes)
        assert not differ or source.name == "m.keras"


def test_a_backbone_that_comes_back_as_a_task_is_said_to(models, tmp_path):
    report = shardload.convert(write(models["qwen3"], tmp_path, "step"), tmp_path / "out", to="safetensors")
    says = "config.json names Qwen3ForCausalLM, so the folder loads as Qwen3CausalLM; this is a Qwen3Backbone"
    assert says in report.notes
    assert type(shardload.load(tmp_path / "out", mesh="1x1")) is keras_hub.models.Qwen3CausalLM


def test_layers_of_two_epsilons_are_said_to_be_written_with_one(models, tmp_path):
    models["qwen3"].save(tmp_path / "m.keras")
    report = shardload.convert(tmp_path / "m.keras", tmp_path / "out", to="safetensors")
    (note,) = [note for note in report.notes if "in config.json, but " in note]
    wanted = "1e-06 in config.json, but 1e-05 in 4 layers in this model, so results of the written one differ"
    assert note == f"rms_norm_eps: {wanted}"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("epsilon", 1e-2, r"layer_norm_eps is 1e-12 in the configuration, but 0.01 in 1 layer in the model"),
        ("activation", keras.activations.elu, r"hidden_act is gelu_new in the configuration, but elu in the model"),
    ],
)
def test_layers_that_no_configuration_describes_are_refused(name, value, says, tmp_path):
    model = keras_hub.models.BertBackbone(48, 2, 4, 32, 56, max_sequence_length=16)
    layers = [layer for _, layer in saved_objects(model) if hasattr(layer, name) and "pool" not in layer.name]
    setattr(layers[-1], name, value)
    with pytest.raises(UnsupportedError, match=f"Cannot describe BertBackbone in .*: {says}. Choose the format preset"):
        shardload.save_as(model, tmp_path / "out", to="safetensors")
    for layer in layers:
        setattr(layer, name, value)
    with pytest.raises(UnsupportedError, match="Cannot describe BertBackbone in a Hugging Face configuration"):
        shardload.save_as(model, tmp_path / "out", to="safetensors")


def test_arguments_that_kerashub_does_not_serialise_are_said(models, tmp_path):
    (tmp_path / "hf").mkdir()
    folder = hub_folders.write(tmp_path / "hf", "qwen2_moe", hub_folders.build(tmp_path / "hf", "qwen2_moe"))
    model = shardload.load(folder, mesh="1x1", ignore=["model.unwanted.weight"])
    (note,) = [note for note in shardload.report(model).notes if note.startswith("router_aux_loss_coefficient: 0.01")]
    assert note.endswith("save_to_preset() and save() of Keras do not: what they write has 0.001 again")
    assert [note for note in shardload.report(models["llama"]).notes if note.startswith("tie_word_embeddings: True,")]
    model.save(tmp_path / "m.keras")
    assert backbone_of(shardload.load(tmp_path / "m.keras", mesh="1x1")).router_aux_loss_coefficient == 0.001


def save_by_keras(model, target):
    if target.suffix == ".keras":
        model.save(target)
    elif target.name == "preset":
        model.save_to_preset(target)
    else:
        model.compile("sgd", "mse")
        let_save(keras.callbacks.OrbaxCheckpoint(target), model)
    return target


@pytest.mark.sample(2)
@pytest.mark.parametrize("to", ["m.keras", "preset", "run"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["LlamaModel", "LlamaForCausalLM"])
def test_a_tied_llama_that_keras_wrote_is_tied(architecture, tied, to, tmp_path):
    folder = small_folders.write(tmp_path / "hf", "llama", tie_word_embeddings=tied, architectures=[architecture])
    model = shardload.load(folder, mesh="1x1")
    saved = save_by_keras(model, tmp_path / to)
    for path in (saved, shardload.convert(saved, tmp_path / "out", to="orbax").target):
        found = shardload.load(path, mesh="1x1")
        assert backbone_of(found).tie_word_embeddings == backbone_of(model).tie_word_embeddings
        check_same(found, model)


PARTS = {
    "bert": ("BertForMaskedLM", r"pooler\..*", "BertForMaskedLM has no pooler: pooled_dense/kernel, pooled_dense/bias"),
    "albert": ("AlbertForMaskedLM", r".*pooler\..*", "AlbertForMaskedLM has no pooler: "),
    "mistral": ("MistralModel", r"lm_head\.weight", "MistralModel has no output layer: token_embedding/reverse"),
}


@pytest.mark.parametrize("family", PARTS)
def test_a_part_that_the_class_lacks_is_no_reason_to_refuse(family, tmp_path):
    architecture, part, says = PARTS[family]
    (tmp_path / "hf").mkdir()
    folder = hub_folders.write(tmp_path / "hf", family, hub_folders.build(tmp_path / "hf", family), unwanted=False)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if not re.fullmatch(part, name)}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    loaded = shardload.report(shardload.load(folder, mesh="1x1")).notes
    (note,) = [note for note in shardload.convert(folder, tmp_path / "out", to="preset").notes if says in note]
    assert note in loaded
    assert shardload.report(shardload.load(tmp_path / "out", mesh="1x1")).missing == ()


def test_a_name_that_repeats_is_listed_once():
    assert some(["a", "b", "a", "a"]) == "'a' (3 times), 'b'"
    assert some("abcdeffgg") == "'a', 'b', 'c', 'd', 'e' and 4 more"
    assert some("ab") == "'a', 'b'"


TOKENS = {"max_position_embeddings": 128, "bos_token_id": 7, "eos_token_id": [3, 4], "pad_token_id": 9}


@pytest.mark.parametrize("through", ["m.weights.h5", "preset", "orbax"])
def test_the_longest_text_and_token_ids_go_back_to_hugging_face(through, tmp_path):
    folder = small_folders.write(tmp_path / "hf", "llama", **TOKENS)
    shardload.convert(folder, tmp_path / through, to=None if "." in through else through)
    shardload.convert(tmp_path / through, tmp_path / "back", to="safetensors")
    assert json.loads((tmp_path / "back/config.json").read_text()).items() >= TOKENS.items()


@pytest.mark.parametrize(
    "family", ["gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3", "gpt2", "bert"]
)
def test_what_the_source_does_not_know_is_left_out_and_said(family, tmp_path):
    shardload.convert(small_folders.write(tmp_path / "hf", family), tmp_path / "preset", to="preset")
    shutil.rmtree(tmp_path / "preset/transformers")  # as in a preset of KerasHub
    report = shardload.convert(tmp_path / "preset", tmp_path / "out", to="safetensors")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert not {"bos_token_id", "eos_token_id", "pad_token_id"} & config.keys()
    longest = config.get("max_position_embeddings", config.get("n_positions"))
    assert longest == (64 if family in ("gpt2", "bert") else None)
    assert [note for note in report.notes if "bos_token_id, eos_token_id, pad_token_id, which the source" in note]


@pytest.mark.parametrize(
    "wrong", [3, {"layers": 3}, {"a": {"call": 1.0}}, {"a": {"epsilon": "1"}}, {"a": {"epsilon": -1.0}}]
)
def test_a_wrong_entry_is_refused(wrong, models, tmp_path):
    path = write(models["qwen3"], tmp_path, "preset") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "shardload_attributes": wrong}))
    with pytest.raises(SourceError, match=r"The configuration has .*invalid attribute"):
        shardload.load(tmp_path / "preset", mesh="1x1")
