"""Quantised folders as the library of each method writes them: equal, bit for bit, to what it makes of them."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers_cross import folders, quantised

import shardload
from shardload.errors import UnsupportedError

BY_NAME = {case.name: case for case in quantised.CASES}


@pytest.fixture(scope="session")
def fixture_of(request):
    written_now = request.config.getoption("--folders-from")
    folder = written_now / quantised.FIXTURES.name if written_now else quantised.FIXTURES
    return lambda name: folders.read_family(BY_NAME[name].family, folder)[name]


def plain_twin(fixture, folder, to):
    """The plain folder that a quantised one means; each weight is first compared with what its library made of it."""
    tensors = {}
    for name, tensor in shardload.inspect(folder).tensors.items():
        reader = getattr(tensor.storage, "reader", None)
        if reader is None:
            dtype, shape = folders.parse(fixture["files"]["model.safetensors"][name])
            tensors[name] = folders.tensor_values(name, shape, dtype, fixture).astype(np.float32)
        else:
            tensors[name] = reader.read_rows(0, tensor.rows).astype(np.float32)
            assert quantised.digest(tensors[name]) == fixture["weights"][name], name
            for start, stop in np.sort(np.random.default_rng(1).integers(0, tensor.rows + 1, (4, 2))):
                rows = reader.read_rows(int(start), int(stop)).astype(np.float32)
                assert np.array_equal(rows.view("u4"), tensors[name][start:stop].view("u4")), (name, start, stop)
    assert fixture["weights"].keys() <= tensors.keys()
    to.mkdir()
    config = {k: v for k, v in fixture["json"]["config.json"].items() if k != "quantization_config"}
    (to / "config.json").write_text(json.dumps(config))
    save_file(tensors, to / "model.safetensors")
    return to


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", BY_NAME)
def test_weights_are_those_of_the_library_that_wrote_them_on_any_mesh(name, fixture_of, tmp_path):
    fixture = fixture_of(name)
    folder = folders.build(fixture, tmp_path / "quantised")
    plain = plain_twin(fixture, folder, tmp_path / "plain")
    theirs = shardload.load(plain, dtype="float32")
    for mesh in ("1x8", "2x4", "1x3"):
        ours = shardload.load(folder, mesh=mesh, dtype="float32")
        for found, expected in zip(ours.weights, theirs.weights, strict=True):
            assert np.array_equal(np.asarray(found.value).view("u4"), np.asarray(expected.value).view("u4")), mesh


@pytest.mark.parametrize("method", ["modelopt fp8", "modelopt nvfp4"])
def test_older_folders_of_modelopt_say_it_in_a_file_of_their_own(method, fixture_of, tmp_path):
    fixture = fixture_of(f"llama, {method}")
    folder = folders.build(fixture, tmp_path / "quantised")
    expected = shardload.load(folder, dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    said = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    for wanted in (True, False):
        algorithm = said["quant_algo"] if wanted else "W4A8_AWQ"
        beside = {
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": None},
        }
        (folder / "hf_quant_config.json").write_text(json.dumps(beside))
        if wanted:
            found = shardload.load(folder, dtype="float32")
            for ours, theirs in zip(found.weights, expected.weights, strict=True):
                assert np.array_equal(ours.numpy(), theirs.numpy())
    with pytest.raises(UnsupportedError, match="quant_algo='W4A8_AWQ'"):
        shardload.load(folder)


def test_every_case_has_a_fixture_and_every_fixture_a_case():
    paths = quantised.FIXTURES.glob("*.json.gz")
    assert {name for path in paths for name in folders.read_family(path.name[:-8], quantised.FIXTURES)} == set(BY_NAME)


def test_fixtures_are_what_the_libraries_write_now(request, fixture_of):
    """Under ``--folders-from``."""
    if not request.config.getoption("--folders-from"):
        pytest.skip("needs fixtures written now: make folders")
    for name, case in BY_NAME.items():
        assert folders.read_family(case.family, quantised.FIXTURES)[name] == fixture_of(name), name
