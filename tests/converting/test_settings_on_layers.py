"""What loading sets on layers, and arguments that KerasHub does not serialise, come back from every file we write."""

import json
import shutil

import jax
import keras
import keras_hub
import numpy as np
import pytest
import small_folders
from hub_settings import settings_of

import shardload
from shardload.errors import SourceError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras 3.15, NumPy 2.4

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
    config = keras.saving.serialize_keras_object(models["bert"])
    other = keras.saving.deserialize_keras_object(config)
    report = shardload.restore(other, path) if to == "step" else shardload.load_weights(other, path)
    assert [note for note in report.notes if "layers of this model have another activation, epsilon" in note]


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
    assert config.get("max_position_embeddings", config.get("n_positions")) == (
        64 if family in ("gpt2", "bert") else None
    )
    assert [note for note in report.notes if "bos_token_id, eos_token_id, pad_token_id, which the source" in note]


@pytest.mark.parametrize(
    "wrong", [3, {"layers": 3}, {"a": {"call": 1.0}}, {"a": {"epsilon": "1"}}, {"a": {"epsilon": -1.0}}]
)
def test_a_wrong_entry_is_refused(wrong, models, tmp_path):
    path = write(models["qwen3"], tmp_path, "preset") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "shardload_attributes": wrong}))
    with pytest.raises(SourceError, match=r"The configuration has .*invalid attribute"):
        shardload.load(tmp_path / "preset", mesh="1x1")
