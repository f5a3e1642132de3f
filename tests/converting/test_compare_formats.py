"""`diff` of formats that name their tensors differently: by the weights of the model."""

import gguf_pairs
import hub_folders
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import shardload
from shardload.comparing import diff
from shardload.synth import synth


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    return synth("gemma2_2b", scale=0.02, directory=tmp_path_factory.mktemp("preset"))


@pytest.fixture
def folder(preset, tmp_path):
    """The same as a Hugging Face folder, whose kernels are transposed."""
    shardload.convert(preset, tmp_path / "hf", to="safetensors")
    return tmp_path / "hf"


def test_equal_models_are_equal(preset, folder):
    for pair in ((preset, folder), (folder, preset)):
        found = diff(*pair)
        assert (found.matched_by, found.differences, found.notes) == ("weight", (), ())
        assert found.equal == len(shardload.inspect(preset).tensors)


def test_what_differs_is_named_by_its_weight(preset, folder):
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    changed = tensors[name].astype(np.float32)
    changed[2, 5] += 1
    tensors[name] = changed.astype(tensors[name].dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    [difference] = diff(preset, folder).differences
    assert difference.name.endswith("decoder_block_1/ffw_linear/kernel")
    assert (difference.what, difference.elements) == ("values", 1)
    assert difference.largest == pytest.approx(1, abs=0.1)


def test_values_that_loading_computes(tmp_path):
    """Mixtral's experts are separate tensors in Hugging Face's files, and one in KerasHub's."""
    made = hub_folders.build(tmp_path / "hf", "mixtral")
    folder = hub_folders.write(tmp_path / "hf", "mixtral", made, "bfloat16", unwanted=False)
    shardload.convert(folder, tmp_path / "preset", to="h5")
    found = diff(folder, tmp_path / "preset")
    assert (found.matched_by, found.differences) == ("weight", ())


def test_files_without_a_model_are_listed_with_the_reason(preset, tmp_path):
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "other.safetensors")
    found = diff(preset, tmp_path / "other.safetensors")
    assert found.matched_by == "tensor"
    assert {d.what for d in found.differences} == {"only in the first", "only in the second"}
    assert "cannot be compared by their models' weights" in found.notes[0]


def test_quantised_values_are_compared_as_loaded(tmp_path):
    source, _ = gguf_pairs.write(tmp_path, "gemma2", "Q8_0")
    shardload.convert(source, tmp_path / "out", to="safetensors")
    for pair in ((source, tmp_path / "out"), (tmp_path / "out", source)):
        found = diff(*pair)
        assert (found.matched_by, found.differences) == ("tensor", ())
        assert f"the values of {source} are quantised: compared after decoding" in found.notes[0]
    assert diff(source, source).notes == ()
