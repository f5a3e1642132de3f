"""docs/how-to/add-a-family.md works as written: its family, in a package of its own, announced by its entry point."""

import dataclasses
import json
import os
import re
from pathlib import Path

import gguf
import gguf_pairs
import numpy as np
import pytest
import warm_start
from checkpoints import finish_gguf
from safetensors.numpy import load_file, save_file

import shardload
from shardload.errors import UnsupportedError, UsageError
from shardload.families import Family, ModelType, register, unregister
from shardload.families.registry import GROUP
from shardload.loaders import open_manifest

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "add-a-family.md").read_text(encoding="utf-8")
MODULE, PROGRAM = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
(TOML,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def site(tmp_path):
    """A folder with the page's package, installed."""
    folder = tmp_path / "site"
    (folder / "acme_models").mkdir(parents=True)
    (folder / "acme_models" / "acme.py").write_text(MODULE, encoding="utf-8")
    about = folder / "acme_models-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-models\nVersion: 1.0\n")
    assert TOML.startswith(f'[project.entry-points."{GROUP}"]\n')
    (about / "entry_points.txt").write_text(f"[{GROUP}]\n{TOML.partition(chr(10))[2].replace(chr(34), '')}")
    return folder


@pytest.fixture
def acme():
    """The page's family, registered in this process."""
    names = {}
    exec(compile(MODULE, "add-a-family.md", "exec"), names)  # our own page
    register(names["FAMILY"])
    yield names["FAMILY"]
    unregister("acme")


def test_the_program_of_the_page_runs_with_the_installed_package(site, tmp_path):
    paths = os.pathsep.join([os.environ["PYTHONPATH"], str(site)])
    env = {**os.environ, "PYTHONPATH": paths, "SHARDLOAD_HOME": str(tmp_path / "root"), "KERAS_BACKEND": "jax"}
    assert "acme_1b" in warm_start.run(["-c", PROGRAM], env=env, cwd=tmp_path, check=True).stdout


@pytest.fixture
def folder(acme, tmp_path):
    """A small checkpoint with random weights."""
    path = tmp_path / "hf"
    path.mkdir()
    config = {
        **acme.sizes["acme_1b"],
        **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64},
    }
    (path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    tensors = acme.model_types[0].tensors(config)
    save_file({one.name: rng.normal(size=one.shape).astype("float32") for one in tensors}, path / "model.safetensors")
    return path


def test_a_checkpoint_loads_as_the_llama_that_it_is(folder, tmp_path):
    llama = tmp_path / "llama"
    llama.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    (llama / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    found, expected = (shardload.load(path, mesh="1x2", dtype="float32") for path in (folder, llama))
    assert all(map(np.array_equal, found.get_weights(), expected.get_weights()))


def write_gguf(folder, into, architecture):
    blocks = architecture.block_names.items()
    names = {f"model.layers.{i}.{hf}": f"blk.{i}.{own}" for i in range(2) for own, hf in blocks}
    names |= {hf: own for own, hf in architecture.top_names.items()}
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(into / "acme.gguf"), architecture.name)
    gguf_pairs.describe(writer, {**config, "head_dim": 8, "rope_theta": 1e4})
    for name, value in load_file(folder / "model.safetensors").items():
        stem, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names[stem]}.{suffix}", value)
    finish_gguf(writer)
    return into / "acme.gguf"


def test_a_gguf_file_loads_as_its_folder(acme, folder, tmp_path):
    file = write_gguf(folder, tmp_path, acme.gguf[0])
    found, expected = (shardload.load(path, mesh="1x2", dtype="float32") for path in (file, folder))
    assert all(map(np.array_equal, found.get_weights(), expected.get_weights()))


def test_a_gguf_file_of_a_kind_that_no_family_has_is_refused(acme, folder, tmp_path):
    unregister("acme")
    other = dataclasses.replace(acme.gguf[0], applies=lambda values: values.has("expert_count"))
    register(dataclasses.replace(acme, gguf=(other,)))
    reason = open_manifest(write_gguf(folder, tmp_path, acme.gguf[0])).undescribed
    assert "has the architecture 'acme', which is not supported" in str(reason)


def test_names_of_families_and_model_types_are_unique():
    with pytest.raises(UsageError, match="the name is taken"):
        register(Family(name="llama", title="Llama"))
    with pytest.raises(UsageError, match="its model_type 'llama' belongs to 'llama'"):
        register(Family(name="mine", title="Mine", model_types=(ModelType(name="llama"),)))


@pytest.mark.parametrize(
    ("text", "match"), [("FAMILY = None", "expected its Family"), ("import nothing_at_all", "failed")]
)
def test_a_package_that_cannot_be_used_is_named(text, match, site, tmp_path):
    (site / "acme_models" / "acme.py").write_text(text)
    code = "from shardload.families.registry import families; families()"
    paths = os.pathsep.join([os.environ["PYTHONPATH"], str(site)])
    done = warm_start.run(["-c", code], env={**os.environ, "PYTHONPATH": paths}, cwd=tmp_path)
    assert UnsupportedError.__name__ in done.stderr
    assert re.search(f"Cannot use the family 'acme': .*{match}", done.stderr)
