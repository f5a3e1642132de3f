"""Keras' NNX mode, in which variables are those of Flax NNX too: all loads, saves and restores give the same bits.

The mode is chosen when Keras is imported, so it has a process of its own, which also repeats tests of other folders.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nnx_child
import pytest
import small_folders

ROOT = Path(__file__).parents[2]
NAMES = [f"{case.__name__}-{mesh}" for case in nnx_child.CASES for mesh in nnx_child.MESHES]
OWN_NAMES = [f"{case.__name__}-{mesh}" for case in nnx_child.NNX_CASES for mesh in nnx_child.MESHES]
PAGE = ROOT / "docs" / "how-to" / "keras-with-flax-nnx.md"
AGAIN = (
    "tests/keras_bridge/test_abstraction.py",
    "tests/keras_bridge/test_keras_contract.py",
    "tests/mapping/test_assign.py",
    "tests/optimizers/test_shard_optimizer.py",
    # Python asks for the hash of a class that has none, where Keras' layers are modules of Flax.
    "--deselect=tests/keras_bridge/test_abstraction.py::test_variables_are_found_whatever_holds_them",
)
"""Tests of what touches variables most, which run in NNX mode too."""


WITHOUT_TENSORFLOW = "import sys; sys.modules['tensorflow'] = sys.modules['tensorflow_text'] = None\n"


def in_nnx_mode(*arguments, cwd=ROOT):
    environment = {**os.environ, "KERAS_NNX_ENABLED": "true"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=False, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each case gives without the mode, and in it."""
    folder = tmp_path_factory.mktemp("nnx")
    sources = nnx_child.write_sources(folder / "sources")
    plain = nnx_child.outcomes(nnx_child.CASES, sources, folder / "plain")
    child = in_nnx_mode("-m", "nnx_child", sources, folder / "nnx")
    assert child.returncode == 0, child.stderr
    return json.loads(json.dumps(plain)), json.loads(child.stdout[child.stdout.index('{"') :])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_as_without_the_mode(name, outcomes):
    plain, found = outcomes
    assert "Traceback" not in str(plain[name]), plain[name]
    assert found[name] == plain[name]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", OWN_NAMES)
def test_programs_of_flax_nnx(name, outcomes):
    assert outcomes[1][name] is None


@pytest.mark.slow
def test_tests_of_variables_pass_in_the_mode():
    child = in_nnx_mode("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *AGAIN)
    assert child.returncode == 0, child.stdout


@pytest.mark.slow
def test_the_how_to(tmp_path):
    """Its blocks run as in `test_docs_examples`, but in the mode."""
    small_folders.write(tmp_path / "gemma2-hf", "gemma2", architectures=["Gemma2ForCausalLM"])
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    child = in_nnx_mode("-c", WITHOUT_TENSORFLOW + "".join(blocks), cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    assert "(2, 9, 32)" in child.stdout
