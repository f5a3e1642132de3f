"""LoRA of Keras saved for PEFT: PEFT reads what is written, and computes what the model computes."""

import json

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers_cross import adapters, exported_adapters, folders, running

import shardload
from shardload.errors import UnsupportedError, UsageError, WriteError
from shardload.keras_bridge.lora import lora_layers

FIXTURES = folders.read_family(exported_adapters.FAMILY, adapters.FIXTURES)
CASES = {case.name: case for case in exported_adapters.EXPORTS}
MESHES = ("1x8", "2x4", "1x3", "1x1")


def base_of(name, folder):
    fixture = FIXTURES[name]
    return folders.build(folders.read_family(fixture["family"])[fixture["base"]], folder / "base")


@pytest.mark.parametrize(("name", "mesh"), [(name, MESHES[i % 4]) for i, name in enumerate(CASES)])
def test_a_folder_is_the_one_that_peft_read_and_peft_computes_the_same(name, mesh, tmp_path):
    model = exported_adapters.tuned(CASES[name], base_of(name, tmp_path), mesh=mesh)
    report = shardload.save_as(model, tmp_path / "out", to="peft")
    assert report.format == "peft" and report.tensors == len(FIXTURES[name]["tensors"])
    found = exported_adapters.described(tmp_path / "out")
    assert found["config"] == FIXTURES[name]["config"]
    assert found["tensors"] == FIXTURES[name]["tensors"]
    assert running.compare(model, FIXTURES[name]).kind == "equal"


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_loaded_again(name, tmp_path):
    base = base_of(name, tmp_path)
    model = exported_adapters.tuned(CASES[name], base)
    shardload.save_as(model, tmp_path / "out", to="peft")
    merged = shardload.load(base, dtype="float32", mesh="1x3", adapter=tmp_path / "out")
    assert running.compare(merged, FIXTURES[name]).kind == "equal"


def test_an_adapter_that_was_kept_is_written_with_its_own_rank(tmp_path):
    fixture = folders.read_family(adapters.FAMILY, adapters.FIXTURES)["gemma3_text, every linear"]
    base, [adapter] = adapters.build(fixture, tmp_path)
    model = shardload.load(base, dtype="float32", mesh="2x4")
    shardload.load_adapter(model, adapter)
    report = shardload.save_as(model, tmp_path / "out", to="peft")
    assert not report.notes  # blocks of zeros, which Keras' factors have, are left out
    merged = shardload.load(base, dtype="float32", adapter=tmp_path / "out")
    assert running.compare(merged, fixture).kind == "equal"


def test_what_peft_has_no_place_for_is_told(tmp_path):
    base = base_of("gemma2, every layer", tmp_path)
    model = shardload.load(base, dtype="float32")
    with pytest.raises(UnsupportedError, match="it has no LoRA"):
        shardload.save_as(model, tmp_path / "out", to="peft")
    model.backbone.enable_lora(2)
    for options in ({"dtype": "bfloat16"}, {"merge_lora": True}, {"max_shard_bytes": "1GiB"}):
        with pytest.raises(UsageError, match=f"Cannot use {next(iter(options))}= with to='peft'"):
            shardload.save_as(model, tmp_path / "out", to="peft", **options)
    with pytest.raises(UsageError, match="it is a folder"):
        shardload.save_as(model, tmp_path / "out.weights.h5", to="peft")
    with pytest.raises(UnsupportedError, match="to='peft' to write the factors"):
        shardload.save_as(model, tmp_path / "out", to="safetensors")
    shardload.save_as(model, tmp_path / "out", to="peft")
    with pytest.raises(WriteError, match="already exists"):
        shardload.save_as(model, tmp_path / "out", to="peft")
    shardload.save_as(model, tmp_path / "out", to="peft", overwrite=True)
    model.backbone.get_layer("token_embedding").enable_lora(2)
    with pytest.raises(UnsupportedError, match="it is also the output layer"):
        shardload.save_as(model, tmp_path / "other", to="peft")
    assert not (tmp_path / "other").exists()
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    plain.layers[0].enable_lora(2)
    with pytest.raises(UnsupportedError):
        shardload.save_as(plain, tmp_path / "other", to="peft")


def test_a_new_adapter_changes_nothing(tmp_path):
    base = base_of("gemma2, every layer", tmp_path)
    model = shardload.load(base, dtype="float32")
    before = [w.numpy() for w in model.weights]
    model.backbone.enable_lora(2)
    shardload.save_as(model, tmp_path / "out", to="peft")
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["target_modules"] == ["q_proj", "v_proj"]
    merged = shardload.load(base, dtype="float32", adapter=tmp_path / "out")
    assert all(np.array_equal(a, w.numpy()) for a, w in zip(before, merged.weights, strict=True))
    assert all(not v.any() for n, v in load_file(tmp_path / "out/adapter_model.safetensors").items() if "lora_B" in n)
    assert lora_layers(model)
