"""`file:///path` is the path itself, for each function and command that reads a checkpoint."""

import json

import jax
import keras
import pytest

import shardload
from shardload.cli import main
from shardload.comparing import diff
from shardload.runs.listing import list_steps
from shardload.verifying import verify


def small_model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="dense")])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files") / "run"
    shardload.save(small_model(), folder, step=8)
    return folder


READERS = {
    "restore": lambda url, _: shardload.restore(small_model(), url),
    "restore, a step": lambda url, _: shardload.restore(small_model(), url, step=8),
    "load": lambda url, _: shardload.load(url),
    "load, a step": lambda url, _: shardload.load(url, step=8),
    "load_weights": lambda url, _: shardload.load_weights(small_model(), url),
    "load_arrays": lambda url, _: shardload.load_arrays(url, jax.devices()[0]),
    "inspect": lambda url, _: shardload.inspect(url),
    "plan": lambda url, _: shardload.plan(url, mesh="1x2"),
    "convert": lambda url, path: shardload.convert(url, path / "converted.weights.h5"),
    "verify": lambda url, _: verify(url),
    "diff": lambda url, _: diff(url, url),
    "list_steps": lambda url, _: list_steps(url)[0],
}


@pytest.mark.parametrize("reads", READERS)
@pytest.mark.parametrize("scheme", ["file://", "FILE://"])
def test_functions_take_a_file_url(reads, scheme, run, tmp_path):
    assert READERS[reads](f"{scheme}{run}", tmp_path) is not None


@pytest.mark.parametrize("command", ["steps", "verify", "inspect", "plan", "diff"])
def test_commands_take_a_file_url(command, run, capsys):
    others = [f"file://{run}"] if command == "diff" else []
    assert main([command, f"file://{run}", *others, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_a_folder_without_steps_is_explained_by_url_too(run):
    with pytest.raises(shardload.errors.SourceNotFoundError, match="looks like a step itself: give its folder"):
        shardload.restore(small_model(), f"file://{run / '8'}")
