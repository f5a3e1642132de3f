"""The examples in the docstrings of public names, run; and that each public name which users call has one.

Each example has a folder of its own, with small checkpoints under the names that the examples use.
"""

import importlib
import inspect
import re
import textwrap
from pathlib import Path

import jax
import keras
import numpy as np
import peft_folders
import pytest

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.synth import synth

BLOCK = re.compile(r"^ *```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
PAGES = sorted((Path(__file__).parents[2] / "docs/reference/api").glob("*.md"))
REFERENCE = "".join(page.read_text() for page in PAGES)
PLACES = {"/mnt/nvme/shardload": "nvme", "s3://bucket/gemma-2-9b": "gemma3_270m"}
"""What an example names and a test lacks, and what takes its place."""

pytestmark = pytest.mark.filterwarnings("ignore:Step .* without a data position", "ignore:Your input ran out of data")


def documented():
    """The public functions and classes of the reference, by name."""
    for module, name in re.findall(r"^::: ([\w.]+)\.(\w+)$", REFERENCE, re.MULTILINE):
        found = getattr(importlib.import_module(module), name)
        yield from [(f"{module}.{name}", found)] if callable(found) else []


NAMES = dict(documented())
EXAMPLES = {name: "".join(map(textwrap.dedent, BLOCK.findall(found.__doc__ or ""))) for name, found in NAMES.items()}


def build_model():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(8)])
    model.compile("adam", "mse")
    return model


def numbers():
    x = np.random.default_rng(0).random((256, 64), "float32")
    return x, x[:, :8]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints that no example changes."""
    folder, model = tmp_path_factory.mktemp("made"), build_model()
    synth("gemma2_2b", format="preset", scale=0.02, directory=folder / "preset")
    synth("gemma2_2b", format="safetensors", scale=0.02, directory=folder / "hf")
    (preset,), (hugging_face,) = (folder / "preset").iterdir(), (folder / "hf").iterdir()
    peft_folders.write(folder / "my-lora", hugging_face, ("o_proj", "up_proj"))
    model.fit(*numbers(), epochs=2, verbose=0, callbacks=[OrbaxCheckpoint(folder / "checkpoints", monitor="loss")])
    model.save_weights(folder / "model.weights.h5")
    own = {name: folder / name for name in ("my-lora", "checkpoints", "model.weights.h5")}
    return {**own, "gemma3_270m": preset, "gemma-2-2b": hugging_face}


@pytest.mark.parametrize("name", [name for name, code in EXAMPLES.items() if code])
def test_the_example_of_a_name_runs(name, made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for path, target in made.items():
        Path(path).symlink_to(target)
    x, y = numbers()
    given = {"shardload": shardload, "jax": jax, "keras": keras, "np": np, "x": x, "y": y}
    given |= {"model": build_model(), "build_model": build_model}
    code = EXAMPLES[name]
    for place, there in PLACES.items():
        code = code.replace(place, there)
    with shardload.cache(None):  # at its end, the choice of a cache is as before
        exec(compile(code, f"the docstring of {name}", "exec"), given)


def is_called(found):
    """Whether users call it: a function, or a class that nothing in the package makes for them."""
    own = ("OrbaxCheckpoint", "Checkpointer", "StoredAs", "AutoShardDistribution", "TensorParallelKeras", "REKLS")
    return inspect.isfunction(found) or found.__name__ in (*own, "Follower", "TensorParallelOptimizer")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_users_call_has_an_example(name):
    assert EXAMPLES[name] or not is_called(NAMES[name])
