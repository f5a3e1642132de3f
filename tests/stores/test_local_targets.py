"""Nothing is written to a URL: each place that a user can name is refused before a folder of its scheme appears."""

import inspect
import json
from pathlib import Path

import jax.numpy as jnp
import keras
import pytest

import shardload
from shardload import synth
from shardload.callbacks import OrbaxCheckpoint
from shardload.cli import main
from shardload.console.app import command
from shardload.errors import UsageError
from shardload.parallel import LayoutPlan
from shardload.stores.local import local_target

SCHEMES = ("s3", "gs", "https", "hf", "abfss", "file")
URL = "https://bucket/out"
PLACES = {"dst", "path", "directory", "filepath", "save_plan", "svg", "html"}
"""Names of parameters for places to write to."""
OTHERS = {"LayoutPlan.load", "LayoutPlan.why", "restore"}
"""Have such a parameter, for what they read or for the path of a variable."""


@pytest.fixture
def model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])


@pytest.fixture(autouse=True)
def nothing_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir())


WRITERS = {
    "convert": lambda model, url: shardload.convert("missing", url, to="orbax"),
    "save_as": lambda model, url: shardload.save_as(model, url, to="h5"),
    "save_arrays": lambda model, url: shardload.save_arrays({"a": jnp.zeros(2)}, url, to="orbax"),
    "save": lambda model, url: shardload.save(model, url, step=0),
    "Checkpointer": lambda model, url: shardload.Checkpointer(url),
    "callbacks.OrbaxCheckpoint": lambda model, url: OrbaxCheckpoint(url),
    "cache": lambda model, url: shardload.cache(url),
    "synth.synth": lambda model, url: synth.synth("gemma3_270m", scale=0.01, directory=url),
    "LayoutPlan.save": lambda model, url: LayoutPlan.save(_WithJson(), url),
}


class _WithJson:
    def to_json(self):
        return {}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_user_that_the_system_does_not_know_is_refused_too(writer, model):
    with pytest.raises(UsageError, match=r"Cannot write to ~nobody_here/out: this system knows no home folder ~nobody"):
        WRITERS[writer](model, "~nobody_here/out")


def test_the_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_target("~/out") == tmp_path / "out"


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", [str, Path])
def test_a_url_is_refused_by_every_function_that_writes(writer, kind, model):
    with pytest.raises(
        UsageError, match=r"^Cannot write to https:/+bucket/out: it is a URL \(https\), expected a path"
    ):
        WRITERS[writer](model, kind(URL))


def test_every_function_that_writes_is_tried_above():
    public = {name: getattr(shardload, name) for name in shardload.__all__}
    public |= {f"callbacks.{name}": getattr(shardload.callbacks, name) for name in shardload.callbacks.__all__}
    public |= {f"synth.{name}": getattr(synth, name) for name in synth.__all__}
    public |= {f"LayoutPlan.{name}": value for name, value in vars(LayoutPlan).items() if callable(value)}
    found = {name for name, value in public.items() if PLACES & _parameters(value)}
    assert found - OTHERS == WRITERS.keys()


def _parameters(value):
    try:
        return set(inspect.signature(value).parameters) if callable(value) else set()
    except ValueError:  # has no signature
        return set()


COMMANDS = {
    ("convert", "target"): ["convert", "missing", URL, "--to", "orbax"],
    ("cache", "directory"): ["cache", "--cache", URL],
    ("synth", "directory"): ["synth", "gemma3_270m", "--directory", URL],
    ("plan", "save_plan"): ["plan", "gemma3_270m", "--mesh", "1x2", "--save-plan", f"{URL}.json"],
    ("load", "html"): ["load", "gemma3_270m", "--html", f"{URL}.html"],
    ("inspect", "html"): ["inspect", "gemma3_270m", "--html", f"{URL}.html"],
    ("diff", "html"): ["diff", "gemma3_270m", "gemma3_270m", "--html", f"{URL}.html"],
    ("plan", "html"): ["plan", "gemma3_270m", "--html", f"{URL}.html"],
    ("plan", "svg"): ["plan", "gemma3_270m", "--mesh", "1x2", "--svg", f"{URL}.svg"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_url_is_refused_by_every_option_for_a_place(name, capfd):
    assert main([*COMMANDS[name], "--json"]) == 2
    error = json.loads(capfd.readouterr().out)["error"]
    assert error["message"].startswith("Cannot write to https:/") and "copy it from there" in error["message"]


def test_every_option_for_a_place_is_tried_above():
    options = ((name, p.name) for name, each in command().commands.items() for p in each.params)
    found = {(name, option) for name, option in options if option in {*PLACES, "target"}}
    assert found - {("steps", "directory")} == COMMANDS.keys()


def test_the_root_of_checkpoints_is_no_url(monkeypatch):
    monkeypatch.setenv("SHARDLOAD_HOME", URL)
    with pytest.raises(UsageError, match="Cannot write to https://bucket/out"):
        synth.synth("gemma3_270m", scale=0.01)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_refused(scheme):
    with pytest.raises(UsageError, match=rf"\({scheme}\)"):
        local_target(f"{scheme}://somewhere/out")


@pytest.mark.parametrize("name", ["C:/models/out", "run:1/out", "12:30/out", "/data/s3:/out", "./s3:/out", "a:b"])
def test_names_with_a_colon_are_names(name):
    assert local_target(name) == Path(name)


@pytest.mark.parametrize("writer", ["convert", "save_as", "save_arrays", "Checkpointer"])
def test_the_address_of_a_bucket_is_no_path(writer, model):
    with pytest.raises(UsageError, match=r"it is a URL \(s3\).* Pass an address of a bucket as text, not as a path"):
        WRITERS[writer](model, Path("s3://bucket/out"))
