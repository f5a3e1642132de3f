"""Adapters of PEFT merged into what a conversion writes: the same values as in a load."""

import json
import shutil

import numpy as np
import peft_folders
import pytest
import quantised_folders
import warm_start
from conversions import same
from progress_calls import AfterShare
from safetensors.numpy import load_file
from transformers_cross import adapters, folders, running, table
from transformers_cross.cases import CASES

import shardload
from shardload.cli import main
from shardload.errors import UsageError

LINEAR = ("q_proj", "o_proj", "query", "q_lin", "c_attn", "out_proj", "attention.dense", "dense", "qkv_proj", "fc1")
EXPECTED = table.read()
BASES = {case.family: case.name for case in reversed(CASES) if EXPECTED[case.name].ours == "loads"}
"""The first folder of each family that loads."""
NO_PRESET = ("dinov2", "dinov2_with_registers")
"""Families that `convert` writes as no preset, as a layer of KerasHub computes what it saves."""
FIXTURES = folders.read_family(adapters.FAMILY, adapters.FIXTURES)


def given(fixture, made):
    return made[0] if len(made) == 1 else dict(zip(made, fixture["weights"], strict=True))


@pytest.fixture
def built(tmp_path):
    return lambda name: adapters.build(FIXTURES[name], tmp_path)


@pytest.mark.parametrize("to", ["safetensors", "preset", "orbax"])
@pytest.mark.parametrize("name", ["llama, every linear", "gemma3_text, every linear", "llama, two adapters"])
def test_a_merged_export_computes_what_peft_does(name, to, built, tmp_path):
    base, made = built(name)
    shardload.convert(base, tmp_path / "out", to=to, adapter=given(FIXTURES[name], made))
    model = shardload.load(tmp_path / "out", mesh="1x3")
    found = running.compare(model, FIXTURES[name])
    assert found.kind == "equal", found


@pytest.mark.parametrize("name", FIXTURES)
def test_a_merged_copy_has_the_bits_of_a_merged_load(name, built, tmp_path):
    base, made = built(name)
    adapter = given(FIXTURES[name], made)
    report = shardload.convert(base, tmp_path / "out", to="safetensors", adapter=adapter)
    assert any("merged into" in note for note in report.notes)
    own, plain = load_file(tmp_path / "out" / "model.safetensors"), load_file(base / "model.safetensors")
    assert own.keys() == plain.keys()
    assert {k: v.dtype for k, v in own.items() if k in FIXTURES[name]["merged"]} == {
        k: v.dtype for k, v in plain.items() if k in FIXTURES[name]["merged"]
    }
    one = shardload.load(tmp_path / "out", dtype="float32")
    two = shardload.load(base, adapter=adapter)
    if plain["model.norm.weight" if "model.norm.weight" in plain else "transformer.ln_f.weight"].dtype == "float32":
        assert all(a.tobytes() == b.tobytes() for a, b in zip(one.get_weights(), two.get_weights(), strict=True))


def test_a_conversion_with_other_weights_begins_again(built, tmp_path):
    base, [one, two] = built("llama, two adapters")
    with pytest.raises(KeyboardInterrupt):
        progress = AfterShare(KeyboardInterrupt, 0.5, stage="Converting")
        shardload.convert(base, tmp_path / "out", to="safetensors", adapter={one: 0.5, two: 0.25}, progress=progress)
    report = shardload.convert(base, tmp_path / "out", to="safetensors", adapter={one: 0.5, two: 0.5})
    assert not report.resumed
    shardload.convert(base, tmp_path / "again", to="safetensors", adapter={one: 0.5, two: 0.5})
    assert same(tmp_path / "out", tmp_path / "again")


def test_an_adapter_is_not_overwritten_by_its_result(built, tmp_path):
    base, [adapter] = built("llama, every linear")
    shutil.copytree(base, tmp_path / "out")
    shutil.move(adapter, tmp_path / "out" / "adapter")
    with pytest.raises(UsageError, match="one contains the other"):
        shardload.convert(base, tmp_path / "out", to="safetensors", adapter=tmp_path / "out/adapter", overwrite=True)


def test_an_adapter_next_to_its_weights_is_not_copied_again(built, tmp_path):
    base, [adapter] = built("llama, every linear")
    for file in adapter.iterdir():
        shutil.copy(file, base)
    shardload.convert(base, tmp_path / "out", to="safetensors", adapter=base)
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith("adapter")]
    assert running.compare(shardload.load(base, adapter=base), FIXTURES["llama, every linear"]).kind == "equal"


def test_the_command_merges_too(built, tmp_path):
    base, [one, two] = built("llama, two adapters")
    options = ["--to", "safetensors", "--adapter", f"{one}=0.5", "--adapter", f"{two}=0.25"]
    done = warm_start.run(["-m", "shardload", "convert", base, "out", *options], cwd=tmp_path)
    assert done.returncode == 0 and "0.25 times the adapter" in done.stderr, done.stderr
    shardload.convert(base, tmp_path / "again", to="safetensors", adapter={one: 0.5, two: 0.25})
    assert same(tmp_path / "out", tmp_path / "again")
    options = ["--adapter", f"{one}=0.5", "--adapter", f"{two}=0.25", "--mesh", "1x3", "--json"]
    done = warm_start.run(["-m", "shardload", "load", base, *options], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert any("0.5 times the adapter" in note for note in json.loads(done.stdout)["notes"])


@pytest.mark.parametrize("method", ["packed 4 channels", "nf4 nested", "fp8 blocks"])
def test_a_quantised_base_is_merged_and_written_dequantised(method, tmp_path):
    quantised_folders.write(tmp_path / "base", method)
    adapter = peft_folders.write(tmp_path / "adapter", tmp_path / "base", ("down_proj",), rank=3, alpha=6)
    one, two = (shardload.load(base, adapter=adapter, dtype="float32", mesh="1x3") for base in bases(tmp_path))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(one.get_weights(), two.get_weights(), strict=True))
    for base, out in zip(bases(tmp_path), ("one", "two"), strict=True):
        shardload.convert(base, tmp_path / out, to="safetensors", dtype="float32", adapter=adapter)
    assert same(tmp_path / "one", tmp_path / "two")
    shardload.convert(tmp_path / "base", tmp_path / "three", to="safetensors", adapter=adapter)
    assert "quantization_config" not in (tmp_path / "three" / "config.json").read_text()
    three = shardload.load(tmp_path / "three", dtype="float32")
    for a, b in zip(one.get_weights(), three.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-8, atol=1e-6)  # a base in 16 bits is written in 16 bits


def bases(folder):
    return folder / "base", folder / "base" / "plain"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", BASES)
def test_every_family_is_merged_alike_in_each_format(model_type, tmp_path):
    """In a copy, and in a preset, which a model of KerasHub is built for."""
    base = folders.build(folders.read_family(model_type)[BASES[model_type]], tmp_path / "base")
    names = [name for name, tensor in shardload.inspect(base).tensors.items() if len(tensor.shape) == 2]
    ends = [end for end in LINEAR if any(name.endswith(f"{end}.weight") for name in names)]
    assert ends
    adapter = peft_folders.write(tmp_path / "adapter", base, ends)
    shardload.convert(base, tmp_path / "copy", to="safetensors", adapter=adapter)
    formats = ("copy", "preset") if model_type not in NO_PRESET else ("copy",)
    if "preset" in formats:
        shardload.convert(base, tmp_path / "preset", to="preset", adapter=adapter)
    found = [shardload.load(tmp_path / name, mesh="1x3").get_weights() for name in formats]
    found.append(shardload.load(base, adapter=adapter).get_weights())
    plain = shardload.load(base).get_weights()
    for others in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], others, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(found[0], plain, strict=True))


def test_a_weight_that_is_no_number(tmp_path, capfd):
    (tmp_path / "adapter").mkdir()
    assert main(["load", "missing", "--adapter", f"{tmp_path}/adapter=abc"]) == 2
    assert "Invalid value for --adapter: 'abc' is no number" in capfd.readouterr().err
